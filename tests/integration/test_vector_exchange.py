"""Vectors leave a library as Parquet and come back; items that came that way are no files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from clips import steady, write_video
from gare import GARE, GareConfig, Library
from gare.errors import LibraryError
from gare.library.library import model_stamp
from gare.library.store.store_schema import item_id
from servers import HANG_S

NAMES = ["/elsewhere/a.mp4", "/elsewhere/b.mp4", "s3://bucket/c.mp4"]


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}})).eval()


def clips(model: GARE, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((frames, model.dim)).astype(np.float32) for frames in (1, 4, 12)]


@pytest.fixture
def library(model: GARE, tmp_path: Path):
    with Library.open(tmp_path / "library", model=model) as library:
        assert library.add(clips(model), paths=NAMES, start=[0, 1.5, 0], end=[2, 4, 9]) == 3
        yield library


def hits(library: Library) -> list[tuple[str, float, float]]:
    return [(hit.path, round(hit.score, 5), hit.moment) for hit in library.search("a red light", top=5)]


def test_added_items_are_found_with_the_scores_of_their_vectors(library, model):
    ids = [item_id(name, start) for name, start in zip(NAMES, (0, 1.5, 0), strict=True)]
    scores = model.similarity("a red light", library.features(ids))[0]
    found = {hit.path: hit.score for hit in library.search("a red light", top=5)}
    assert found == pytest.approx(dict(zip(NAMES, scores.tolist(), strict=True)), abs=1e-5)
    stage1 = library.vectors(ids)
    assert stage1.shape == (3, model.dim + 1)
    query = np.append(model.encode("a red light"), np.float32(1))
    assert stage1 @ query == pytest.approx(scores.numpy(), abs=0.05)
    row = library.get(ids[1])
    assert (row["start"], row["end"], row["content"]) == (1.5, 4.0, "")


def test_a_library_that_is_exported_and_added_is_the_same(library, model, tmp_path):
    target = tmp_path / "vectors.parquet"
    assert library.export(target) == 3
    table = pq.read_table(target)
    assert table.column_names == [
        *("id", "path", "start", "end", "file_duration", "width", "height", "tags"),
        *("vector", "frames", "times"),
    ]
    assert json.loads(table.schema.metadata[b"gare"])["model"]["fingerprint"] == model.fingerprint()
    frames = {row["path"]: np.array(row["frames"]) for row in table.to_pylist()}
    for name, clip in zip(NAMES, clips(model), strict=True):
        np.testing.assert_array_equal(frames[name], clip.astype(np.float16))
    with Library.open(tmp_path / "other", model=model) as other:
        assert other.add(target) == 3
        assert hits(other) == hits(library)
        ids = table["id"].to_pylist()
        np.testing.assert_array_equal(other.vectors(ids), library.vectors(ids))
        assert other.add(target) == 3  # again: nothing comes twice
        assert len(other) == 3
    assert library.export(tmp_path / "some.parquet", where="duration:>5") == 1


def test_a_file_is_not_overwritten_unless_asked_and_never_half_written(library, tmp_path, monkeypatch):
    target = tmp_path / "vectors.parquet"
    target.write_text("mine")
    with pytest.raises(LibraryError, match="exists already"):
        library.export(target)
    with pytest.raises(LibraryError, match=r"written as Parquet; name the file vectors\.parquet"):
        library.export(tmp_path / "vectors.csv")
    scan = library.store.scan

    def broken(**options):
        yield from scan(**options)
        raise LibraryError("the disk is gone")

    monkeypatch.setattr(library.store, "scan", broken)
    with pytest.raises(LibraryError, match="disk is gone"):
        library.export(target, overwrite=True)
    assert target.read_text() == "mine"
    monkeypatch.undo()
    assert library.export(target, overwrite=True) == 3
    assert [path.name for path in tmp_path.glob("vectors*")] == ["vectors.parquet"]
    with pytest.raises(LibraryError, match="is a folder"):
        library.export(tmp_path)
    with pytest.raises(LibraryError, match="cannot be written"):
        library.export(tmp_path / "no such folder" / "x.parquet")


@pytest.mark.parametrize(
    ("vectors", "facts", "message"),
    [
        ([np.ones((2, 7))], {}, r"16 dimensions"),
        ([np.full((2, 16), np.nan)], {}, "NaN or inf"),
        ([np.full((2, 16), 1e6)], {}, "too large"),
        ([np.zeros((2, 16))], {}, "zero"),
        ([np.ones((13, 16))], {}, "1 to 12"),
        ([np.ones((0, 16))], {}, "1 to 12"),
        ([[["a"] * 16]], {}, "not numbers"),
        ([np.ones((1, 16))], {"paths": None}, "needs a path"),
        ([np.ones((1, 16))], {"paths": ["a", "b"]}, "list of 1"),
        ([np.ones((1, 16))], {"start": [3.0], "end": [2.0]}, "start ≤ end"),
        ([np.ones((2, 16))], {"times": [[1.0]]}, "2 frames and 1 times"),
        ([np.ones((1, 16))] * 2, {"paths": ["a", "a"]}, "comes twice"),
        ([np.ones((1, 16))], {"tags": ["holiday"]}, "a list of words"),
    ],
)
def test_what_does_not_fit_is_refused(library, vectors, facts, message):
    with pytest.raises(LibraryError, match=message):
        library.add(vectors, **{"paths": ["a"], **facts})
    assert len(library) == 3


def test_vectors_of_texts_are_no_items(library, model):
    for texts in (model.encode(["a dog"]), model.encode_text(["a dog"])):
        with pytest.raises(LibraryError, match="vectors of texts"):
            library.add(texts, paths=["a"])


def test_vectors_of_another_model_are_refused(library, model, tmp_path):
    library.export(tmp_path / "vectors.parquet")
    torch.manual_seed(1)
    other = GARE(model.config).eval()
    assert model_stamp(other, "").dim == model.dim
    with Library.open(tmp_path / "other", model=other) as wrong:
        with pytest.raises(LibraryError, match="cannot be compared"):
            wrong.add(tmp_path / "vectors.parquet")
        pq.write_table(pa.table({"path": ["x.mp4"]}), tmp_path / "no_frames.parquet")
        with pytest.raises(LibraryError, match="lacks the columns frames"):
            wrong.add(tmp_path / "no_frames.parquet")
        (tmp_path / "text.parquet").write_text("not Parquet")
        with pytest.raises(LibraryError, match="Parquet"):
            wrong.add(tmp_path / "text.parquet")
        with pytest.raises(LibraryError, match="no item nobody"):
            wrong.vectors(["nobody"])
        rows = [{"path": "elsewhere", "frames": clips(model)[1].tolist()}]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")  # of one's own making
        assert wrong.add(tmp_path / "own.parquet") == 1


def test_indexing_leaves_them_and_takes_the_place_of_one_whose_file_it_finds(model, tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    write_video(videos / "there.mp4", steady(1.0))
    with Library.open(tmp_path / "library", model=model) as library:
        paths = [str(videos / "gone.mp4"), str(videos / "there.mp4"), "/etc/passwd"]
        library.add(clips(model), paths=paths)
        before = {row["path"]: row["modified"].timestamp() for row in library.items()}
        assert before["/etc/passwd"] == 0  # no date: the server plays no file under that name
        report = library.index(videos)
        assert (report.new, report.deleted) == (1, 0)
        after = {row["path"]: row for row in library.items()}
        assert set(after) == set(paths)
        assert after[paths[1]]["content"]
        assert not after[paths[0]]["content"]
        library.index(videos)
        assert len(library) == 3


def test_the_command_writes_the_same_file(library, tmp_path):
    target = tmp_path / "vectors.parquet"
    command = [sys.executable, "-m", "gare", "export", str(target), "--library", str(tmp_path / "library")]
    first = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert first.returncode == 0, first.stderr
    assert pq.read_table(target).num_rows == 3
    again = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    assert "Traceback" not in again.stderr


def test_the_how_to_page_works(shared, tmp_path, monkeypatch):
    clips_folder = shared / "data/clips"
    (tmp_path / "videos").mkdir()
    names = {"boy.avi": "v_SoccerJuggling_g23_c01.avi", "speech.mp4": "video176.mp4"}
    for name, source in names.items():
        for folder in (tmp_path, tmp_path / "videos"):
            shutil.copyfile(clips_folder / source, folder / name)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs/how-to/use-vectors.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {}
    exec("\n".join(blocks), names)
    scores, plain = names["scores"].numpy(), names["plain"]
    assert scores.argmax(axis=1).tolist() == [0, 1]
    assert not np.allclose(scores, plain, atol=1e-4)
    assert names["near"] == pytest.approx(names["exact"][0].numpy(), abs=0.02)
    with Library.open("another") as library:
        ids = {item["id"] for item in library.items()}
        assert len(names["ids"]) > 2  # ranges that start together are items of their own
        assert ids > set(names["ids"])
        assert len(ids) == len(names["ids"]) + 2
        assert library.search("a man gives a speech", top=1)[0].path.endswith("speech.mp4")

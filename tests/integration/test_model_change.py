"""A library gets another model while people search it: nothing fails, nothing is lost, and it can go back."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from browser import chromium, serious_violations
from clips import write_video
from gare import GARE, GareConfig
from gare.errors import LibraryError
from gare.library.index.index_run import IndexOptions
from gare.library.library import Library, model_stamp
from gare.library.model_change import num_behind
from gare.library.store.store_schema import frame_schema, item_schema
from gare.model.known_models import KNOWN_MODELS
from gare.model.model_inventory import Speed, list_models, read_speeds, remember_speed, speeds_path
from serve_library import write_colour
from serve_process import PATIENT, ServeProcess
from servers import HANG_S, kill_hard, wait_until
from warm import WarmProcess, run_gare

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Playwright's own sockets
NUM_FILES, NUM_WINDOWS = 20, 10
NUM_ITEMS = NUM_FILES * NUM_WINDOWS
SPLIT = IndexOptions(split="window:1", num_workers=1)
QUERIES = ("red", "a blue sky", "green", "a white ball")
DRIVER = Path(__file__).parents[1] / "change_driver.py"


def save_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1 + seed}, "num_frames": 2 + seed}
    GARE(GareConfig.load(config)).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two that agree on nothing, not even on the number of frames."""
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder / "old", 0), save_model(folder / "new", 1)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number in range(NUM_FILES):
        write_colour(folder / f"{number:02d}.mp4", number / NUM_FILES, seconds=NUM_WINDOWS, size=(64, 48))
    return folder


@pytest.fixture
def few(tmp_path: Path) -> Path:
    folder = tmp_path / "few"
    folder.mkdir()
    for number in range(4):
        write_colour(folder / f"{number}.mp4", number / 4, seconds=1, size=(64, 48))
    return folder


def gare(*words: object) -> dict[str, Any]:
    """What a command prints as JSON."""
    done = run_gare(*map(str, words), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def answers(place: object, model: Path) -> dict[str, list[tuple[str, float]]]:
    """What a library says with the vectors of a model."""
    with Library.open(str(place), model=model, read_only=True) as library:
        return {query: brief(library.search(query, top=5)) for query in QUERIES}


def brief(hits: Any) -> list[tuple[str, float]]:
    return [(hit.id, round(hit.score, 4)) for hit in hits]


class Client(threading.Thread):
    """Searches without a pause, looks at what it found, and keeps every answer."""

    def __init__(self, server: ServeProcess) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.answers: list[tuple[str, list[tuple[str, float]]]] = []
        self.failed: list[str] = []
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.is_set():
            for query in QUERIES:
                asked = self.server.get(f"/api/v1/search?q={query.replace(' ', '+')}&limit=5")
                if asked.status == 200:
                    found = [(hit["id"], round(hit["score"], 4)) for hit in asked.json()["hits"]]
                    self.answers.append((query, found))
                    asked = self.server.get(f"/api/v1/items/{found[0][0]}/thumbnail" if found else "/nowhere")
                if asked.status != 200:
                    self.failed.append(f"{asked.status} {asked.content!r}")

    def wait_for(self, known: dict[str, list[tuple[str, float]]]) -> None:
        """Wait until the answers are these."""
        deadline = time.monotonic() + HANG_S
        while not self.answers or not same(self.answers[-1][1], known[self.answers[-1][0]]):
            assert time.monotonic() < deadline, f"no answer as {known}"
            assert not self.failed, self.failed[:3]
            time.sleep(0.02)

    def end(self) -> None:
        self._end.set()
        self.join(HANG_S)


def same(found: list[tuple[str, float]], known: list[tuple[str, float]]) -> bool:
    close = all(abs(a - b) < 2e-4 for (_, a), (_, b) in zip(found, known, strict=False))
    return len(found) == len(known) and close


def runs(names: list[str]) -> list[str]:
    """A list without repetitions that follow each other."""
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


@pytest.mark.parametrize("kind", ["folder", "s3", "postgres"])
def test_two_hundred_items_change_while_a_client_searches_are_killed_go_on_and_go_back(
    kind: str, videos: Path, models: tuple[Path, Path], new_library: Any, tmp_path: Path
):
    old, new = models
    place = new_library(kind)
    with Library.open(place, model=old) as library:
        library.index(videos, options=SPLIT)
        assert len(library) == NUM_ITEMS
    says = {"old": answers(place, old)}
    with ServeProcess(place, options=PATIENT, log_folder=tmp_path) as server:
        client = Client(server)
        client.start()
        try:
            client.wait_for(says["old"])
            kill_half_way(place, new)
            with Library.open(place, read_only=True) as library:
                assert [(found.state, found.is_current) for found in library.sets()] == [
                    ("complete", True),
                    ("building", False),
                ]
                assert library.store.stamp.name == str(old)
                half = library.open_set(library.sets()[1].name).count()
                assert 0 < half < NUM_ITEMS
            report = gare("index", "--library", place, "--model", new, "--workers", 1)
            assert report["changed_to"] == str(new)
            assert report["encoded_again"] + half // NUM_WINDOWS == NUM_FILES  # none is encoded twice
            says["new"] = answers(place, new)
            client.wait_for(says["new"])
            assert server.get("/api/v1/info").json()["model"] == str(new)

            with Library.open(place) as library:
                assert library.use_model(str(old)) == 0  # it is behind by no file
            client.wait_for(says["old"])
            with Library.open(place) as library:
                library.use_model(str(new))
                library.forget_model(str(old))  # while the server may still search it
            client.wait_for(says["new"])
        finally:
            client.end()
    assert client.failed == []
    # Every answer is a whole answer of one of the two.
    seen = [
        next((name for name, known in says.items() if same(found, known[query])), "nobody's")
        for query, found in client.answers
    ]
    assert runs(seen) == ["old", "new", "old", "new"]
    assert len(seen) > 100
    with Library.open(place, read_only=True) as library:
        assert [found.stamp.name for found in library.sets()] == [str(new)]
        assert library.home.count() == 0
        assert library.home.num_bytes() < library.store.num_bytes() / 3


def kill_half_way(place: object, model: Path) -> None:
    """kill −9 when half of the files are done."""
    kill_when_done(place, model, NUM_FILES // 2)


def kill_when_done(place: object, model: Path, number: int) -> None:
    """kill −9 when so many files are done."""
    command = [str(DRIVER), str(place), str(model), str(number)]
    process = WarmProcess(command, stdout=subprocess.PIPE, env=dict(os.environ))
    assert process.stdout is not None
    with process.stdout as lines:
        assert any(int(line) == number for line in lines)
    kill_hard(process)


@pytest.mark.parametrize("kind", ["folder", "s3", "postgres"])
def test_every_store_changes_goes_back_and_forgets(kind: str, few: Path, models: Any, new_library: Any):
    old, new = models
    place = new_library(kind)
    with Library.open(place, model=old) as library, Library.open(place, read_only=True) as reader:
        library.index(few)
        before = {query: brief(library.search(query)) for query in QUERIES}
        # On object storage a reader sees new rows within a second.
        wait_until(lambda: brief(reader.search("red")) == before["red"], "the reader")
        with pytest.raises(LibraryError, match=r"gare index --model"):
            Library.open(place, model=new)

        report = library.change_model(new)
        assert (report.encoded_again, report.changed_to, report.failures) == (4, str(new), [])
        after = {query: brief(library.search(query)) for query in QUERIES}
        assert after["red"] != before["red"]
        assert answers(place, new) == after
        assert answers(place, old) == before  # the old vectors are kept, and can be searched by name
        reader.refresh()
        assert brief(reader.search("red")) == after["red"]
        sizes = [library.open_set(found.name).num_bytes() or 0 for found in library.sets()]
        assert all(size > 1000 for size in sizes)

        (few / "0.mp4").unlink()
        write_colour(few / "9.mp4", 0.9, seconds=1, size=(64, 48))
        assert (library.index().deleted, len(library)) == (1, 4)
        assert library.use_model(str(old)) == 1  # one file is not in it
        assert len(library) == 3  # the one that is gone is not shown
        report = library.index()
        assert (report.new, len(library)) == (1, 4)

        with pytest.raises(LibraryError, match="use the vectors of this model"):
            library.forget_model(str(old))
        library.forget_model(str(new))
        assert [found.stamp.name for found in library.sets()] == [str(old)]
        assert library.change_model(new).encoded_again == 4  # all over again
        library.forget_model(str(old))
        assert library.change_model(old).encoded_again == 4
        assert len(library.search("red")) == 4
        library.maintain()
    with Library.open(place, create=False) as library:
        assert library.store.stamp.name == str(old)
        assert len(library) == 4


def test_tags_dates_and_deletions_go_along_also_those_of_the_last_moment(
    few: Path, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old, new = models
    with Library.open(tmp_path / "library", model=old) as library:
        library.index(few, options=IndexOptions(tags=("holidays",)))
        first, second, third, fourth = sorted(row["id"] for row in library.items())
        added = {row["id"]: row["added"] for row in library.items()}
        library.delete([first])
        source = library.store

        def tag(item: str, name: str) -> None:
            schema = item_schema(source.stamp.stage1_dim)
            row = source.fetch([item], schema.names).to_pylist()[0]
            import pyarrow as pa

            changed = pa.Table.from_pylist([{**row, "tags": [name]}], schema=schema)
            source.upsert(changed, frame_schema().empty_table())

        tag(second, "before")
        use = type(library._sets).use

        def late(sets: Any, name: str) -> None:
            """Somebody tags and deletes after all was carried over, before the change."""
            tag(third, "late")
            source.delete([fourth])
            use(sets, name)

        monkeypatch.setattr(type(library._sets), "use", late)
        library.change_model(new)
        found = {row["id"]: row for row in library.items()}
        assert {item: row["tags"] for item, row in found.items()} == {second: ["before"], third: ["late"]}
        assert all(row["added"] == added[item] for item, row in found.items())


class Channel:
    """An encoder that sees whether one of the colours is bright: every model has shots of its own."""

    image_size = 16

    def __init__(self, channel: int) -> None:
        self.name = self.fingerprint = f"channel {channel}"
        self.channel = channel

    def encode_texts(self, texts: list[str]) -> np.ndarray:
        return np.ones((len(texts), 2))

    def encode_images(self, images: list[np.ndarray]) -> np.ndarray:
        is_bright = [image[..., self.channel].mean() > 127 for image in images]
        return np.eye(2)[np.array(is_bright, dtype=int)]


def ranges(library: Library) -> set[tuple[str, float, float]]:
    return {(Path(row["path"]).name, row["start"], row["end"]) for row in library.items()}


def test_moments_that_another_model_cuts_elsewhere_are_kept(tmp_path: Path):
    """Items of films are ranges that depend on the model: other ranges are no deletions."""
    folder = tmp_path / "films"
    folder.mkdir()
    colours = ["black"] * 7 + ["red"] * 7 + ["magenta"] * 7  # red changes after 7 seconds, blue after 14
    pictures = [Image.new("RGB", (64, 48), colour) for colour in colours]
    for name in ("kept", "deleted", "deleted later"):
        write_video(folder / f"{name}.mp4", range(len(colours)), pictures=pictures, size=(64, 48))
    with Library.open(tmp_path / "fresh", model=Channel(2)) as library:
        library.index(folder)
        expected = ranges(library)
    with Library.open(tmp_path / "library", model=Channel(0)) as library:
        library.index(folder)
        before = ranges(library)
        assert before != expected

        def without(items: set[tuple[str, float, float]], *names: str) -> set[tuple[str, float, float]]:
            return {item for item in items if item[0] not in names}

        def delete(name: str) -> None:
            library.delete([next(row["id"] for row in library.items() if Path(row["path"]).name == name)])

        delete("deleted.mp4")
        library.change_model(Channel(2))
        assert ranges(library) == without(expected, "deleted.mp4")
        library.use_model("channel 0")
        assert ranges(library) == without(before, "deleted.mp4")
        delete("deleted later.mp4")
        library.use_model("channel 2")
        assert ranges(library) == without(expected, "deleted.mp4", "deleted later.mp4")


def test_what_is_indexed_meanwhile_is_encoded_before_the_change(few: Path, models: Any, tmp_path: Path):
    old, new = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)

    def somebody_else(progress: Any) -> None:
        if not (few / "late.mp4").exists():
            write_colour(few / "late.mp4", 0.7, seconds=1, size=(64, 48))
            with Library.open(place) as other:
                assert other.index().new == 1

    with Library.open(place) as library:
        report = library.change_model(new, on_progress=somebody_else)
        assert report.encoded_again == 5
        assert len(library) == 5
        assert num_behind(library.home, library.store) == 0


def test_a_model_that_somebody_else_changed_to_meanwhile_is_the_one_that_is_followed(
    few: Path, models: Any, tmp_path: Path
):
    old, new = models
    place, third = tmp_path / "library", save_model(tmp_path / "third", 2)
    with Library.open(place, model=old) as library:
        library.index(few)

    def somebody_else(progress: Any) -> None:
        if not (few / "late.mp4").exists():
            write_colour(few / "late.mp4", 0.7, seconds=1, size=(64, 48))
            with Library.open(place) as other:
                other.change_model(third)
                assert other.index().new == 1

    with Library.open(place) as library:
        library.change_model(new, on_progress=somebody_else)
        assert (library.store.stamp.name, len(library)) == (str(new), 5)


def test_what_is_indexed_while_the_model_changes_is_in_the_library_afterwards(
    few: Path, models: Any, tmp_path: Path
):
    old, new = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)
    write_colour(few / "late.mp4", 0.7, seconds=1, size=(64, 48))
    changed: list[str] = []

    def somebody_else(progress: Any) -> None:
        if not changed:
            with Library.open(place) as other:
                changed.append(other.change_model(new).changed_to)

    with Library.open(place) as library:
        report = library.index(on_progress=somebody_else)
        assert changed == [str(new)]
        assert (library.store.stamp.name, report.new, len(library)) == (str(new), 1, 5)


@pytest.mark.parametrize("kind", ["folder", "s3", "postgres"])
def test_vectors_that_are_forgotten_while_they_are_made(kind: str, few: Path, models: Any, new_library: Any):
    old, new = models
    place = new_library(kind)
    with Library.open(place, model=old) as library:
        library.index(few)
    forgotten: list[str] = []

    def somebody_else(progress: Any) -> None:
        if progress.done and not forgotten:
            with Library.open(place) as other:
                forgotten.append(other.forget_model(str(new)).name)

    with Library.open(place) as library:
        options = IndexOptions(num_workers=1, commit_seconds=0.0)
        with pytest.raises(LibraryError, match=r"not changed: .* forgotten while they were made.* again"):
            library.change_model(new, options=options, on_progress=somebody_else)
        assert [found.stamp.name for found in library.sets()] == [str(old)]
        assert len(library.search("red")) == 4
    with Library.open(place) as library:
        assert library.change_model(new).encoded_again == 4
        assert len(library.search("red")) == 4


@pytest.mark.parametrize("forgotten", ["first", "second"])
def test_a_library_that_is_open_elsewhere_survives_that_its_vectors_are_forgotten_at_once(
    forgotten: str, few: Path, models: Any, tmp_path: Path
):
    old, new = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)
        library.change_model(new)
        if forgotten == "first":
            library.use_model(str(old))
        else:
            old, new = new, old
    with Library.open(place) as reader:
        before = brief(reader.search("red"))
        with Library.open(place) as other:
            other.use_model(str(new))
            other.forget_model(str(old))
        reader._looked = time.monotonic()  # it has just looked, and knows of nothing
        after = brief(reader.search("red"))
        assert after == answers(place, new)["red"]
        assert after != before


def test_a_model_that_is_gone_after_the_change_is_named_with_the_way_back(
    few: Path, models: Any, tmp_path: Path
):
    old, new = models
    place, gone = tmp_path / "library", tmp_path / "gone"
    shutil.copytree(new, gone)
    with Library.open(place, model=old) as library:
        library.index(few)
        library.change_model(gone)
    shutil.rmtree(gone)
    with Library.open(place) as library:
        with pytest.raises(LibraryError, match=rf"^{place} was made by .*--use {old}$"):
            library.search("red")
        library.use_model(str(old))
        assert len(library.search("red")) == 4


def test_a_disk_that_is_not_there_stops_the_change_and_loses_nothing(few: Path, models: Any, tmp_path: Path):
    old, new = models
    disk = tmp_path / "disk"
    disk.mkdir()
    write_colour(disk / "far.mp4", 0.4, seconds=1, size=(64, 48))
    with Library.open(tmp_path / "library", model=old) as library:
        library.index(few, disk)
        os.rename(disk, tmp_path / "unmounted")
        with pytest.raises(LibraryError, match=r"not changed: 1 files .*far\.mp4.*mounted"):
            library.change_model(new)
        assert (library.store.stamp.name, len(library)) == (str(old), 5)
        os.rename(tmp_path / "unmounted", disk)
        assert library.change_model(new).encoded_again == 1  # the others are done
        assert len(library) == 5


def test_files_that_were_left_out_stay_out_and_hidden_ones_stay_in(few: Path, models: Any, tmp_path: Path):
    old, new = models
    write_colour(few / ".secret.mp4", 0.4, seconds=1, size=(64, 48))
    with Library.open(tmp_path / "library", model=old) as library:
        library.index(few, options=IndexOptions(hidden=True, exclude=("0.mp4",)))
        names = sorted(Path(row["path"]).name for row in library.items())
        assert names == [".secret.mp4", "1.mp4", "2.mp4", "3.mp4"]
        library.change_model(new)
        assert sorted(Path(row["path"]).name for row in library.items()) == names


def test_a_model_that_others_cannot_load_leaves_them_with_the_old_one(
    few: Path, models: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    old, new = models
    with Library.open(tmp_path / "library", model=old) as library:
        library.index(few)
        with Library.open(tmp_path / "library") as reader:
            before = brief(reader.search("red"))
            library.change_model(GARE.from_pretrained(new))  # it has no name that loads it
            reader._looked = 0.0
            assert brief(reader.search("red")) == before
            assert "was changed, but not here" in caplog.text


def test_a_change_to_a_set_that_is_not_complete_is_refused(few: Path, models: Any, tmp_path: Path):
    old, new = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)
        kill_when_done(place, new, 1)
        with pytest.raises(LibraryError, match=r"not complete.*gare index"):
            library.use_model(str(new))
        with pytest.raises(LibraryError, match="made by model"):
            Library.open(place, model=new)
        library.forget_model(str(new))
        assert not list((place / "sets").iterdir())
        with pytest.raises(LibraryError, match="has no vectors of"):
            library.use_model(str(new))


@pytest.mark.parametrize("table", ["items", "frames", "files"])
def test_sets_that_are_half_made_or_half_gone_are_listed(table: str, few: Path, models: Any, tmp_path: Path):
    """A change and a `--forget` that were killed at their first and last writes."""
    old, new = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)
        name = library._sets.begin(model_stamp(GARE.from_pretrained(new), str(new)))
    shutil.rmtree(place / "sets" / name / f"{table}.lance")
    listed = gare("models", "--library", place)
    assert [(row["state"], row["num_items"]) for row in listed] == [("complete", 4), ("building", 0)]
    with Library.open(place) as library:
        assert library.check().damage == []
        assert library.change_model(new).encoded_again == 4
        library.use_model(str(old))
        library._sets._note(name, library.sets()[1].stamp, "leaving")
        shutil.rmtree(place / "sets" / name / f"{table}.lance")
    listed = gare("models", "--library", place)
    assert [(row["state"], row["num_items"]) for row in listed] == [("complete", 4), ("leaving", 0)]
    assert len(gare("models", "--library", place, "--forget", new)) == 1
    assert not list((place / "sets").iterdir())


def test_vectors_that_were_removed_by_hand_leave_the_first_ones(few: Path, models: Any, tmp_path: Path):
    old, new = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)
        library.change_model(new)
    shutil.rmtree(place / "sets")
    with Library.open(place) as library:
        assert library.store.stamp.name == str(old)
        assert "are gone" in library.store.repairs[-1]
        assert [found.stamp.name for found in library.sets()] == [str(old)]
        assert library.change_model(new).encoded_again == 4


# --- the command, the API and the page ---------------------------------------------------------------------


def test_gare_models_lists_uses_and_forgets(few: Path, models: Any, tmp_path: Path):
    old, new = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)
        library.change_model(new)
    listed = gare("models", "--library", place)
    assert [(row["model"], row["num_items"], row["is_current"]) for row in listed] == [
        (str(old), 4, False),
        (str(new), 4, True),
    ]
    assert all(row["num_bytes"] > 1000 for row in listed)
    assert [row["is_current"] for row in gare("models", "--library", place, "--use", old)] == [True, False]
    refused = run_gare("models", "--library", str(place), "--forget", str(old))
    assert refused.returncode == 1
    assert "change to another one first" in refused.stderr
    name = listed[1]["set"][:6]  # the beginning of a set's name will do
    assert [row["model"] for row in gare("models", "--library", place, "--forget", name)] == [str(old)]


def test_a_folder_is_named_as_it_was_typed(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number, name in enumerate(("old", "new")):
        save_model(tmp_path / "models" / name, number)
    monkeypatch.chdir(tmp_path)
    with Library.open("library", model="models/old") as library:
        library.index(few)
        library.change_model("models/new")
        library.use_model("models/old")
        assert library.sets()[0].is_current
        shutil.rmtree("models/new")  # its vectors can be forgotten still
        library.forget_model("./models/new/")
        assert [found.stamp.name for found in library.sets()] == [str(tmp_path.resolve() / "models/old")]


def test_models_in_the_box_in_the_cache_and_by_name(models: Any, tmp_path: Path):
    """In the cache: a model of gare, a pair of towers, and one that is neither."""
    hub = tmp_path / "hub"
    put_into_cache(hub, "me/mine", {path.name: path for path in models[0].iterdir() if path.is_file()})
    towers = {"model_type": "clip", "projection_dim": 512, "text_config": {}, "vision_config": {}}
    weights = models[0] / "model.safetensors"
    card = b"---\nlicense: mit\nlanguage:\n- en\n---\n"
    put_into_cache(hub, "me/towers", {"config.json": towers, "model.safetensors": weights, "README.md": card})
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    cut_off = tmp_path / "model.safetensors"
    cut_off.write_bytes(weights.read_bytes()[:300])
    put_into_cache(hub, "me/cut-off", {"config.json": towers, "model.safetensors": cut_off})
    shards = {"model.safetensors": weights, "model.safetensors.index.json": index}
    put_into_cache(hub, "me/shards", {"config.json": towers, **shards})
    no_number = {"config.json": towers | {"projection_dim": "x"}, "model.safetensors": weights}
    put_into_cache(hub, "me/no-number", no_number)
    odd_card = b"---\nlanguage: 3\n---\n"
    odd_index = {"weight_map": 5}
    odd = {"README.md": odd_card, "model.safetensors.index.json": odd_index}
    put_into_cache(hub, "me/odd", {"config.json": towers, "model.safetensors": weights, **odd})
    put_into_cache(hub, "me/words", {"config.json": {"model_type": "bert"}, "model.safetensors": weights})
    # A process of its own: the hub library reads where its cache is when it is imported.
    found = subprocess.run(
        [sys.executable, "-m", "gare", "models", "--json"],
        env={**os.environ, "HF_HUB_CACHE": str(hub), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    listed = {model["name"]: model for model in json.loads(found.stdout)}
    assert next(iter(listed)) == "gare-mini"
    assert listed["gare-mini"]["where"] == "box"
    assert listed["gare-mini"]["disk_bytes"] > 1e6
    assert (
        listed["gare-mini"]["dim"] == KNOWN_MODELS["gare-mini"].dim
    )  # one from its file, one from the table
    assert (listed["me/towers"]["where"], listed["me/towers"]["dim"]) == ("cache", 512)
    assert (listed["me/towers"]["licence"], listed["me/towers"]["languages"]) == ("mit", ["en"])
    assert listed["me/odd"]["languages"] == ["3"]
    assert listed["me/towers"]["memory_bytes"] == listed["me/mine"]["memory_bytes"] > 1000
    assert not {"me/words", "me/cut-off", "me/shards", "me/no-number"} & listed.keys()
    assert listed["google/siglip2-base-patch16-224"]["where"] == "hub"
    assert listed["google/siglip2-base-patch16-224"]["memory_bytes"] == 4 * 375_187_970


def test_a_measured_speed_is_listed(tmp_path: Path, models: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_speeds() == {}
    speed = Speed("CPU, 1 threads", 120.5, 33.0, "2026-01-01")
    remember_speed("gare-mini", speed)
    remember_speed("other", speed)
    assert next(model for model in list_models() if model.name == "gare-mini").speed == speed
    speeds_path().write_text("{")  # cut short: as if nothing had been measured
    assert read_speeds() == {}


def put_into_cache(hub: Path, name: str, files: dict[str, Any]) -> None:
    repo = hub / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for number, (file, content) in enumerate(files.items()):
        blob = repo / "blobs" / f"{number:040d}"
        if isinstance(content, Path):
            content = content.read_bytes()
        blob.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        (snapshot / file).symlink_to(blob)


def test_the_settings_page_changes_goes_back_and_forgets(few: Path, models: Any, tmp_path: Path):
    """In a real browser: the model in the box is chosen, the work is followed, and it is undone."""
    old, _ = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)
    with chromium() as browser, ServeProcess(place) as server:
        page = browser.new_page()
        page.set_default_timeout(1000 * HANG_S)
        page.goto(f"{server.url}/settings")
        assert serious_violations(page) == []
        page.select_option("#model", "gare-mini")
        page.click("#change")
        page.wait_for_selector("tr[data-model='gare-mini'] .chip:text('searched now')")
        assert server.get("/api/v1/info").json()["model"] == "gare-mini"
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 844})
            assert page.evaluate(_OUTSIDE) == []
        page.click(f"tr[data-model='{old}'] [data-use]")
        page.wait_for_selector(f"tr[data-model='{old}'] .chip:text('searched now')")
        assert server.get("/api/v1/info").json()["model"] == str(old)
        page.click("tr[data-model='gare-mini'] [data-forget]")
        page.wait_for_selector("#model option[value='gare-mini']", state="attached")
        assert [found["model"] for found in server.get("/api/v1/models").json()["sets"]] == [str(old)]
        page.close()


_OUTSIDE = """() => {
  const edge = document.querySelector("#models").getBoundingClientRect().right;
  const isOut = (each) => each.getBoundingClientRect().right > edge;
  const isNoCell = (each) => getComputedStyle(each).display === "flex";
  const wide = [...document.querySelectorAll("#models *")].filter(isOut);
  const cells = [...document.querySelectorAll("#models td")].filter(isNoCell);
  return [...wide, ...cells].map((each) => each.outerHTML);
}"""
"""What of the menu of models sticks out of its panel, or out of its table."""


def test_the_api_refuses_what_would_harm(few: Path, models: Any, tmp_path: Path):
    old, new = models
    place = tmp_path / "library"
    with Library.open(place, model=old) as library:
        library.index(few)
    with ServeProcess(place) as server:
        refused = server.post("/api/v1/jobs", {"kind": "change", "model": str(new)})  # any folder at all
        assert (refused.status, refused.json()["error"]["code"]) == (422, "no_such_model")
        assert server.post("/api/v1/jobs", {"kind": "change"}).status == 422
        current = server.get("/api/v1/models").json()["sets"][0]["set"]
        assert (
            server.post("/api/v1/models/forget", {"set": current}).json()["error"]["code"] == "not_possible"
        )
        assert server.post("/api/v1/models/use", {"set": "nothing"}).status == 409
        # A picture that was taken in before the model was changed is encoded again, or asked for again.
        picture = io.BytesIO()
        Image.new("RGB", (64, 48), "red").save(picture, "png")
        upload = server.upload(picture.getvalue()).json()["upload"]
        assert server.get(f"/api/v1/search?upload={upload}").status == 200
        with Library.open(place) as library:
            library.change_model(new)
        wait_until(lambda: server.get("/api/v1/info").json()["model"] == str(new), "the new model")
        gone = server.get(f"/api/v1/search?upload={upload}")
        assert (gone.status, gone.json()["error"]["code"]) == (410, "upload_gone")
        assert server.upload(picture.getvalue()).status == 200


def test_a_query_in_another_language_gets_a_notice(few: Path, tmp_path: Path):
    """On the command line, in the API and on the page, with the model in the box."""
    place = tmp_path / "library"
    with Library.open(place) as library:
        library.index(few)
    asked = run_gare("search", "ein roter Ball am Strand", "--library", str(place), "--paths")
    assert "looks like German, and gare-mini reads English only" in asked.stderr
    assert len(asked.stdout.splitlines()) == 4
    assert "looks like" not in run_gare("search", "a red ball", "--library", str(place)).stderr
    with ServeProcess(place) as server:
        notices = server.get("/api/v1/search?q=ein+roter+Ball").json()["notices"]
        assert len(notices) == 1
        assert "google/siglip2" in notices[0]
        assert server.get("/api/v1/search?q=a+red+ball").json()["notices"] == []
        assert b"gare-mini reads English only" in server.get("/?q=ein+roter+Ball").content

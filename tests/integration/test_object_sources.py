"""Videos on a real S3 service are indexed as those of a folder are, and fetched only when they must be."""

from __future__ import annotations

import os
import urllib.request
import uuid
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch

from clips import steady, write_video
from gare import GARE, GareConfig, Library
from gare.errors import LibraryError
from gare.library.index.index_run import IndexOptions
from gare.library.index.object_files import SCRATCH_VARIABLE, Scratch
from gare.library.index.scan import FoundFile
from servers import HANG_S, SeaweedFS


@pytest.fixture(scope="module")
def model() -> GARE:
    torch.manual_seed(0)
    return GARE(GareConfig.load({"encoder": {"name": "tiny"}})).eval()


class Bucket:
    """Objects below a prefix of a real service, written by plain HTTP."""

    def __init__(self, port: int) -> None:
        self.prefix = f"videos-{uuid.uuid4().hex[:8]}"
        self.uri = f"s3://gare/{self.prefix}"
        self._port = port

    def put(self, name: str, data: bytes) -> None:
        self._ask("PUT", name, data)

    def remove(self, name: str) -> None:
        self._ask("DELETE", name)

    def _ask(self, method: str, name: str, data: bytes | None = None) -> None:
        url = f"http://127.0.0.1:{self._port}/gare/{self.prefix}/{quote(name)}"
        urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=HANG_S).close()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Five videos, one of them twice, and a file that is none."""
    (tmp_path / "tree" / "a").mkdir(parents=True)
    for number in range(4):
        write_video(tmp_path / "tree" / "a" / f"clip {number}.mp4", steady(1 + number / 4))
    (tmp_path / "tree" / "copy.mp4").write_bytes((tmp_path / "tree" / "a" / "clip 0.mp4").read_bytes())
    (tmp_path / "tree" / "text.mp4").write_text("no video")
    (tmp_path / "tree" / "notes.txt").write_text("no video")
    return tmp_path / "tree"


@pytest.fixture
def bucket(seaweedfs: SeaweedFS, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(seaweedfs.port)
    for path in tree.rglob("*"):
        if path.is_file():
            bucket.put(str(path.relative_to(tree)), path.read_bytes())
    return bucket


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def vectors(library: Library, root: str) -> dict[str, np.ndarray]:
    rows = [
        row for batch in library.store.scan(columns=["path", "start", "vector"]) for row in batch.to_pylist()
    ]
    return {f"{row['path'].removeprefix(root)}@{row['start']}": np.array(row["vector"]) for row in rows}


def test_objects_are_indexed_as_files_are(
    bucket: Bucket, tree: Path, tmp_path: Path, model: GARE, scratch: Path
) -> None:
    with Library.open(tmp_path / "local", model=model) as local:
        local.index(tree)
        expected = vectors(local, str(tree))
    with Library.open(tmp_path / "library", model=model) as library:
        report = library.index(f"{bucket.uri}/")
        assert (report.new, report.duplicate) == (4, 1)
        assert [failure.path for failure in report.failures] == [f"{bucket.uri}/text.mp4"]
        found = vectors(library, bucket.uri)
        assert found.keys() == expected.keys()
        for name, vector in found.items():
            np.testing.assert_allclose(vector, expected[name], atol=1e-5)
        assert os.listdir(scratch) == []
        assert library.check().findings == []
        again = library.index(bucket.uri)
        assert (again.unchanged, again.failed_before, again.did_something) == (5, 1, False)

        bucket.put("a/clip 1.mp4", (tree / "a" / "clip 2.mp4").read_bytes() + b" ")
        bucket.remove("a/clip 3.mp4")
        bucket.remove("copy.mp4")
        bucket.put("moved.mp4", (tree / "copy.mp4").read_bytes())
        third = library.index(bucket.uri)
        assert (third.changed, third.deleted, third.moved, third.unchanged) == (1, 1, 1, 2)
        assert os.listdir(scratch) == []


def test_nothing_is_fetched_that_has_not_changed(
    bucket: Bucket, tmp_path: Path, model: GARE, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Library.open(tmp_path / "library", model=model) as library:
        library.index(bucket.uri)
        monkeypatch.setattr(Scratch, "fetch", lambda self, file: pytest.fail(f"{file.path} was fetched"))
        assert library.index(bucket.uri).unchanged == 5


def test_scratch_space_has_a_limit_and_many_objects_pass_through_it(
    bucket: Bucket, tree: Path, tmp_path: Path, model: GARE, scratch: Path
) -> None:
    largest = max(path.stat().st_size for path in tree.rglob("*.mp4"))
    with Library.open(tmp_path / "library", model=model) as library:
        report = library.index(bucket.uri, options=IndexOptions(scratch_bytes=largest))
        assert (report.new, report.duplicate, report.failed) == (4, 1, 1)
        assert os.listdir(scratch) == []
    with Library.open(tmp_path / "other", model=model) as library:
        report = library.index(bucket.uri, options=IndexOptions(scratch_bytes=100))
        assert report.failure_kinds() == {"unreachable": 5, "unreadable": 1}
        assert "--scratch" in report.failures[0].message
        # What could not be fetched is no failure of the file: the next run tries again.
        assert library.index(bucket.uri).new == 4


def test_scratch_space_that_cannot_be_made_is_named(
    bucket: Bucket, tmp_path: Path, model: GARE, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "nowhere"))
    with Library.open(tmp_path / "library", model=model) as library:
        report = library.index(bucket.uri)
        assert report.failure_kinds() == {"unreachable": 6}
        assert f"no scratch space in {tmp_path / 'nowhere'}" in report.failures[0].message


def test_what_a_killed_process_left_in_scratch_space_is_removed(scratch: Path, bucket: Bucket) -> None:
    (scratch / "gare-scratch-999999999-abc").mkdir()
    (scratch / f"gare-scratch-{os.getpid()}-mine").mkdir()
    space = Scratch()
    with pytest.raises(OSError, match="cannot be fetched"):
        space.fetch(FoundFile(f"{bucket.uri}/nowhere.mp4", 10, 0))
    names = {path.name for path in scratch.iterdir()}
    assert "gare-scratch-999999999-abc" not in names
    assert f"gare-scratch-{os.getpid()}-mine" in names
    space.close()


def test_a_bucket_that_is_not_there_is_an_error_and_one_that_is_empty_drops_nothing(
    bucket: Bucket, tree: Path, tmp_path: Path, model: GARE
) -> None:
    with Library.open(tmp_path / "library", model=model) as library:
        with pytest.raises(LibraryError, match="there is nothing at s3://gare/nowhere"):
            library.index("s3://gare/nowhere")
        library.index(bucket.uri)
        for path in tree.rglob("*.*"):
            bucket.remove(str(path.relative_to(tree)))
        report = library.index(bucket.uri)
        assert "--prune" in report.skipped_roots[bucket.uri]
        assert len(library) > 0

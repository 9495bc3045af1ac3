"""The power goes while a library or a model is written: what was acknowledged is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from crash_points import quick_folder
from gare.library.store.lance_storage import broken_manifests
from power_cut import Disk, PowerCuts, cuts
from write_shim import Write

ASSETS = Path(__file__).parents[1] / "assets" / "v0.1"


@pytest.fixture(scope="module")
def cutter() -> Iterator[PowerCuts]:
    with ExitStack() as stack:
        yield PowerCuts(stack, stack.enter_context(quick_folder()))


@pytest.mark.parametrize("name", ["first index", "index after changes", "maintain"])
def test_a_library_after_a_power_cut(name: str, cutter: PowerCuts) -> None:
    _, num_disks, wrong = cutter.library(name, stride=3, most=6)
    assert num_disks == 6
    assert not wrong


@pytest.mark.parametrize("name", ["checkpoint", "best model", "results.json"])
def test_training_after_a_power_cut(name: str, cutter: PowerCuts) -> None:
    _, num_disks, wrong = cutter.training(name, most=6)
    assert num_disks == 6
    assert not wrong


def calls(*lines: tuple[str, str, str, bytes]) -> list[Write]:
    return [Write(kind, path, target, 0, data) for kind, path, target, data in lines]


NEW_FILE = [
    ("C", "/x/part", "", b""),
    ("W", "/x/part", "", b"0123456789"),
    ("F", "/x/part", "", b""),
    ("R", "/x/part", "/x/file", b""),
    ("F", "/x", "", b""),
]


@pytest.mark.parametrize(
    ("left_out", "contents"),
    [
        (None, [None, b"0123456789"]),
        (
            2,
            [None, b"", b"01234", bytes(10), b"0123456789", b"\0\0\0\0\x0056789"],
        ),  # not flushed before its name
        (4, [None, b"0123456789"]),
    ],
)
def test_the_simulation_loses_what_was_not_flushed(
    left_out: int | None, contents: list[bytes | None], tmp_path: Path
) -> None:
    trace = calls(*[line for number, line in enumerate(NEW_FILE) if number != left_out])
    found = list(cuts(trace, "/x", tmp_path))
    assert {cut.image.get("/file") for cut in found} <= set(contents)
    assert {b"" if left_out == 2 else b"0123456789", None} <= {cut.image.get("/file") for cut in found}
    at_the_end = {cut.image.get("/file") for cut in found if cut.is_end}
    if left_out is None:
        assert at_the_end == {b"0123456789"}
    else:
        assert len(at_the_end) > 1


def test_a_disk_without_a_trace_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(b"old")
    assert Disk("/x", tmp_path).after_cut("lost") == {"": None, "/sub": None, "/sub/file": b"old"}


@pytest.mark.parametrize("spoil", ["empty", "half", "zeros", "hole"])
@pytest.mark.parametrize("table", ["items", "frames", "files", "facts"])
def test_a_manifest_that_a_power_cut_spoilt_is_seen(table: str, spoil: str, tmp_path: Path) -> None:
    manifests = sorted((ASSETS / "library" / f"{table}.lance" / "_versions").glob("*.manifest"))
    (tmp_path / "_versions").mkdir()
    for manifest in manifests:
        (tmp_path / "_versions" / manifest.name).write_bytes(manifest.read_bytes())
    assert broken_manifests(tmp_path) == []
    newest = tmp_path / "_versions" / manifests[0].name
    whole = newest.read_bytes()
    half = len(whole) // 2
    spoilt = {
        "empty": b"",
        "half": whole[:half],
        "zeros": bytes(len(whole)),
        "hole": bytes(half) + whole[half:],
    }
    newest.write_bytes(spoilt[spoil])
    assert broken_manifests(tmp_path) == [newest]

"""Training stopped at its n-th write: what is left is whole, and a run ends as if never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_crash_points import spread

import crash_training
from crash_points import quick_folder
from crash_scenes import make_model
from crash_server import CrashServer
from gare import atomic
from write_shim import Stop, read_trace


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with quick_folder() as path:
        yield path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[CrashServer]:
    with CrashServer(make_model(folder / "model"), trains=True) as process:
        yield process


@pytest.mark.parametrize("name", crash_training.SCENES)
def test_training_stopped_at_any_write(name: str, server: CrashServer, folder: Path) -> None:
    stage = crash_training.set_stage(name, server, folder / name.replace(" ", "-"))
    killed = 0
    for mode in ("before", "torn"):
        for at in spread(stage.points, mode, 6 if mode == "before" else 3):
            killed += crash_training.try_point(stage, at, mode).was_killed
    assert killed >= 2


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_as_a_whole(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    folder = tmp_path / "best"
    for number in range(3):
        with atomic.replacing_folder(folder) as part:
            (part / "model").write_text(str(number))
        if number == 0:
            (folder / "notes of mine").write_text("stay")
    assert (folder / "model").read_text() == "2"
    assert (folder / "notes of mine").read_text() == "stay"
    with pytest.raises(ZeroDivisionError), atomic.replacing_folder(folder) as part:
        (part / "model").write_text(str(1 / 0))
    assert (folder / "model").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_where_folders_cannot_be_exchanged_the_old_one_is_put_back(tmp_path: Path) -> None:
    """A kill between the two renames."""
    (tmp_path / "best.old.part").mkdir()
    (tmp_path / "best.old.part" / "model").write_text("old")
    atomic.recover_folder(tmp_path / "best")
    assert (tmp_path / "best" / "model").read_text() == "old"


def test_the_shim_counts_what_is_written(server: CrashServer, folder: Path) -> None:
    """Eight writes that are known: each kind of call, one after the other."""
    place = folder / "counted"
    place.mkdir()
    trace = folder / "counted.trace"
    done = server.run("write_eight", Stop(str(place), trace=str(trace)), folder=str(place))
    assert done.get() is None
    assert done.num_writes == 8
    assert "".join(write.kind for write in read_trace(trace)) == "MCWFRTLUD"
    for at in range(1, 9):
        for path in (place / "sub", place):
            for file in path.glob("*"):
                file.unlink() if file.is_file() else None
        if (place / "sub").exists():
            (place / "sub").rmdir()
        outcome = server.run("write_eight", Stop(str(place), at=at, mode="before"), folder=str(place))
        assert outcome.was_killed

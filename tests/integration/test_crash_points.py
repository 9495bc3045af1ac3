"""Every operation stopped at its n-th write, on every store: nothing is lost, doubled or wrong.

A few writes of each operation are tried here, spread over all of it. `make crash` tries every one;
GARE_CRASH_POINTS=all does so here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from crash_places import KINDS, CrashPlace
from crash_points import open_place, quick_folder
from crash_scenes import SCENES, learn_truth, make_clips, make_model, set_stage, try_point
from crash_server import CrashServer
from library_state import Truth

ALL = os.environ.get("GARE_CRASH_POINTS") == "all"


class Theatre:
    """What all tests of this file share; each part is made when it is first asked for."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self.folder = stack, folder
        self.server: CrashServer = stack.enter_context(CrashServer(make_model(folder / "model")))
        self.clips = make_clips(folder / "clips")
        self._places: dict[str, CrashPlace] = {}
        self._truth: Truth | None = None

    def place(self, kind: str) -> CrashPlace:
        if kind not in self._places:
            self._places[kind] = self._stack.enter_context(open_place(kind, self.folder))
        return self._places[kind]

    @property
    def truth(self) -> Truth:
        if self._truth is None:
            self._truth = learn_truth(self.place("folder"), self.server, self.clips)
        return self._truth


@pytest.fixture(scope="module", params=KINDS)
def theatre(request: pytest.FixtureRequest) -> Iterator[tuple[Theatre, str]]:
    """One for each store: the process that is forked must have been started with its address."""
    with ExitStack() as stack:
        folder = stack.enter_context(quick_folder())
        place = stack.enter_context(open_place(request.param, folder))
        stage = Theatre(stack, folder)
        stage._places[request.param] = place
        yield stage, request.param


def spread(points: Callable[..., Iterator[int]], mode: str, number: int) -> list[int]:
    """So many of the points, none at the very end: how many messages a server gets may differ by a few."""
    found = list(points(mode))
    if ALL or len(found) <= number:
        return found
    return [found[len(found) * (2 * part + 1) // (2 * number)] for part in range(number)]


@pytest.mark.parametrize("name", SCENES)
def test_a_library_stopped_at_any_write(name: str, theatre: tuple[Theatre, str]) -> None:
    stage_house, kind = theatre
    place = stage_house.place(kind)
    folder = stage_house.folder / name.replace(" ", "-")
    stage = set_stage(SCENES[name], place, stage_house.server, folder, stage_house.clips, stage_house.truth)
    killed = 0
    for mode in place.modes:
        for at in spread(stage.points, mode, 3 if mode == "before" and kind == "folder" else 1):
            killed += try_point(stage, at, mode).was_killed
    assert killed >= 2
    # One write more than there are: nothing is stopped, and the same checks hold.
    assert not try_point(stage, 2 * stage.num_writes + 100, "before").was_killed

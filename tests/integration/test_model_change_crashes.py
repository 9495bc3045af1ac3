"""A change of model, going back and forgetting, stopped at their writes: searches find what they found
before, or all that is new; the sets can be listed; the same command goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from crash_places import KINDS, CrashPlace
from crash_points import open_place, quick_folder
from crash_scenes import make_clips, make_model
from crash_server import CrashServer
from gare import GARE, GareConfig
from write_shim import read_trace

ALL = os.environ.get("GARE_CRASH_POINTS") == "all"
Seen = tuple[list[dict[str, Any]], list[tuple[str, float]], list[str]]


@dataclass
class House:
    """A library with vectors of one model, a second model, and the server that is stopped."""

    kind: str
    place: CrashPlace
    server: CrashServer
    folder: Path
    old: str
    new: str
    library: str

    def look(self, uri: str) -> Seen:
        seen: Seen = self.server.do("look_at_sets", uri=uri)
        return seen


@pytest.fixture(scope="module", params=KINDS)
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    with ExitStack() as stack:
        folder = stack.enter_context(quick_folder())
        place = stack.enter_context(open_place(request.param, folder))
        old, new = make_model(folder / "old"), folder / "new"
        torch.manual_seed(1)
        GARE(GareConfig.load({"encoder": {"name": "tiny"}, "num_frames": 3})).eval().save_pretrained(new)
        server = stack.enter_context(CrashServer(old))
        library = place.new()
        clips = make_clips(folder / "clips")
        server.do("index_with", uri=library, root=str(clips), model=str(old))
        yield House(request.param, place, server, folder, str(old), str(new), library)


def brief(sets: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [(row["model"], row["state"], row["is_current"], row["num_items"]) for row in sets]


@pytest.mark.parametrize("name", ["change", "go back", "forget the first", "forget the second"])
def test_stopped_at_any_write(name: str, house: House) -> None:
    """What is forgotten is the vectors where the library is, or those of a store below it."""
    task = {"change": "change_model", "go back": "use_model"}.get(name, "forget_model")
    model = house.new if name in ("change", "forget the second") else house.old
    start = house.place.copy(house.library)
    if name != "change":
        house.server.do("change_model", uri=start, model=house.new)
    if name == "forget the second":
        house.server.do("use_model", uri=start, model=house.old)
    before = house.look(start)
    reference, trace = house.place.copy(start), str(house.folder / f"trace {name}")
    house.server.run(task, house.place.stop(reference, 0, "count", trace), uri=reference, model=model).get()
    after = house.look(reference)
    kinds = [write.kind for write in read_trace(trace) if write.kind not in "FA"]
    assert before[2] == after[2] == []
    num_killed = 0
    for mode in house.place.modes:
        points = [at for at, kind in enumerate(kinds, 1) if mode != "torn" or kind in "WS"]
        few = 3 if mode == "before" else 1
        for at in points if ALL else points[len(points) // (2 * few) :: max(1, len(points) // few)]:
            uri = house.place.copy(start)
            try:
                outcome = house.server.run(task, house.place.stop(uri, at, mode), uri=uri, model=model)
                assert outcome.code == 0 or outcome.was_killed or outcome.is_explained, outcome.error
                num_killed += outcome.was_killed
                house.place.settle(uri)
                check(house, task, model, uri, before, after)
            except AssertionError as error:
                raise AssertionError(f"{house.kind}, {name}, {mode} {at} of {len(kinds)}: {error}") from error
            house.place.remove(uri)
    assert num_killed >= 2


def check(house: House, task: str, model: str, uri: str, before: Seen, after: Seen) -> None:
    sets, hits, _ = house.look(uri)  # which may know of an unfinished set
    assert hits in (before[1], after[1]), "searches find something else"
    if brief(sets) != brief(after[0]):
        house.server.do(task, uri=uri, model=model)
    sets, hits, findings = house.look(uri)
    assert brief(sets) == brief(after[0])
    assert hits == after[1]
    assert findings == []

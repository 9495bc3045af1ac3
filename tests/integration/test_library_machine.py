"""A few seeded runs of `library_machine.py`, on every store. `make torture` has as many as one likes."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from crash_places import KINDS
from crash_points import quick_folder
from library_machine import World, run


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_a_library_ends_as_one_made_anew(kind: str) -> None:
    with ExitStack() as stack:
        world = World(stack, kind, stack.enter_context(quick_folder()))
        run(world, seed=16, num_runs=4 if kind == "folder" else 2, num_steps=8)
        assert world.num_steps > 10

"""A library under everything that happens to one, in any order; in the end it is as one that was made anew.

Files are put, replaced, renamed, swapped, copied, touched and removed. The library is indexed, split anew,
tagged, maintained, repaired, rid of items. Writers are killed at any write, or two work at once. After every
step the library is sound, and `teardown` compares it with a fresh index of the same files.

    python tests/library_machine.py --runs 200 --seed 1 --store folder

`make torture RUNS=200 SEED=1` calls it. It prints its seeds and, where something is wrong, the steps.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from crash_places import KINDS, CrashPlace
from crash_points import open_place, quick_folder
from crash_scenes import COLOURS, Tree, learn_truth, make_clips, make_model
from crash_server import CrashServer, Job
from library_state import State, Truth, assert_same, check_sound
from same_examples import use_no_constants_of_ours

NAMES = st.sampled_from(["a.mp4", "b.mp4", "c.mp4", "d.mp4"])
SPLITS = st.sampled_from(["moments:1", "window:1"])
MOMENTS = st.one_of(st.integers(1, 40), st.integers(1, 120), st.integers(1, 250))
RUNS_PER_SEED = 10


class World:
    """What all runs share."""

    def __init__(self, stack: ExitStack, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.place: CrashPlace = stack.enter_context(open_place(kind, folder))
        self.server: CrashServer = stack.enter_context(CrashServer(make_model(folder / "model")))
        self.clips = make_clips(folder / "clips")
        self.truth: Truth = learn_truth(self.place, self.server, self.clips)
        self.num_runs = self.num_steps = self.num_kills = 0


class LibraryMachine(RuleBasedStateMachine):
    """One run."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[str] = []
        self._home = self.world.folder / f"run{self.world.num_runs}"
        shutil.rmtree(self._home, ignore_errors=True)
        self.tree = Tree(self._home, self.world.clips)
        self._uri = self.world.place.new()
        self._split = "moments:1"
        self._deleted: set[str] = set()
        self._is_sound = True
        self._two = False

    # --- files ------------------------------------------------------------------------------------------

    @property
    def _names(self) -> list[str]:
        return sorted(path.name for path in self._home.iterdir())

    @rule(name=NAMES, colour=st.sampled_from(COLOURS))
    def put(self, name: str, colour: str) -> None:
        """A new video, or another one in the place of the old."""
        self._note("put", name, colour)
        self.tree.put(name, colour)

    @rule(name=NAMES, other=NAMES, how=st.sampled_from(["rename", "copy", "swap", "touch", "remove"]))
    def rearrange(self, name: str, other: str, how: str) -> None:
        if name not in self._names:
            return
        self._note(how, name, other)
        if how == "touch":
            self.tree.touch(name)
        elif how == "remove":
            self.tree.remove(name)
        elif name == other:
            return
        elif how == "rename":
            self.tree.rename(name, other)
        elif how == "copy":
            self.tree.copy(name, other)
        elif other in self._names:  # with their dates
            self.tree.rename(name, "third.mp4")
            self.tree.rename(other, name)
            self.tree.rename("third.mp4", other)

    # --- the library ------------------------------------------------------------------------------------

    @property
    def _index(self) -> dict[str, Any]:
        return {"uri": self._uri, "root": str(self._home)}

    @rule(split=st.one_of(st.none(), SPLITS), tag=st.sampled_from(["", "", "seen"]))
    def index(self, split: str | None, tag: str) -> None:
        self._do("index", **self._index, split=split, tags=[tag] if tag else [])
        self._split = split or self._split

    @rule(split=st.one_of(st.none(), SPLITS), at=MOMENTS, mode=st.integers(0, 3))
    def index_and_crash(self, split: str | None, at: int, mode: int) -> None:
        self._crash("index", at, mode, **self._index, split=split)

    @rule(name=NAMES, colour=st.sampled_from(COLOURS), at=MOMENTS, mode=st.integers(0, 3))
    def put_and_crash(self, name: str, colour: str, at: int, mode: int) -> None:
        """Another video in the place of one, and a crash while it is indexed."""
        self.put(name, colour)
        self._crash("index", at, mode, **self._index)

    @rule(first=SPLITS, second=SPLITS, at=st.one_of(st.just(0), MOMENTS))
    def two_indexers(self, first: str, second: str, at: int) -> None:
        """At once; the first may be killed."""
        self._note("together", first, second, at)
        self._two = self._two or bool(at)
        stop = self.world.place.stop(self._uri, at, "before") if at else None
        jobs = [
            Job("index", {**self._index, "split": first}, stop),
            Job("index", {**self._index, "split": second}),
        ]
        one, other = self.world.server.together(jobs)
        self.world.num_kills += one.was_killed
        assert one.was_killed or one.code == 0, self._failure(one.error)
        assert other.code == 0, self._failure(other.error)
        self._split = self._look().notes.get("split", self._split)

    @precondition(lambda self: self._exists)
    @rule(age_s=st.sampled_from([0.0, 3600.0]))
    def maintain(self, age_s: float) -> None:
        self._do("maintain", uri=self._uri, age_s=age_s, index_from=3)

    @precondition(lambda self: self._exists)
    @rule()
    def repair(self) -> None:
        """After whatever crash: nothing is beyond repair, and nothing good is thrown away."""
        assert self._do("repair", uri=self._uri) == [], self._failure("something could not be mended")

    @precondition(lambda self: self._exists)
    @rule(at=MOMENTS, mode=st.integers(0, 3))
    def maintain_and_crash(self, at: int, mode: int) -> None:
        self._crash("maintain", at, mode, uri=self._uri, age_s=0.0, index_from=3)

    @precondition(lambda self: self._exists)
    @rule(number=st.integers(0, 10), at=st.one_of(st.just(0), st.integers(1, 15)))
    def delete(self, number: int, at: int) -> None:
        """One item; perhaps with a crash."""
        items = sorted(self._look().items.values(), key=lambda row: (row["path"], row["start"]))
        if not items:
            return
        row = items[number % len(items)]
        self._deleted.add(row["path"])
        if at:
            self._crash("delete", at, at, uri=self._uri, ids=[row["id"]])
        else:
            self._do("delete", uri=self._uri, ids=[row["id"]])
            assert row["id"] not in self._look().items, self._failure("a deleted item is there")

    # --- what must be true ------------------------------------------------------------------------------

    _exists = False

    def _do(self, task: str, **arguments: Any) -> Any:
        self._note(task, arguments)
        outcome = self.world.server.run(task, **arguments)
        assert outcome.code == 0, self._failure(outcome.error)
        self._exists = True
        self._look()
        return outcome.result

    def _crash(self, task: str, at: int, mode: int, **arguments: Any) -> None:
        modes = [name for name in self.world.place.modes if name != "cut"]
        how = modes[mode % len(modes)]
        self._note(f"{task}, killed {how} write {at}", arguments)
        outcome = self.world.server.run(task, self.world.place.stop(self._uri, at, how), **arguments)
        self.world.num_kills += outcome.was_killed
        assert outcome.was_killed or outcome.code == 0, self._failure(outcome.error)
        self.world.place.settle(self._uri)
        self._exists = self._exists or self.world.server.do("exists", uri=self._uri)
        if self._exists:
            self._split = self._look().notes.get("split", self._split)

    def _look(self) -> State:
        outcome = self.world.server.run("state", uri=self._uri)
        assert outcome.code == 0, self._failure(outcome.error)
        self._exists = True
        state: State = outcome.result
        try:
            assert not state.repairs, state.repairs
            # Of two that write a file at once one may be killed before its ledger: a run does not believe it.
            check_sound(state, self.world.truth, deleted=self._deleted, turns=not self._two)
        except AssertionError as error:
            raise AssertionError(self._failure(str(error))) from error
        return state

    def teardown(self) -> None:
        """Index once more: as a fresh index of the same files, and nothing is left to do or to remove."""
        try:
            if self._is_sound:
                self._compare()
        finally:
            self.world.num_runs += 1
            self.world.num_steps += len(self._steps)
            self.world.place.remove(self._uri)
            shutil.rmtree(self._home, ignore_errors=True)

    def _compare(self) -> None:
        for path in sorted(self._deleted):  # what was deleted by hand comes back when its file changes
            if Path(path).exists():
                self.tree.touch(Path(path).name)
        self._deleted.clear()
        self._do("index", **self._index, split=self._split)
        self._two = False
        again = self._do("index", **self._index)
        assert (again["new"], again["changed"], again["failed"]) == (0, 0, 0), self._failure(str(again))
        assert again["num_items_encoded"] == 0, self._failure(str(again))
        self._do("maintain", uri=self._uri, age_s=0.0)
        state = self._look()
        fresh = self.world.place.new()
        self.world.server.do("index", uri=fresh, root=str(self._home), split=self._split)
        expected = self.world.server.do("state", uri=fresh)
        self.world.place.remove(fresh)
        try:
            assert_same(_untagged(state), expected)
            keys = {row["frames_key"] for row in state.items.values()}
            assert set(state.frames_keys) == keys, "orphaned frames stay"
        except AssertionError as error:
            raise AssertionError(self._failure(str(error))) from error

    def _note(self, *words: object) -> None:
        self._steps.append(" ".join(map(str, words)).replace(str(self._home), "").replace(self._uri, "URI"))

    def _failure(self, text: str) -> str:
        self._is_sound = False
        return "\n".join([text, "after these steps:", *self._steps])


def _untagged(state: State) -> State:
    """Without tags: a fresh index has none."""
    items = {key: {**row, "tags": []} for key, row in state.items.items()}
    return State(items, state.ledger, state.notes, state.frames_keys, state.repairs)


def run(world: World, seed: int, num_runs: int, num_steps: int) -> None:
    """So many runs from one seed; raises where one of them goes wrong."""
    use_no_constants_of_ours()
    machine = type("SeededMachine", (LibraryMachine,), {"world": world})
    hypothesis.seed(seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_runs,
            stateful_step_count=num_steps,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="default: a new one")
    parser.add_argument("--steps", type=int, default=12, help="the most steps of a run")
    parser.add_argument("--store", choices=KINDS, default="folder")
    options = parser.parse_args()
    num_wrong, started = 0, time.monotonic()
    with ExitStack() as stack:
        world = World(stack, options.store, stack.enter_context(quick_folder()))
        for number in range(-(-options.runs // RUNS_PER_SEED)):
            seed, before = options.seed + number, world.num_runs
            try:
                run(world, seed, min(RUNS_PER_SEED, options.runs), options.steps)
                verdict = "sound"
            except Exception as error:
                num_wrong += 1
                parts = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
                verdict = "WRONG: " + "\n".join(map(str, parts))
            print(f"seed {seed}: {world.num_runs - before} runs, {verdict}", flush=True)
    print(
        f"{options.store}: seeds {options.seed} to {seed}, {world.num_runs} runs, {world.num_steps:,} steps, "
        f"{world.num_kills:,} kills, {num_wrong} seeds wrong, {time.monotonic() - started:,.0f} s"
    )
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""What a library holds, as plain values, and what must be true of it whatever happened to its writers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gare.library.store import Store

Row = dict[str, Any]
_COLUMNS = ("id", "path", "content", "start", "end", "width", "height", "tags", "frames_key", "vector")
_FRAME_COLUMNS = ("vectors", "times", "thumbnail", "strip")
_UNFINISHED = -1


@dataclass(frozen=True)
class State:
    """A library as it was read."""

    items: dict[str, Row]
    """By id, with their frames."""
    ledger: dict[str, Row]
    notes: dict[str, str]
    frames_keys: list[str]
    """Of the table of frames, orphans and all."""
    repairs: tuple[str, ...]

    def files(self) -> dict[str, list[Row]]:
        """The items of every file, in their order."""
        found: dict[str, list[Row]] = {}
        for row in sorted(self.items.values(), key=lambda row: (row["path"], row["start"])):
            found.setdefault(row["path"], []).append(row)
        return found


def read_state(store: Store) -> State:
    """Read everything; fails where a key is there twice."""
    ids = [row["id"] for batch in store.scan(columns=["id"]) for row in batch.to_pylist()]
    _assert_unique(ids, "item")
    items = store.fetch(ids, [*_COLUMNS, *_FRAME_COLUMNS]).to_pylist()
    assert {row["id"] for row in items} == set(ids), "items cannot be fetched"
    files = [row for batch in store.scan_files() for row in batch.to_pylist()]
    _assert_unique([row["path"] for row in files], "line of the ledger")
    keys = _frames_keys(store)
    _assert_unique(keys, "row of frames")
    return State(
        {row["id"]: row for row in items},
        {row["path"]: row for row in files},
        store.get_notes(),
        keys,
        tuple(getattr(store, "repairs", ())),
    )


def _assert_unique(names: Iterable[str], what: str) -> None:
    doubled = [name for name, number in Counter(names).items() if number > 1]
    assert not doubled, f"a {what} is there twice: {doubled[0]}"


def _frames_keys(store: Any) -> list[str]:
    if hasattr(store, "_link"):
        return [
            row[0]
            for row in store._link.run(lambda c: c.execute("SELECT frames_key FROM gare_frames").fetchall())
        ]
    table = store._frames.snapshot(fresh=True).dataset.to_table(columns=["frames_key"])
    return list(table["frames_key"].to_pylist())


# --- what must be true --------------------------------------------------------------------------------------

Recipe = tuple[str, str, float]
"""What vectors depend on: content, segmentation, start."""


def recipe(row: Row) -> Recipe:
    return row["content"], row["frames_key"].split("/")[1], row["start"]


class Truth:
    """The right vectors of every content, from libraries that nobody disturbed."""

    def __init__(self) -> None:
        self._rows: dict[Recipe, Row] = {}
        self._ends: dict[tuple[str, str], list[float]] = {}

    def learn(self, state: State) -> None:
        for items in state.files().values():
            for row in items:
                self._rows.setdefault(recipe(row), row)
            self._ends[recipe(items[0])[:2]] = [row["start"] for row in items]

    def check_item(self, row: Row) -> None:
        """The item has the end, the vectors and the pictures of its content."""
        right = self._rows[recipe(row)]
        assert row["frames_key"].startswith(row["content"] + "/"), f"{row['path']}: frames of another file"
        # Batch mates differ from run to run, and with them the last bit of a vector.
        assert np.allclose(row["vector"], right["vector"], atol=1e-5), f"{row['path']}: wrong stage-1 vector"
        one, other = (np.frombuffer(r["vectors"], "<f2").astype(np.float32) for r in (row, right))
        assert one.shape == other.shape, f"{row['path']}: wrong number of frames"
        assert np.allclose(one, other, atol=4e-3), f"{row['path']}: wrong frame vectors"
        for name in ("end", "times", "thumbnail", "strip", "width", "height"):
            assert row[name] == right[name], f"{row['path']}: wrong {name}"

    def starts(self, content: str, split: str) -> list[float]:
        """Where the items of a content begin."""
        return self._ends[content, split]


def check_sound(state: State, truth: Truth, *, deleted: Iterable[str] = (), turns: bool = True) -> None:
    """Every file has the items of one content and one segmentation, all of them, and the ledger does not lie.

    Args:
        deleted: files of which items were taken out by hand; the ledger still counts those.
        turns: writers took turns, so that the ledger speaks of the items that are there.
    """
    gone = set(deleted)
    keys = set(state.frames_keys)
    for path, items in state.files().items():
        assert len({recipe(row)[:2] for row in items}) == 1, f"{path} has items of two generations"
        content, split, _ = recipe(items[0])
        found = {row["start"] for row in items}
        expected = set(truth.starts(content, split))
        missing = expected - found
        assert found <= expected
        if missing and path not in gone:
            raise AssertionError(f"{path} lacks the items that begin at {sorted(missing)}")
        for row in items:
            assert row["frames_key"] in keys
            truth.check_item(row)
        line = state.ledger.get(path)
        if line is None or line["size"] == _UNFINISHED:
            continue  # the next run looks at the file again
        assert line["state"] == "indexed", f"{path} has items, and failed according to the ledger"
        if turns:
            assert (line["content"], line["split"]) == (content, split), f"the ledger lies about {path}"
    for path, line in state.ledger.items():
        if line["state"] == "indexed" and line["size"] != _UNFINISHED and path not in state.files():
            number = len(truth.starts(line["content"], line["split"]))
            assert path in gone, f"the ledger has {number} items of {path}, and there is none"


def summary(state: State) -> tuple[Any, Any]:
    """What two libraries of the same files have in common: items by path and range, and the ledger."""
    items = {
        (row["path"], row["start"], row["end"]): (row["content"], recipe(row)[1], tuple(row["tags"]))
        for row in state.items.values()
    }
    ledger = {
        path: tuple(line[name] for name in ("size", "mtime_ns", "content", "state", "num_items", "split"))
        for path, line in state.ledger.items()
    }
    return items, ledger


def assert_same(one: State, other: State) -> None:
    for mine, others, what in zip(summary(one), summary(other), ("items", "ledger"), strict=True):
        different = {key for key in mine.keys() | others.keys() if mine.get(key) != others.get(key)}
        assert not different, (
            f"{what} differ: {[(k, mine.get(k), others.get(k)) for k in sorted(different)][:3]}"
        )


def same_notes(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return {k: one.get(k) for k in ("folders", "split")} == {k: other.get(k) for k in ("folders", "split")}

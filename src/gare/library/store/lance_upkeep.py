"""Keeping Lance tables quick and small, while others read and write, and whatever moment it is killed at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from gare.library.store.lance_storage import Place, with_retries
from gare.library.store.lance_table import VECTOR_INDEX, LanceTable
from gare.library.store.store_protocol import Progress, Stats

INDEX_FROM_ROWS = 10_000
"""The fewest items that get a vector index: reading fewer takes a few milliseconds."""
_ROWS_PER_PARTITION = 1_000_000
_ITEM_ROWS_PER_FRAGMENT = 1_000_000
_FRAME_ROWS_PER_FRAGMENT = 16_384  # about 300 MB: no row is rewritten for ever, as the table grows
_MOST_NEW_ROWS = 1_000  # more unindexed rows than this slow a search down
_REBUILD_SHARE = 0.1


def maintain_tables(
    place: Place,
    *,
    items: LanceTable,
    frames: LanceTable,
    others: Sequence[LanceTable],
    orphan_age: timedelta,
    version_age: timedelta,
    progress: Progress | None,
) -> Stats:
    """Join small fragments, index new vectors, remove orphaned frames and old versions."""
    actions: list[str] = []
    freed = 0
    with place.maintaining() as is_ours:
        if not is_ours:
            actions.append("another process is at it already: nothing was done")
            return Stats(*_counts(items), 0, tuple(actions))
        steps: list[tuple[str, Callable[[], str]]] = [
            ("joining items", partial(_join, items, _ITEM_ROWS_PER_FRAGMENT)),
            ("indexing vectors", partial(_update_index, items)),
            ("removing orphaned frames", partial(_remove_orphans, place, items, frames, orphan_age)),
            ("joining frames", partial(_join, frames, _FRAME_ROWS_PER_FRAGMENT)),
            *((f"joining {table.name}", partial(_join, table, _ITEM_ROWS_PER_FRAGMENT)) for table in others),
        ]
        tables = (items, frames, *others)
        for number, (name, step) in enumerate(steps):
            if progress:
                progress(name, number, len(steps) + 1)
            actions += filter(None, [step()])
        if progress:
            progress("removing old versions", len(steps), len(steps) + 1)
        freed = sum(table.clean(version_age) for table in tables)
        if freed:
            actions.append(f"freed {freed / 1e6:.1f} MB of old versions")
        if progress:
            progress("done", len(steps) + 1, len(steps) + 1)
    return Stats(*_counts(items), freed, tuple(actions))


def _counts(items: LanceTable) -> tuple[int, int]:
    dataset = items.snapshot(fresh=True).dataset
    return dataset.count_rows(), index_cover(dataset)[0]


def index_cover(dataset: Any) -> tuple[int, int]:
    """Rows the index covers, and of how many parts it is made."""
    for index in dataset.describe_indices():
        if index.name == VECTOR_INDEX:
            return int(index.num_rows_indexed), len(index.segments)
    return 0, 0


def _join(table: LanceTable, rows_per_fragment: int) -> str:
    removed = table.compact(rows_per_fragment=rows_per_fragment)
    return f"joined {removed} fragments of {table.name}" if removed else ""


def _update_index(items: LanceTable) -> str:
    """Index what is new; from a tenth of the rows on, or a fourth part, build it anew."""
    dataset = items.snapshot(fresh=True).dataset
    num_rows = dataset.count_rows()
    num_indexed, num_parts = index_cover(dataset)
    num_new = num_rows - num_indexed
    if num_rows < INDEX_FROM_ROWS or num_new <= min(_MOST_NEW_ROWS, num_rows // 10):
        return ""
    if num_parts == 0 or num_new > _REBUILD_SHARE * num_rows or num_parts >= 4:
        partitions = max(1, round(num_rows / _ROWS_PER_PARTITION))
        items.build_index(VECTOR_INDEX, partitions)
        return f"built the vector index over {num_rows:,} items"
    items.extend_index(VECTOR_INDEX)
    return f"added {num_new:,} items to the vector index"


def _remove_orphans(place: Place, items: LanceTable, frames: LanceTable, age: timedelta) -> str:
    """Frames that no item refers to and that nobody can still be writing the item of."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def orphans() -> list[str]:
        limit = pa.scalar(datetime.now(UTC) - age, pa.timestamp("us", tz="UTC"))
        frames_now = frames.snapshot(fresh=True).dataset.to_table(columns=["frames_key", "written"])
        items_now = items.snapshot(fresh=True).dataset.to_table(columns=["frames_key"])
        old = frames_now.filter(pc.less(frames_now["written"], limit))["frames_key"]
        gone = pc.invert(pc.is_in(old, items_now["frames_key"].combine_chunks()))
        return list(old.filter(gone).to_pylist())

    with place.writing():
        removed = with_retries(lambda: frames.remove(keys) if (keys := orphans()) else 0)
    return f"removed the frames of {removed:,} items that are gone" if removed else ""

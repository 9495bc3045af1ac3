"""From the vectors of one model to those of another, while people search.

Every file of the library is encoded again into a set of its own, beside the vectors that searches use. What
was said about items meanwhile (tags, deletions) is carried over, and then one note makes the new set the
current one. Stopped or killed at any moment, the same call goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from gare.errors import LibraryError
from gare.library.index.commit import delete_items
from gare.library.index.index_report import IndexProgress, IndexReport
from gare.library.index.index_run import IndexOptions, choose_segmentation, index_folders
from gare.library.index.plan import Known, read_ledger
from gare.library.index.scan import is_below
from gare.library.store import ModelStamp, Store
from gare.library.store.store_schema import frame_schema, is_dense, item_schema
from gare.library.vector_sets import VectorSets
from gare.model import GARE

_MOST_ROUNDS = 5
_ROWS_AT_ONCE = 1000


def encode_again(
    sets: VectorSets,
    source: Store,
    model: GARE,
    stamp: ModelStamp,
    folders: Sequence[str],
    *,
    options: IndexOptions,
    on_progress: Callable[[IndexProgress], None],
) -> IndexReport:
    """Encode every file that `source` knows with another model, then search with that one.

    Args:
        source: the current set.
        folders: those the library was made of.
        options: how files are read. Tags are for new files, and there are none here.

    Raises:
        LibraryError: a folder of the library is not there, so that the new vectors would lack its files.
            Or somebody forgot the new vectors meanwhile.
    """
    name = sets.begin(stamp)
    with _explained_if_forgotten(sets, name, stamp):
        target = sets.open(name)
        split = str(choose_segmentation(options, source, model))
        options = replace(options, split=split, exclude=(), hidden=True, tags=(), settle_seconds=0.0)
        total = IndexReport()
        seen: dict[str, Known] = {}
        for _ in range(_MOST_ROUNDS):  # what came in while we worked is done in the next round
            source = sets.open(sets.current_name())  # somebody may change the model to a third one meanwhile
            known = read_ledger(source)
            if seen and known.items() <= seen.items():
                break
            report = index_folders(
                target,
                model,
                _roots(folders, known),
                options=options,
                on_progress=on_progress,
                skip=[sets.home.uri],
                only=known,
            )
            _add(total, report)
            if report.interrupted:
                return total
            _check_all_there(report, known, read_ledger(target), prune=options.prune)
            seen = known
        if total.did_something:
            target.maintain()  # before anybody searches it
        change_to(sets, source, name)
        total.changed_to = stamp.name
        return total


@contextmanager
def _explained_if_forgotten(sets: VectorSets, name: str, stamp: ModelStamp) -> Iterator[None]:
    """Whoever fills a set that somebody forgets meanwhile hears that, not what the store says of it."""
    try:
        yield
    except LibraryError:
        if any(found.name == name for found in sets.all()):
            raise
        raise LibraryError(
            f"the model was not changed: the vectors of {stamp.name} were forgotten while they were made. "
            "To make them after all, run the same command again"
        ) from None


def change_to(sets: VectorSets, source: Store, name: str, *, is_complete: bool = True) -> None:
    """Carry over what was said about items, then make this set the current one.

    Args:
        source: the set that was current.
        is_complete: False for an older set, which may have files that the library has not any more.
    """
    target = sets.open(name)
    remarks = _Remarks.read(source)
    _carry_over(remarks, source, target, drops_files=not is_complete)
    sets.use(name)
    # Somebody may have written to the old set between the two.
    _carry_changes(remarks, _Remarks.read(source), target)


def num_behind(source: Store, target: Store) -> int:
    """How many files of one set are not in the other as they are now."""
    known, there = read_ledger(source), read_ledger(target)
    return sum(_state(there.get(path)) != _state(row) for path, row in known.items())


def _state(row: Known | None) -> tuple[int, int] | None:
    return None if row is None else (row.size, row.mtime_ns)


def _roots(folders: Sequence[str], known: Iterable[str]) -> list[str]:
    """The folders, and single files that lie in none of them."""
    strays = [path for path in known if not any(is_below(path, folder) for folder in folders)]
    return [*folders, *(path for path in strays if os.path.lexists(path))]


def _check_all_there(
    report: IndexReport, known: Iterable[str], done: Mapping[str, Known], *, prune: bool
) -> None:
    closed = [*report.skipped_roots, *(failure.path for failure in report.failures if failure.is_folder)]
    missing = [
        path for path in known if path not in done and any(is_below(path, folder) for folder in closed)
    ]
    if missing and not prune:
        raise LibraryError(
            f"the model was not changed: {len(missing):,} files of the library cannot be read now, such as "
            f"{missing[0]}. Is the disk mounted? What was encoded is kept: run the same command again when "
            "they are there, or pass --prune to change without them"
        )


def _add(total: IndexReport, report: IndexReport) -> None:
    total.encoded_again += report.new + report.changed + report.moved + report.duplicate
    total.num_items_encoded += report.num_items_encoded
    total.video_seconds += report.video_seconds
    total.num_items_reused += report.num_items_reused
    total.failures += report.failures
    total.skipped_roots |= report.skipped_roots
    total.interrupted = report.interrupted
    total.seconds += report.seconds
    total.unchanged = report.unchanged
    total.deleted += report.deleted


# --- what people said about items -------------------------------------------------------------------------


@dataclass
class _Remark:
    path: str
    tags: tuple[str, ...]
    added: datetime
    is_moment: bool
    """A range of the frames of its file. Each model has ranges of its own, and they are deleted together."""


@dataclass
class _Remarks:
    """What is known of items besides their vectors."""

    by_id: dict[str, _Remark] = field(default_factory=dict)

    @classmethod
    def read(cls, store: Store) -> _Remarks:
        found: dict[str, _Remark] = {}
        for batch in store.scan(columns=["id", "path", "tags", "added", "frames_key"]):
            for row in batch.to_pylist():
                is_moment = is_dense(row["frames_key"])
                found[row["id"]] = _Remark(row["path"], tuple(row["tags"]), row["added"], is_moment)
        return cls(found)

    def of_files(self) -> dict[str, _Remark]:
        """The same for whole files: every tag of any of their items, and the earliest date."""
        files: dict[str, _Remark] = {}
        for remark in self.by_id.values():
            known = files.setdefault(remark.path, remark)
            tags = tuple(sorted({*known.tags, *remark.tags}))
            files[remark.path] = replace(remark, tags=tags, added=min(known.added, remark.added))
        return files


def _is_same_file(before: Known, now: Known | None) -> bool:
    """Whether two ledgers speak of the same content in the same segments; deletions change their counts."""
    return now is not None and replace(before, num_items=0) == replace(now, num_items=0)


def _carry_over(remarks: _Remarks, source: Store, target: Store, *, drops_files: bool) -> None:
    """Give the items of the target the tags and dates of the source, and delete what was deleted there."""
    known, there = read_ledger(source), read_ledger(target)
    of_files = remarks.of_files()
    changes: dict[str, _Remark] = {}
    gone: list[str] = []
    for item, mine in _Remarks.read(target).by_id.items():
        said = remarks.by_id.get(item) or (of_files.get(mine.path) if mine.is_moment else None)
        before, now = known.get(mine.path), there.get(mine.path)
        if said is None and before is not None and _is_same_file(before, now):
            gone.append(item)  # the same file in the same segments: somebody deleted this one
            continue
        if said is None and before is None and now is not None and drops_files:
            gone.append(item)  # its file left the library; vectors that were added without a file stay
            continue
        said = said or of_files.get(mine.path)
        if said is not None and (said.tags, said.added) != (mine.tags, mine.added):
            changes[item] = said
    _delete(target, gone)
    if drops_files:
        target.forget_files([path for path in there if path not in known])
    _write(target, changes)


def _carry_changes(before: _Remarks, now: _Remarks, target: Store) -> None:
    """Repeat on the target what happened to the source between two readings."""
    changes = {
        item: remark
        for item, remark in now.by_id.items()
        if item in before.by_id and before.by_id[item].tags != remark.tags
    }
    _delete(target, [item for item in before.by_id if item not in now.by_id])
    _write(target, changes)


def _delete(target: Store, ids: Sequence[str]) -> None:
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        delete_items(target, ids[start : start + _ROWS_AT_ONCE])


def _write(target: Store, changes: Mapping[str, _Remark]) -> None:
    """Write tags and dates into items that are there."""
    import pyarrow as pa

    schema = item_schema(target.stamp.stage1_dim)
    ids = list(changes)
    for start in range(0, len(ids), _ROWS_AT_ONCE):
        rows = target.fetch(ids[start : start + _ROWS_AT_ONCE], schema.names).to_pylist()
        changed: list[dict[str, Any]] = [
            {**row, "tags": list(changes[row["id"]].tags), "added": changes[row["id"]].added} for row in rows
        ]
        if changed:
            target.upsert(pa.Table.from_pylist(changed, schema=schema), frame_schema().empty_table())

"""Mends a damaged library: tables first, then rows, then what has to be encoded again from its files.

| damage | its mend |
| --- | --- |
| tables, data files, manifests, facts | a surgeon makes a library that opens (`store_damage`) |
| stage-1 vector | computed anew from the frames |
| frames; items that are lost or damaged | the file is encoded again, by the code of `gare index` |
| ledger | written anew from the items |
| items of several segmentations | those of the ledger stay, or the file is encoded again |
| vector index | built anew |

A file is encoded again only when its content is still the one that was indexed. Where it is gone, or another
one now, the damaged item stays as it is, is left out of searches, and is listed. Every step may be repeated.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gare.errors import LibraryError
from gare.library.check.check_report import CheckReport, Finding
from gare.library.check.check_run import CheckProgress, check_rows, open_part, read_share, surgeon_of
from gare.library.check.ledger_repair import ask_for_another_look, mend_ledger
from gare.library.check.library_rows import LibraryRows, is_good_note, lacks_checksums, split_of
from gare.library.check.read_share import ReadShare
from gare.library.check.row_data import DataDamage, read_items, stage1_of
from gare.library.index.commit import add_frame_checksums
from gare.library.index.content_hash import hash_file
from gare.library.index.encode_segments import encode_file
from gare.library.index.file_outcomes import Kept
from gare.library.index.index_run import encode_again
from gare.library.index.scan import FoundFile
from gare.library.index.segment import parse_segmentation
from gare.library.store import ModelStamp, Store, fetch_readable
from gare.library.store.row_checksums import CHECKSUM_COLUMN, SHOWN_COLUMNS, damaged_item_columns
from gare.library.store.store_damage import REPAIR_NOTE
from gare.library.store.store_protocol import no_library
from gare.library.store.store_schema import frame_schema, is_dense, item_id, item_schema

if TYPE_CHECKING:
    from gare.model import GARE

LoadModel = Callable[[ModelStamp | None], tuple["GARE", ModelStamp]]
"""Loads the model of a stamp; of None, the one that the user names. Gives the model and its stamp."""

_ROWS_AT_ONCE = 256
_SAME_START_S = 0.0005
_ROUNDING = 0.02  # of float16, and of other processors
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEEDS_ENCODING = ("item_without_frames", "wrong_id", "wrong_key", "lost_items")


def repair_library(
    address: str | os.PathLike[str],
    load_model: LoadModel,
    *,
    read_data: str = "all",
    on_progress: CheckProgress = lambda what, done, total: None,
    beside: str | None = None,
    with_rows: bool = True,
) -> CheckReport:
    """Check the library at this address and mend what is damaged: its first set of vectors, or another one.

    Args:
        load_model: called when vectors have to be made, or when the library does not know its model any more.
        read_data: how much of the bulk data to read first; this and the rest as for `check_library`.

    Raises:
        MissingLibraryError: there is nothing of a library.
        LibraryError: it is out of reach or cannot be written; or its model is lost and the given one did not
            make it.
    """
    started = time.monotonic()
    share = ReadShare.parse(read_data)
    address = os.fspath(address)
    surgeon = surgeon_of(address, beside)
    report = CheckReport(surgeon.uri if surgeon else address, beside or "", was_repaired=True)
    damaged_tables: set[str] = set()
    if surgeon is not None:
        try:
            on_progress("looking at the tables", 0, 1)
            if not surgeon.exists():
                raise no_library(report.library)
            damages = surgeon.examine(read_all=share.size == 1.0)
            for damage in damages:
                report.add(damage.kind, damage.what)
            damaged_tables = {damage.table for damage in damages if damage.kind != "broken_index"}
            if damages:
                on_progress("mending the tables", 0, 1)
                stamp = surgeon.stamp()
                if stamp is None:
                    model, stamp = load_model(None)
                    _check_model(report.library, surgeon.sample(), model)
                report.mended += surgeon.mend(stamp, read_all=share.size == 1.0)
        finally:
            surgeon.close()
    store = open_part(address, beside, read_only=False)
    try:
        report.mended += store.repairs
        if not with_rows:
            return report
        if unfinished := store.get_notes().get(REPAIR_NOTE):  # by a repair that was cut short, or this one
            damaged_tables |= set(unfinished.split(","))
        _Repair(
            store,
            report,
            load_model,
            share,
            on_progress,
            lost_rows="items" in damaged_tables,
            lost_facts="facts" in damaged_tables,
        ).run()
        if unfinished:
            store.set_notes({REPAIR_NOTE: ""})
    finally:
        store.close()
    report.seconds = time.monotonic() - started
    return report


@dataclass
class _Repair:
    store: Store
    report: CheckReport
    load_model: LoadModel
    share: ReadShare
    on_progress: CheckProgress
    lost_rows: bool
    """Rows of items are known to be lost: a file with fewer items than the ledger counts has lost them."""
    lost_facts: bool
    """The table of facts was damaged, and notes with it."""
    _model: GARE | None = None
    _unmended: dict[str, str] = field(default_factory=dict)  # why, by path

    @property
    def model(self) -> GARE:
        """Loaded when it is first needed."""
        if self._model is None:
            self._model = self.load_model(self.store.stamp)[0]
        return self._model

    def run(self) -> None:
        """Check, mend, check again."""
        rows, damage = self._check(self.report)
        found = list(self.report.findings)
        if self.lost_rows or any(finding.kind in ("wrong_id", "damaged_item") for finding in found):
            found += [
                Finding("lost_items", finding.message, finding.path)
                for finding in found
                if finding.kind == "deleted_items" and os.path.exists(finding.path)
            ]
        self._mend_notes(rows)
        self._mend_names(found, damage)
        self._mend_vectors(damage)
        self._mend_mixed(rows, found, damage)
        self._encode(rows, found, damage)
        if num_lines := mend_ledger(self.store, self.on_progress):
            self.report.mended.append(f"wrote {num_lines:,} lines of the ledger anew from the items")
        self._add_checksums(rows, damage)
        self._mend_index(found)
        self._list_what_is_left(damage)

    def _check(self, report: CheckReport) -> tuple[LibraryRows, DataDamage]:
        rows = check_rows(self.store, report, with_files=True, on_progress=self.on_progress)
        damage = read_share(self.store, rows, report, self.share, None, None, self.on_progress)
        if not report.is_complete:
            raise KeyboardInterrupt
        return rows, damage

    # --- notes, names, vectors ------------------------------------------------------------------------------

    def _mend_notes(self, rows: LibraryRows) -> None:
        bad = [name for name, value in rows.notes.items() if not is_good_note(name, value)]
        if self.lost_facts:
            bad += [name for name in ("split", "folders") if name not in rows.notes]
        if not bad:
            return
        splits = Counter(known.split for known in rows.ledger.values() if known.state == "indexed")
        splits.update(split_of(rows, path) for path in rows.by_path if path not in rows.ledger)
        usual = splits.most_common(1)[0][0] if splits else "whole"
        self.store.set_notes({name: {**_EMPTY_NOTES, "split": usual}.get(name, "") for name in bad})
        more = "; name the folders at the next 'gare index'" if "folders" in bad else ""
        self.report.mended.append(f"notes that could not be read were reset: {', '.join(sorted(bad))}{more}")

    def _mend_names(self, found: list[Finding], damage: DataDamage) -> None:
        """Write items again that are whole otherwise: a store derives the name itself."""
        wrong = {finding.item for finding in found if finding.kind in _NEEDS_ENCODING} | damage.columns.keys()
        named = [finding.item for finding in found if finding.kind == "misnamed_item"]
        ids = [item for item in named if item not in wrong]
        for first in range(0, len(ids), _ROWS_AT_ONCE):
            table, _ = fetch_readable(self.store, ids[first : first + _ROWS_AT_ONCE], self._item_columns())
            self.store.upsert(table, frame_schema().empty_table())
        if ids:
            self.report.mended.append(f"wrote the names of {len(ids):,} items anew")

    def _mend_vectors(self, damage: DataDamage) -> None:
        """Stage-1 vectors of items that are whole otherwise are made of their frames."""
        ids = [item for item, columns in damage.columns.items() if columns <= {"vector", "wrong"}]
        if not ids:
            return
        for first in range(0, len(ids), _ROWS_AT_ONCE):
            some = ids[first : first + _ROWS_AT_ONCE]
            table, _ = fetch_readable(self.store, some, self._item_columns(["times", "vectors"]))
            vectors = stage1_of(table, self.model)
            place = table.schema.get_field_index("vector")
            table = table.set_column(
                place, table.schema.field(place), pa.array(list(vectors), table.schema.field(place).type)
            )
            self.store.upsert(table.drop_columns(["times", "vectors"]), frame_schema().empty_table())
        for item in ids:
            del damage.columns[item]
        self.report.mended.append(
            f"computed the stage-1 vectors of {len(ids):,} items anew from their frames"
        )

    def _item_columns(self, more: Iterable[str] = ()) -> list[str]:
        return [*item_schema(self.store.stamp.stage1_dim).names, *more]

    # --- files ----------------------------------------------------------------------------------------------

    def _mend_mixed(self, rows: LibraryRows, found: list[Finding], damage: DataDamage) -> None:
        """Where a file has items of several encodings, keep those of the ledger, if they are complete."""
        for path in {finding.path for finding in found if finding.kind == "mixed_items"}:
            known = rows.ledger.get(path)
            expected = f"{known.content}/{known.split}" if known else ""
            good = [item for item in rows.by_path[path] if rows.items[item].recipe == expected]
            others = [item for item in rows.by_path[path] if item not in good]
            is_complete = known is not None and not known.is_unfinished and 0 < known.num_items == len(good)
            if is_complete and not any(item in damage.columns for item in good):
                self.store.delete(others)
                rows.by_path[path] = good
                for item in others:
                    del rows.items[item]
                    damage.columns.pop(item, None)
                self.report.mended.append(f"{path}: removed {len(others)} items of another encoding")
            else:
                found.append(Finding("wrong_key", f"{path} is encoded again", path))

    def _encode(self, rows: LibraryRows, found: list[Finding], damage: DataDamage) -> None:
        """Encode again what cannot be mended otherwise, file by file."""
        strays = {f.item for f in found if f.kind == "wrong_id" and f.path not in rows.ledger}
        paths = {f.path for f in found if f.kind in _NEEDS_ENCODING and f.item not in strays}
        paths |= {self._path_of(rows, item) for item in damage.columns if item not in strays}
        before = self._damaged_rows(damage)
        by_split: dict[str, list[FoundFile]] = {}
        for number, path in enumerate(sorted(filter(None, paths))):
            self.on_progress("comparing files", number, len(paths))
            file = self._find(rows, path)
            if file is not None:
                by_split.setdefault(split_of(rows, path), []).append(file)
        for split, files in by_split.items():
            kept = self._kept(rows, [file.path for file in files], strays)
            done = encode_again(
                self.store,
                self.model,
                files,
                kept,
                segmentation=split,
                on_progress=lambda at: self.on_progress("encoding again", at.done, at.total),
            )
            for failure in done.failures:
                self._unmended[failure.path] = f"it cannot be encoded again: {failure.message}"
            num_done = len(files) - done.failed
            if num_done:
                self.report.mended.append(f"encoded {num_done:,} files again, segmented as {split}")
            if done.interrupted:
                raise KeyboardInterrupt
        self._drop_strays(rows, found)
        self._compare_tags(before)

    def _damaged_rows(self, damage: DataDamage) -> list[dict[str, Any]]:
        """The rows of items, as far as they can be read, that are not as they were written."""
        ids = [item for item, columns in damage.columns.items() if "row" in columns]
        table, _ = fetch_readable(self.store, ids, [*SHOWN_COLUMNS, CHECKSUM_COLUMN]) if ids else (None, {})
        return list(table.to_pylist()) if table is not None else []

    def _compare_tags(self, before: Sequence[dict[str, Any]]) -> None:
        """Tags are kept from a damaged row. Its checksum tells whether they are good: with what was made anew
        it fits, unless they were damaged."""
        for old in before:
            for new in self.store.fetch([old["id"]], list(SHOWN_COLUMNS)).to_pylist():
                whole = {**new, "tags": old["tags"], "frames_key": old["frames_key"]}
                if old["tags"] and damaged_item_columns({**whole, CHECKSUM_COLUMN: old[CHECKSUM_COLUMN]}):
                    tags = ", ".join(old["tags"])
                    line = (
                        f"look at the tags of item {new['id']} of {new['path']}, which may be wrong: {tags}"
                    )
                    self.report.mended.append(line)

    def _path_of(self, rows: LibraryRows, item: str) -> str:
        return rows.items[item].path if item in rows.items else ""

    def _find(self, rows: LibraryRows, path: str) -> FoundFile | None:
        """The file, if it is still the one that was indexed; otherwise it is noted why not."""
        known = rows.ledger.get(path)
        contents = {rows.items[item].content for item in rows.by_path.get(path, [])}
        if known is not None and known.content:
            contents.add(known.content)
        try:
            hashed = hash_file(path)
        except OSError as error:
            self._unmended[path] = f"the file cannot be read: {error.strerror or error}"
            return None
        if hashed.content not in contents:
            self._unmended[path] = "the file has another content now; 'gare index' takes it in anew"
            if known is not None:
                ask_for_another_look(self.store, path, known)
            return None
        _, _, size, mtime_ns, _ = hashed.identity
        return FoundFile(path, size, mtime_ns)

    def _kept(self, rows: LibraryRows, paths: Sequence[str], strays: Iterable[str]) -> dict[str, Kept]:
        """Tags and dates of the items of these files, where they can be read; of strays too, whose path alone
        may be wrong."""
        ids = list(dict.fromkeys([*(item for path in paths for item in rows.by_path.get(path, [])), *strays]))
        table, _ = fetch_readable(self.store, ids, ["id", "tags", "added"]) if ids else (None, {})
        found = table.to_pylist() if table is not None else []
        return {row["id"]: Kept(tuple(row["tags"]), row["added"]) for row in found}

    def _drop_strays(self, rows: LibraryRows, found: list[Finding]) -> None:
        """Items that are no segment of their path, and whose path is no file's: that is made anew."""
        strays = sorted({finding.item for finding in found if finding.kind == "wrong_id"})
        table, _ = fetch_readable(self.store, strays, _NAMING) if strays else (None, {})
        lost = [
            row
            for row in (table.to_pylist() if table is not None else [])
            if _id_of(row) != row["id"] and row["path"] not in rows.ledger
        ]
        if lost:
            self.store.delete([row["id"] for row in lost])
            named = ", ".join(f"{row['id']} ({row['path']})" for row in lost)
            self.report.mended.append(f"removed items whose row was damaged beyond recognition: {named}")

    # --- checksums, index -----------------------------------------------------------------------------------

    def _add_checksums(self, rows: LibraryRows, damage: DataDamage) -> None:
        """Items of older libraries: what was read and makes sense gets checksums."""
        ids = [
            item for item, key in rows.items.items() if lacks_checksums(key) and item not in damage.columns
        ]
        if not ids or self.share.size < 1.0:
            return
        num_done = 0
        columns = list(dict.fromkeys(self._item_columns([*frame_schema().names, CHECKSUM_COLUMN])))
        for first in range(0, len(ids), _ROWS_AT_ONCE):
            self.on_progress("adding checksums", first, len(ids))
            wrong = DataDamage()
            some = ids[first : first + _ROWS_AT_ONCE]
            read_items(self.store, some, lambda item: self._path_of(rows, item), self.model, wrong)
            good = [item for item in some if item not in wrong.columns]
            damage.columns |= wrong.columns
            self.report.findings += wrong.findings
            table, _ = fetch_readable(self.store, good, columns)
            if len(table):
                items, frames = add_frame_checksums(table.drop_columns([CHECKSUM_COLUMN]))
                self.store.upsert(items, frames)
                num_done += len(table)
        self._mend_vectors(damage)
        self.report.mended.append(f"added checksums to {num_done:,} items")

    def _mend_index(self, found: list[Finding]) -> None:
        if any(finding.kind == "broken_index" for finding in found):
            self.on_progress("building the vector index", 0, 1)
            self.store.drop_index()
            self.store.maintain()
            self.report.mended.append("built the vector index anew")

    # --- what is left ---------------------------------------------------------------------------------------

    def _list_what_is_left(self, damage: DataDamage) -> None:
        """Check again: the rows, and the data of what was damaged."""
        after = CheckReport(self.report.library)
        rows = check_rows(self.store, after, with_files=False, on_progress=self.on_progress)
        again = DataDamage()
        ids = [item for item in damage.columns if item in rows.items]
        for first in range(0, len(ids), _ROWS_AT_ONCE):
            read_items(
                self.store, ids[first : first + _ROWS_AT_ONCE], lambda i: rows.items[i].path, None, again
            )
        for finding in [*after.damage, *again.findings]:
            why = self._unmended.pop(finding.path, "")
            message = f"{finding.message}: {why}" if why else finding.message
            self.report.left.append(Finding(finding.kind, message, finding.path, finding.item))
        for path, why in self._unmended.items():
            if not any(finding.path == path for finding in self.report.left):
                self.report.left.append(Finding("lost_items", f"{path}: {why}", path))
        self.report.num_items, self.report.num_files = after.num_items, after.num_files
        self.report.num_frames = after.num_frames


_NAMING = ["id", "path", "start", "end", "frames_key"]


def _id_of(row: dict[str, Any]) -> str:
    """The id that an item must have by what its row says."""
    return item_id(row["path"], row["start"], row["end"] if is_dense(row["frames_key"]) else None)


_EMPTY_NOTES = {"folders": "[]", "audit": '{"candidates": 256, "num_items": 0}'}


def _check_model(library: str, sample: pa.Table, model: GARE) -> None:
    """Refuse a model that did not make this library: it must make the same frame vectors of a file.

    Raises:
        LibraryError: it makes others.
    """
    for row in sample.to_pylist():
        split = row["frames_key"].split("/")[1:2]
        try:
            if not split or hash_file(row["path"]).content != row["content"]:
                continue
        except OSError:
            continue
        stored = np.frombuffer(row["vectors"], "<f2").astype(np.float32)
        for made in encode_file(model, row["path"], parse_segmentation(split[0])):
            if abs(made.start - row["start"]) > _SAME_START_S:
                continue
            found = np.frombuffer(made.frames, "<f2").astype(np.float32)
            if (
                found.shape == stored.shape
                and np.abs(found - stored).max() <= _ROUNDING * np.abs(stored).max()
            ):
                return
            raise LibraryError(
                f"library {library} has lost the name of its model, and the one that is named did not make "
                "it. Name that one with --model"
            )

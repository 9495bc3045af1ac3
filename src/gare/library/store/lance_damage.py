"""What is wrong with the Lance tables of a library: manifests, data files, indexes. It writes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gare.errors import LibraryError
from gare.library.store.lance_storage import Place, explained, explanation, is_whole
from gare.library.store.lance_store import NAME_COLUMN, STAMP_COPY, WRITTEN_COLUMN, storage_options
from gare.library.store.lance_table import VECTOR_INDEX
from gare.library.store.store_damage import Damage
from gare.library.store.store_schema import ModelStamp, file_schema, frame_schema, item_schema, parse_stamp

TABLE_KEYS = {"facts": "key", "items": "id", "frames": "frames_key", "files": "path"}
_ROWS_AT_ONCE = 1024
_ADDED_LATER = {"strip", "split"}  # libraries of format 0 lack them
_COLUMNS = {
    "facts": {"key", "value"},
    "items": {*item_schema(1).names, NAME_COLUMN},
    "frames": {*frame_schema().names, WRITTEN_COLUMN},
    "files": set(file_schema().names),
}
_REQUIRED = {name: columns - _ADDED_LATER for name, columns in _COLUMNS.items()}
"""The columns of each table: a manifest that names others is broken."""


class Files:
    """The files of a library, in a folder or on object storage, by their names below it."""

    def __init__(self, uri: str) -> None:
        from pyarrow import fs

        self.uri = uri
        self.is_folder = "://" not in uri
        if self.is_folder:
            self._system, self._root = fs.LocalFileSystem(), uri
            return
        options = storage_options(os.environ)
        endpoint = options.get("aws_endpoint")
        scheme, _, host = (endpoint or "https://").partition("://")
        self._system = fs.S3FileSystem(
            endpoint_override=host or None, scheme=scheme, region=options.get("aws_region")
        )
        self._root = uri.removeprefix("s3://").rstrip("/")

    def size(self, name: str) -> int | None:
        """The bytes of a file; None where there is none."""
        if "\0" in name:  # no system has such a file; a broken manifest may
            return None
        info = self._system.get_file_info(f"{self._root}/{name}")
        return int(info.size) if info.is_file else None

    def names(self, folder: str) -> list[str]:
        """All files below a folder."""
        from pyarrow import fs

        selector = fs.FileSelector(f"{self._root}/{folder}", recursive=True, allow_not_found=True)
        with explained(self.uri):
            found = self._system.get_file_info(selector)
        start = len(self._root) + 1
        return sorted(info.path[start:] for info in found if info.is_file)

    def read(self, name: str) -> bytes:
        """The content of a file."""
        with self._system.open_input_stream(f"{self._root}/{name}") as stream:
            content: bytes = stream.read()
        return content

    def move(self, name: str, target: str) -> None:
        """Move a file within the library; a missing one is left out."""
        if self.size(name) is None:
            return
        if self.is_folder:
            os.makedirs(os.path.dirname(f"{self._root}/{target}"), exist_ok=True)
        self._system.move(f"{self._root}/{name}", f"{self._root}/{target}")


@dataclass
class TableState:
    """One table as it was found."""

    name: str
    dataset: Any = None
    """None where no version of it can be read."""
    manifests: list[str] = field(default_factory=list)
    """Newest first."""
    num_broken: int = 0
    """How many of the newest manifests cannot be read."""
    bad_fragments: dict[int, list[Damage]] = field(default_factory=dict)
    lost_version: int = 0
    """The number of a version newer than all that are there; 0 where none is known of."""

    @property
    def is_there(self) -> bool:
        """Whether the table can be opened as it is."""
        return self.dataset is not None and not self.num_broken


def look_at_table(files: Files, place: Place, name: str, *, read_all: bool) -> TableState:
    """Find the newest version that can be read, and the fragments of it that cannot."""
    with _without_panics():
        return _look_at_table(files, place, name, read_all=read_all)


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
    """Keep from the terminal what Lance's own language prints there when it meets broken bytes."""
    sys.stderr.flush()
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)


def _look_at_table(files: Files, place: Place, name: str, *, read_all: bool) -> TableState:
    state = TableState(name)
    found = [path for path in files.names(f"{name}.lance/_versions") if path.endswith(".manifest")]
    state.manifests = sorted(found, key=_age)
    hinted = _hinted_version(files, name)
    if state.manifests and hinted > _version(state.manifests[0]):
        state.lost_version = hinted
    for number, manifest in enumerate(state.manifests):
        dataset = _open_version(files, place, name, manifest)
        if dataset is None or _has_lost_columns(files, place, name, dataset, state.manifests[number + 1 :]):
            continue
        state.dataset, state.num_broken = dataset, number
        break
    else:
        state.num_broken = len(state.manifests)
    if state.dataset is not None:
        state.bad_fragments = dict(_bad_fragments(files, state, place, read_all=read_all))
    return state


def _open_version(files: Files, place: Place, name: str, manifest: str) -> Any:
    """The table as this manifest tells it; None where the manifest is broken."""
    import lance

    uri, version = f"{files.uri.rstrip('/')}/{name}.lance", _version(manifest)
    try:
        with _damage_only(files.uri):
            if not is_whole(files.read(manifest)):
                return None
            dataset = lance.dataset(uri, version=version, storage_options=place.options)
            if not _REQUIRED[name] <= set(dataset.schema.names) or dataset.version != version:
                return None
            dataset.count_rows()
            return dataset
    except _Damaged:
        return None


def _has_lost_columns(files: Files, place: Place, name: str, dataset: Any, older: list[str]) -> bool:
    """Whether the version before has columns that are missing here: they are added, never dropped."""
    missing = (_ADDED_LATER & _COLUMNS[name]) - set(dataset.schema.names)
    if not missing or not older:
        return False
    before = _open_version(files, place, name, older[0])
    return before is not None and bool(missing & set(before.schema.names))


def version_hint(name: str) -> str:
    """The file in which Lance notes the number of the newest version, after each commit."""
    return f"{name}.lance/_versions/latest_version_hint.json"


def _hinted_version(files: Files, name: str) -> int:
    if files.size(version_hint(name)) is None:
        return 0
    try:
        return int(json.loads(files.read(version_hint(name)))["version"])
    except (ValueError, KeyError, TypeError):
        return 0


def _age(manifest: str) -> int:
    return -_version(manifest)


def _version(manifest: str) -> int:
    """Names of manifests count down from the largest number of 64 bits."""
    number = int(os.path.basename(manifest).partition(".")[0].lstrip("d") or 0)
    return 2**64 - 1 - number if number > 2**63 else number


def _bad_fragments(
    files: Files, state: TableState, place: Place, *, read_all: bool
) -> Iterator[tuple[int, list[Damage]]]:
    for fragment in state.dataset.get_fragments():
        damages = list(_look_at_fragment(files, state, fragment, place, read_all=read_all))
        if damages:
            yield fragment.fragment_id, damages


def _look_at_fragment(
    files: Files, state: TableState, fragment: Any, place: Place, *, read_all: bool
) -> Iterator[Damage]:
    from lance.file import LanceFileReader

    metadata = fragment.metadata
    for file in metadata.files:
        name = f"{state.name}.lance/data/{file.path}"
        size = files.size(name)
        if size is None:
            yield Damage("lost_data", state.name, f"{name} is gone")
        elif file.file_size_bytes not in (None, size):
            what = f"{name} has {size:,} bytes, not {file.file_size_bytes:,}"
            yield Damage("cut_data", state.name, what)
        else:
            try:
                with _damage_only(files.uri):
                    uri = f"{files.uri.rstrip('/')}/{name}"
                    if (
                        LanceFileReader(uri, storage_options=place.options).num_rows()
                        != metadata.physical_rows
                    ):
                        raise _Damaged("it has another number of rows than its table says")
            except _Damaged as error:
                yield Damage("broken_data", state.name, f"{name} cannot be read: {error}")
    if metadata.deletion_file is not None:
        name = f"{state.name}.lance/{metadata.deletion_file.path(fragment.fragment_id)}"
        if files.size(name) is None:
            yield Damage("lost_data", state.name, f"{name}, the list of removed rows, is gone")
            return
    columns = None if read_all else [TABLE_KEYS[state.name]]
    try:
        with _damage_only(files.uri):
            for batch in fragment.to_batches(columns=columns, batch_size=_ROWS_AT_ONCE):
                batch.validate(full=True)
    except _Damaged as error:
        names = ", ".join(file.path for file in metadata.files)
        yield Damage("broken_data", state.name, f"{state.name}.lance/data/{names} cannot be read: {error}")


class _Damaged(Exception):
    """What was read is not what Lance wrote."""


class _damage_only:
    """Turns what Lance raises on broken bytes into `_Damaged`; a storage out of reach is an error as ever."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, _Damaged | KeyboardInterrupt | SystemExit | LibraryError):
            return
        known = explanation(self._uri, error) if isinstance(error, Exception) else None
        if known is not None and "is damaged" not in str(known):
            raise known from error
        raise _Damaged(str(error).strip().partition("\n")[0][:200] or type(error).__name__) from error


def is_readable(uri: str, read: Any) -> Any:
    """What `read()` returns; None where the bytes are broken."""
    try:
        with _without_panics(), _damage_only(uri):
            return read()
    except _Damaged:
        return None


# --- what it means ------------------------------------------------------------------------------------------


def describe_table(files: Files, state: TableState) -> list[Damage]:
    """The damage of one table that is or was there."""
    if not state.manifests:
        return [Damage("lost_table", state.name, f"the table {state.name}.lance is gone")]
    if state.dataset is None:
        what = f"no version of {state.name}.lance can be read"
        return [Damage("lost_table", state.name, what)]
    damages = [
        Damage("broken_manifest", state.name, f"{manifest} cannot be read")
        for manifest in state.manifests[: state.num_broken]
    ]
    if state.lost_version:
        what = f"version {state.lost_version} of {state.name}.lance is gone"
        damages.append(Damage("broken_manifest", state.name, what))
    damages += [damage for found in state.bad_fragments.values() for damage in found]
    if not state.bad_fragments and (doubled := doubled_rows(state.dataset, TABLE_KEYS[state.name])):
        what = f"{len(doubled):,} keys of {state.name}.lance are there twice, such as {next(iter(doubled))}"
        damages.append(Damage("doubled_rows", state.name, what))
    return damages


def doubled_rows(dataset: Any, key: str) -> dict[str, list[int]]:
    """Where the rows lie whose key is there more than once: addresses by key."""
    import pyarrow.compute as pc

    table = dataset.to_table(columns=[key], with_row_address=True)
    counts = table[key].combine_chunks().value_counts()
    twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if not len(twice):
        return {}
    doubled: dict[str, list[int]] = {}
    found = table.filter(pc.is_in(table[key], twice))
    for name, address in zip(found[key].to_pylist(), found["_rowaddr"].to_pylist(), strict=True):
        doubled.setdefault(name, []).append(address)
    return doubled


def describe_index(files: Files, items: TableState) -> list[Damage]:
    """Whether the vector index, where there is one, answers."""
    import numpy as np

    dataset = items.dataset
    if dataset is None or items.bad_fragments or not dataset.has_index:
        return []
    try:
        with _damage_only(files.uri):
            names = {description.name for description in dataset.describe_indices()}
            if VECTOR_INDEX not in names:
                return []
            width = dataset.schema.field("vector").type.list_size
            nearest = {"column": "vector", "q": np.ones(width, np.float32), "k": 10, "metric": "dot"}
            found = dataset.to_table(columns=["_distance"], nearest=nearest)
            if not found.num_rows:
                raise _Damaged("it finds nothing")
    except _Damaged as error:
        return [Damage("broken_index", "items", f"the vector index cannot be read: {error}")]
    return []


def find_stamp(states: dict[str, TableState]) -> ModelStamp | None:
    """The stamp that most copies say: that of the facts, and one with each table."""
    stamps = Counter(stamp for stamp in [parse_stamp(facts_of(states["facts"]).get("stamp"))] if stamp)
    for state in states.values():
        metadata = (state.dataset.schema.metadata or {}) if state.dataset is not None else {}
        if stamp := parse_stamp(metadata.get(STAMP_COPY.encode(), b"").decode("utf-8", "replace")):
            stamps[stamp] += 1
    return stamps.most_common(1)[0][0] if stamps else None


def wrong_facts(states: dict[str, TableState]) -> list[str]:
    """The keys of facts that are not there, or cannot be right."""
    facts = facts_of(states["facts"])
    stamp = parse_stamp(facts.get("stamp"))
    wrong = ["stamp"] if stamp is None or stamp != find_stamp(states) else []
    version = facts.get("schema_version", "")
    return wrong if version.isdecimal() else [*wrong, "schema_version"]


def facts_of(state: TableState) -> dict[str, str]:
    """What can be read of the table of facts."""
    if state.dataset is None or state.bad_fragments:
        return {}
    table = state.dataset.to_table(columns=["key", "value"])
    return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))

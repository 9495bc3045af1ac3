"""Videos and pictures inside a larger file, each read where it lies: nothing is ever unpacked.

| container | member | |
| --- | --- | --- |
| `shard.tar` | `clip7.mp4`, `cat.webp` | a file in the archive |
| `shard.tar` | `video7/` | a folder of pictures in the archive |
| `data.arrow`, `data.parquet` | `video/17.mp4` | row 17 of the column `video` of a Hugging Face dataset |

A source is written `container::member`. The ending of the member says what it is: a video or a picture. A tar
may lie on object storage, `s3://bucket/shard.tar`: its headers and then single members are read from there.
Members that are links, or whose name leads out of the archive, are not there.
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from gare.data.containers import VIDEO_SUFFIXES
from gare.data.object_storage import is_remote, open_binary
from gare.errors import VideoError

SEPARATOR = "::"
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm"}
TABLE_SUFFIXES = {".arrow", ".parquet"}
LARGEST_VIDEO = 16 * 2**30
"""Bytes of a video in a container; a larger one is a file of its own, or a lie."""
_LARGEST_HEADER = 2**20  # of a tar's long names, which are read at once
_HEADER_TYPES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_COPIED_AT_ONCE = 2**22


class Container(Protocol):
    """A file with members."""

    def select(self, member: str) -> Sequence[str]:
        """The member itself, or the pictures in it if it is a folder."""

    def size(self, member: str) -> int:
        """Its bytes."""

    def chunks(self, member: str) -> Iterator[bytes]:
        """Its content, piece by piece."""


def is_packed(source: str) -> bool:
    """Whether a source names a member of a container."""
    return SEPARATOR in source


def is_packed_video(source: str) -> bool:
    """Whether a source names a video in a container.

    >>> is_packed_video("a.tar::clip.mp4"), is_packed_video("a.tar::cat.png"), is_packed_video("a.tar::cats/")
    (True, False, False)
    """
    return is_packed(source) and Path(source).suffix.lower() in VIDEO_SUFFIXES


def is_in_table(source: str) -> bool:
    """Whether a source is a cell of a dataset, which is slow to read again and again."""
    return is_packed(source) and Path(source.partition(SEPARATOR)[0]).suffix in TABLE_SUFFIXES


def select_members(source: str) -> list[str]:
    """Every picture or video that a packed source names, as a source each."""
    path, _, member = source.partition(SEPARATOR)
    found = [f"{path}{SEPARATOR}{name}" for name in _open(path).select(member)]
    if not found:
        raise VideoError(f"{path} has no image, video or folder '{member}'", "missing")
    return found


def member_size(source: str) -> int:
    """How many bytes a member has."""
    path, _, member = select_members(source)[0].partition(SEPARATOR)
    return _open(path).size(member)


def read_member(source: str) -> bytes:
    """The bytes of a member."""
    return b"".join(_chunks(source))


@contextmanager
def member_file(source: str) -> Iterator[int]:
    """The descriptor of a file with the bytes of a member; it has no name and is gone afterwards."""
    descriptor = open_member(source)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_member(source: str) -> int:
    """As `member_file`; whoever calls it closes the descriptor."""
    size = member_size(source)
    if size > LARGEST_VIDEO:
        raise VideoError(f"{source} has {size:,} bytes; unpack a video of that size and name the file")
    if not size:
        raise VideoError(f"{source} is empty (0 bytes); get its container again", "zero_length")
    with tempfile.NamedTemporaryFile(prefix="gare-") as file:
        for chunk in _chunks(source):
            file.write(chunk)
        file.flush()
        return os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)  # read-only: a decoder gets it


def _chunks(source: str) -> Iterator[bytes]:
    path, _, member = select_members(source)[0].partition(SEPARATOR)
    try:
        yield from _open(path).chunks(member)
    except OSError as error:
        raise VideoError(f"{source} cannot be read: {error}") from None


def _open(path: str) -> Container:
    if is_remote(path):
        return _index_remote_tar(path)
    try:
        stat = os.stat(path)
    except OSError:
        raise VideoError(f"the archive {path} does not exist", "missing") from None
    make = _open_table if Path(path).suffix in TABLE_SUFFIXES else _index_tar
    return make(path, stat.st_mtime_ns, stat.st_size)


# --- tar ----------------------------------------------------------------------------------------------------


class _BoundedTarInfo(tarfile.TarInfo):
    """Refuses a long name of gigabytes, which tarfile would read into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.type in _HEADER_TYPES and self.size > _LARGEST_HEADER:
            raise tarfile.ReadError(f"a name of {self.size:,} bytes")
        process: Any = super()
        return process._proc_member(archive)


def tar_members(path: str | Path) -> Iterator[tarfile.TarInfo]:
    """The entries of an uncompressed tar, in order.

    Raises:
        VideoError: it is none, or it is cut off.
    """
    try:
        with (
            open_binary(str(path)) as file,
            tarfile.open(fileobj=file, mode="r:", tarinfo=_BoundedTarInfo) as archive,
        ):
            size = file.seek(0, os.SEEK_END)
            for member in archive:
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"{member.name} ends after the archive does")
                yield member
    except OSError as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise VideoError(f"{path} cannot be read: {reason}") from None
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise VideoError(
            f"{path} is not a plain tar archive ({error}); compressed ones must be unpacked"
        ) from None


def leads_out(name: str) -> bool:
    """Whether a name in an archive would be unpacked elsewhere.

    >>> leads_out("../a.mp4"), leads_out("/a.mp4"), leads_out("a/b..mp4")
    (True, True, False)
    """
    return name.startswith("/") or ".." in PurePosixPath(name).parts


@dataclass(frozen=True)
class _TarIndex:
    """Where every picture and video of an uncompressed tar lies, so that any one is a single read."""

    path: str
    places: dict[str, tuple[int, int]]
    folders: dict[str, list[str]]

    def select(self, member: str) -> Sequence[str]:
        return [member] if member in self.places else self.folders.get(member.rstrip("/"), [])

    def size(self, member: str) -> int:
        return self.places[member][1]

    def chunks(self, member: str) -> Iterator[bytes]:
        offset, left = self.places[member]
        # Opened for each read: no descriptor to leak or to share over a fork, and it costs microseconds.
        with open_binary(self.path) as file:
            file.seek(offset)
            while left and (chunk := file.read(min(left, _COPIED_AT_ONCE))):
                left -= len(chunk)
                yield chunk


@lru_cache(maxsize=1024)
def _index_remote_tar(path: str) -> _TarIndex:
    """As `_index_tar`, once for a process: a shard on object storage is written once and stays."""
    return _index_tar(path, 0, 0)


@lru_cache(maxsize=64)
def _index_tar(path: str, _mtime_ns: int, _size: int) -> _TarIndex:
    places: dict[str, tuple[int, int]] = {}
    folders: dict[str, list[str]] = {}
    for member in tar_members(path):
        name = member.name.removeprefix("./")
        suffix = Path(name).suffix.lower()
        if not member.isfile() or member.issparse() or leads_out(name):
            continue
        if suffix in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
            places[name] = (member.offset_data, member.size)
        if suffix in IMAGE_SUFFIXES:
            folders.setdefault(name.rpartition("/")[0], []).append(name)
    in_order = {name: sorted(names, key=natural_order) for name, names in folders.items()}
    return _TarIndex(path, places, in_order)


def natural_order(name: str) -> list[str | int]:
    """`frame2` before `frame10`."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


# --- tables of Hugging Face datasets ------------------------------------------------------------------------


class _Table:
    """Cells of a column of pictures or videos: `video/17.mp4` is that of row 17."""

    def __init__(self, path: str) -> None:
        self.table = MediaTable(path)

    def select(self, member: str) -> Sequence[str]:
        column, row = _cell_of(member)
        is_there = column in self.table.columns and 0 <= row < self.table.num_rows
        return [member] if is_there else []

    def size(self, member: str) -> int:
        return len(self._bytes(member))

    def chunks(self, member: str) -> Iterator[bytes]:
        yield self._bytes(member)

    def _bytes(self, member: str) -> bytes:
        column, row = _cell_of(member)
        cell = self.table.cell(column, row)
        content = cell.get("bytes") if isinstance(cell, dict) else None
        return content if isinstance(content, bytes) else b""


class MediaTable:
    """An Arrow file that `datasets` wrote, or a Parquet file; rows are read where they lie.

    Raises:
        VideoError: the file is damaged, or neither.
    """

    def __init__(self, path: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        self._last: tuple[str, int, Any] | None = None
        self._parquet: Any = None
        self._table: Any = None
        with self._naming_damage():
            if path.endswith(".parquet"):
                self._parquet = pq.ParquetFile(path, memory_map=True)
                self.schema = self._parquet.schema_arrow
                self.num_rows = self._parquet.metadata.num_rows
            else:
                self._table = _read_arrow(pa, path)
                self.schema, self.num_rows = self._table.schema, self._table.num_rows
        self.columns: list[str] = self.schema.names

    def values(self, column: str) -> list[Any]:
        """All values of a column: captions, ids."""
        with self._naming_damage():
            found = self._table if self._parquet is None else self._parquet.read(columns=[column])
            values: list[Any] = found.column(column).to_pylist()
            return values

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise VideoError(
                f"{self._path} is not a table that can be read ({reason}); get it again"
            ) from None

    def contents(self, column: str) -> list[tuple[str | None, bool]]:
        """The path of each cell of a column of videos or pictures, and whether it has bytes; none is read."""
        with self._naming_damage():
            return self._contents(column)

    def _contents(self, column: str) -> list[tuple[str | None, bool]]:
        import pyarrow.compute as pc

        if self._parquet is None:
            cells = self._table.column(column)
            has_bytes = pc.is_valid(pc.struct_field(cells, "bytes")).to_pylist()
            return list(zip(pc.struct_field(cells, "path").to_pylist(), has_bytes, strict=True))
        paths = self._parquet.read(columns=[f"{column}.path"]).column(column)
        has_bytes = [
            each for group in range(self._parquet.num_row_groups) for each in self._filled(column, group)
        ]
        return list(zip(pc.struct_field(paths, "path").to_pylist(), has_bytes, strict=True))

    def _filled(self, column: str, group: int) -> list[bool]:
        """Which cells of a row group have bytes; its statistics tell where all have, or none."""
        import pyarrow.compute as pc

        noted = self._parquet.metadata.row_group(group)
        leaves = {
            noted.column(number).path_in_schema: noted.column(number) for number in range(noted.num_columns)
        }
        statistics = leaves[f"{column}.bytes"].statistics
        missing = statistics.null_count if statistics is not None and statistics.has_null_count else None
        if missing in (0, noted.num_rows):
            return [not missing] * noted.num_rows
        cells = self._parquet.read_row_group(group, columns=[f"{column}.bytes"]).column(column)
        filled: list[bool] = pc.is_valid(pc.struct_field(cells, "bytes")).to_pylist()
        return filled

    def cell(self, column: str, row: int) -> Any:
        """One value of a column."""
        with self._naming_damage():
            return self._cell(column, row)

    def _cell(self, column: str, row: int) -> Any:
        if self._parquet is None:
            return self._table.column(column)[row].as_py()
        group, first = self._group_of(row)
        if self._last is None or self._last[:2] != (column, group):  # rows are asked for in order
            self._last = (column, group, self._parquet.read_row_group(group, columns=[column]))
        return self._last[2].column(column)[row - first].as_py()

    def _group_of(self, row: int) -> tuple[int, int]:
        first = 0
        for group in range(self._parquet.num_row_groups):
            size = self._parquet.metadata.row_group(group).num_rows
            if row < first + size:
                return group, first
            first += size
        raise ValueError(f"there is no row {row}")


@lru_cache(maxsize=8)
def _open_table(path: str, _mtime_ns: int, _size: int) -> _Table:
    return _Table(path)


def _read_arrow(pa: Any, path: str) -> Any:
    """The rows of an Arrow file, mapped into memory and checked: a damaged offset would read elsewhere."""
    source = pa.memory_map(path)
    try:
        table = pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(pa.memory_map(path)).read_all()
    table.validate(full=True)
    return table


def cell_member(column: str, row: int, suffix: str) -> str:
    """The name of a cell.

    >>> cell_member("video", 17, ".mp4"), _cell_of("video/17.mp4")
    ('video/17.mp4', ('video', 17))
    """
    return f"{column}/{row}{suffix}"


def _cell_of(member: str) -> tuple[str, int]:
    column, _, row = member.rpartition("/")
    digits = row.partition(".")[0]
    return column, int(digits) if digits.isascii() and digits.isdecimal() else -1

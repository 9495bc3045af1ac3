"""Large values of a table in a folder, read where they lie in its files.

Lance takes 256 rows of 12 KB in 5 ms of processor time, nearly all of it to hand each row from thread to
thread; to read the bytes takes one. The metadata of a file say where each page of a column begins, and where
in it each value does: eight bytes with its length, then the value. Files are written once, so this is looked
up once. What looks otherwise is left to Lance: files of an older format, values that it compressed, damage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

_HEADER = 8  # bytes before each value: its length
# How Lance describes a page whose values lie one after the other, whole and as they are: the words alone.
_PLAIN_PAGE = re.compile(
    r"PageLayout layout Some FullZipLayout FullZipLayout bits_rep 0 bits_def 0 num_items (\d+) "
    r"num_visible_items \1 value_compression Some CompressiveEncoding compression Some Variable Variable "
    r"offsets Some CompressiveEncoding compression Some Flat Flat bits_per_value 64 data None values None "
    r"layers RepdefAllValidItem details Some BitsPerOffset 64"
)


@dataclass(frozen=True)
class _Places:
    """Where each row of a file begins, with its header, and how long its value is."""

    file: Path
    start_N: np.ndarray
    length_N: np.ndarray


class ValueFiles:
    """The large values of a table, by the addresses of their rows.

    Args:
        folder: of the table.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "data"
        self._of_file: dict[tuple[str, int], _Places | None] = {}
        self._of_version: tuple[int, dict[tuple[int, str], _Places | None]] = (-1, {})

    def read(self, dataset: Any, column: str, addresses: np.ndarray) -> pa.LargeBinaryArray | None:
        """The values of these rows in this order; None where Lance has to read them."""
        if not hasattr(os, "preadv"):  # Windows
            return None
        try:
            return self._read(dataset, column, addresses)
        except (OSError, RuntimeError, ValueError, LookupError):  # Lance says what is wrong
            return None

    def _read(self, dataset: Any, column: str, addresses: np.ndarray) -> pa.LargeBinaryArray | None:
        numbers_N, rows_N = (addresses >> 32).astype(np.int64), (addresses & 0xFFFFFFFF).astype(np.int64)
        start_N, length_N = np.empty_like(rows_N), np.empty_like(rows_N)
        groups = []
        for number in np.unique(numbers_N).tolist():
            places = self._places(dataset, column, number)
            if places is None:
                return None
            own_N = np.flatnonzero(numbers_N == number)
            start_N[own_N], length_N[own_N] = places.start_N[rows_N[own_N]], places.length_N[rows_N[own_N]]
            groups.append((places.file, own_N))
        return _read_values(groups, start_N, length_N)

    def _places(self, dataset: Any, column: str, number: int) -> _Places | None:
        """Where the values of a fragment lie; None where its file is not as expected."""
        version, known = self._of_version
        if version != dataset.version:
            known = {}
            self._of_version = (dataset.version, known)
        if (number, column) not in known:
            known[number, column] = self._find_places(dataset, column, number)
        return known[number, column]

    def _find_places(self, dataset: Any, column: str, number: int) -> _Places | None:
        field = dataset.lance_schema.field(column).id()
        for file in dataset.get_fragment(number).metadata.files:
            if field in file.fields:
                key = file.path, file.column_indices[file.fields.index(field)]
                if key not in self._of_file:
                    place = self._folder / file.path
                    is_whole = place.stat().st_size == file.file_size_bytes
                    self._of_file[key] = _places_in(place, key[1]) if is_whole else None
                return self._of_file[key]
        return None


def _places_in(file: Path, column: int) -> _Places | None:
    from lance.file import LanceFileReader

    starts, lengths = list[np.ndarray](), list[np.ndarray]()
    with file.open("rb") as opened:
        for page in LanceFileReader(str(file)).metadata().columns[column].pages:
            plain = _PLAIN_PAGE.fullmatch(" ".join(re.findall(r"\w+", page.encoding)))
            if plain is None or len(page.buffers) != 2:
                return None
            data, offsets = page.buffers
            width, rest = divmod(offsets.size, int(plain[1]) + 1)
            if rest or width not in (1, 2, 4, 8) or data.position + data.size > file.stat().st_size:
                return None
            stored = os.pread(opened.fileno(), offsets.size, offsets.position)
            begin_N = np.frombuffer(stored, f"<u{width}", int(plain[1]) + 1).astype(np.int64)
            size_N = np.diff(begin_N)
            if begin_N[0] != 0 or begin_N[-1] != data.size or (size_N < _HEADER).any():
                return None
            starts.append(data.position + begin_N[:-1])
            lengths.append(size_N - _HEADER)
    return _Places(file, np.concatenate(starts), np.concatenate(lengths))


def _read_values(
    groups: Sequence[tuple[Path, np.ndarray]], start_N: np.ndarray, length_N: np.ndarray
) -> pa.LargeBinaryArray | None:
    """The values at these places of these files; None where one is cut short or its length is another."""
    import pyarrow as pa

    end_N = np.concatenate([[0], np.cumsum(length_N)])
    headers_N, values = np.empty(len(start_N), "<u8"), np.empty(int(end_N[-1]), np.uint8)
    header_bytes, value_bytes, num_read = headers_N.data.cast("B"), values.data, 0
    for file, own_N in groups:
        columns = own_N, start_N[own_N], end_N[own_N], end_N[own_N + 1]
        with file.open("rb") as opened:
            for row, start, first, last in zip(*(column.tolist() for column in columns), strict=True):
                header = header_bytes[_HEADER * row : _HEADER * (row + 1)]
                num_read += os.preadv(opened.fileno(), [header, value_bytes[first:last]], start)
    if num_read != len(header_bytes) + len(values) or (headers_N != length_N).any():
        return None
    buffers = [None, pa.py_buffer(end_N), pa.py_buffer(values)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(start_N), buffers)

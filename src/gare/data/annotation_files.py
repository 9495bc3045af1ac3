"""Annotation files as people really have them: CSV, JSON, zipped JSON, lists. Errors name the line."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gare.errors import DataError

_SHOWN = 5


class Problems:
    """What is wrong in one file, gathered so that a user can mend it all at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []

    def add(self, line: int, message: str) -> None:
        """Note a problem of one line."""
        self._lines.append(f"{self._path}, line {line}: {message}")

    def raise_if_any(self) -> None:
        """Raise one DataError that lists the problems."""
        if self._lines:
            more = len(self._lines) - _SHOWN
            shown = self._lines[:_SHOWN] + ([f"… and {more} more like these"] if more > 0 else [])
            raise DataError("\n".join(shown))


def read_text(path: Path) -> str:
    """UTF-8, with or without a byte-order mark."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; check the folder of annotations") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}, line 1: this is UTF-16; save it as UTF-8 ('CSV UTF-8' in a spreadsheet)")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: this is not UTF-8 text; save the file as UTF-8") from None


def split_lines(text: str) -> list[str]:
    """Lines with their ends. `str.splitlines` would also cut at separators that captions contain."""
    return list(io.StringIO(text, newline=""))


def read_csv(
    path: Path, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows with their line numbers; columns in any order, others ignored, missing ones refused."""
    return parse_csv(split_lines(read_text(path)), path, required, optional)


def parse_csv(
    lines: Iterable[str],
    path: Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    first_line: int = 1,
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows with their line numbers, from the lines of a CSV file; the first line names the columns."""
    reader = csv.reader(lines)
    columns = [column.strip() for column in next(reader, [])]
    missing = [column for column in required if column not in columns]
    if missing:
        raise DataError(
            f"{path}, line {first_line}: no column {', '.join(missing)}, found {', '.join(columns)}; "
            f"it must name the columns {','.join(required)}"
        )
    wanted = [column for column in (*required, *optional) if column in columns]
    problems = Problems(path)
    for fields in reader:
        line = first_line - 1 + reader.line_num
        if not any(field.strip() for field in fields):
            continue
        if len(fields) != len(columns):
            advice = 'put a text with commas in quotes: "one, two"'
            problems.add(line, f"{len(fields)} fields instead of {len(columns)}; {advice}")
            continue
        row = dict(zip(columns, fields, strict=True))
        yield line, {column: row[column].strip() for column in wanted}
    problems.raise_if_any()


def read_list(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers, empty ones left out."""
    for line, text in enumerate(split_lines(read_text(path)), start=1):
        if text.strip():
            yield line, text.strip()


def read_json(path: Path) -> Any:
    """A JSON file, or the one inside a zip."""
    text = _unzip(path) if path.suffix == ".zip" else read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: this is not JSON ({error.msg})") from None


def _unzip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".json")]
            if len(names) != 1:
                raise DataError(f"{path} holds {len(names)} JSON files; expected one")
            return io.TextIOWrapper(archive.open(names[0]), encoding="utf-8-sig").read()
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; check the folder of annotations") from None
    except (zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged ({error}); download it again") from None

"""What a probe found: a few values (JSON) and long columns (Parquet), and the folder that keeps them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gare.atomic import write_text
from gare.errors import EvaluationError

Columns = Mapping[str, Tensor | Sequence[Any]]


@dataclass(frozen=True)
class Numbers:
    """What a probe found: `values` go to JSON, `tables` (columns of equal length) to Parquet."""

    values: dict[str, Any]
    tables: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], tables: Mapping[str, Columns] | None = None) -> Numbers:
        """Numbers from anything with dataclasses and tensors in it."""
        plain = {
            name: {key: as_list(x) for key, x in table.items()} for name, table in (tables or {}).items()
        }
        for name, table in plain.items():
            if len({len(column) for column in table.values()}) > 1:
                raise ValueError(f"the columns of table '{name}' differ in length")
        return cls(to_plain(values), plain)


@dataclass(frozen=True)
class NumberStore:
    """The folder of a report's numbers. A probe is kept under the fingerprint of all it depends on."""

    folder: Path

    def path(self, probe: str) -> Path:
        """The JSON file of a probe."""
        return self.folder / f"{probe}.json"

    def table_path(self, probe: str, table: str) -> Path:
        """The Parquet file of one table of a probe."""
        return self.folder / f"{probe}.{table}.parquet"

    def save(self, probe: str, fingerprint: str, numbers: Numbers, seconds: float) -> None:
        """Write the tables of a probe, then its values."""
        import pyarrow as pa
        from pyarrow import parquet

        self.folder.mkdir(parents=True, exist_ok=True)
        self.path(probe).unlink(missing_ok=True)  # else a stop halfway leaves old values with new tables
        for name, columns in numbers.tables.items():
            parquet.write_table(pa.table(columns), self.table_path(probe, name))
        record = {
            "probe": probe,
            "fingerprint": fingerprint,
            "seconds": round(seconds, 2),
            "tables": sorted(numbers.tables),
            "values": numbers.values,
        }
        # Last: a probe with a JSON file is complete.
        write_text(self.path(probe), json.dumps(record, indent=1, allow_nan=False) + "\n")

    def load(self, probe: str, fingerprint: str | None = None) -> Numbers | None:
        """The numbers of a probe; None if it was never run, or on something else than `fingerprint`."""
        from pyarrow import parquet

        try:
            record = json.loads(self.path(probe).read_text(encoding="utf-8"))
            if fingerprint is not None and record["fingerprint"] != fingerprint:
                return None
            tables = {
                name: parquet.read_table(self.table_path(probe, name)).to_pydict()
                for name in record["tables"]
            }
            return Numbers(record["values"], tables)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EvaluationError(
                f"{self.path(probe)} or a table beside it is damaged ({error}); delete it, or pass --force"
            ) from None


def fingerprint(*parts: object) -> str:
    """Sixteen hex digits of what a result depends on.

    >>> fingerprint("a", 1) == fingerprint("a", 1), fingerprint("a", 1) == fingerprint("a", 2)
    (True, False)
    """
    return hashlib.sha256(json.dumps([str(part) for part in parts]).encode()).hexdigest()[:16]


def file_fingerprint(folder: Path, name: str) -> str:
    """The fingerprint of a file's content, or its path where there is none; `folder` may be the file."""
    path = folder / name if folder.is_dir() else folder
    return fingerprint(path.read_bytes()) if path.is_file() else str(path)


def to_plain(value: Any) -> Any:
    """Dataclasses, tensors and mappings as JSON values; what is not a number becomes null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, Tensor):
        return to_plain(value.tolist())
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def as_list(column: Tensor | Sequence[Any]) -> list[Any]:
    """A column as a list of Python values."""
    return column.tolist() if isinstance(column, Tensor) else list(column)

"""What an indexing run did, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class FileFailure:
    path: str
    kind: str
    message: str
    is_folder: bool = False
    """A folder that cannot be read; what is in it stays as it was, and it is tried again in every run."""


@dataclass
class IndexReport:
    """Numbers are files, unless they say items."""

    new: int = 0
    changed: int = 0
    moved: int = 0
    """Renamed or moved: found again by content, not decoded."""
    duplicate: int = 0
    """Copies of a file that is there as well; they have items of their own and were not decoded."""
    unchanged: int = 0
    deleted: int = 0
    failed_before: int = 0
    """Failed in an earlier run and have not changed since."""
    failures: list[FileFailure] = field(default_factory=list)
    """Of this run."""
    num_items_encoded: int = 0
    num_items_reused: int = 0
    skipped_roots: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return len(self.failures)

    @property
    def did_something(self) -> bool:
        has_failed = any(not failure.is_folder for failure in self.failures)
        return bool(self.new or self.changed or self.moved or self.duplicate or self.deleted or has_failed)

    def failure_kinds(self) -> dict[str, int]:
        return dict(Counter(failure.kind for failure in self.failures).most_common())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "failed": self.failed, "failure_kinds": self.failure_kinds()}


@dataclass(frozen=True)
class IndexProgress:
    """Where a run is: how many of the files that need work are done, and how many of them failed."""

    done: int
    total: int
    failed: int
    path: str

"""What an indexing run did, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class FileFailure:
    """A file or folder that could not be indexed, and why."""

    path: str
    kind: str
    message: str
    is_folder: bool = False
    """A folder that cannot be read; what is in it stays as it was, and it is tried again in every run."""


@dataclass
class IndexReport:
    """What a run did. Every number counts files, unless its name says items."""

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
    """What failed in this run."""
    num_items_encoded: int = 0
    num_items_reused: int = 0
    video_seconds: float = 0.0
    """How long the files play that were decoded and encoded."""
    skipped_roots: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    seconds: float = 0.0
    encoded_again: int = 0
    """Files that were encoded with another model, to change that of the library."""
    changed_to: str = ""
    """The model that the library has now, if this run changed it."""

    @property
    def failed(self) -> int:
        """How many files and folders failed in this run."""
        return len(self.failures)

    @property
    def did_something(self) -> bool:
        """Whether the library changed."""
        has_failed = any(not failure.is_folder for failure in self.failures)
        has_changed = self.new or self.changed or self.moved or self.duplicate or self.deleted
        return bool(has_changed or has_failed or self.encoded_again or self.changed_to)

    def after_a_change(self, before: IndexReport) -> IndexReport:
        """This report, with what changing the model did before."""
        num_known = sum(not failure.is_folder for failure in before.failures)
        return replace(
            self,
            failed_before=max(0, self.failed_before - num_known),
            failures=[*before.failures, *self.failures],
            num_items_encoded=before.num_items_encoded + self.num_items_encoded,
            video_seconds=before.video_seconds + self.video_seconds,
            seconds=before.seconds + self.seconds,
            encoded_again=before.encoded_again,
            changed_to=before.changed_to,
        )

    def failure_kinds(self) -> dict[str, int]:
        """How many failures of each kind, the most frequent first."""
        return dict(Counter(failure.kind for failure in self.failures).most_common())

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**asdict(self), "failed": self.failed, "failure_kinds": self.failure_kinds()}


@dataclass(frozen=True)
class IndexProgress:
    """Where a run is: how many of the files that need work are done, and how many of them failed."""

    done: int
    total: int
    failed: int
    path: str
    at: float | None = None
    """A long file is being read, and this second of it is done; None when a whole file is done."""

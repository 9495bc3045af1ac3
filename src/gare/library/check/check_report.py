"""What a check found and what a repair did, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from gare.library.store.store_damage import DAMAGE_KINDS

FINDING_KINDS = {
    **DAMAGE_KINDS,
    "unreadable": "rows cannot be read",
    "damaged_item": "the row of an item is not as it was written",
    "damaged_vector": "a stage-1 vector is not as it was written",
    "wrong_vector": "a stage-1 vector is not what the model makes of the frames",
    "damaged_frames": "frame vectors, times, thumbnail or strip are not as they were written",
    "item_without_frames": "an item has lost its frames",
    "wrong_id": "the id of an item is not that of its path and start",
    "wrong_key": "an item refers to frames of another content",
    "misnamed_item": "a filter by name does not find an item",
    "mixed_items": "a file has items of several contents or segmentations",
    "lost_items": "a file has fewer items than the ledger counts",
    "lost_ledger": "the ledger is empty, and there are items",
    "ledger_mismatch": "the ledger and the items of a file disagree",
    "bad_note": "a note of the library cannot be read",
}
"""Kinds of damage: `gare check` ends with exit code 3, `--repair` mends them."""

NOTE_KINDS = {
    "unchecked": "rows without checksum, of a library made before format 2",
    "item_without_ledger": "a file whose indexing was cut short; the next `gare index` finishes it",
    "unfinished_library": "a library whose making was cut short; the next `gare index` finishes it",
    "missing_set": "the vectors of another model are not there: not begun yet, or removed by hand",
    "unfinished_file": "a file that the next `gare index` looks at again",
    "extra_items": "a file has more items than the ledger counts",
    "deleted_items": "a file has fewer items than the ledger counts: they were deleted, or the file is gone",
    "orphaned_frames": "frames that no item refers to; upkeep removes them once they are a day old",
    "unindexed_items": "items that the vector index does not cover yet; they are read one by one",
    "missing_file": "a file is not on the disk",
    "changed_file": "a file on the disk is not the one that was indexed",
}
"""What is worth knowing and is no damage."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    kind: str
    """One of `FINDING_KINDS` or `NOTE_KINDS`."""
    message: str
    path: str = ""
    """The video file, where one is concerned."""
    item: str = ""

    @property
    def is_damage(self) -> bool:
        """Whether it needs a repair."""
        return self.kind in FINDING_KINDS


@dataclass
class CheckReport:
    """What a check found. The library is sound when there is no damage."""

    library: str
    vector_set: str = ""
    """The name of the set of vectors; empty for the first, and for all of them."""
    num_items: int = 0
    num_files: int = 0
    num_frames: int | None = None
    """Rows of frames; None where the store cannot tell."""
    num_read: int = 0
    """Items whose data was read and compared with its checksums."""
    num_to_read: int = 0
    """Items whose data was to be read."""
    is_complete: bool = True
    """False when it was interrupted or ran out of time; the next run goes on from there."""
    findings: list[Finding] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    """What a repair did, in words."""
    left: list[Finding] = field(default_factory=list)
    """What a repair could not mend."""
    seconds: float = 0.0

    @property
    def damage(self) -> list[Finding]:
        """What needs a repair."""
        return [finding for finding in self.findings if finding.is_damage]

    @property
    def notes(self) -> list[Finding]:
        """What is worth knowing."""
        return [finding for finding in self.findings if not finding.is_damage]

    @property
    def is_sound(self) -> bool:
        """Nothing needs a repair, or all of it was repaired."""
        return not self.left if self.was_repaired else not self.damage

    was_repaired: bool = False
    """Whether this is the report of a repair."""

    def add(self, kind: str, message: str, *, path: str = "", item: str = "") -> None:
        """Note a finding."""
        self.findings.append(Finding(kind, message, path, item))

    def kinds(self) -> dict[str, int]:
        """How often each kind was found."""
        return dict(Counter(finding.kind for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {**asdict(self), "is_sound": self.is_sound, "kinds": self.kinds()}


def summarise(findings: Iterable[Finding], most: int = 20) -> list[str]:
    """A line for each finding; of a kind with many, the first ones and how many there are."""
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    lines = []
    for kind, found in by_kind.items():
        lines += [f"{kind}: {finding.message}" for finding in found[:most]]
        if len(found) > most:
            lines.append(f"{kind}: and {len(found) - most:,} more")
    return lines

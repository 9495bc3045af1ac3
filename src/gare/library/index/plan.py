"""What a run has to do: the files that are there, compared with the ledger of those that were."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gare.data.object_storage import is_remote
from gare.errors import LibraryError
from gare.library.index.object_files import has_objects, normal_source
from gare.library.index.scan import FoundFile, Problem, Scan, is_below
from gare.library.store import Store

_CHEAP_TO_RETRY = {"no_permission", "missing"}


@dataclass(frozen=True)
class Known:
    """A line of the ledger."""

    size: int
    mtime_ns: int
    content: str
    state: str
    error_kind: str
    split: str
    """How the file was segmented."""
    num_items: int = 0


@dataclass(frozen=True)
class Roots:
    """The folders and files asked for, and those left alone because they are suddenly gone."""

    usable: list[str]
    skipped: dict[str, str]
    """Why, by path."""


@dataclass
class Plan:
    """What becomes of every file in this run."""

    new: list[FoundFile] = field(default_factory=list)
    changed: list[FoundFile] = field(default_factory=list)
    """Files that changed, with those that failed and are tried again."""
    num_unchanged: int = 0
    failed_before: list[str] = field(default_factory=list)
    """Unchanged since they failed; left alone until `retry_failed`."""
    problems: list[Problem] = field(default_factory=list)
    """What the scan could not read, to be noted in the ledger."""
    gone: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[FoundFile]:
        """The files to read, in the order of their names."""
        return sorted(self.new + self.changed, key=lambda file: file.path)

    @property
    def num_to_do(self) -> int:
        """How many files this run reads, or reports as problems."""
        return len(self.new) + len(self.changed) + len(self.problems)


def read_ledger(store: Store) -> dict[str, Known]:
    """Every row of the ledger, by path. One that speaks of other items than there are has no size.

    Two processes may write a file at once, and one of them may be killed between its items and its ledger.
    """
    columns = ["path", "size", "mtime_ns", "content", "state", "error_kind", "split", "num_items"]
    ledger = {
        row.pop("path"): Known(**row) for batch in store.scan_files(columns) for row in batch.to_pylist()
    }
    for batch in store.scan(columns=["path", "frames_key"]):
        for path, frames_key in zip(batch["path"].to_pylist(), batch["frames_key"].to_pylist(), strict=True):
            known = ledger.get(path)
            if known is not None and not frames_key.startswith(f"{known.content}/{known.split}/"):
                ledger[path] = replace(known, size=-1)
    return ledger


def check_roots(roots: Sequence[str], ledger: Mapping[str, Known], *, prune: bool) -> Roots:
    """Skip a root that had files and has none: a disk that is not mounted must not empty the library."""
    usable: list[str] = []
    skipped: dict[str, str] = {}
    for root in dict.fromkeys(map(normal_source, roots)):
        num_known = sum(is_below(path, root) for path in ledger)
        exists = has_objects(root) if is_remote(root) else os.path.lexists(root)
        if not exists and not num_known:
            raise LibraryError(_explain_missing(root))
        if prune or not num_known or (exists and not _is_empty_folder(root)):
            usable.append(root)
        else:
            skipped[root] = (
                f"{root} is {'empty' if exists else 'not there'}, but the library has {num_known:,} of its "
                "files. Is the disk mounted? If you deleted them, pass --prune"
            )
    return Roots(usable, skipped)


def _explain_missing(root: str) -> str:
    if is_remote(root):
        return (
            f"there is nothing at {root}; check the bucket and the prefix, and AWS_ENDPOINT_URL where the "
            "service is not Amazon's"
        )
    return f"{root} does not exist; give a folder of videos, or a video"


def make_plan(
    scan: Scan,
    ledger: Mapping[str, Known],
    roots: Sequence[str],
    *,
    segmentation: str,
    retry_failed: bool = False,
    keep: Collection[str] = (),
) -> Plan:
    """Compare what is there with what was; `keep` are files that are there but not to be read yet."""
    plan = Plan()
    for file in scan.files:
        known = ledger.get(file.path)
        if known is None:
            plan.new.append(file)
        elif (known.size, known.mtime_ns) != (file.size, file.mtime_ns):
            plan.changed.append(file)
        elif known.state == "failed":
            again = retry_failed or (known.error_kind in _CHEAP_TO_RETRY and _can_read(file.path))
            (plan.changed.append(file) if again else plan.failed_before.append(file.path))
        elif known.split != segmentation:
            plan.changed.append(file)
        else:
            plan.num_unchanged += 1
    for problem in scan.problems:
        known = ledger.get(problem.path)
        if known is not None and known.error_kind == problem.kind:
            plan.failed_before.append(problem.path)
        else:
            plan.problems.append(problem)
    plan.gone = [path for path in _find_gone(scan, ledger, roots) if path not in keep]
    return plan


def _find_gone(scan: Scan, ledger: Iterable[str], roots: Sequence[str]) -> list[str]:
    """Files of the ledger that these roots hold no more; those in folders that cannot be read stay."""
    present = {file.path for file in scan.files} | {problem.path for problem in scan.problems}
    closed = [problem.path for problem in scan.problems if problem.is_folder]
    return [
        path
        for path in ledger
        if path not in present
        and any(is_below(path, root) for root in roots)
        and not any(is_below(path, folder) for folder in closed)
    ]


def _can_read(path: str) -> bool:
    return is_remote(path) or os.access(path, os.R_OK)


def _is_empty_folder(path: str) -> bool:
    try:
        return os.path.isdir(path) and not os.listdir(path)
    except OSError:
        return False  # the scan will say what is wrong with it

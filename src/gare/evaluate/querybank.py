"""The queries QB-Norm looks at: given explicitly, and never those of the evaluation itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from gare.data.manifest import SPLITS, Manifest, find_manifest
from gare.errors import EvaluationError


@dataclass(frozen=True)
class QueryBank:
    """Texts and where they come from."""

    source: str
    queries: tuple[str, ...]
    num_dropped: int = 0
    """Queries left out because the evaluated split has the same caption."""

    def __str__(self) -> str:
        dropped = f", {self.num_dropped:,} left out that are test captions too" if self.num_dropped else ""
        return f"{self.source}, {len(self.queries):,} queries{dropped}"

    def overlap(self, captions: Iterable[str]) -> list[str]:
        """The queries that are captions too, whatever their case and spaces."""
        known = {_plain(caption) for caption in captions}
        return [query for query in self.queries if _plain(query) in known]

    def refuse_overlap(self, captions: Iterable[str]) -> None:
        """A bank that holds what is asked in the test knows too much."""
        shared = self.overlap(captions)
        if shared:
            raise EvaluationError(
                f"{len(shared):,} of the {len(self.queries):,} queries of bank {self.source} are captions of "
                f"the split that is evaluated, such as '{shared[0]}': that leaks. Give queries of another "
                "split, or pass --drop-overlap to leave these out, with their number in the result"
            )

    def without(self, captions: Iterable[str]) -> QueryBank:
        """Without the queries that are captions too; their number stays in the label."""
        shared = set(self.overlap(captions))
        kept = tuple(query for query in self.queries if query not in shared)
        if not kept:
            raise EvaluationError(
                f"every query of the bank {self.source} is a caption of the split that is evaluated; "
                "give queries of another split"
            )
        return replace(self, queries=kept, num_dropped=self.num_dropped + len(self.queries) - len(kept))


def read_querybank(place: str) -> QueryBank:
    """From `MANIFEST`, `MANIFEST:SPLIT` (train, if not said) or a text file with a query a line."""
    path, _, split = place.rpartition(":")
    if split not in SPLITS:
        path, split = place, "train"
    if Path(path).is_file() and Path(path).suffix not in (".csv", ".parquet"):
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise EvaluationError(f"{path} is not a text file; write one query a line, in UTF-8") from None
        queries = tuple(line.strip() for line in lines if line.strip())
        if not queries:
            raise EvaluationError(f"{path} has no queries; write one a line")
        return QueryBank(Path(path).name, queries)
    if not Path(path).exists():
        raise EvaluationError(
            f"there is no query bank at {path}; give what 'gare data prepare' made (MANIFEST or "
            "MANIFEST:SPLIT) or a text file with a query a line"
        )
    manifest = Manifest.load(find_manifest(Path(path)), allow_missing=True)
    return QueryBank(f"{manifest.header.name}:{split}", tuple(manifest.captions(split)))  # type: ignore[arg-type]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())

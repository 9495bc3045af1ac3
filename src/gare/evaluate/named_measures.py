"""A measure by the name that any harness gives it: R@1, recall_at_10, hit_rate@5, nDCG@10, MRR, MdR, MnR.

Each query has one right candidate, so a measure is a function of its rank, and several names mean the same:
recall, hit rate, success and accuracy at k. Shares of queries are fractions, as everywhere in the code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gare.evaluate.rank_metrics import median, recall_at

Kind = Literal["recall", "ndcg", "mrr", "median_rank", "mean_rank"]

_KINDS: dict[str, Kind] = {
    "r": "recall",
    "recall": "recall",
    "hit_rate": "recall",
    "hit": "recall",
    "success": "recall",
    "accuracy": "recall",
    "acc": "recall",
    "ndcg": "ndcg",
    "mrr": "mrr",
    "mdr": "median_rank",
    "median_rank": "median_rank",
    "mnr": "mean_rank",
    "mean_rank": "mean_rank",
}
_NAME = re.compile(r"([a-z_]+?)(?:(?:@|_at_)([1-9]\d{0,8}))?")
"""Beyond nine digits a cutoff is a mistake: no gallery is so large."""


@dataclass(frozen=True)
class Measure:
    """One measure; `cutoff` is the k of R@k, None where there is none."""

    kind: Kind
    cutoff: int | None = None

    @classmethod
    def named(cls, name: str) -> Measure:
        """The measure of a name, whatever its case.

        >>> Measure.named("R@1") == Measure.named("hit_rate_at_1"), str(Measure.named("ndcg_at_10"))
        (True, 'nDCG@10')
        """
        match = _NAME.fullmatch(name.strip().lower())
        kind = _KINDS.get(match[1]) if match else None
        needs_cutoff = kind in ("recall", "ndcg")
        if match is None or kind is None or (match[2] is None and needs_cutoff):
            raise ValueError(
                f"'{name}' is not a measure known here; use R@1, nDCG@10, MRR@10, MRR, MdR or MnR"
            )
        if match[2] and kind.endswith("_rank"):
            raise ValueError(f"'{name}' has a cutoff, but a median or mean rank has none")
        return cls(kind, int(match[2]) if match[2] else None)

    def __str__(self) -> str:
        plain = {"recall": "R", "ndcg": "nDCG", "mrr": "MRR", "median_rank": "MdR", "mean_rank": "MnR"}
        return plain[self.kind] + (f"@{self.cutoff}" if self.cutoff else "")

    @property
    def is_share(self) -> bool:
        """Whether it lies in 0…1 and is printed in percent."""
        return not self.kind.endswith("_rank")

    def of_ranks(self, ranks: Tensor) -> float:
        """Its value for 1-based ranks.

        >>> ranks = torch.tensor([1, 2, 20])
        >>> Measure.named("MRR@10").of_ranks(ranks), round(Measure.named("nDCG@10").of_ranks(ranks), 4)
        (0.5, 0.5436)
        """
        if self.kind == "recall":
            return recall_at(ranks, self.cutoff or 1)
        if self.kind == "median_rank":
            return median(ranks)
        place = ranks.double()
        if self.kind == "mean_rank":
            return float(place.mean())
        gain = 1 / place if self.kind == "mrr" else 1 / torch.log2(place + 1)
        return float(gain.where(place <= (self.cutoff or torch.inf), torch.zeros_like(gain)).mean())

    def percent(self, value: float, spec: str = ".1f") -> str:
        """A value as tables print it: shares in percent, ranks as they are."""
        return format(100 * value if self.is_share else value, spec)


MAIN_MEASURES = tuple(map(Measure.named, ("R@1", "R@5", "R@10", "MdR", "MnR", "nDCG@10", "MRR@10")))
"""The columns of the tables of protocols."""

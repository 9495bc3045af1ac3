"""Rescoring: scores corrected by those of other queries. Shapes: Q queries, N candidates, B bank queries.

A system that answers one query at a time cannot do this, so rescored numbers are labelled and never stand in
the main column. The functions rank rows: for video→text hand in the transposed matrix. The queries of QB-Norm
are given explicitly as a `QueryBank`, and are never those of the evaluation itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gare.data.manifest import SPLITS, Manifest, find_manifest
from gare.errors import EvaluationError
from gare.evaluate.rank_metrics import Array, as_matrix

Rescoring = Literal["none", "dsl", "qb_norm"]


def dual_softmax(scores: Array, *, temperature: float = 0.01) -> Tensor:
    """DSL at inference: s_qn · softmax over the *queries* of s_qn / temperature.

    A candidate that every query likes is worth less to each of them. The factor is a prior for positive
    scores; among negative ones it prefers what is unlikely, as in the papers that use it. Computed in
    float64: in float32 small probabilities become zeros that tie. From Cheng et al., "Improving Video-Text
    Retrieval by Multi-Stream Corpus Alignment and Dual Softmax Loss", arXiv:2109.04290.

    >>> dual_softmax(torch.tensor([[0.9, 0.8], [0.8, 0.1]]), temperature=0.1).argmax(dim=1)
    tensor([1, 0])
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    scores_QN = as_matrix(scores).double()
    return scores_QN * (scores_QN / temperature).softmax(dim=0)


def querybank_norm(
    scores: Array, bank_scores: Array, *, inverse_temperature: float = 20.0, num_activated: int = 1
) -> Tensor:
    """QB-Norm with the dynamic inverted softmax; the query bank is given, never taken from the test queries.

    A candidate is *activated* when it is among the best `num_activated` of some bank query. A query whose
    best candidate is activated is scored log(exp(β s_qn) / Σ_b exp(β s_bn)); every other query keeps its
    scores. The logarithm, which the paper leaves out, changes no rank and cannot overflow. From Bogolin et
    al., "Cross Modal Retrieval with Querybank Normalisation", CVPR 2022, arXiv:2112.12777.

    Args:
        scores: [queries, candidates].
        bank_scores: [bank queries, candidates], the same candidates scored for queries of the training set.
        inverse_temperature: β, 20 in the authors' code.
        num_activated: k of the activation set, 1 in the authors' code.

    >>> scores = torch.tensor([[0.9, 0.8]])
    >>> querybank_norm(scores, torch.tensor([[0.9, 0.1]])).argmax(dim=1)  # candidate 0 is a hub of the bank
    tensor([1])
    """
    scores_QN, bank_BN = as_matrix(scores).double(), as_matrix(bank_scores).double()
    if bank_BN.shape[1] != scores_QN.shape[1]:
        raise ValueError(
            f"the bank scores {bank_BN.shape[1]} candidates, but there are {scores_QN.shape[1]}; "
            "score the bank's queries against the same candidates"
        )
    if inverse_temperature <= 0 or not 1 <= num_activated <= scores_QN.shape[1]:
        raise ValueError(
            f"inverse_temperature must be positive and num_activated in 1…{scores_QN.shape[1]}, "
            f"got {inverse_temperature} and {num_activated}"
        )
    is_activated_N = torch.zeros(scores_QN.shape[1], dtype=torch.bool, device=scores_QN.device)
    is_activated_N[bank_BN.topk(num_activated, dim=1).indices.flatten()] = True
    normalised_QN = inverse_temperature * scores_QN - (inverse_temperature * bank_BN).logsumexp(dim=0)
    return torch.where(is_activated_N[scores_QN.argmax(dim=1)][:, None], normalised_QN, scores_QN)


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
        """Refuse a bank that holds captions of the evaluated split: that would leak."""
        shared = self.overlap(captions)
        if shared:
            raise EvaluationError(
                f"{len(shared):,} of the {len(self.queries):,} queries of bank {self.source} are captions of "
                f"the split that is evaluated, such as '{shared[0]}': that leaks. Give queries of another "
                "split, or pass --drop-overlap to leave these out, with their number in the result"
            )

    def without(self, captions: Iterable[str]) -> QueryBank:
        """The bank without queries that are captions too; the label keeps their number."""
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

"""Rescorings of published methods: EERCF's two stages, DiCoSA's query bank, ProST's assignment.

Each changes the rank of a candidate by scores that a search of one query does not have, or by the order of
two stages. Their numbers are labelled and never stand in the main column.

Shapes: Q queries, N candidates, B bank queries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gare.evaluate.rank_metrics import Array, as_matrix

COARSE_TO_FINE_OFFSET = 100.0


def coarse_to_fine(coarse: Array, fine: Array, *, top: int = 50, offset: float | None = None) -> Tensor:
    """The best `top` candidates of each query by the coarse scores come first, ordered by the fine ones.

    Args:
        coarse, fine: [queries, candidates].
        top: candidates of the second stage.
        offset: what is added to the fine scores of the best. EERCF adds 100, which works while logits stay
            below it. By default as much as is needed for them to stay in front.

    >>> coarse_to_fine(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.9]]), top=2).argsort(1)
    tensor([[2, 0, 1]])
    """
    coarse_QN, fine_QN = as_matrix(coarse).double(), as_matrix(fine).double()
    top = min(top, coarse_QN.shape[1])
    best_QK = coarse_QN.topk(top, dim=1).indices
    if offset is None:
        offset = float(coarse_QN.max() - fine_QN.min()) + 1
    return coarse_QN.scatter(1, best_QK, offset + fine_QN.gather(1, best_QK))


def hub_norm(
    scores: Array, bank_scores: Array, *, inverse_temperature: float = 70.0, least_hits: int = 3
) -> Tensor:
    """DiCoSA's query bank: a query whose best candidate is a hub is scored by the inverted softmax.

    A hub is the best candidate of at least `least_hits` bank queries. Rows of other queries stay raw, as rows
    are never compared. `querybank_norm` is the published QB-Norm, with other settings and a logarithm.
    """
    scores_QN, bank_BN = as_matrix(scores).double(), as_matrix(bank_scores).double()
    hits_N = torch.bincount(bank_BN.argmax(dim=1), minlength=bank_BN.shape[1])
    share_N = (inverse_temperature * bank_BN).exp().sum(dim=0)
    normalised_QN = (inverse_temperature * scores_QN).exp() / share_N
    is_hub_Q = hits_N[scores_QN.argmax(dim=1)] >= least_hits
    return torch.where(is_hub_Q[:, None], normalised_QN, scores_QN)


def assignment(scores: Array) -> Tensor:
    """ProST's printed recalls: each candidate is given to one query, so that the sum of scores is largest.

    The candidate a query is given comes first, the others follow by their scores. A query that is given none
    keeps its order. It needs every query at once, and as many candidates as queries make it a puzzle with one
    solution: recalls rise by knowing that no two queries want the same video.

    >>> assignment(torch.tensor([[0.9, 0.8], [0.95, 0.1]])).argmax(dim=1)
    tensor([1, 0])
    """
    scores_QN = as_matrix(scores).double()
    given_QN = torch.zeros_like(scores_QN)
    for query, candidate in enumerate(best_assignment(scores_QN.cpu().numpy())):
        if candidate >= 0:
            given_QN[query, candidate] = float(scores_QN.max() - scores_QN.min()) + 1
    return scores_QN + given_QN


def best_assignment(scores: np.ndarray) -> list[int]:
    """The candidate each query is given so that the sum is largest; −1 where there are more queries.

    The Hungarian method with potentials, one query at a time, O(queries² · candidates).
    """
    if scores.shape[0] > scores.shape[1]:
        queries = best_assignment(scores.T)
        given = {query: candidate for candidate, query in enumerate(queries)}
        return [given.get(query, -1) for query in range(scores.shape[0])]
    num_queries, num_candidates = scores.shape
    cost = np.zeros((num_queries + 1, num_candidates + 1))
    cost[1:, 1:] = -scores
    of_query, of_candidate = np.zeros(num_queries + 1), np.zeros(num_candidates + 1)
    holder = np.zeros(num_candidates + 1, dtype=int)  # the query that has each candidate; 0 is none
    for query in range(1, num_queries + 1):
        holder[0], column = query, 0
        slack = np.full(num_candidates + 1, np.inf)
        before = np.zeros(num_candidates + 1, dtype=int)
        used = np.zeros(num_candidates + 1, dtype=bool)
        while holder[column]:
            used[column] = True
            row = holder[column]
            reduced = cost[row] - of_query[row] - of_candidate
            better = ~used & (reduced < slack)
            better[0] = False
            slack[better], before[better] = reduced[better], column
            free = np.flatnonzero(~used[1:]) + 1
            following = free[slack[free].argmin()]
            step = slack[following]
            of_query[holder[used]] += step
            of_candidate[used] -= step
            slack[~used] -= step
            column = following
        while column:
            holder[column], column = holder[before[column]], before[column]
    given = {int(query): place for place, query in enumerate(holder[1:]) if query}
    return [given[query] for query in range(1, num_queries + 1)]

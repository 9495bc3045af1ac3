"""Rescorings of published methods: two stages, hubs, assignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from gare.evaluate.method_rescoring import assignment, best_assignment, coarse_to_fine, hub_norm


def scores(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3), (1, 1)])
def test_the_assignment_has_the_largest_sum_there_is(shape):
    matrix = scores(*shape).numpy().astype(np.float64)
    given = best_assignment(matrix)
    total = sum(matrix[query, candidate] for query, candidate in enumerate(given) if candidate >= 0)
    wide = matrix if shape[0] <= shape[1] else matrix.T
    best = max(
        sum(wide[row, column] for row, column in enumerate(columns))
        for columns in itertools.permutations(range(wide.shape[1]), wide.shape[0])
    )
    assert total == pytest.approx(best)
    assert len([c for c in given if c >= 0]) == len({c for c in given if c >= 0}) == min(shape)


def test_an_assignment_raises_recall_of_noisy_scores():
    """It knows that no two queries want the same candidate: what ProST's printed numbers contain.

    Some candidates are hubs, as in real scores.
    """
    matrix = 2.5 * torch.eye(60) + scores(60, 60) + 1.5 * scores(1, 60, seed=1)
    right = torch.arange(60)
    plain = (matrix.argmax(dim=1) == right).float().mean()
    assigned = (assignment(matrix).argmax(dim=1) == right).float().mean()
    assert assigned > plain + 0.05


def test_two_stages_keep_the_best_in_front_whatever_their_scores():
    coarse, fine = scores(6, 9) + 300, scores(6, 9, seed=1)
    by_ranks, by_offset = coarse_to_fine(coarse, fine, top=3), coarse_to_fine(coarse, fine, top=3, offset=100)
    best = coarse.topk(3, dim=1).indices.sort(dim=1).values
    assert torch.equal(by_ranks.topk(3, dim=1).indices.sort(dim=1).values, best)
    assert not torch.equal(by_offset.topk(3, dim=1).indices.sort(dim=1).values, best)  # 100 is not enough


def test_only_queries_whose_best_is_a_hub_change():
    bank = torch.tensor([[0.9, 0.1, 0.0]] * 3 + [[0.0, 0.5, 0.1]])
    matrix = torch.tensor([[0.9, 0.8, 0.0], [0.1, 0.9, 0.0]])
    found = hub_norm(matrix, bank, inverse_temperature=10.0)
    assert found[0].argmax() == 1
    assert torch.equal(found[1].float(), matrix[1])

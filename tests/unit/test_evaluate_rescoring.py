"""DSL and QB-Norm against their formulas, written out as loops."""

from __future__ import annotations

import math

import pytest
import torch

from gare.evaluate import dual_softmax, querybank_norm, ranks_of_targets


def test_dual_softmax_is_the_formula():
    scores = torch.rand(4, 3, dtype=torch.float64)
    expected = [
        [
            float(scores[q, n])
            * math.exp(scores[q, n] / 0.1)
            / sum(math.exp(scores[other, n] / 0.1) for other in range(4))
            for n in range(3)
        ]
        for q in range(4)
    ]
    torch.testing.assert_close(
        dual_softmax(scores, temperature=0.1), torch.tensor(expected, dtype=torch.float64)
    )


def test_querybank_norm_is_the_formula():
    scores, bank = torch.rand(6, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)
    scores[0] = torch.tensor([0.9, 0.1, 0.1, 0.1])
    activated = {max(range(4), key=lambda n: float(row[n])) for row in bank}
    actual = querybank_norm(scores, bank)
    for q in range(6):
        if max(range(4), key=lambda n: float(scores[q, n])) in activated:
            ratio = [
                math.exp(20 * scores[q, n]) / sum(math.exp(20 * bank[b, n]) for b in range(5))
                for n in range(4)
            ]
            torch.testing.assert_close(actual[q].exp(), torch.tensor(ratio, dtype=torch.float64))
        else:
            assert torch.equal(actual[q], scores[q])


def test_a_query_whose_best_candidate_is_no_hub_keeps_its_scores():
    scores = torch.tensor([[0.9, 0.8, 0.1]], dtype=torch.float64)
    assert torch.equal(querybank_norm(scores, torch.tensor([[0.0, 0.1, 0.9]])), scores)
    assert not torch.equal(querybank_norm(scores, torch.tensor([[0.0, 0.1, 0.9]]), num_activated=3), scores)


def test_large_scores_do_not_overflow():
    scores, bank = torch.eye(3) * 1e4, torch.eye(3) * 1e4
    assert ranks_of_targets(dual_softmax(scores)).tolist() == [1, 1, 1]
    assert ranks_of_targets(querybank_norm(scores, bank)).tolist() == [1, 1, 1]


def test_minus_infinity_padding_is_refused():
    scores = torch.tensor([[0.1, float("-inf")], [0.2, 0.3]])
    with pytest.raises(ValueError, match="leave no padding"):
        dual_softmax(scores)
    with pytest.raises(ValueError, match="leave no padding"):
        querybank_norm(torch.eye(2), scores)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="temperature must be positive"):
        dual_softmax(torch.eye(2), temperature=0)
    with pytest.raises(ValueError, match=r"num_activated in 1…2"):
        querybank_norm(torch.eye(2), torch.eye(2), num_activated=3)
    with pytest.raises(ValueError, match="the bank scores 3 candidates, but there are 2"):
        querybank_norm(torch.eye(2), torch.eye(3))

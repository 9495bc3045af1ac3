"""Intervals and paired tests against loops over resamples, and against numbers known in closed form."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch

from gare.evaluate import METRIC_NAMES, bootstrap_intervals, mean_and_std, paired_permutation_test


def slow_metrics(ranks):
    ranks = list(ranks)
    recalls = [sum(rank <= cutoff for rank in ranks) / len(ranks) for cutoff in (1, 5, 10, 50)]
    return [*recalls, statistics.median(ranks), statistics.fmean(ranks)]


def slow_quantiles(samples):
    return np.quantile(np.array(samples), [0.025, 0.975], axis=0)


RANKS = np.random.default_rng(0).geometric(0.15, size=200)


def test_bootstrap_agrees_with_resampling_queries_in_a_loop():
    rng = np.random.default_rng(1)
    low, high = slow_quantiles([slow_metrics(rng.choice(RANKS, size=200)) for _ in range(2_000)])
    actual = bootstrap_intervals(RANKS, num_resamples=4_000, seed=2)
    for i, name in enumerate(METRIC_NAMES):
        spread = max(high[i] - low[i], 1e-9)
        assert abs(actual[name].low - low[i]) <= 0.15 * spread, name
        assert abs(actual[name].high - high[i]) <= 0.15 * spread, name


def test_grouped_bootstrap_agrees_with_resampling_groups_in_a_loop():
    rng = np.random.default_rng(1)
    groups = np.sort(rng.integers(0, 40, size=200))
    ranks = 1 + groups % 7  # captions of one video do alike
    members = [ranks[groups == group] for group in np.unique(groups)]
    samples = [
        slow_metrics(np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))]))
        for _ in range(2_000)
    ]
    low, high = slow_quantiles(samples)
    actual = bootstrap_intervals(ranks, groups=groups, num_resamples=4_000, seed=2)
    for i, name in enumerate(METRIC_NAMES):
        spread = max(high[i] - low[i], 1e-9)
        assert abs(actual[name].low - low[i]) <= 0.15 * spread, name
        assert abs(actual[name].high - high[i]) <= 0.15 * spread, name


def test_the_interval_has_the_textbook_width():
    # 490 of 1,000 right: standard error sqrt(p (1 - p) / n) = 1.58 points.
    interval = bootstrap_intervals([1] * 490 + [2] * 510)["recall_at_1"]
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * math.sqrt(0.49 * 0.51 / 1000), rel=0.08)


def test_captions_that_rise_and_fall_together_widen_the_interval():
    ranks, groups = [1] * 500 + [2] * 500, np.repeat(np.arange(50), 20)
    alone = bootstrap_intervals(ranks)["recall_at_1"]
    together = bootstrap_intervals(ranks, groups=groups)["recall_at_1"]
    assert (together.high - together.low) / (alone.high - alone.low) == pytest.approx(math.sqrt(20), rel=0.1)


def test_the_seed_decides_and_a_generator_is_accepted():
    assert bootstrap_intervals(RANKS, seed=3) == bootstrap_intervals(RANKS, seed=np.random.default_rng(3))
    assert bootstrap_intervals(RANKS, seed=3) != bootstrap_intervals(RANKS, seed=4)


def test_one_query_has_an_interval_without_width():
    interval = bootstrap_intervals(torch.tensor([7]))["mean_rank"]
    assert (interval.low, interval.high) == (7.0, 7.0)


def slow_exact_p_values(a, b, groups):
    labels = sorted(set(groups))
    observed = np.subtract(slow_metrics(b), slow_metrics(a))
    hits, tried = np.zeros(6), 0
    for flips in itertools.product([False, True], repeat=len(labels)):
        flipped = {label for label, flip in zip(labels, flips, strict=True) if flip}
        swap = [group in flipped for group in groups]
        first = [y if s else x for x, y, s in zip(a, b, swap, strict=True)]
        second = [x if s else y for x, y, s in zip(a, b, swap, strict=True)]
        difference = np.subtract(slow_metrics(second), slow_metrics(first))
        hits += np.abs(difference) >= np.abs(observed) - 1e-9
        tried += 1
    return hits / tried


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grouped", [False, True])
def test_small_cases_try_every_permutation(seed, grouped):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(1, 8, 8).tolist(), rng.integers(1, 12, 8).tolist()
    groups = [0, 1, 0, 2, 2, 3, 4, 1] if grouped else list(range(8))
    tests = paired_permutation_test(a, b, groups=groups if grouped else None)
    assert all(test.exact for test in tests.values())
    expected = slow_exact_p_values(a, b, groups)
    assert [test.p_value for test in tests.values()] == pytest.approx(expected.tolist())
    assert [test.a for test in tests.values()] == pytest.approx(slow_metrics(a))
    assert [test.b for test in tests.values()] == pytest.approx(slow_metrics(b))


def test_recall_at_one_agrees_with_the_exact_sign_test():
    # 30 queries gained, 15 lost, the rest unchanged: the sign-flip test is the exact McNemar test.
    a, b = [2] * 30 + [1] * 15 + [1] * 55, [1] * 30 + [2] * 15 + [1] * 55
    test = paired_permutation_test(a, b, num_permutations=40_000)["recall_at_1"]
    exact = 2 * sum(math.comb(45, k) for k in range(16)) / 2**45
    assert not test.exact
    assert test.difference == pytest.approx(0.15)
    assert test.p_value == pytest.approx(exact, rel=0.1)


def test_a_sampled_p_value_is_never_zero():
    test = paired_permutation_test([1] * 100, [9] * 100, num_permutations=999)["mean_rank"]
    assert (test.p_value, test.difference) == (0.001, 8.0)


def test_identical_runs_do_not_differ():
    for test in paired_permutation_test(RANKS, RANKS).values():
        assert (test.difference, test.p_value, test.exact) == (0.0, 1.0, True)


def test_p_values_are_fair_when_there_is_no_difference():
    rng = np.random.default_rng(0)
    p_values = []
    for seed in range(200):
        a, b = rng.geometric(0.2, size=(2, 60))
        p_values.append(paired_permutation_test(a, b, num_permutations=199, seed=seed)["mean_rank"].p_value)
    assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(0.05, abs=0.04)
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.07)


def test_mean_and_std_over_seeds():
    spread = mean_and_std([0.47, 0.48, 0.49])
    assert (spread.mean, spread.std, spread.num_seeds) == (pytest.approx(0.48), pytest.approx(0.01), 3)
    assert mean_and_std([0.5]).std is None
    assert f"{mean_and_std([50.0]):.1f}" == "50.0 ± n/a (one seed)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_intervals([]), "non-empty vector of 1-based ranks"),
        (lambda: bootstrap_intervals([0, 1]), "1-based"),
        (lambda: bootstrap_intervals([1, float("nan")]), "1-based"),
        (lambda: bootstrap_intervals([1], confidence=95), "between 0 and 1"),
        (lambda: bootstrap_intervals([1, 2], groups=[0]), "one label for each of 2 queries"),
        (lambda: paired_permutation_test([1, 2], [1]), "the same queries, got 2 and 1"),
        (lambda: paired_permutation_test([1], [1], num_permutations=0), "must be positive"),
        (lambda: mean_and_std([]), "one per seed"),
    ],
)
def test_nonsense_is_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()

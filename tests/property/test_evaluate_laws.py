"""Laws of ranks, metrics and protocols. Scores are small integers, so that ties are common."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gare.evaluate import (
    METRIC_NAMES,
    bootstrap_intervals,
    dual_softmax,
    evaluate_scores,
    paired_permutation_test,
    ranks_of_targets,
    retrieval_metrics,
)
from gare.evaluate.rank_metrics import recall_at

FAIR_POLICIES = ("optimistic", "average", "pessimistic")


def law(*strategies):
    """`given` without a deadline: the first call of a torch operation may take long."""
    return lambda test: settings(deadline=None)(given(*strategies)(test))


policies = st.sampled_from(FAIR_POLICIES)
protocols = st.sampled_from(("max_caption", "any_caption", "one_caption"))


@st.composite
def scored_queries(draw):
    """Scores [Q, N] and the target of each query."""
    shape = draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    scores = draw(arrays.arrays(np.int64, shape, elements=st.integers(-3, 3)))
    targets = draw(arrays.arrays(np.int64, shape[0], elements=st.integers(0, shape[1] - 1)))
    return scores.astype(np.float32), targets


@st.composite
def captioned_videos(draw):
    """Scores [T, V] and the video of each text; every video has at least one, in any order."""
    num_videos = draw(st.integers(1, 5))
    extra = draw(st.lists(st.integers(0, num_videos - 1), max_size=6))
    video_of_text = np.array(draw(st.permutations([*range(num_videos), *extra])))
    scores = draw(arrays.arrays(np.int64, (len(video_of_text), num_videos), elements=st.integers(-3, 3)))
    return scores.astype(np.float32), video_of_text


def slow_ranks(scores, targets, ties):
    ranks = []
    for row, target in zip(scores.tolist(), targets.tolist(), strict=True):
        above = sum(score > row[target] for score in row)
        tied = sum(score == row[target] for score in row) - 1
        ranks.append(1 + above + {"optimistic": 0, "average": tied / 2, "pessimistic": tied}[ties])
    return ranks


@law(scored_queries(), policies)
def test_ranks_equal_a_slow_loop(case, ties):
    scores, targets = case
    assert ranks_of_targets(scores, targets, ties).tolist() == slow_ranks(scores, targets, ties)


@law(scored_queries())
def test_legacy_is_what_the_field_computes(case):
    scores, targets = case
    target_scores = -scores[np.arange(len(scores)), targets][:, None]
    expected = np.where(np.sort(-scores, axis=1) - target_scores == 0)[1] + 1
    assert ranks_of_targets(scores, targets, "legacy").tolist() == expected.tolist()


@law(scored_queries(), st.sampled_from([np.exp, np.arctan, lambda x: x**3, lambda x: 5 * x - 2]))
def test_an_increasing_transform_leaves_ranks_alone(case, transform):
    scores, targets = case
    assert torch.equal(
        ranks_of_targets(transform(scores.astype(np.float64)), targets), ranks_of_targets(scores, targets)
    )


@law(scored_queries(), policies, st.randoms(use_true_random=False))
def test_permuting_candidates_with_their_targets_changes_nothing(case, ties, random):
    scores, targets = case
    order = list(range(scores.shape[1]))
    random.shuffle(order)
    moved = np.argsort(order)[targets]
    assert torch.equal(
        ranks_of_targets(scores[:, order], moved, ties), ranks_of_targets(scores, targets, ties)
    )


@law(scored_queries(), policies, st.randoms(use_true_random=False))
def test_permuting_queries_permutes_ranks(case, ties, random):
    scores, targets = case
    order = list(range(len(scores)))
    random.shuffle(order)
    assert torch.equal(
        ranks_of_targets(scores[order], targets[order], ties), ranks_of_targets(scores, targets, ties)[order]
    )


@law(scored_queries())
def test_optimistic_is_at_most_average_is_at_most_pessimistic(case):
    optimistic, average, pessimistic = (ranks_of_targets(*case, ties) for ties in FAIR_POLICIES)
    assert (optimistic <= average).all()
    assert (average <= pessimistic).all()
    assert torch.equal(2 * average, (optimistic + pessimistic).double())


@law(scored_queries(), policies)
def test_recall_is_a_fraction_that_grows_to_one(case, ties):
    scores, targets = case
    ranks = ranks_of_targets(scores, targets, ties)
    num_candidates = scores.shape[1]
    recalls = [recall_at(ranks, k) for k in range(1, num_candidates + 1)]
    assert all(0 <= recall <= 1 for recall in recalls)
    assert recalls == sorted(recalls)
    assert recalls[-1] == 1.0
    assert ((ranks >= 1) & (ranks <= num_candidates)).all()


@law(scored_queries(), policies)
def test_one_rank_per_query_and_metrics_follow_from_ranks(case, ties):
    metrics = retrieval_metrics(*case, ties)
    ranks = metrics.ranks.numpy()
    assert len(ranks) == metrics.num_queries == len(case[0])
    assert metrics.median_rank == np.median(ranks)
    assert metrics.mean_rank == pytest.approx(ranks.mean())
    assert metrics.recall_at_5 == np.mean(ranks <= 5)


@law(scored_queries())
def test_tensors_and_arrays_give_the_same(case):
    scores, targets = case
    assert retrieval_metrics(torch.from_numpy(scores), torch.from_numpy(targets)) == retrieval_metrics(
        scores, targets
    )


@law(scored_queries(), st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_one_bad_score_anywhere_is_refused(case, bad, data):
    scores, targets = case
    row, column = (data.draw(st.integers(0, size - 1)) for size in scores.shape)
    scores[row, column] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        retrieval_metrics(scores, targets)


@law(captioned_videos(), protocols, st.randoms(use_true_random=False))
def test_permuting_videos_permutes_their_ranks_and_nothing_else(case, protocol, random):
    scores, video_of_text = case
    order = list(range(scores.shape[1]))
    random.shuffle(order)
    before = evaluate_scores(scores, video_of_text, protocol=protocol)
    after = evaluate_scores(scores[:, order], np.argsort(order)[video_of_text], protocol=protocol)
    for ties in FAIR_POLICIES:
        assert torch.equal(after.text_to_video[ties].ranks, before.text_to_video[ties].ranks)
        assert torch.equal(after.video_to_text[ties].ranks, before.video_to_text[ties].ranks[order])


@law(captioned_videos(), st.sampled_from(("max_caption", "any_caption")), st.randoms(use_true_random=False))
def test_the_order_of_captions_does_not_matter(case, protocol, random):
    scores, video_of_text = case
    order = list(range(len(scores)))
    random.shuffle(order)
    before = evaluate_scores(scores, video_of_text, protocol=protocol)
    after = evaluate_scores(scores[order], video_of_text[order], protocol=protocol)
    assert torch.equal(after.video_to_text["pessimistic"].ranks, before.video_to_text["pessimistic"].ranks)
    assert torch.equal(
        after.text_to_video["pessimistic"].ranks, before.text_to_video["pessimistic"].ranks[order]
    )


@law(captioned_videos(), policies)
def test_more_captions_to_beat_never_help(case, ties):
    """A video stands behind its best caption, so it ranks no lower among videos than among captions."""
    videos = evaluate_scores(*case, protocol="max_caption").video_to_text[ties].ranks
    captions = evaluate_scores(*case, protocol="any_caption").video_to_text[ties].ranks
    assert (videos <= captions).all()


@law(scored_queries())
def test_dual_softmax_ignores_a_bonus_that_every_query_gives(case):
    """Adding a constant to a candidate's column leaves the prior over queries alone."""
    scores = torch.from_numpy(case[0]).double() + 10  # a prior times a score: keep scores positive
    bonus = torch.arange(scores.shape[1]).double()
    prior = dual_softmax(scores, temperature=1.0) / scores
    with_bonus = dual_softmax(scores + bonus, temperature=1.0) / (scores + bonus)
    torch.testing.assert_close(prior, with_bonus)


rank_lists = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@law(rank_lists)
def test_intervals_stay_within_the_ranks_seen(ranks):
    intervals = bootstrap_intervals(ranks, num_resamples=50)
    for name in METRIC_NAMES:
        low, high = (0, 1) if name.startswith("recall") else (min(ranks), max(ranks))
        assert low - 1e-9 <= intervals[name].low <= intervals[name].high <= high + 1e-9


@law(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=30))
def test_swapping_the_runs_swaps_the_sign_and_keeps_the_p_value(pairs):
    a, b = zip(*pairs, strict=True)
    forward = paired_permutation_test(a, b, num_permutations=64)
    backward = paired_permutation_test(b, a, num_permutations=64)
    for name in METRIC_NAMES:
        assert forward[name].difference == pytest.approx(-backward[name].difference)
        assert forward[name].p_value == backward[name].p_value
        assert 0 < forward[name].p_value <= 1

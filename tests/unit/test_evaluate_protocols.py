"""Multi-caption protocols against loops over Python lists; captions of a video are not contiguous."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gare.evaluate import evaluate_scores, retrieval_metrics

PROTOCOLS = ("max_caption", "any_caption", "one_caption")


def slow_rank(target, rivals, ties):
    above = sum(rival > target for rival in rivals)
    tied = sum(rival == target for rival in rivals)
    return 1 + above + {"optimistic": 0, "average": tied / 2, "pessimistic": tied}[ties]


def slow_video_to_text(scores, video_of_text, protocol, ties):
    texts, videos = range(len(scores)), range(len(scores[0]))
    captions = [[text for text in texts if video_of_text[text] == video] for video in videos]
    ranks = []
    for query in videos:
        best = max(scores[text][query] for text in captions[query])
        others = [video for video in videos if video != query]
        if protocol == "max_caption":
            rivals = [max(scores[text][query] for text in captions[video]) for video in others]
        elif protocol == "any_caption":
            rivals = [scores[text][query] for text in texts if video_of_text[text] != query]
        else:
            best = scores[captions[query][0]][query]
            rivals = [scores[captions[video][0]][query] for video in others]
        ranks.append(slow_rank(best, rivals, ties))
    return ranks


def multi_caption_case(seed, *, num_texts=23, num_videos=6):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 7, (num_texts, num_videos), generator=generator).float()
    extra = torch.randint(num_videos, (num_texts - num_videos,), generator=generator)
    video_of_text = torch.cat([torch.arange(num_videos), extra])
    return scores, video_of_text[torch.randperm(num_texts, generator=generator)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("ties", ["optimistic", "average", "pessimistic"])
@pytest.mark.parametrize("seed", range(5))
def test_both_directions_equal_slow_loops(protocol, ties, seed):
    scores, video_of_text = multi_caption_case(seed)
    result = evaluate_scores(scores, video_of_text, protocol=protocol)
    rows, videos = scores.tolist(), video_of_text.tolist()
    expected = [
        slow_rank(row[video], row[:video] + row[video + 1 :], ties)
        for row, video in zip(rows, videos, strict=True)
    ]
    assert result.text_to_video[ties].ranks.tolist() == expected
    assert result.video_to_text[ties].ranks.tolist() == slow_video_to_text(rows, videos, protocol, ties)


def test_the_three_protocols_by_hand():
    # Video 0 owns texts 0 and 3, video 1 texts 1 and 2.
    scores = torch.tensor([[0.1, 0.0], [0.5, 0.9], [0.6, 0.1], [0.7, 0.0]])
    video_of_text = [0, 1, 1, 0]
    first_rank = {
        protocol: evaluate_scores(scores, video_of_text, protocol=protocol)
        .video_to_text["pessimistic"]
        .ranks.tolist()
        for protocol in PROTOCOLS
    }
    # Text 3 (0.7) is the best for video 0; the first caption alone (0.1) loses to text 1 (0.5).
    assert first_rank == {"max_caption": [1, 1], "any_caption": [1, 1], "one_caption": [2, 1]}


def test_any_caption_counts_captions_where_max_caption_counts_videos():
    scores = torch.tensor([[0.5, 0.0], [0.6, 0.9], [0.7, 0.9]])
    video_of_text = [0, 1, 1]
    ranks = {
        protocol: evaluate_scores(scores, video_of_text, protocol=protocol)
        .video_to_text["optimistic"]
        .ranks.tolist()
        for protocol in ("max_caption", "any_caption")
    }
    assert ranks == {"max_caption": [2, 1], "any_caption": [3, 1]}


def test_the_last_caption_belongs_to_its_video():
    # Off by one, as in several repositories, would give text 1 to video 1.
    scores = torch.tensor([[0.0, 0.5], [0.9, 0.1], [0.2, 0.8]])
    result = evaluate_scores(scores, [0, 0, 1], protocol="max_caption")
    assert result.text_to_video["pessimistic"].ranks.tolist() == [2, 1, 1]
    assert result.video_to_text["pessimistic"].ranks.tolist() == [1, 1]


def test_a_video_is_not_punished_for_having_the_same_caption_twice():
    scores = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]])
    result = evaluate_scores(scores, [0, 0, 1], protocol="any_caption")
    assert result.video_to_text["pessimistic"].ranks.tolist() == [1, 1]
    assert len(result.video_to_text["legacy"].ranks) == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_with_one_caption_per_video_the_protocols_agree_with_the_transposed_matrix(protocol):
    scores = torch.randint(0, 9, (12, 12)).float()
    order = torch.randperm(12)
    for ties in ("optimistic", "average", "pessimistic", "legacy"):
        expected = retrieval_metrics(scores.T, ties=ties)
        shuffled = evaluate_scores(scores[order], order, protocol=protocol)
        assert shuffled.video_to_text[ties] == expected
        assert evaluate_scores(scores, protocol=protocol).video_to_text[ties] == expected


def test_rescored_matrices_may_differ_by_direction():
    good, bad = torch.eye(3), -torch.eye(3)
    result = evaluate_scores(bad, video_to_text_scores=good)
    assert result.text_to_video["pessimistic"].recall_at_1 == 0.0
    assert result.video_to_text["pessimistic"].recall_at_1 == 1.0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_msvd_size(protocol):
    rng = np.random.default_rng(0)
    video_of_text = rng.permutation(np.concatenate([np.arange(670), rng.integers(0, 670, 27_763 - 670)]))
    scores = rng.random((27_763, 670), dtype=np.float32)
    scores[np.arange(27_763), video_of_text] += 2
    result = evaluate_scores(scores, video_of_text, protocol=protocol)
    assert result.text_to_video["pessimistic"].num_queries == 27_763
    assert result.video_to_text["pessimistic"].num_queries == 670
    assert (
        result.text_to_video["pessimistic"].recall_at_1
        == result.video_to_text["pessimistic"].recall_at_1
        == 1.0
    )


@pytest.mark.parametrize(
    ("shape", "video_of_text", "message"),
    [
        ((3, 2), None, "3 texts and 2 videos are not pairs; pass video_of_text"),
        ((3, 2), [0, 0, 0], "1 of 2 videos have no text.*column 1"),
        ((3, 2), [0, 1, 2], r"video_of_text\[2\] is 2"),
        ((3, 2), [0, 1], "one index for each of 3 rows"),
    ],
)
def test_captions_that_do_not_fit_are_refused(shape, video_of_text, message):
    with pytest.raises(ValueError, match=message):
        evaluate_scores(torch.zeros(shape), video_of_text)


def test_an_unknown_protocol_lists_the_known_ones():
    with pytest.raises(ValueError, match="max_caption, any_caption, one_caption"):
        evaluate_scores(torch.eye(2), protocol="best_caption")


def test_matrices_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="video_to_text_scores"):
        evaluate_scores(torch.eye(2), video_to_text_scores=torch.eye(3))

"""The derivation of the bottleneck holds step by step, on drawn distributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gare.objective import kl_bottleneck
from gare.theory.information_bottleneck import bottleneck_steps, least_largest_distance

SEEDS = st.integers(0, 2**31 - 1)
SIZES = st.integers(1, 5)


def drawn(seed: int, texts: int, videos: int, values: int):
    generator = torch.Generator().manual_seed(seed)
    increment_TVK = (
        torch.randn(texts, videos, values, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    )
    pair_TV = (
        torch.randn(texts * videos, generator=generator, dtype=torch.float64).softmax(0).view(texts, videos)
    )
    prior_K = torch.randn(values, generator=generator, dtype=torch.float64).softmax(0)
    return increment_TVK, pair_TV, prior_K


@given(SEEDS, SIZES, SIZES, SIZES)
def test_every_step_of_the_derivation(seed, texts, videos, values):
    increment_TVK, pair_TV, prior_K = drawn(seed, texts, videos, values)
    steps = bottleneck_steps(increment_TVK, pair_TV, prior_K)
    assert steps.variational_bound >= steps.information_pair - 1e-12  # VIB
    assert steps.variational_bound >= steps.relaxed_bound - 1e-12  # Jensen
    assert steps.information_pair >= steps.information_video - 1e-12
    chain = steps.information_video + steps.information_text_given_video
    torch.testing.assert_close(steps.information_pair, chain)
    assert steps.relaxed_bound >= steps.information_video - 1e-12


@given(SEEDS, SIZES, SIZES)
def test_the_bound_is_tight_for_the_marginal_as_prior(seed, texts, videos):
    increment_TVK, pair_TV, _ = drawn(seed, texts, videos, 4)
    marginal_K = torch.einsum("tv,tvk->k", pair_TV, increment_TVK)
    steps = bottleneck_steps(increment_TVK, pair_TV, marginal_K)
    torch.testing.assert_close(steps.variational_bound, steps.information_pair)


def test_the_relaxed_term_does_not_bound_what_it_relaxes():
    """An increment that tells the text alone: the relaxed term is zero, I(Δ; T, V) is not."""
    increment_TVK = torch.eye(2, dtype=torch.float64)[:, None].expand(2, 2, 2)
    half = torch.full((2,), 0.5, dtype=torch.float64)
    steps = bottleneck_steps(increment_TVK, torch.full((2, 2), 0.25, dtype=torch.float64), half)
    assert steps.relaxed_bound == pytest.approx(0, abs=1e-12)
    assert steps.information_pair == pytest.approx(torch.tensor(2.0).log().item())


def test_the_training_term_is_the_relaxed_one_for_gaussians():
    """KL(N(μ, σ²) ‖ N(0, 1)) of a video's increments over texts: on a grid it is the same integral."""
    generator = torch.Generator().manual_seed(0)
    increment_TVD = torch.randn(400, 1, 1, generator=generator, dtype=torch.float64) * 0.7 + 0.4
    grid_K = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    mean, std = increment_TVD.mean(), increment_TVD.std() + 1e-6
    fitted_K = (-((grid_K - mean) / std).square() / 2).softmax(0)
    prior_K = (-grid_K.square() / 2).softmax(0)
    steps = bottleneck_steps(fitted_K[None, None], torch.ones(1, 1, dtype=torch.float64), prior_K)
    assert kl_bottleneck(increment_TVD, reduction="event").item() == pytest.approx(
        steps.relaxed_bound.item(), abs=1e-6
    )


@given(SEEDS, st.integers(2, 5))
def test_no_text_is_near_two_videos_that_lie_apart(seed, videos):
    generator = torch.Generator().manual_seed(seed)
    video_VD = torch.randn(videos, 3, generator=generator, dtype=torch.float64)
    text_D = torch.randn(3, generator=generator, dtype=torch.float64)
    distance_V = (video_VD - text_D).norm(dim=-1)
    further_VV = torch.maximum(distance_V[:, None], distance_V)
    least_VV = least_largest_distance(video_VD)
    assert (further_VV >= least_VV - 1e-12).all()
    # An increment for each pair reaches every video at once.
    shifted_VD = text_D + (video_VD - text_D)
    assert (shifted_VD - video_VD).norm(dim=-1).max() < 1e-12
    middle_D = (video_VD[0] + video_VD[1]) / 2
    assert (middle_D - video_VD[0]).norm() == pytest.approx(least_VV[0, 1].item())  # the bound is reached


def test_what_is_not_a_distribution_is_refused():
    with pytest.raises(ValueError, match="prior_K is not a distribution"):
        bottleneck_steps(torch.ones(1, 1, 1), torch.ones(1, 1), torch.tensor([0.5]))

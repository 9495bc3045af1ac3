"""Laws of GARE alone: gradients on every ablation axis, and what is left without an increment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from features import every_factored, every_gap_aware, short
from gare.interaction import GapAwareConfig
from interaction_laws import fast_scores_are_those_of_the_reference, gradients_of_both_are_equal, random_scene


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("config", every_factored(), ids=short)
def test_values_and_gradients_of_both_paths_are_equal_on_every_axis(config, num_heads):
    scene = random_scene(5, replace(config, num_heads=num_heads), sizes=(3, 4, 4, 3))
    fast_scores_are_those_of_the_reference(scene)
    gradients_of_both_are_equal(scene)


@given(st.integers(0, 2**31 - 1), st.sampled_from(every_gap_aware(normalise=False, query="gap")))
@example(seed=1, config=GapAwareConfig(pooling="text_conditioned")).via("the paper's baseline")
def test_a_zero_increment_is_the_baseline(seed, config):
    scene = random_scene(seed, config)
    interaction, text, video = scene.interaction, scene.text, scene.video
    torch.nn.init.zeros_(interaction.increment_net.output.weight)
    torch.nn.init.zeros_(interaction.increment_net.output.bias)
    baseline = interaction.without_increments().score(text, video)
    for scores in (interaction.score_pairs(text, video).scores_TV, interaction.score(text, video)):
        torch.testing.assert_close(scores, baseline, atol=1e-10, rtol=0)


@given(st.integers(0, 2**31 - 1), st.sampled_from(every_gap_aware()))
def test_its_vectors_are_those_of_the_reference(seed, config):
    """Training's increments and analysis' are the same numbers; adding them to their side gives the score."""
    scene = random_scene(seed, config)
    pairs = scene.interaction.score_pairs(scene.text, scene.video)
    vectors = scene.interaction.pair_vectors(scene.text, scene.video)
    torch.testing.assert_close(vectors.increment_TVD, pairs.increment_TVD, atol=1e-9, rtol=1e-9)
    assert vectors.corrected_side == config.corrected_side
    text_TVD = vectors.own_TVD if config.corrected_side == "text" else vectors.other_TVD
    torch.testing.assert_close(text_TVD, scene.text.text_TD[:, None].expand_as(text_TVD))

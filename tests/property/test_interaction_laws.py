"""Every interaction there is keeps every law, over drawn shapes, masks, weights and all its settings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from features import variants
from gare import INTERACTIONS
from gare.interaction.peers import PEERS
from interaction_laws import LAWS, random_scene

SEEDS = st.integers(0, 2**31 - 1)


def examples(name: str) -> int:
    """Published methods score plainly, by `score_pairs` in blocks: fewer examples tell as much."""
    return {"gare": 40}.get(name, 3 if name in PEERS else 15)


@pytest.mark.parametrize("name", list(INTERACTIONS))
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_it_keeps_the_law(law, name):
    @settings(max_examples=examples(name))
    @given(SEEDS, st.sampled_from(variants(INTERACTIONS[name].Config)))
    def check(seed, config):
        law(random_scene(seed, config))

    check()


@pytest.mark.parametrize("name", list(INTERACTIONS))
def test_float32_is_close_to_the_reference(name):
    @settings(max_examples=5 if name in PEERS else settings.default.max_examples)
    @given(SEEDS, st.sampled_from(variants(INTERACTIONS[name].Config)))
    def check(seed, config):
        scene = random_scene(seed, config, dtype=torch.float32)
        actual = scene.interaction.score(scene.text, scene.video)
        expected = scene.interaction.score_pairs(scene.text, scene.video).scores_TV
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)

    check()


@pytest.mark.parametrize("name", list(INTERACTIONS))
@torch.no_grad()
def test_half_precision_is_scored_in_float32(name):
    for config in variants(INTERACTIONS[name].Config)[: 3 if name in PEERS else 8]:
        scene = random_scene(3, config, sizes=(6, 4, 7, 5))
        exact = scene.interaction.score(scene.text, scene.video)
        half = scene.interaction.to(torch.bfloat16)
        scores = half.score(scene.text.to(torch.bfloat16), scene.video.to(torch.bfloat16))
        assert scores.dtype == torch.float32
        assert (scores - exact).abs().max() < 0.1  # what rounding inputs and weights to eight bits costs

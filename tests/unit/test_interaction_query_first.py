"""The increment net asked by a few texts against the net itself."""

from __future__ import annotations

import pytest
import torch

from gare import TextFeatures, VideoFeatures
from gare.interaction import GapAware, GapAwareConfig
from gare.interaction.query_first import QueryFirst

DIM = 24


def make_case(num_heads: int, *, texts: int = 2, videos: int = 7, frames: int = 5, pooling: str = "mean"):
    torch.manual_seed(num_heads)
    interaction = GapAware(GapAwareConfig(num_heads=num_heads, pooling=pooling), DIM).double().eval()
    for parameter in interaction.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # biases and scales must show
    text = TextFeatures.from_vectors(torch.randn(texts, DIM, dtype=torch.float64))
    mask_VF = torch.arange(frames) < torch.randint(1, frames + 1, (videos, 1))
    video = VideoFeatures(torch.randn(videos, frames, DIM, dtype=torch.float64), mask_VF)
    return interaction, text, video


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("is_folded", [False, True])
def test_another_order_of_products_gives_the_same_increments(num_heads, is_folded):
    interaction, text, video = make_case(num_heads)
    weights = interaction.increment_net.weights()
    few = QueryFirst.fold(weights) if is_folded else QueryFirst(weights)
    expected = interaction.increments(text, video)
    interaction.increment_net.forward = few
    torch.testing.assert_close(interaction.increments(text, video), expected, rtol=0, atol=1e-12)


def test_scores_do_not_depend_on_how_many_texts_are_asked_at_once():
    """One text takes the few-text way, many go over score cards."""
    interaction, text, video = make_case(1, texts=12, pooling="text_conditioned")
    together = interaction.score(text, video)
    alone = torch.cat([interaction.score(text[row : row + 1], video) for row in range(12)])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-11)


def test_half_precision_is_scored_in_float32():
    interaction, text, video = make_case(1, texts=1)
    exact = interaction.score(text, video)
    half = interaction.float().score(text.to(torch.float16), video.to(torch.float16))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=5e-3)


def test_made_ready_for_search_the_matrices_are_multiplied_out_once():
    interaction, text, video = make_case(1)
    ready = interaction.for_search()
    with torch.no_grad():
        expected = ready.score(text, video)
        for parameter in interaction.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
    assert not torch.allclose(interaction.score(text, video), expected)
    assert torch.equal(ready._folded.folded.query_weight, ready.for_search()._folded.folded.query_weight / 4)

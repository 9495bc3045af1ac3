"""Psi asked by a few texts against psi itself."""

from __future__ import annotations

import pytest
import torch

from gare.model.increment import IncrementNet
from gare.scoring import dense, factored
from gare.scoring.few import QueryFirst
from gare.types import Interaction, TextFeatures, VideoFeatures

DIM = 24


def make_case(num_heads: int, *, texts: int = 2, videos: int = 7, frames: int = 5):
    torch.manual_seed(num_heads)
    psi = IncrementNet(DIM, num_heads=num_heads).double().eval()
    for parameter in psi.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # biases and scales must show
    text = TextFeatures.from_vectors(torch.randn(texts, DIM, dtype=torch.float64))
    mask_VF = torch.arange(frames) < torch.randint(1, frames + 1, (videos, 1))
    video = VideoFeatures(torch.randn(videos, frames, DIM, dtype=torch.float64), mask_VF)
    return psi, text, video


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("is_folded", [False, True])
def test_another_order_of_products_gives_the_same_increments(num_heads, is_folded):
    psi, text, video = make_case(num_heads)
    few = QueryFirst.fold(psi.weights()) if is_folded else QueryFirst(psi.weights())
    expected = dense.increments(text, video, psi, Interaction())
    torch.testing.assert_close(
        dense.increments(text, video, few, Interaction()), expected, rtol=0, atol=1e-12
    )


def test_scores_do_not_depend_on_how_many_texts_are_asked_at_once():
    """One text takes the few-text way, many go over score cards."""
    psi, text, video = make_case(1, texts=12)
    interaction = Interaction(pooling="text_conditioned")
    together = factored.score(text, video, psi, interaction)
    alone = torch.cat([factored.score(text[row : row + 1], video, psi, interaction) for row in range(12)])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-11)


def test_half_precision_is_scored_in_float32():
    psi, text, video = make_case(1, texts=1)
    exact = factored.score(text, video, psi, Interaction())
    half = factored.score(text.to(torch.float16), video.to(torch.float16), psi.float(), Interaction())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=5e-3)

"""Laws of scoring, over drawn shapes, masks, heads and every ablation axis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from features import AXES, all_interactions, random_psi, random_text, random_video
from gare import Interaction, TextFeatures, VideoFeatures
from gare.model import IncrementNet
from gare.scoring import dense, factored, score_cards

interactions = st.builds(Interaction, **{name: st.sampled_from(values) for name, values in AXES.items()})


@st.composite
def scenes(
    draw: st.DrawFn, dtype: torch.dtype = torch.float64
) -> tuple[TextFeatures, VideoFeatures, IncrementNet]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    num_heads = draw(st.sampled_from([1, 2, 4]))
    dim = num_heads * draw(st.integers(2, 6)) * 2
    size = st.integers(1, 6)
    text = random_text(generator, draw(size), draw(size), dim, dtype)
    video = random_video(generator, draw(size), draw(size), dim, dtype)
    return text, video, random_psi(generator, dim, num_heads, dtype)


@given(scenes(), interactions)
def test_factored_equals_dense_in_float64(scene, interaction):
    text, video, psi = scene
    expected = dense.score_pairs(text, video, psi, interaction)
    torch.testing.assert_close(
        factored.score(text, video, psi, interaction), expected.scores_TV, atol=1e-10, rtol=0
    )
    radii = expected.increment_TVD.norm(dim=-1)
    torch.testing.assert_close(factored.radii(text, video, psi, interaction), radii, atol=1e-9, rtol=1e-9)


@given(scenes(torch.float32), interactions)
def test_factored_equals_dense_in_float32(scene, interaction):
    text, video, psi = scene
    actual = factored.score(text, video, psi, interaction)
    torch.testing.assert_close(actual, dense.score(text, video, psi, interaction), atol=2e-5, rtol=0)


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("interaction", all_interactions(), ids=str)
def test_gradients_of_factored_and_dense_are_equal(interaction, num_heads):
    generator = torch.Generator().manual_seed(5)
    text, video = random_text(generator, 3, 4, 16), random_video(generator, 4, 3, 16)
    psi = random_psi(generator, 16, num_heads)
    upstream = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    inputs = [text.text_TD, text.words_TWD, video.frames_VFD, *psi.parameters()]
    for tensor in inputs:
        tensor.requires_grad_()

    def gradients(score):
        return torch.autograd.grad(
            (score(text, video, psi, interaction) * upstream).sum(), inputs, allow_unused=True
        )

    def in_blocks(*scene):
        return factored.score(*scene, text_block=2, video_block=2)

    slow, fast, blocked = gradients(dense.score), gradients(factored.score), gradients(in_blocks)
    for a, b in [*zip(slow, fast, strict=True), *zip(slow, blocked, strict=True)]:
        if a is None or b is None:  # an input the interaction does not use
            assert all(gradient is None or gradient.abs().max() < 1e-9 for gradient in (a, b))
        else:
            torch.testing.assert_close(b, a, atol=1e-9, rtol=1e-7)


@given(scenes(), interactions, st.integers(1, 4), st.integers(1, 4))
def test_blocks_change_nothing(scene, interaction, text_block, video_block):
    text, video, psi = scene
    expected = factored.score(text, video, psi, interaction)
    blocked = factored.score(text, video, psi, interaction, text_block=text_block, video_block=video_block)
    torch.testing.assert_close(blocked, expected, atol=1e-12, rtol=0)
    cards = score_cards(video, psi, interaction)
    from_cards = factored.score(text, cards, psi, interaction, text_block=text_block, video_block=video_block)
    torch.testing.assert_close(from_cards, expected, atol=1e-12, rtol=0)
    dense_blocked = dense.score(text, video, psi, interaction, text_block=text_block, video_block=video_block)
    torch.testing.assert_close(dense_blocked, expected, atol=1e-10, rtol=0)


@given(scenes(), interactions, st.integers(1, 4), st.sampled_from([0.0, 1e6, float("nan"), float("inf")]))
def test_padding_of_any_content_changes_nothing(scene, interaction, num_padding, content):
    text, video, psi = scene
    interaction = _with(interaction, mask_frames=True)
    padding = torch.full((len(video), num_padding, video.dim), content, dtype=video.frames_VFD.dtype)
    padded = VideoFeatures(
        torch.cat([video.frames_VFD, padding], dim=1),
        torch.cat([video.mask_VF, torch.zeros(len(video), num_padding, dtype=torch.bool)], dim=1),
    )
    for score in (dense.score, factored.score):
        expected = score(text, video, psi, interaction)
        torch.testing.assert_close(score(text, padded, psi, interaction), expected, atol=1e-10, rtol=0)


@given(scenes(), interactions, st.randoms(use_true_random=False))
def test_permuting_videos_permutes_columns(scene, interaction, random):
    text, video, psi = scene
    order = list(range(len(video)))
    random.shuffle(order)
    shuffled = VideoFeatures(video.frames_VFD[order], video.mask_VF[order])
    expected = factored.score(text, video, psi, interaction)[:, order]
    torch.testing.assert_close(factored.score(text, shuffled, psi, interaction), expected, atol=1e-12, rtol=0)


@given(scenes(), interactions)
def test_a_pair_does_not_depend_on_its_batch_mates(scene, interaction):
    text, video, psi = scene
    alone = factored.score(text[-1:], video[-1:], psi, interaction)
    together = factored.score(text, video, psi, interaction)[-1:, -1:]
    torch.testing.assert_close(alone, together, atol=1e-12, rtol=0)


@given(scenes(), interactions)
@example(scene=None, interaction=Interaction(pooling="text_conditioned")).via("the paper's baseline")
def test_a_zero_increment_is_the_baseline(scene, interaction):
    if scene is None:
        generator = torch.Generator().manual_seed(1)
        scene = random_text(generator, 2, 2, 8), random_video(generator, 3, 2, 8), random_psi(generator, 8)
    text, video, psi = scene
    torch.nn.init.zeros_(psi.output.weight)
    torch.nn.init.zeros_(psi.output.bias)
    interaction = _with(interaction, normalise=False, query="gap")
    baseline = factored.score(text, video, None, interaction)
    for score in (dense.score, factored.score):
        torch.testing.assert_close(score(text, video, psi, interaction), baseline, atol=1e-10, rtol=0)


def _with(interaction: Interaction, **changes) -> Interaction:
    return Interaction(**{name: changes.get(name, getattr(interaction, name)) for name in AXES})

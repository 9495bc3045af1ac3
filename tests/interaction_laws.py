"""The laws that every interaction keeps, whoever wrote it: each a function of a random scene.

`tests/property/test_interaction_laws.py` holds every entry of INTERACTIONS to them. The test of an
interaction of one's own may do the same: `for law in LAWS: law(random_scene(seed, config))`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from features import random_interaction, random_text, random_video
from gare import Interaction, TextFeatures, VideoFeatures
from gare.errors import EvaluationError
from gare.interaction import InteractionConfig, build_interaction
from gare.interaction.interaction import products_of, score_in_blocks
from gare.interaction.score_bounds import ScoreBounds

CONTENTS = (0.0, 1e6, float("nan"), float("inf"))
"""What padding may hold."""


@dataclass(frozen=True)
class Scene:
    """An interaction with random weights, and what it scores."""

    interaction: Interaction
    text: TextFeatures
    video: VideoFeatures
    seed: int

    def number(self, stop: int, salt: int = 0) -> int:
        """A number below `stop` that depends on the scene."""
        return (self.seed // (1 + salt) + salt) % stop


def random_scene(
    seed: int,
    config: InteractionConfig,
    *,
    sizes: tuple[int, int, int, int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Scene:
    """`sizes` are texts, words, videos, frames; 1 to 6 of each where they are not given."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, 7, (5,), generator=generator).tolist()
    texts, words, videos, frames = sizes or drawn[:4]
    dim = 4 * drawn[4] + 4
    text = random_text(generator, texts, words, dim, dtype)
    video = random_video(generator, videos, frames, dim, dtype)
    return Scene(random_interaction(generator, config, dim, dtype), text, video, seed)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


# --- scores -------------------------------------------------------------------------------------------------


def fast_scores_are_those_of_the_reference(scene: Scene) -> None:
    interaction, text, video = scene.interaction, scene.text, scene.video
    pairs = interaction.score_pairs(text, video)
    assert pairs.scores_TV.shape == (len(text), len(video))
    assert pairs.scores_TV.isfinite().all()
    close(interaction.score(text, video), pairs.scores_TV, 1e-10)
    assert (pairs.increment_TVD is not None) == interaction.has_increments
    if pairs.increment_TVD is None:
        with pytest.raises(ValueError, match="has no increments"):
            interaction.radii(text, video)
    else:
        radii_TV = pairs.increment_TVD.norm(dim=-1)
        torch.testing.assert_close(interaction.radii(text, video), radii_TV, atol=1e-9, rtol=1e-9)


def gradients_of_both_are_equal(scene: Scene) -> None:
    """Whole and in blocks, on the features and on every parameter."""
    interaction, text, video = scene.interaction, scene.text, scene.video
    inputs = [text.text_TD, text.words_TWD, video.frames_VFD, *interaction.parameters()]
    for tensor in inputs:
        tensor.requires_grad_()
    generator = torch.Generator().manual_seed(scene.seed)
    upstream_TV = torch.randn(len(text), len(video), generator=generator, dtype=text.text_TD.dtype)

    def gradients(scores_TV: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad((scores_TV * upstream_TV).sum(), inputs, allow_unused=True)

    expected = gradients(interaction.score_pairs(text, video).scores_TV)
    for blocks in ({}, {"text_block": 2, "video_block": 2}):
        actual = gradients(interaction.score(text, video, **blocks))
        for a, b in zip(expected, actual, strict=True):
            if a is None or b is None:  # an input the interaction does not use
                assert all(gradient is None or gradient.abs().max() < 1e-9 for gradient in (a, b))
            else:
                torch.testing.assert_close(b, a, atol=1e-9, rtol=1e-7)
    for tensor in inputs:
        tensor.requires_grad_(False)


def blocks_change_nothing(scene: Scene) -> None:
    interaction, text, video = scene.interaction, scene.text, scene.video
    expected_TV = interaction.score(text, video)
    blocks = {"text_block": 1 + scene.number(4), "video_block": 1 + scene.number(4, salt=1)}
    close(interaction.score(text, video, **blocks), expected_TV)
    close(score_in_blocks(interaction.score_pairs, text, video, **blocks), expected_TV, 1e-10)


def cards_change_nothing(scene: Scene) -> None:
    interaction, text, video = scene.interaction, scene.text, scene.video
    expected_TV = interaction.score(text, video)
    cards = interaction.cards(video)
    assert len(cards) == len(video)
    blocks = {"text_block": 1 + scene.number(4), "video_block": 1 + scene.number(4, salt=1)}
    for again in (cards, cards.to("cpu")):
        close(interaction.score(text, again), expected_TV)
        close(interaction.score(text, again, **blocks), expected_TV)
    chosen = torch.arange(len(video)).flip(0)
    close(interaction.score(text, cards[chosen]), expected_TV[:, chosen])
    if len(video) > 1:
        close(interaction.score(text, cards[1:]), expected_TV[:, 1:])


def permuting_permutes(scene: Scene) -> None:
    """Videos and texts in another order: the same scores in that order."""
    interaction, text, video = scene.interaction, scene.text, scene.video
    generator = torch.Generator().manual_seed(scene.seed)
    rows = torch.randperm(len(text), generator=generator)
    columns = torch.randperm(len(video), generator=generator)
    expected_TV = interaction.score(text, video)[rows][:, columns]
    close(interaction.score(text[rows], video[columns]), expected_TV)


def a_pair_does_not_depend_on_its_batch_mates(scene: Scene) -> None:
    interaction, text, video = scene.interaction, scene.text, scene.video
    alone = interaction.score(text[-1:], video[-1:])
    close(alone, interaction.score(text, video)[-1:, -1:])
    close(interaction.score_pairs(text[-1:], video[-1:]).scores_TV, alone, 1e-10)


def padding_of_any_content_changes_nothing(scene: Scene) -> None:
    """Words always; frames where the interaction masks them."""
    interaction, text, video = scene.interaction, scene.text, scene.video
    content, number = CONTENTS[scene.number(len(CONTENTS))], 1 + scene.number(4, salt=1)
    padded_text, padded_video = _pad_texts(text, number, content), video
    if interaction.masks_padding:
        padded_video = _pad_videos(video, number, content)
    close(interaction.score(padded_text, padded_video), interaction.score(text, video), 1e-10)
    dense_TV = interaction.score_pairs(padded_text, padded_video).scores_TV
    close(dense_TV, interaction.score_pairs(text, video).scores_TV, 1e-10)
    if interaction.masks_padding:
        slope_VD = interaction.stage1_slope(padded_text, padded_video)
        close(slope_VD, interaction.stage1_slope(text, video), 1e-10)
        weights = interaction.frame_weights(padded_text, padded_video).pool_TVF
        assert not weights[..., video.frames_VFD.shape[1] :].any()
        close(
            weights[..., : video.frames_VFD.shape[1]], interaction.frame_weights(text, video).pool_TVF, 1e-10
        )


# --- identity -----------------------------------------------------------------------------------------------


def settings_and_weights_are_all_of_it(scene: Scene) -> None:
    """Built again from its settings as text and its weights, it scores the same."""
    interaction, text, video = scene.interaction, scene.text, scene.video
    config = type(interaction.config).load(interaction.config.to_values())
    assert config == interaction.config
    again = build_interaction(config, interaction.dim).to(text.text_TD.dtype).eval()
    again.load_state_dict(interaction.state_dict())
    assert torch.equal(again.score(text, video), interaction.score(text, video))
    assert not interaction.has_active_dropout


def made_ready_for_search_it_scores_the_same(scene: Scene) -> None:
    interaction, text, video = scene.interaction, scene.text, scene.video
    ready = interaction.for_search()
    close(ready.score(text, video), interaction.score(text, video), 1e-10)
    close(ready.score(text[:1], video), interaction.score(text, video)[:1], 1e-10)
    close(ready.score(text, interaction.cards(video)), interaction.score(text, video), 1e-10)


def cards_of_other_settings_are_refused(scene: Scene) -> None:
    @dataclass(frozen=True)
    class OtherConfig(InteractionConfig):
        name: str = "another"

    from gare.interaction.score_cards import FrameCards

    foreign = FrameCards(OtherConfig(), scene.video.frames_VFD, scene.video.mask_VF)
    with pytest.raises(ValueError, match="made by a model with other settings"):
        scene.interaction.score(scene.text, foreign)


# --- what it shows ------------------------------------------------------------------------------------------


def frame_weights_are_shares_of_real_frames(scene: Scene) -> None:
    """Where frames become one vector, the weights sum to one; attention always does."""
    interaction, text, video = scene.interaction, scene.text, scene.video
    found = interaction.frame_weights(text, video)
    shape = (len(text), len(video), video.frames_VFD.shape[1])
    assert found.pool_TVF.shape == shape
    assert found.pool_TVF.isfinite().all()
    if interaction.masks_padding:
        assert not found.pool_TVF[:, ~video.mask_VF].any()
        if _pools(scene):
            close(found.pool_TVF.sum(dim=-1), torch.ones_like(found.pool_TVF[..., 0]))
    if found.attention_TVHF is not None:
        close(found.attention_TVHF.sum(dim=-1), torch.ones_like(found.attention_TVHF[..., 0]))
    of_cards = interaction.frame_weights(text, interaction.cards(video))
    for field in fields(found):
        ours, theirs = getattr(found, field.name), getattr(of_cards, field.name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            close(theirs, ours)


def the_products_are_those_of_the_vectors(scene: Scene) -> None:
    """And the score is their cosine. An interaction without one vector for a video says so."""
    interaction, text, video = scene.interaction, scene.text, scene.video
    if not _pools(scene):
        with pytest.raises(EvaluationError, match=r"no single vector for a video.*another interaction"):
            interaction.pair_products(text, video)
        return
    vectors = interaction.pair_vectors(text, video)
    expected, actual = products_of(vectors), interaction.pair_products(text, video)
    for field in fields(expected):
        torch.testing.assert_close(
            getattr(actual, field.name), getattr(expected, field.name), atol=1e-9, rtol=1e-9, msg=field.name
        )
    shifted_TVD = vectors.own_TVD + vectors.increment_TVD
    cosine_TV = torch.nn.functional.cosine_similarity(shifted_TVD, vectors.other_TVD, dim=-1, eps=1e-16)
    close(cosine_TV, interaction.score(text, video), 1e-9)


def the_stage1_slope_is_a_vector_for_each_video(scene: Scene) -> None:
    interaction, text, video = scene.interaction, scene.text, scene.video
    slope_VD = interaction.stage1_slope(text, video)
    assert slope_VD.shape == (len(video), video.dim)
    assert slope_VD.isfinite().all()
    close(interaction.stage1_slope(text, video[-1:]), slope_VD[-1:])


def without_increments_it_is_a_plain_interaction(scene: Scene) -> None:
    interaction, text, video = scene.interaction, scene.text, scene.video
    plain = interaction.without_increments()
    assert not plain.has_increments
    assert plain.score(text, video).isfinite().all()
    if not interaction.has_increments:
        close(plain.score(text, video), interaction.score(text, video))


def it_costs_something(scene: Scene) -> None:
    interaction = scene.interaction
    size = {"texts": 2, "videos": 3, "frames": 4, "words": 5}
    assert interaction.flops(**size) > 0
    assert interaction.flops(**{**size, "texts": 4}) > interaction.flops(**size)


def _pools(scene: Scene) -> bool:
    """Whether frames become one vector a pair."""
    try:
        scene.interaction.pair_vectors(scene.text, scene.video)
    except EvaluationError:
        return False
    return True


def _pad_texts(text: TextFeatures, number: int, content: float) -> TextFeatures:
    return TextFeatures(text.text_TD, *_pad(text.words_TWD, text.mask_TW, number, content))


def _pad_videos(video: VideoFeatures, number: int, content: float) -> VideoFeatures:
    return VideoFeatures(*_pad(video.frames_VFD, video.mask_VF, number, content))


def _pad(tokens: Tensor, mask: Tensor, number: int, content: float) -> tuple[Tensor, Tensor]:
    """More padding, and this content in all of it."""
    rows, _, dim = tokens.shape
    tokens = tokens.masked_fill(~mask[..., None], content)
    return (
        torch.cat([tokens, tokens.new_full((rows, number, dim), content)], dim=1),
        torch.cat([mask, mask.new_zeros(rows, number)], dim=1),
    )


def no_score_leaves_its_bounds(scene: Scene) -> None:
    """Whatever the weights (ten times as large as well), the mask and the precision the cards are kept in."""
    interaction = copy.deepcopy(scene.interaction)
    text, video = scene.text, scene.video
    if scene.number(
        2, salt=2
    ):  # frames that resemble each other: bounds are narrow then, and easier to leave
        mean_V1D = video.mean()[:, None]
        video = VideoFeatures(mean_V1D + 0.03 * (video.frames_VFD - mean_V1D), video.mask_VF)
    dtype = (torch.float64, torch.float32, torch.float16, torch.bfloat16)[scene.number(4)]
    key_dtype = (torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.int8)[
        scene.number(5, salt=3)
    ]
    with torch.no_grad():
        for parameter in interaction.parameters():
            parameter *= (1, 10, 0.1)[scene.number(3, salt=1)]
        cards = interaction.bound_cards(video, dtype)
        if cards is None:
            with pytest.raises(ValueError, match="no bounds"):
                interaction.bounds(text, None)  # type: ignore[arg-type]
            return
        assert len(cards) == len(video)
        keys = interaction.key_cards(video, cards, key_dtype)
        assert (keys is not None) == interaction.has_keys
        for asked in (text, text.to(torch.float32)):
            scores_TV = interaction.score_pairs(asked.to(torch.float64), video).scores_TV
            _is_between(interaction.bounds(asked, cards), scores_TV)
            _is_between(interaction.bounds(asked, cards[:1]), scores_TV[:, :1])
            if keys is not None:
                _is_between(interaction.key_bounds(asked, cards, keys), scores_TV)
                _is_between(interaction.key_bounds(asked, cards[:1], keys[:1]), scores_TV[:, :1])


def no_score_leaves_its_bounds_at_the_edges(scene: Scene) -> None:
    """Weights × 1000, texts of no length or hardly any, frames that are equal, opposite, zero or denormal."""
    interaction = copy.deepcopy(scene.interaction)
    first_V1D, num_frames = scene.video.frames_VFD[:, :1], scene.video.frames_VFD.shape[1]
    sign_F1 = 1.0 - 2.0 * (torch.arange(num_frames) % 2)[:, None]
    frames_VFD = (
        first_V1D.expand_as(scene.video.frames_VFD),
        first_V1D * sign_F1,
        torch.zeros_like(scene.video.frames_VFD),
        1e-41 * scene.video.frames_VFD,
        scene.video.frames_VFD,
    )[scene.number(5)]
    video = VideoFeatures(frames_VFD, scene.video.mask_VF)
    length = (0.0, 1e-40, 5e-9, 1e-7, 1.0, 1e3)[scene.number(6, salt=1)]
    text = scene.text.text_TD.clone()
    text[-1] = video.mean()[0]  # a gap of no length, or nearly so
    asked = TextFeatures((length * text).float(), scene.text.words_TWD.float(), scene.text.mask_TW)
    with torch.no_grad():
        for parameter in interaction.parameters():
            parameter *= (1000, 1, 0)[scene.number(3, salt=2)]
        cards = interaction.bound_cards(video, torch.float16)
        if cards is None:
            return
        scores_TV = interaction.score_pairs(asked.to(torch.float64), video).scores_TV
        _is_between(interaction.bounds(asked, cards), scores_TV)
        keys = interaction.key_cards(video, cards, torch.int16)
        if keys is not None:
            _is_between(interaction.key_bounds(asked, cards, keys), scores_TV)


def _is_between(bounds: ScoreBounds, scores_TV: Tensor) -> None:
    assert (bounds.lower_TV <= scores_TV).all()
    assert (scores_TV <= bounds.upper_TV).all()


LAWS: list[Callable[[Scene], None]] = [
    fast_scores_are_those_of_the_reference,
    gradients_of_both_are_equal,
    blocks_change_nothing,
    cards_change_nothing,
    permuting_permutes,
    a_pair_does_not_depend_on_its_batch_mates,
    padding_of_any_content_changes_nothing,
    settings_and_weights_are_all_of_it,
    made_ready_for_search_it_scores_the_same,
    cards_of_other_settings_are_refused,
    frame_weights_are_shares_of_real_frames,
    the_products_are_those_of_the_vectors,
    the_stage1_slope_is_a_vector_for_each_video,
    without_increments_it_is_a_plain_interaction,
    it_costs_something,
    no_score_leaves_its_bounds,
    no_score_leaves_its_bounds_at_the_edges,
]

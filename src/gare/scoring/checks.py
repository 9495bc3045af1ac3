"""What can be wrong with features before they are scored, said in words.

Shapes are checked on every call; values (NaN, empty masks) cost a pass over the data: `GARE.score` does that.
"""

from __future__ import annotations

from typing import cast

import torch

from gare.scoring.cards import ScoreCards
from gare.types import IncrementModule, Interaction, PairModule, TextFeatures, TokenWeights, VideoFeatures


def check_shapes(text: TextFeatures, video: VideoFeatures | ScoreCards) -> None:
    """Refuse what is not features, is empty, or does not belong together."""
    if not isinstance(text, TextFeatures) or not isinstance(video, VideoFeatures | ScoreCards):
        raise ValueError(
            f"texts first, then videos: got {type(text).__name__} and {type(video).__name__} instead of "
            "TextFeatures and VideoFeatures (or ScoreCards)"
        )
    frames_VFD = video.pool.frames_VFD if isinstance(video, ScoreCards) else video.frames_VFD
    if not len(text) or not len(video):
        raise ValueError(f"nothing to score: {len(text)} texts and {len(video)} videos")
    if not text.words_TWD.shape[1] or not frames_VFD.shape[1]:
        raise ValueError("texts need at least one word and videos one frame")
    if text.dim != frames_VFD.shape[-1]:
        raise ValueError(
            f"texts of {text.dim} and videos of {frames_VFD.shape[-1]} dimensions; "
            "encode both with the same model"
        )
    for what in ("dtype", "device"):
        ours, theirs = getattr(text.text_TD, what), getattr(frames_VFD, what)
        if ours != theirs:
            raise ValueError(f"texts are {ours}, videos {theirs}; bring both to one {what} with .to(…)")
    if not text.text_TD.is_floating_point():
        raise ValueError(f"features must be floating point numbers, got {text.text_TD.dtype}")


def check_cards(cards: ScoreCards, psi: PairModule | None, interaction: Interaction) -> None:
    """Refuse cards that another model made."""
    weights = None if psi is None else psi.weights()
    expected_heads, heads = None, None if cards.increment is None else cards.increment.num_heads
    if weights is not None and not isinstance(weights, TokenWeights) and interaction.context == "frames":
        expected_heads = weights.num_heads
    has_tokens = interaction.pooling == "token_wise"
    if (
        cards.interaction != interaction
        or heads != expected_heads
        or (cards.tokens is not None) != has_tokens
    ):
        raise ValueError(
            "these score cards were made by a model with other settings; make them again with score_cards"
        )


def check_features(
    text: TextFeatures, video: VideoFeatures | ScoreCards, psi: PairModule | None, interaction: Interaction
) -> None:
    check_shapes(text, video)
    if isinstance(video, ScoreCards):
        check_cards(video, psi, interaction)


def increment_module(psi: PairModule | None, interaction: Interaction) -> IncrementModule | None:
    """Psi, or the attention that pools; refused where it is missing or weighs tokens instead."""
    if psi is None and interaction.pooling != "cross_attention":
        return None
    if psi is None or isinstance(psi.weights(), TokenWeights):
        needed = "CrossAttentionPool" if interaction.pooling == "cross_attention" else "IncrementNet"
        raise ValueError(f"pooling '{interaction.pooling}' needs a module of its own, an {needed}")
    if interaction.pooling == "cross_attention" and interaction.context != "frames":
        raise ValueError("pooling 'cross_attention' attends over frames; set context = 'frames'")
    return cast(IncrementModule, psi)


def check_text(text: TextFeatures, interaction: Interaction) -> None:
    """Refuse texts without a word, NaN and infinity."""
    if not text.mask_TW.any(dim=1).all():
        raise ValueError("a text without a word; leave it out or mend its mask")
    finite = torch.isfinite(text.text_TD).all()
    if interaction.context == "words" or interaction.pooling == "token_wise":
        finite &= torch.isfinite(text.words_TWD.masked_fill(~text.mask_TW[..., None], 0)).all()
    if not finite:
        raise ValueError("texts contain NaN or infinity; look for a broken input or weights that diverged")


def check_video(video: VideoFeatures, interaction: Interaction) -> None:
    """Refuse videos without a frame, NaN and infinity (in padding only where the interaction looks at it)."""
    if not video.mask_VF.any(dim=1).all():
        raise ValueError("a video without a real frame; leave it out or mend its mask")
    frames_VFD = video.frames_VFD
    if interaction.mask_frames:
        frames_VFD = frames_VFD.masked_fill(~video.mask_VF[..., None], 0)
    if not torch.isfinite(frames_VFD).all():
        raise ValueError("videos contain NaN or infinity; look for a broken input or weights that diverged")

"""HBI's game: what a word and a frame are worth together beyond what each adds alone.

Words and frames are the players, and a coalition S is worth v(S), its token-wise score. The interaction of
word a and frame b is the mean of v(S∪{a,b}) − v(S∪{a}) − v(S∪{b}) + v(S) over random coalitions S of the
others. HBI's teacher is trained on these numbers.

Shapes: B pairs, W words, F frames, R draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

COSINE_SCALE = 1000.0
DRAWS = 100


@torch.no_grad()
def banzhaf_interactions(
    cosines_BWF: Tensor,
    word_logits_BW: Tensor,
    frame_logits_BF: Tensor,
    *,
    draws: int = DRAWS,
    single_cell: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The interaction of each word and frame, from so many random coalitions, [B, W, F].

    Args:
        cosines_BWF: of each word and frame; 0 where either is padding.
        word_logits_BW: a coalition's words count as the softmax of these; −inf on padding.
        frame_logits_BF: the same for frames.
        single_cell: as the published code has it, S∪{a,b} gains the cosine of a and b alone, and the weights
            of S go through a second softmax beside the logits of a and b.
    """
    words, frames = cosines_BWF.shape[1:]
    cosines = COSINE_SCALE * cosines_BWF
    interactions = torch.empty_like(cosines)
    real_words, real_frames = word_logits_BW.isfinite(), frame_logits_BF.isfinite()
    for a in range(words):
        for b in range(frames):
            drawn = torch.rand(draws, 1, words + frames, generator=generator).to(cosines.device) < 0.5
            drawn[..., [a, words + b]] = False
            with_both = drawn.clone()
            with_both[..., [a, words + b]] = True
            own_words, more_words = (x[..., :words] & real_words for x in (drawn, with_both))
            own_frames, more_frames = (x[..., words:] & real_frames for x in (drawn, with_both))
            members = [
                (own_words, own_frames),
                (more_words, own_frames),
                (own_words, more_frames),
                (more_words, more_frames),
            ]
            weights = [
                (_shares(word_logits_BW, of_words), _shares(frame_logits_BF, of_frames))
                for of_words, of_frames in members
            ]
            cells = [
                cosines * of_words[..., None] * of_frames[..., None, :] for of_words, of_frames in members
            ]
            if single_cell:
                cells[3] = cells[0].clone()
                cells[3][..., a, b] = cosines[:, a, b]
                weights[3] = (
                    _again(weights[0][0], own_words, word_logits_BW, a),
                    _again(weights[0][1], own_frames, frame_logits_BF, b),
                )
            none, word, frame, both = map(_worth, cells, weights)
            interactions[:, a, b] = (both - word - frame + none).mean(dim=0)
    return interactions * real_words[..., None] * real_frames[:, None]


def _worth(cells_RBWF: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    """The token-wise score of what is left of the cosines, [R, B]."""
    by_words = (weights[0] * cells_RBWF.amax(dim=-1)).sum(dim=-1)
    return (by_words + (weights[1] * cells_RBWF.amax(dim=-2)).sum(dim=-1)) / 2


def _shares(logits_BN: Tensor, members_RBN: Tensor) -> Tensor:
    """The softmax over the members; zeros where there is none."""
    return logits_BN.masked_fill(~members_RBN, float("-inf")).softmax(dim=-1).nan_to_num(0.0)


def _again(shares_RBN: Tensor, members_RBN: Tensor, logits_BN: Tensor, place: int) -> Tensor:
    """A second softmax over shares, one of which is a logit."""
    mixed = shares_RBN.masked_fill(~members_RBN, float("-inf"))
    mixed[..., place] = logits_BN[:, place]
    return mixed.softmax(dim=-1).nan_to_num(0.0)

"""Token-wise interaction: each word finds its frame and each frame its word (WTI; Wang et al. 2022, DRL).

score_ij = ½ Σ_w a_iw max_f cos(word_iw, frame_jf) + ½ Σ_f b_jf max_w cos(word_iw, frame_jf)

with a and b softmax weights from two small layers on each token. Padding takes part in neither maximum nor
softmax. Shapes: T texts, V videos, F frames, W words, D embedding; O owners of N tokens each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gare.scoring.blocks import block_budget, each_block
from gare.scoring.cards import ScoreCards, TokenCard, importance, token_card, unit_tokens
from gare.types import PairModule, TextFeatures, TokenWeights, VideoFeatures, block_slices


def score_pairs(text: TextFeatures, video: VideoFeatures, net: PairModule | None) -> Tensor:
    """Scores [T, V] with all T × W × V × F cosines at once: for training and as the reference."""
    weights = token_weights(net)
    return _mean_of_both(
        token_card(text.words_TWD, text.mask_TW, weights.words),
        token_card(video.frames_VFD, video.mask_VF, weights.frames),
    )


def score(
    text: TextFeatures,
    video: VideoFeatures | ScoreCards,
    net: PairModule | None,
    *,
    text_block: int | None = None,
    video_block: int | None = None,
) -> Tensor:
    """Scores [T, V] in blocks of pairs; only the scores are kept."""
    heads = token_weights(net)
    default_text, default_video = _block_sizes(text, video)
    text_rows = list(block_slices(len(text), text_block or default_text))

    # Weights are made once; unit words again for every block, so that no second copy of all words is held.
    weights = [importance(text.words_TWD[rows], text.mask_TW[rows], heads.words) for rows in text_rows]

    def column_of_blocks(rows: slice) -> Tensor:
        frames = _video_card(video[rows], heads)
        words = (
            TokenCard(unit_tokens(text.words_TWD[r], text.mask_TW[r]), weight_TW, text.mask_TW[r])
            for r, weight_TW in zip(text_rows, weights, strict=True)
        )
        return torch.cat([_mean_of_both(card, frames) for card in words])

    video_rows = list(block_slices(len(video), video_block or default_video))
    return torch.cat(each_block(column_of_blocks, video_rows), dim=1)


def frame_shares(text: TextFeatures, video: VideoFeatures | ScoreCards, net: PairModule | None) -> Tensor:
    """What each frame adds to the frame side of the score: its weight times its best cosine, [T, V, F]."""
    heads = token_weights(net)
    words, frames = token_card(text.words_TWD, text.mask_TW, heads.words), _video_card(video, heads)
    best_TVF = _cosines(words, frames).amax(dim=1)
    return (best_TVF * frames.weight_ON).masked_fill(~frames.mask_ON, 0)


def token_weights(net: PairModule | None) -> TokenWeights:
    weights = None if net is None else net.weights()
    if not isinstance(weights, TokenWeights):
        raise ValueError("pooling 'token_wise' needs a module of its own, a TokenWeighting")
    return weights


def _mean_of_both(words: TokenCard, frames: TokenCard) -> Tensor:
    cosines_TWVF = _cosines(words, frames)
    # A padded token's weight is zero, but its maximum is −inf, and the product of the two would be NaN.
    best_TWV = cosines_TWVF.amax(dim=-1).masked_fill(~words.mask_ON[..., None], 0)
    best_TVF = cosines_TWVF.amax(dim=1).masked_fill(~frames.mask_ON, 0)
    text_side_TV = torch.einsum("twv,tw->tv", best_TWV, words.weight_ON)
    video_side_TV = torch.einsum("tvf,vf->tv", best_TVF, frames.weight_ON)
    return ((text_side_TV + video_side_TV) / 2).clamp(-1, 1)


def _cosines(words: TokenCard, frames: TokenCard) -> Tensor:
    """[T, W, V, F], −inf where either token is padding."""
    flat_NM = words.unit_OND.flatten(0, 1) @ frames.unit_OND.flatten(0, 1).mT
    cosines_TWVF: Tensor = flat_NM.unflatten(1, frames.mask_ON.shape).unflatten(0, words.mask_ON.shape)
    is_real_TWVF = words.mask_ON[..., None, None] & frames.mask_ON
    return cosines_TWVF.masked_fill(~is_real_TWVF, float("-inf"))


def _video_card(video: VideoFeatures | ScoreCards, heads: TokenWeights) -> TokenCard:
    if isinstance(video, VideoFeatures):
        return token_card(video.frames_VFD, video.mask_VF, heads.frames)
    assert video.tokens is not None  # `check_cards` saw to it
    return video.tokens


def _block_sizes(text: TextFeatures, video: VideoFeatures | ScoreCards) -> tuple[int, int]:
    """Texts and videos a block, about as many of one as of the other."""
    frames_VFD = video.pool.frames_VFD if isinstance(video, ScoreCards) else video.frames_VFD
    num_cosines = text.words_TWD.shape[1] * frames_VFD.shape[1]
    num_pairs = max(1, block_budget(frames_VFD.device) // num_cosines)
    text_block = min(len(text), max(1, int(num_pairs**0.5)))
    return text_block, max(1, num_pairs // text_block)

"""The values that cross folders. Shapes: T texts, V videos, F frames, W words, D embedding, H heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from gare.settings import PositiveFloat, Settings


def block_slices(length: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `length`.

    >>> list(block_slices(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if size < 1:
        raise ValueError(f"a block must hold at least one, got a size of {size}")
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


@dataclass(frozen=True)
class TextFeatures:
    """What the text tower knows of each text; nothing is normalised."""

    text_TD: Tensor
    words_TWD: Tensor
    mask_TW: Tensor

    def __post_init__(self) -> None:
        if self.text_TD.ndim != 2 or self.words_TWD.ndim != 3:
            raise ValueError(
                f"text_TD must be [T, D] and words_TWD [T, W, D], got {list(self.text_TD.shape)} and "
                f"{list(self.words_TWD.shape)}"
            )
        if self.words_TWD.shape[0] != len(self) or self.words_TWD.shape[2] != self.dim:
            raise ValueError(
                f"words_TWD {list(self.words_TWD.shape)} does not fit text_TD {list(self.text_TD.shape)}"
            )
        _check_mask(self.mask_TW, self.words_TWD, "mask_TW", "word")

    def __len__(self) -> int:
        return self.text_TD.shape[0]

    @property
    def dim(self) -> int:
        return self.text_TD.shape[1]

    def __getitem__(self, rows: slice) -> TextFeatures:
        return TextFeatures(self.text_TD[rows], self.words_TWD[rows], self.mask_TW[rows])

    def blocks(self, size: int) -> Iterator[TextFeatures]:
        return (self[rows] for rows in block_slices(len(self), size))

    def to(self, target: torch.device | str | torch.dtype) -> TextFeatures:
        mask_TW = self.mask_TW if isinstance(target, torch.dtype) else self.mask_TW.to(target)
        return TextFeatures(self.text_TD.to(target), self.words_TWD.to(target), mask_TW)

    @classmethod
    def from_vectors(cls, text_TD: Tensor) -> TextFeatures:
        """Texts of which only the sentence vector is kept: the vector itself is the one word.

        >>> len(TextFeatures.from_vectors(torch.zeros(3, 8)))
        3
        """
        mask_TW = torch.ones(text_TD.shape[0], 1, dtype=torch.bool, device=text_TD.device)
        return cls(text_TD, text_TD[:, None], mask_TW)


@dataclass(frozen=True)
class VideoFeatures:
    """Frame vectors after the temporal transformer; `mask_VF` is true where a frame is real."""

    frames_VFD: Tensor
    mask_VF: Tensor

    def __post_init__(self) -> None:
        if self.frames_VFD.ndim != 3:
            raise ValueError(f"frames_VFD must be [V, F, D], got {list(self.frames_VFD.shape)}")
        _check_mask(self.mask_VF, self.frames_VFD, "mask_VF", "frame")

    def __len__(self) -> int:
        return self.frames_VFD.shape[0]

    @property
    def dim(self) -> int:
        return self.frames_VFD.shape[2]

    def __getitem__(self, rows: slice) -> VideoFeatures:
        return VideoFeatures(self.frames_VFD[rows], self.mask_VF[rows])

    def blocks(self, size: int) -> Iterator[VideoFeatures]:
        return (self[rows] for rows in block_slices(len(self), size))

    def to(self, target: torch.device | str | torch.dtype) -> VideoFeatures:
        mask_VF = self.mask_VF if isinstance(target, torch.dtype) else self.mask_VF.to(target)
        return VideoFeatures(self.frames_VFD.to(target), mask_VF)


def _check_mask(mask: Tensor, tokens: Tensor, name: str, token: str) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name} must be a bool tensor (true = real {token}), got {mask.dtype}; use {name}.bool()"
        )
    if mask.shape != tokens.shape[:2]:
        raise ValueError(f"{name} is {list(mask.shape)}, but there are {list(tokens.shape[:2])} {token}s")


@dataclass(frozen=True)
class PairScores:
    """Every text against every video, with the increment of each pair (None for the baseline)."""

    scores_TV: Tensor
    increment_TVD: Tensor | None


@dataclass(frozen=True)
class Interaction(Settings):
    """How a text and a video meet: each field is one ablation axis of the paper."""

    corrected_side: Literal["text", "video"] = "text"
    """Which vector the increment is added to."""
    context: Literal["frames", "words"] = "frames"
    """What the increment net attends over: the frames of the video or the words of the text."""
    query: Literal["gap", "text"] = "gap"
    """What it asks with: the gap, or the text alone (then the increment is a unit direction times
    `exp(mean cosine of text and frames)`)."""
    gap_direction: Literal["video_minus_text", "text_minus_video"] = "video_minus_text"
    """The paper's eta: +1 is video minus text."""
    normalise: bool = False
    """Scale every increment to length one."""
    pooling: Literal["mean", "text_conditioned", "cross_attention", "token_wise"] = "mean"
    """How frames become the video vector of the score. The last two are baselines with weights of their own
    and without increments: X-Pool's cross-attention, and DRL's comparison of words and frames."""
    pooling_temperature: PositiveFloat = 3.0
    """Temperature of the text-conditioned softmax over frames."""
    mask_frames: bool = True
    """Leave padded frames out of the mean and of psi's attention. The released code does not."""


@dataclass(frozen=True)
class IncrementWeights:
    """The parameters of the increment net as plain tensors, for scoring without the module."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor
    value_weight: Tensor
    value_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    residual_weight: Tensor
    residual_bias: Tensor
    norm3_weight: Tensor
    norm3_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor
    num_heads: int
    eps: float

    def to(self, dtype: torch.dtype) -> IncrementWeights:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("num_heads", "eps")}
        return replace(self, **{name: tensor.to(dtype) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class TokenHead:
    """Two layers that give each token of one side its importance, before the softmax."""

    hidden_weight: Tensor
    hidden_bias: Tensor
    output_weight: Tensor

    def to(self, dtype: torch.dtype) -> TokenHead:
        return TokenHead(*(getattr(self, field.name).to(dtype) for field in fields(self)))


@dataclass(frozen=True)
class TokenWeights:
    """The parameters of token-wise interaction as plain tensors."""

    words: TokenHead
    frames: TokenHead


class IncrementModule(Protocol):
    """What scoring needs of psi or of cross-attention pooling: `gare.model.increment.CrossAttention`s."""

    def __call__(self, query_BQD: Tensor, context_BCD: Tensor, mask_BC: Tensor) -> Tensor: ...

    def weights(self) -> IncrementWeights: ...


class TokenModule(Protocol):
    """What scoring needs of token-wise interaction: `gare.model.pooling.TokenWeighting` is one."""

    def weights(self) -> TokenWeights: ...


PairModule = IncrementModule | TokenModule
"""The learned part of a pair's score, whichever `Interaction.pooling` asks for."""

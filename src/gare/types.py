"""The values that packages pass to each other: features, scores, frame weights.

Shapes: T texts, V videos, F frames, W words, D embedding, H heads.

Features own their algebra: joining, padding, taking rows, the mean frame, a digest. Nothing else in the
package pads or joins them by hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Rows = slice | Tensor
"""Which texts or videos: a slice, or their indices."""


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
    """Sentence and word vectors of each text, from the text tower; nothing is normalised."""

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
        """D, the width of the embedding."""
        return self.text_TD.shape[1]

    def __getitem__(self, rows: Rows) -> TextFeatures:
        return TextFeatures(self.text_TD[rows], self.words_TWD[rows], self.mask_TW[rows])

    def blocks(self, size: int) -> Iterator[TextFeatures]:
        """The texts, at most `size` at a time."""
        return (self[rows] for rows in block_slices(len(self), size))

    def to(self, target: torch.device | str | torch.dtype) -> TextFeatures:
        """The same texts on another device or in another precision."""
        mask_TW = self.mask_TW if isinstance(target, torch.dtype) else self.mask_TW.to(target)
        return TextFeatures(self.text_TD.to(target), self.words_TWD.to(target), mask_TW)

    def pad(self, num_words: int) -> TextFeatures:
        """The same texts with room for `num_words` words; the new ones are masked."""
        return TextFeatures(
            self.text_TD, _padded(self.words_TWD, num_words), _padded(self.mask_TW, num_words)
        )

    @staticmethod
    def cat(parts: Sequence[TextFeatures]) -> TextFeatures:
        """All texts of all parts, padded to the longest.

        >>> parts = [TextFeatures.from_vectors(torch.zeros(n, 4)) for n in (2, 3)]
        >>> len(TextFeatures.cat(parts))
        5
        """
        num_words = max(part.words_TWD.shape[1] for part in parts)
        padded = [part.pad(num_words) for part in parts]
        return TextFeatures(
            torch.cat([part.text_TD for part in padded]),
            torch.cat([part.words_TWD for part in padded]),
            torch.cat([part.mask_TW for part in padded]),
        )

    @classmethod
    def from_vectors(cls, text_TD: Tensor) -> TextFeatures:
        """Texts of which only the sentence vector is kept: the vector itself is the one word.

        >>> len(TextFeatures.from_vectors(torch.zeros(3, 8)))
        3
        """
        mask_TW = torch.ones(text_TD.shape[0], 1, dtype=torch.bool, device=text_TD.device)
        return cls(text_TD, text_TD[:, None], mask_TW)

    def digest(self) -> str:
        """Sixteen hex digits that change when any number does."""
        return digest_tensors({"text": self.text_TD, "words": self.words_TWD, "mask": self.mask_TW})


@dataclass(frozen=True)
class VideoFeatures:
    """Frame vectors after the temporal transformer; `mask_VF` is true where a frame is real."""

    frames_VFD: Tensor
    mask_VF: Tensor
    patches_VFPD: Tensor | None = None
    """Patch vectors of each frame in the shared space, for interactions that read them; no encoder of the
    package gives them yet."""

    def __post_init__(self) -> None:
        if self.frames_VFD.ndim != 3:
            raise ValueError(f"frames_VFD must be [V, F, D], got {list(self.frames_VFD.shape)}")
        _check_mask(self.mask_VF, self.frames_VFD, "mask_VF", "frame")
        patches_VFPD = self.patches_VFPD
        if patches_VFPD is not None and (
            patches_VFPD.ndim != 4 or patches_VFPD.shape[:2] != self.mask_VF.shape
        ):
            raise ValueError(
                f"patches_VFPD must be [V, F, P, D] with the frames' V and F, got {list(patches_VFPD.shape)}"
            )

    def __len__(self) -> int:
        return self.frames_VFD.shape[0]

    @property
    def dim(self) -> int:
        """D, the width of the embedding."""
        return self.frames_VFD.shape[2]

    def __getitem__(self, rows: Rows) -> VideoFeatures:
        return VideoFeatures(
            self.frames_VFD[rows], self.mask_VF[rows], _if_any(self.patches_VFPD, lambda x: x[rows])
        )

    def blocks(self, size: int) -> Iterator[VideoFeatures]:
        """The videos, at most `size` at a time."""
        return (self[rows] for rows in block_slices(len(self), size))

    def to(self, target: torch.device | str | torch.dtype) -> VideoFeatures:
        """The same videos on another device or in another precision."""
        mask_VF = self.mask_VF if isinstance(target, torch.dtype) else self.mask_VF.to(target)
        return VideoFeatures(
            self.frames_VFD.to(target), mask_VF, _if_any(self.patches_VFPD, lambda x: x.to(target))
        )

    def pad(self, num_frames: int) -> VideoFeatures:
        """The same videos with room for `num_frames` frames; the new ones are masked."""
        return VideoFeatures(
            _padded(self.frames_VFD, num_frames),
            _padded(self.mask_VF, num_frames),
            _if_any(self.patches_VFPD, lambda x: _padded(x, num_frames)),
        )

    @staticmethod
    def cat(parts: Sequence[VideoFeatures]) -> VideoFeatures:
        """All videos of all parts, padded to the longest.

        >>> def clip(frames):
        ...     return VideoFeatures(torch.zeros(1, frames, 4), torch.ones(1, frames, dtype=torch.bool))
        >>> VideoFeatures.cat([clip(2), clip(3)]).mask_VF
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        num_frames = max(part.frames_VFD.shape[1] for part in parts)
        padded = [part.pad(num_frames) for part in parts]
        patches = [part.patches_VFPD for part in padded if part.patches_VFPD is not None]
        if patches and len(patches) < len(padded):
            raise ValueError("some videos have patch vectors and some have none; encode all alike")
        return VideoFeatures(
            torch.cat([part.frames_VFD for part in padded]),
            torch.cat([part.mask_VF for part in padded]),
            torch.cat(patches) if patches else None,
        )

    @staticmethod
    def stack(clips: Sequence[Tensor], num_frames: int | None = None) -> VideoFeatures:
        """Clips of frame vectors [F, D] as one batch, padded to the longest or to `num_frames`."""
        lengths_V = torch.tensor([len(clip) for clip in clips])
        width = int(lengths_V.max()) if num_frames is None else num_frames
        if int(lengths_V.max()) > width:
            raise ValueError(f"{int(lengths_V.max())} tokens do not fit into {width}")
        frames_VFD = clips[0].new_zeros(len(clips), width, clips[0].shape[1])
        for row, clip in enumerate(clips):
            frames_VFD[row, : len(clip)] = clip
        mask_VF = torch.arange(width) < lengths_V[:, None]
        return VideoFeatures(frames_VFD, mask_VF.to(frames_VFD.device))

    def mean(self) -> Tensor:
        """The mean of each video's real frames, [V, D]."""
        weights_VF = self.mask_VF.to(self.frames_VFD.dtype)
        weights_VF = weights_VF / weights_VF.sum(dim=1, keepdim=True)
        return (weights_VF[:, None] @ self.without_padding().frames_VFD).squeeze(1)

    def without_padding(self) -> VideoFeatures:
        """The same videos with zeros where a frame is padding, whatever stood there."""
        if not self.mask_VF.is_cuda and bool(self.mask_VF.all()):  # nothing to copy
            return self
        padding_VF1 = ~self.mask_VF[..., None]
        return VideoFeatures(
            self.frames_VFD.masked_fill(padding_VF1, 0),
            self.mask_VF,
            _if_any(self.patches_VFPD, lambda x: x.masked_fill(padding_VF1[..., None], 0)),
        )

    def digest(self) -> str:
        """Sixteen hex digits that change when any number does."""
        patches = {} if self.patches_VFPD is None else {"patches": self.patches_VFPD}
        return digest_tensors({"frames": self.frames_VFD, "mask": self.mask_VF, **patches})


def digest_tensors(tensors: dict[str, Tensor]) -> str:
    """Sixteen hex digits of named tensors: their names, types, shapes and every bit.

    >>> digest_tensors({"x": torch.zeros(2)}) == digest_tensors({"x": torch.zeros(3)})
    False
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        update_digest(digest, name, tensor)
    return digest.hexdigest()


def update_digest(digest: hashlib.blake2b, name: str, tensor: Tensor) -> None:
    """Add a named tensor to a digest; about 1 GB a second."""
    digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
    plain = tensor.detach().cpu().contiguous()
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)


def _if_any(tensor: Tensor | None, function: Callable[[Tensor], Tensor]) -> Tensor | None:
    return None if tensor is None else function(tensor)


def _padded(tensor: Tensor, width: int) -> Tensor:
    """Dimension 1 filled up with zeros."""
    missing = width - tensor.shape[1]
    if missing < 0:
        raise ValueError(f"{tensor.shape[1]} tokens do not fit into {width}")
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])], dim=1)


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
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """What loss terms of this interaction need beside the scores, by name; given while training."""
    are_logits: bool = False
    """Whether the loss takes the scores as they are, without the temperature."""


@dataclass(frozen=True)
class FrameWeights:
    """How much each frame counts in the score of each pair."""

    pool_TVF: Tensor
    """Weight of each frame in the video vector of the score. Token-wise: what the frame adds to it."""
    attention_TVHF: Tensor | None = None
    """Attention of each head over the frames, in the increment net or the pooling; None without any."""

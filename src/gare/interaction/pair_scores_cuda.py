"""Scores of single pairs in float64 on a GPU (Triton): what reads frames is in kernels, the rest in torch.

The score is that of `GapAware.score_each`, the reference. There a dozen passes go over every frame in
float64; here two do, over frames as they are stored: the first makes the query of a pair and pools its
frames, the second attends. Between them and after them a pair is one vector.

Imports Triton, so others import this file only when it can run. Shapes: P pairs, T texts, F frames, H heads,
D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gare.interaction.interaction import cosine
from gare.interaction.kernel_calls_cuda import launch
from gare.interaction.query_first import QueryFirst
from gare.types import VideoFeatures

if TYPE_CHECKING:
    from gare.interaction.gap_aware import GapAware

_LARGEST_TILE = 2**14  # numbers of the frames of a video, which a program keeps in registers


@dataclass(frozen=True)
class PairScorer:
    """Scores pairs with weights that were multiplied out once.

    Args:
        interaction: in float64, where scores are computed.
    """

    interaction: GapAware
    net: QueryFirst
    shared_K: Tensor
    """float64: weight and bias of LayerNorm 1, its ε, the temperature of the pooling."""

    @classmethod
    def of(cls, interaction: GapAware) -> PairScorer:
        weights = interaction.increment_net.weights()
        last = [weights.eps, interaction.config.pooling_temperature]
        parts = [weights.norm1_weight, weights.norm1_bias, weights.norm1_weight.new_tensor(last)]
        return cls(interaction, QueryFirst.fold(weights), torch.cat(parts).contiguous())

    def __call__(self, text_TD: Tensor, text_P: Tensor, video: VideoFeatures) -> Tensor:
        """The score of each video with its text, [P].

        Args:
            text_TD: float64.
            text_P: which text a video is scored with.
            video: as many as pairs, in any precision.
        """
        num_pairs, num_frames, dim = video.frames_VFD.shape
        rows, columns = max(16, triton.next_power_of_2(num_frames)), triton.next_power_of_2(dim)
        config, net = self.interaction.config, self.net.net
        constants: dict[str, Any] = {
            "DIM": dim,
            "FRAMES": num_frames,
            "ROWS": rows,
            "COLUMNS": columns,
            "MASK_FRAMES": config.mask_frames,
        }
        warps = {"num_warps": 16 if rows * columns >= _LARGEST_TILE else 8, "num_stages": 1}
        frames_PFD, mask_PF = video.frames_VFD.contiguous(), video.mask_VF.contiguous()
        query_PD, pooled_PD = (text_TD.new_empty(num_pairs, dim) for _ in range(2))
        launch(
            _query_kernel,
            lambda _: num_pairs,
            (frames_PFD, mask_PF, text_TD, text_P, self.shared_K, query_PD, pooled_PD),
            (),
            constants
            | {
                "SIGN": 1 if config.gap_direction == "video_minus_text" else -1,
                "POOL_MEAN": config.pooling == "mean",
            },
            kind=(frames_PFD.dtype,),
            **warps,
        )
        query_PHD = self.net.query(query_PD[:, None])[:, 0].contiguous()
        mixed_PHD = torch.empty_like(query_PHD)
        launch(
            _attention_kernel,
            lambda _: num_pairs,
            (frames_PFD, mask_PF, self.shared_K, query_PHD, mixed_PHD),
            (),
            constants | {"HEADS": net.num_heads},
            kind=(frames_PFD.dtype,),
            **warps,
        )
        increment_PD = self.net.after_attention(mixed_PHD[:, None])[:, 0]
        own_PD = text_TD[text_P]
        if config.corrected_side == "text":
            return cosine(own_PD + increment_PD, pooled_PD)
        return cosine(own_PD, pooled_PD + increment_PD)

    def fits(self, video: VideoFeatures) -> bool:
        """Whether a program can keep the frames of one of these videos."""
        _, num_frames, dim = video.frames_VFD.shape
        rows, columns = max(16, triton.next_power_of_2(num_frames)), triton.next_power_of_2(dim)
        return bool(rows * columns <= _LARGEST_TILE)


@triton.jit
def _frames_of(
    frames_ptr, mask_ptr, pair, DIM: tl.constexpr, FRAMES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, MASK_FRAMES: tl.constexpr,
):  # fmt: skip
    """The frames of a video, zero where none counts; which are real; which count."""
    f, d = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_real = tl.load(mask_ptr + pair * FRAMES + f, mask=f < FRAMES, other=0) != 0
    counts = f < FRAMES
    if MASK_FRAMES:
        counts = is_real
    cell = (pair * FRAMES + f)[:, None] * DIM + d[None, :]
    frames = tl.load(frames_ptr + cell, mask=counts[:, None] & (d < DIM)[None, :], other=0.0)
    return frames.to(tl.float64), is_real, counts


@triton.jit
def _softmax(logit, counts):
    logit = tl.where(counts, logit, float("-inf"))
    weight = tl.exp(logit - tl.max(logit, axis=0))
    return weight / tl.sum(weight, axis=0)


@triton.jit
def _query_kernel(
    frames_ptr, mask_ptr, text_ptr, text_of_ptr, shared_ptr, query_ptr, pooled_ptr, DIM: tl.constexpr,
    FRAMES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASK_FRAMES: tl.constexpr,
    SIGN: tl.constexpr, POOL_MEAN: tl.constexpr,
):  # fmt: skip
    """The gap of a pair after LayerNorm 1, and its pooled frames."""
    pair = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, COLUMNS)
    in_d = d < DIM
    frames, is_real, counts = _frames_of(
        frames_ptr, mask_ptr, pair, DIM, FRAMES, ROWS, COLUMNS, MASK_FRAMES
    )  # fmt: skip
    text = tl.load(text_ptr + tl.load(text_of_ptr + pair) * DIM + d, mask=in_d, other=0.0)
    share = counts.to(tl.float64)
    share = share / tl.sum(share, axis=0)
    mean = tl.sum(share[:, None] * frames, axis=0)
    if POOL_MEAN:
        pooled = mean
    else:
        logit = tl.sum(frames * text[None, :], axis=1) / tl.load(shared_ptr + 2 * DIM + 1)
        weight = tl.where(is_real, _softmax(logit, counts), 0.0)
        pooled = tl.sum(weight[:, None] * frames, axis=0)
    gap = SIGN * (mean - text)
    gap = tl.where(in_d, gap - tl.sum(gap, axis=0) / DIM, 0.0)
    length = tl.sqrt(tl.sum(gap * gap, axis=0) / DIM + tl.load(shared_ptr + 2 * DIM))
    norm = tl.load(shared_ptr + d, mask=in_d, other=0.0)
    bias = tl.load(shared_ptr + DIM + d, mask=in_d, other=0.0)
    tl.store(query_ptr + pair * DIM + d, gap / length * norm + bias, mask=in_d)
    tl.store(pooled_ptr + pair * DIM + d, pooled, mask=in_d)


@triton.jit
def _attention_kernel(
    frames_ptr, mask_ptr, shared_ptr, query_ptr, mixed_ptr, DIM: tl.constexpr, FRAMES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASK_FRAMES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Frames after LayerNorm 1, mixed as the query of each head attends to them."""
    pair = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, COLUMNS)
    in_d = d < DIM
    frames, _, counts = _frames_of(frames_ptr, mask_ptr, pair, DIM, FRAMES, ROWS, COLUMNS, MASK_FRAMES)
    off = tl.where(in_d[None, :], frames - (tl.sum(frames, axis=1) / DIM)[:, None], 0.0)
    length = tl.sqrt(tl.sum(off * off, axis=1) / DIM + tl.load(shared_ptr + 2 * DIM))
    norm = tl.load(shared_ptr + d, mask=in_d, other=0.0)
    bias = tl.load(shared_ptr + DIM + d, mask=in_d, other=0.0)
    normed = off / length[:, None] * norm[None, :] + bias[None, :]
    for head in range(HEADS):
        place = (pair * HEADS + head) * DIM + d
        query = tl.load(query_ptr + place, mask=in_d, other=0.0)
        weight = _softmax(tl.sum(normed * query[None, :], axis=1), counts)
        tl.store(mixed_ptr + place, tl.sum(weight[:, None] * normed, axis=0), mask=in_d)


def gather_rows(table_VN: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table in pinned main memory, on the device of `rows`: a GPU reads them where they are."""
    size = table_VN.shape[1]
    found = torch.empty(len(rows), size, dtype=table_VN.dtype, device=rows.device)
    if len(rows):
        _gather_kernel[(len(rows),)](table_VN, rows, found, size, STEP=2048)
    return found


@triton.jit
def _gather_kernel(table_ptr, rows_ptr, found_ptr, size, STEP: tl.constexpr):
    row, place = tl.load(rows_ptr + tl.program_id(0)), tl.program_id(0).to(tl.int64)
    for first in range(0, size, STEP):
        n = first + tl.arange(0, STEP)
        value = tl.load(table_ptr + row * size + n, mask=n < size, other=0)
        tl.store(found_ptr + place * size + n, value, mask=n < size)

"""One training step: encode, gather, score every pair, leave the gradient of the whole batch in the model.

Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gare.config import ObjectiveConfig
from gare.data.transforms import normalise
from gare.model import GARE
from gare.objective import Loss, training_loss
from gare.train.distributed import Processes, gather_index, gather_text, gather_video, reduce_gradients
from gare.types import TextFeatures, VideoFeatures


@dataclass(frozen=True)
class PairBatch:
    """This process's share of a batch, on its device."""

    token_ids_TW: Tensor
    mask_TW: Tensor
    frames: Tensor
    """Pixels [V, F, 3, H, W] as bytes, or [V, F, E] from a feature cache."""
    mask_VF: Tensor
    video_index: Tensor

    def __len__(self) -> int:
        return self.token_ids_TW.shape[0]

    def __getitem__(self, rows: slice) -> PairBatch:
        return PairBatch(
            self.token_ids_TW[rows],
            self.mask_TW[rows],
            self.frames[rows],
            self.mask_VF[rows],
            self.video_index[rows],
        )


Encode = Callable[[PairBatch], tuple[TextFeatures, VideoFeatures]]


def make_encode(model: GARE, *, autocast: bool) -> Encode:
    """Both towers, in bfloat16 if asked; features are at least float32, as increments differ by little."""
    image_format = model.backbone.image_format

    def encode(batch: PairBatch) -> tuple[TextFeatures, VideoFeatures]:
        context: Any = torch.autocast(batch.frames.device.type, torch.bfloat16) if autocast else nullcontext()
        with context:
            text = model.text_features(batch.token_ids_TW, batch.mask_TW)
            if batch.frames.ndim == 3:
                video = model.video_features_from_cache(batch.frames, batch.mask_VF)
            else:
                pixels_VFCHW = normalise(batch.frames, image_format.mean, image_format.std)
                video = model.video_features(pixels_VFCHW, batch.mask_VF)
        if text.text_TD.dtype.itemsize < 4:
            text, video = text.to(torch.float32), video.to(torch.float32)
        return text, video

    return encode


def compute_gradients(
    model: GARE,
    batch: PairBatch,
    objective: ObjectiveConfig,
    processes: Processes,
    *,
    encode: Encode,
    chunk_size: int | None = None,
    psi_seed: int = 0,
    average_towers: bool = False,
    teacher_logits_TV: Tensor | None = None,
) -> Loss:
    """Add the gradient of the loss of the global batch to `.grad`, the same for any chunks and processes.

    Args:
        encode: towers, from `make_encode`.
        chunk_size: encode this many pairs at a time, twice: once for the features, once for the gradients
            that the loss sends back into them (GradCache). Nothing else of a chunk is kept in between.
        psi_seed: of psi's dropout, the same on every process.
        teacher_logits_TV: what teachers say of the global batch.
    """
    if chunk_size is None or chunk_size >= len(batch):
        text, video = encode(batch)
        loss = _loss(model, text, video, batch, objective, processes, psi_seed, teacher_logits_TV)
        loss.total.backward()
    else:
        loss = _chunked(model, batch, objective, processes, encode, chunk_size, psi_seed, teacher_logits_TV)
    reduce_gradients(model, processes, average_towers=average_towers)
    return Loss(loss.total.detach(), {name: term.detach() for name, term in loss.terms.items()})


def _chunked(
    model: GARE,
    batch: PairBatch,
    objective: ObjectiveConfig,
    processes: Processes,
    encode: Encode,
    chunk_size: int,
    psi_seed: int,
    teacher_logits_TV: Tensor | None,
) -> Loss:
    chunks = [batch[start : start + chunk_size] for start in range(0, len(batch), chunk_size)]
    random_states, features = [], []
    with torch.no_grad():
        for chunk in chunks:
            random_states.append(_random_state(batch.frames.device))
            features.append(encode(chunk))
    after = _random_state(batch.frames.device)
    text = TextFeatures(
        torch.cat([t.text_TD for t, _ in features]).requires_grad_(),
        torch.cat([t.words_TWD for t, _ in features]).requires_grad_(),
        batch.mask_TW.bool(),
    )
    video = VideoFeatures(
        torch.cat([v.frames_VFD for _, v in features]).requires_grad_(), batch.mask_VF.bool()
    )
    loss = _loss(model, text, video, batch, objective, processes, psi_seed, teacher_logits_TV)
    loss.total.backward()
    arrived = [x.grad for x in (text.text_TD, text.words_TWD, video.frames_VFD)]
    for number, (chunk, state) in enumerate(zip(chunks, random_states, strict=True)):
        _set_random_state(state, batch.frames.device)  # the same dropout as in the first pass
        chunk_text, chunk_video = encode(chunk)
        rows = slice(number * chunk_size, number * chunk_size + len(chunk))
        outputs = (chunk_text.text_TD, chunk_text.words_TWD, chunk_video.frames_VFD)
        pairs = [(x, g[rows]) for x, g in zip(outputs, arrived, strict=True) if g is not None]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
    _set_random_state(after, batch.frames.device)
    return loss


def _loss(
    model: GARE,
    text: TextFeatures,
    video: VideoFeatures,
    batch: PairBatch,
    objective: ObjectiveConfig,
    processes: Processes,
    psi_seed: int,
    teacher_logits_TV: Tensor | None,
) -> Loss:
    text, video = gather_text(text, processes), gather_video(video, processes)
    video_index = gather_index(batch.video_index, processes)
    devices = [batch.frames.device] if batch.frames.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(psi_seed)
        pairs = model.score_pairs(text, video)
    return training_loss(
        pairs, model.logit_scale, objective, video_index=video_index, teacher_logits_TV=teacher_logits_TV
    )


def _random_state(device: torch.device) -> Sequence[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_state(state: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)

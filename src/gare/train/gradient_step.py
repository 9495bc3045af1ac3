"""One training step: encode, gather, score every pair, leave the gradient of the whole batch in the model.

Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gare.model import GARE
from gare.objective import Loss, ObjectiveConfig, training_loss
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
    num_real_frames: int | None = None
    """How many frames are real, or some more; None where nobody has counted them."""

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
    """What turns a batch of tokens and pixels into features, with both towers.

    Towers run in bfloat16 if asked. Features are at least float32, because increments differ by little.
    """

    def encode(batch: PairBatch) -> tuple[TextFeatures, VideoFeatures]:
        context: Any = torch.autocast(batch.frames.device.type, torch.bfloat16) if autocast else nullcontext()
        with context:
            # Videos first: while a GPU is busy with them, it is told of the many small kernels of texts.
            if batch.frames.ndim == 3:
                video = model.video_features_from_cache(batch.frames, batch.mask_VF)
            else:
                video = model.encode_frames(batch.frames, batch.mask_VF, num_real=batch.num_real_frames)
            text = model.text_features(batch.token_ids_TW, batch.mask_TW)
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
    interaction_seed: int | None = 0,
    average_towers: bool = False,
    teacher_logits_TV: Tensor | None = None,
    rounds_products: bool = False,
) -> Loss:
    """Add the gradient of the loss of the global batch to `.grad`, the same for any chunks and processes.

    Args:
        encode: towers, from `make_encode`.
        chunk_size: encode this many pairs at a time, twice: once for the features, once for the gradients
            that the loss sends back into them (GradCache). Nothing else of a chunk is kept in between.
        interaction_seed: seed of the interaction's dropout, the same on every process; None where the caller
            has seeded the generators.
        teacher_logits_TV: the teachers' logits of the global batch.
        rounds_products: multiply by tf32 after the towers, where a GPU does: eleven bits of each number are
            enough for features that come from towers in bfloat16, with eight.
    """

    def loss_of(text: TextFeatures, video: VideoFeatures) -> Loss:
        text, video = gather_text(text, processes), gather_video(video, processes)
        with _seeded(interaction_seed, batch.frames.device):
            pairs = model.score_pairs(text, video)
        return training_loss(
            pairs,
            model.logit_scale,
            objective,
            video_index=gather_index(batch.video_index, processes),
            teacher_logits_TV=teacher_logits_TV,
            text=text,
            video=video,
        )

    with _tf32(on=rounds_products and batch.frames.is_cuda):
        if chunk_size is None or chunk_size >= len(batch):
            loss = loss_of(*encode(batch))
            loss.total.backward()
        else:
            loss = _backward_in_chunks(batch, encode, loss_of, chunk_size)
    reduce_gradients(model, processes, average_towers=average_towers)
    return Loss(loss.total.detach(), {name: term.detach() for name, term in loss.terms.items()})


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Within it, random numbers follow from the seed; afterwards they go on as if nothing had been drawn."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _tf32(*, on: bool) -> Iterator[None]:
    """Within it, a GPU multiplies matrices of float32 by its tf32 units, eight times as fast."""
    before = torch.get_float32_matmul_precision()
    if on:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if on:
            torch.set_float32_matmul_precision(before)


def _backward_in_chunks(
    batch: PairBatch,
    encode: Encode,
    loss_of: Callable[[TextFeatures, VideoFeatures], Loss],
    chunk_size: int,
) -> Loss:
    """GradCache: features of all chunks without a graph, the loss of them together, then chunk by chunk."""
    chunks = [batch[start : start + chunk_size] for start in range(0, len(batch), chunk_size)]
    random_states, features = [], []
    with torch.no_grad():
        for chunk in chunks:
            random_states.append(random_state(batch.frames.device))
            features.append(encode(chunk))
    after = random_state(batch.frames.device)
    text = TextFeatures.cat([text for text, _ in features])
    video = VideoFeatures.cat([video for _, video in features])
    leaves = [x.requires_grad_() for x in (text.text_TD, text.words_TWD, video.frames_VFD)]
    loss = loss_of(text, video)
    loss.total.backward()
    arrived = [leaf.grad for leaf in leaves]
    for number, (chunk, state) in enumerate(zip(chunks, random_states, strict=True)):
        _set_random_state(state, batch.frames.device)  # the same dropout as in the first pass
        chunk_text, chunk_video = encode(chunk)
        rows = slice(number * chunk_size, number * chunk_size + len(chunk))
        outputs = (chunk_text.text_TD, chunk_text.words_TWD, chunk_video.frames_VFD)
        pairs = [(x, g[rows]) for x, g in zip(outputs, arrived, strict=True) if g is not None]
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
    _set_random_state(after, batch.frames.device)
    return loss


def random_state(device: torch.device) -> Sequence[Tensor]:
    """Where the generators stand: that of the CPU, and that of the device if it has its own."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_state(state: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)

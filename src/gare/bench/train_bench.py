"""A training step at the size of the paper, beside a bare dual encoder, with the arithmetic both must do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gare.bench.bench_timing import describe_device, median_ms
from gare.model import GARE, GareConfig
from gare.objective import ObjectiveConfig, symmetric_infonce
from gare.train.distributed import Processes
from gare.train.gradient_step import PairBatch, make_encode
from gare.train.optimizers import build_optimizer
from gare.train.replayed_gradients import ReplayedGradients, recorder_for
from gare.train.run_config import OptimizerConfig
from gare.train.starting_model import compile_towers

PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100": 989.0, "NVIDIA A100": 312.0}
"""Dense bfloat16, by the vendor's data sheet; utilisation is left out for other devices."""


@dataclass(frozen=True)
class TrainBenchmark:
    """Milliseconds a step; `bare` is the same towers with mean pooling, InfoNCE and the same optimiser."""

    batch_size: int
    frames: int
    encoder: str
    device: str
    torch: str
    step_ms: float
    bare_ms: float
    step_over_bare: float
    peak_memory_gb: float
    bare_memory_gb: float
    tflop_per_step: float
    bare_tflop_per_step: float
    model_flop_utilisation: float | None
    pairs_per_second: float


def benchmark_train(
    *,
    batch_size: int,
    frames: int,
    model: GareConfig,
    device: torch.device,
    compiled: bool,
    chunk_size: int | None,
    cuda_graph: bool = True,
) -> TrainBenchmark:
    """Random weights and frames, AdamW; on a GPU towers in bfloat16, what follows in float32 by tf32.

    Memory is the most of all steps but the first, and so of the one that is recorded: what a replay has is
    set aside for it, and not counted again.
    """
    torch.manual_seed(0)
    gare = GARE(model).to(device).train()
    if compiled:
        compile_towers(gare)
    optimizer = build_optimizer(gare, OptimizerConfig())
    batch = _random_batch(gare, batch_size, frames, device)
    is_gpu = device.type == "cuda"
    encode = make_encode(gare, autocast=is_gpu)
    parameters = list(gare.parameters())
    compute_gradients = ReplayedGradients(
        gare,
        ObjectiveConfig(),
        Processes(0, 1, device),
        encode=encode,
        chunk_size=chunk_size,
        rounds_products=is_gpu,
        recorder=recorder_for(device) if cuda_graph else None,
    )

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step() -> None:
        compute_gradients(batch)
        update()

    def bare_step() -> None:
        text, video = encode(batch)
        scores_TV = F.normalize(text.text_TD, dim=-1) @ F.normalize(video.mean(), dim=-1).mT
        symmetric_infonce(scores_TV, gare.logit_scale).backward()
        update()

    bare_ms, bare_memory = _measure(bare_step, device)
    step_ms, memory = _measure(step, device)
    towers, pairs = _tflop(gare, batch_size, frames)
    tflop = 3 * (towers + pairs)  # backward takes twice what forward takes
    peak = PEAK_TFLOPS.get(describe_device(device))
    return TrainBenchmark(
        batch_size=batch_size,
        frames=frames,
        encoder=model.encoder.name,
        device=describe_device(device),
        torch=torch.__version__,
        step_ms=step_ms,
        bare_ms=bare_ms,
        step_over_bare=step_ms / bare_ms,
        peak_memory_gb=memory,
        bare_memory_gb=bare_memory,
        tflop_per_step=tflop,
        bare_tflop_per_step=3 * towers,
        model_flop_utilisation=None if peak is None else 1000 * tflop / step_ms / peak,
        pairs_per_second=1000 * batch_size / step_ms,
    )


def _measure(function: object, device: torch.device) -> tuple[float, float]:
    assert callable(function)
    function()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):  # until it is recorded
            function()
    milliseconds = median_ms(function, device, seconds=4.0)
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    return milliseconds, memory


def _random_batch(model: GARE, batch_size: int, frames: int, device: torch.device) -> PairBatch:
    size = model.encoder.image_format.size
    token_ids_TW, mask_TW = model.encoder.random_tokens(batch_size)
    return PairBatch(
        token_ids_TW.to(device),
        mask_TW.to(device),
        torch.randint(256, (batch_size, frames, 3, size, size), dtype=torch.uint8, device=device),
        torch.ones(batch_size, frames, dtype=torch.bool, device=device),
        torch.arange(batch_size, device=device),
        num_real_frames=batch_size * frames,
    )


def _tflop(model: GARE, batch_size: int, frames: int) -> tuple[float, float]:
    """Forward operations of a step: of both towers, and of all pairs of the batch."""
    towers = model.encoder.flops()
    pairs = model.interaction.flops(
        texts=batch_size, videos=batch_size, frames=frames, words=model.encoder.max_words
    )
    return batch_size * (frames * towers["image"] + towers["text"]) / 1e12, pairs / 1e12

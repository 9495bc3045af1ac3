"""Training and encoding on a GPU, one change at a time: what docs/benchmarks.md says of both comes from here.

    python experiments/gpu_train.py [SECONDS] [PART …] [--out FILE] [--small]

Prints a JSON line for each part as it is ready, the most telling first, and writes all of them to FILE. Each
part is a process of its own, ended when its time is over; the next one follows. `--small` runs everything on
a CPU, to try it, kernels in Triton's interpreter.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if "--small" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F

from gare.bench.bench_timing import median_ms
from gare.bench.encode_bench import benchmark_encode, random_clip
from gare.bench.train_bench import benchmark_train
from gare.encoders import bfloat16_layers, short_attention
from gare.encoders.clip_encoder import ClipEncoder, ClipEncoderConfig
from gare.model import GARE, GareConfig

IS_SMALL = "--small" in sys.argv
DEVICE = torch.device("cpu" if IS_SMALL else "cuda")
MOST_S = 600.0 if IS_SMALL else 110.0


# --- parts --------------------------------------------------------------------------------------------------


def attention() -> dict[str, Any]:
    """The kernels alone beside torch's own attention: the same numbers, and how long."""
    pictures = 2 if IS_SMALL else 1536
    dtype = torch.float32 if IS_SMALL else torch.bfloat16
    qkv = torch.randn(3, pictures, 50, 12, 64, device=DEVICE, dtype=dtype).transpose(2, 3)
    leaves = [part.detach().requires_grad_() for part in qkv]
    gradient = torch.randn(pictures, 50, 12, 64, device=DEVICE, dtype=dtype)

    def theirs() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*leaves).transpose(1, 2)

    def ours() -> torch.Tensor:
        attended: torch.Tensor = theirs() if IS_SMALL else short_attention.short_attention(*leaves, 0.125)
        return attended

    result: dict[str, Any] = {"pictures": pictures, "bytes_forward": 4 * gradient.numel() * dtype.itemsize}
    grads = {}
    for name, call in (("ours", ours), ("theirs", theirs)):
        out = call()
        grads[name] = torch.autograd.grad(out, leaves, gradient)
        result[f"{name}_forward_ms"] = median_ms(call, DEVICE)
        both = median_ms(lambda call=call: torch.autograd.grad(call(), leaves, gradient), DEVICE)  # type: ignore[misc]
        result[f"{name}_both_ms"] = both
    pairs = zip(grads["ours"], grads["theirs"], strict=True)
    result["largest_difference"] = max(float((one - other).abs().max()) for one, other in pairs)
    return result


def train() -> dict[str, Any]:
    """`gare bench train`, as shipped, without the bare dual encoder; and the kernels of a step."""
    import gare.bench.train_bench as bench

    taken: list[Callable[[], object]] = []
    measure = bench._measure

    def measure_last(function: Callable[[], object], device: torch.device) -> tuple[float, float]:
        taken.append(function)
        return measure(function, device) if len(taken) == 2 else (float("nan"), 0.0)

    bench._measure = measure_last  # type: ignore[assignment]
    result = train_with_bare()
    print(json.dumps(result), flush=True)
    return result | {"waits": _waits(taken[-1])} | _kernels(taken[-1], most=40)


def _waits(function: Callable[[], object]) -> list[str]:
    """Where a step waits for the GPU before it goes on."""
    if IS_SMALL:
        return []
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(each.filename).name}:{each.lineno} {str(each.message)[:60]}" for each in caught]


def train_with_bare(*, cuda_graph: bool = True) -> dict[str, Any]:
    """`gare bench train`, as shipped."""
    options: dict[str, Any] = {"chunk_size": None, "cuda_graph": cuda_graph, **_PAIRS}
    return vars(benchmark_train(model=_model(), device=DEVICE, compiled=not IS_SMALL, **options))


_PAIRS = {"batch_size": 4, "frames": 2} if IS_SMALL else {"batch_size": 128, "frames": 12}


def _model() -> GareConfig:
    return GareConfig.load({"encoder": {"name": "tiny" if IS_SMALL else "clip"}})


def train_graph() -> dict[str, Any]:
    """The step with its kernels asked for one by one, and as a CUDA graph, in turn; whether they agree."""
    import gare.bench.train_bench as bench
    from gare.objective import ObjectiveConfig
    from gare.train.distributed import Processes
    from gare.train.gradient_step import make_encode
    from gare.train.optimizers import build_optimizer
    from gare.train.replayed_gradients import ReplayedGradients, recorder_for
    from gare.train.run_config import OptimizerConfig
    from gare.train.starting_model import compile_towers

    torch.manual_seed(0)
    model = GARE(_model()).to(DEVICE).train()
    if not IS_SMALL:
        compile_towers(model)
    parameters, optimizer = list(model.parameters()), build_optimizer(model, OptimizerConfig())
    batch = bench._random_batch(model, _PAIRS["batch_size"], _PAIRS["frames"], DEVICE)
    result: dict[str, Any] = {}
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gare.train").addHandler(handler)
    logging.getLogger("gare.train").setLevel(logging.INFO)

    def gradients_by(recorder: Any) -> ReplayedGradients:
        return ReplayedGradients(
            model,
            ObjectiveConfig(),
            Processes(0, 1, DEVICE),
            encode=make_encode(model, autocast=not IS_SMALL),
            rounds_products=not IS_SMALL,
            recorder=recorder,
        )

    recorder: Any = recorder_for(DEVICE)
    if recorder is not None:
        record = recorder.record

        def record_or_explain(step: Callable[[], Any]) -> Any:
            try:
                return record(step)
            except Exception:
                result["why_not_recorded"] = traceback.format_exc()[-4000:]
                raise

        recorder.record = record_or_explain
    eager, replayed = gradients_by(None), gradients_by(recorder)

    def step(gradients: ReplayedGradients) -> None:
        gradients(batch)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def measure(name: str, gradients: ReplayedGradients) -> None:
        call = partial(step, gradients)
        if not IS_SMALL:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(4):  # the third is recorded
            call()
        found = {"ms": median_ms(call, DEVICE, seconds=0.9)}
        if not IS_SMALL:
            found["host_ms"] = _host_ms(call)
            found["most_allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
            found["reserved_gb"] = torch.cuda.memory_reserved() / 1e9
        result[name] = found
        result["recorded"], result["log"] = len(replayed._recorded), messages
        print(json.dumps(result), flush=True)

    step(eager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measure("eager 1", eager)
        measure("replayed 1", replayed)
    result["warnings"] = sorted({str(each.message)[:300] for each in caught})
    if not IS_SMALL:
        result["waits_replayed"] = _waits(partial(step, replayed))
    result["agreement"] = _agreement(model, eager, replayed)
    print(json.dumps(result), flush=True)
    for turn in (2, 3):
        replayed.forget()
        measure(f"eager {turn}", eager)
        measure(f"replayed {turn}", replayed)
    if not IS_SMALL:
        result["idle_replayed"] = _idle(partial(step, replayed))
    return result


def _host_ms(call: Callable[[], object]) -> float:
    """Until all is asked of the GPU."""
    hosts = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        hosts.append(1000 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return statistics.median(hosts)


def _agreement(model: GARE, eager: Any, replayed: Any) -> dict[str, Any]:
    """Three steps from one start, by each way and once more by the first, which says what chance does.

    Sums of gradients by atomic additions come in any order, so that two runs differ in last bits. AdamW
    divides a gradient by its size: where it is nearly zero, its update differs most.
    """
    import gare.bench.train_bench as bench
    from gare.train.optimizers import build_optimizer
    from gare.train.run_config import OptimizerConfig

    torch.manual_seed(1)
    batches = [bench._random_batch(model, _PAIRS["batch_size"], _PAIRS["frames"], DEVICE) for _ in range(3)]
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def train_from_start(gradients: Any) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
        model.load_state_dict(start)
        model.zero_grad(set_to_none=True)
        optimizer = build_optimizer(model, OptimizerConfig())
        first: dict[str, torch.Tensor] = {}
        losses = []
        for number, batch in enumerate(batches):
            losses.append(gradients(batch, interaction_seed=number).total)
            named = [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]
            first = first or {name: gradient.clone() for name, gradient in named}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        updates = {name: each.detach() - start[name] for name, each in model.named_parameters()}
        return {"gradients": first, "updates": updates}, [float(loss) for loss in losses]

    runs = {"eager": eager, "eager again": eager, "replayed": replayed}
    found = {name: train_from_start(gradients) for name, gradients in runs.items()}
    result: dict[str, Any] = {f"losses {name}": losses for name, (_, losses) in found.items()}
    for what, exact in found["eager"][0].items():
        for name in ("eager again", "replayed"):
            other = found[name][0][what]
            shares = sorted(
                (float((other[key] - x).norm() / x.norm()), key) for key, x in exact.items() if x.any()
            )
            result[f"{what}, {name}"] = {
                "parameters": len(shares),
                "equal": sum(share == 0 for share, _ in shares),
                "median": shares[len(shares) // 2][0],
                "worst": shares[-4:],
            }
    model.load_state_dict(start)
    return result


def train_now() -> dict[str, Any]:
    """The step as it is now, and where the GPU has nothing to do."""
    step, result = _step_of_benchmark(seconds=3.0)
    print(json.dumps(result), flush=True)
    if not IS_SMALL:
        result["host_ms"] = _host_ms(step)
        for name, measured in (("waits", _waits), ("idle", _idle), ("kernels", partial(_kernels, most=60))):
            try:
                result[name] = measured(step)
            except Exception as error:
                result[name] = str(error)[:300]
            print(json.dumps(result), flush=True)
    return result | {"again_ms": median_ms(step, DEVICE, seconds=1.2)}


def _step_of_benchmark(*, seconds: float) -> tuple[Callable[[], object], dict[str, Any]]:
    """The step that `gare bench train` measures, and what it says of it, without the bare dual encoder.

    Not as a CUDA graph, so that what is changed afterwards has an effect.
    """
    import gare.bench.train_bench as bench

    taken: list[Callable[[], object]] = []

    def measure(function: Callable[[], object], device: torch.device) -> tuple[float, float]:
        taken.append(function)
        if len(taken) < 2:
            return float("nan"), 0.0
        found = _memory_and_ms("step", function, seconds=seconds)
        return found["step_ms"], found.get("step_gb", 0.0)

    bench._measure = measure  # type: ignore[assignment]
    result = train_with_bare(cuda_graph=False)
    return taken[-1], result


def _idle(function: Callable[[], object]) -> dict[str, Any]:
    """From the first kernel of a step to its last: when none runs, and between which it is longest."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        function()
        torch.cuda.synchronize()
    events = [event for event in run.events() if str(event.device_type).endswith("CUDA")]
    kernels = sorted((event.time_range.start, event.time_range.end, event.name[:60]) for event in events)
    first, end, before = kernels[0][0], kernels[0][1], kernels[0][2]
    span = max(kernel[1] for kernel in kernels) - first
    tenths, gaps = [0.0] * 10, []
    for start, stop, name in kernels:
        if start > end:
            tenths[min(9, int(10 * (start - first) / span))] += (start - end) / 1000
            gaps.append((round(start - end, 1), round((end - first) / 1000, 2), before, name))
        if stop >= end:
            end, before = stop, name
    return {
        "kernels": len(kernels),
        "span_ms": span / 1000,
        "idle_ms": sum(gap[0] for gap in gaps) / 1000,
        "idle_ms_by_tenth_of_step": [round(tenth, 3) for tenth in tenths],
        "longest_us_at_ms": sorted(gaps, reverse=True)[:14],
    }


def exactness() -> dict[str, Any]:
    """Gradients of a step of few pairs beside those in float32: by kernels, with and without tf32; by torch.

    The relative difference of each parameter's gradient, by the part of the model.
    """
    from gare.interaction.temporal import TemporalTransformer
    from gare.objective import ObjectiveConfig
    from gare.train.distributed import Processes
    from gare.train.gradient_step import PairBatch, compute_gradients, make_encode

    torch.manual_seed(0)
    config = _encoder().config
    model = GARE(GareConfig.load({"encoder": config.to_values()})).to(DEVICE).train()
    pairs, frames, size = (2, 2) if IS_SMALL else (16, 12), 3, model.encoder.image_format.size
    tokens, mask = (each.to(DEVICE) for each in model.encoder.random_tokens(pairs[0]))
    shape = (*pairs, frames, size, size)
    batch = PairBatch(
        tokens,
        mask,
        torch.randint(256, shape, dtype=torch.uint8, device=DEVICE),
        torch.ones(pairs, dtype=torch.bool, device=DEVICE),
        torch.arange(pairs[0], device=DEVICE),
    )

    def gradients(*, autocast: bool, kernels: bool, tf32: bool) -> dict[str, torch.Tensor]:
        ClipEncoder.trains_by_kernels = TemporalTransformer.trains_by_kernels = kernels
        model.zero_grad(set_to_none=True)
        encode = make_encode(model, autocast=autocast and not IS_SMALL)
        alone = Processes(0, 1, DEVICE)
        compute_gradients(model, batch, ObjectiveConfig(), alone, encode=encode, rounds_products=tf32)
        named = model.named_parameters()
        return {name: p.grad.double() for name, p in named if p.grad is not None}

    exact = gradients(autocast=False, kernels=False, tf32=False)
    result: dict[str, Any] = {}
    for name, kernels, tf32 in (
        ("by kernels, tf32", True, True),
        ("by kernels", True, False),
        ("by torch", False, False),
        ("by torch, tf32", False, True),
    ):
        found = gradients(autocast=True, kernels=kernels, tf32=tf32)
        shares: dict[str, list[float]] = {}
        for parameter, gradient in found.items():
            if parameter.endswith(
                "k_proj.bias"
            ):  # it moves all logits of a query alike: nothing but rounding
                continue
            part = ".".join(parameter.split(".")[: 2 if parameter.startswith("encoder") else 1])
            wanted = exact[parameter]
            share = float((gradient - wanted).norm() / wanted.norm().clamp_min(1e-30))
            shares.setdefault(part, []).append(share)
        result[name] = {
            part: {"median": statistics.median(each), "worst": max(each)} for part, each in shares.items()
        }
        print(json.dumps(result), flush=True)
    return result


def tower() -> dict[str, Any]:
    """The image tower alone, forward and backward, written out and as torch does it; and how exact each is.

    Differences are those of each parameter's gradient, relative to float32, for few pictures.
    """
    encoder: Any = _encoder().to(DEVICE).train()
    few, total = (2, 2) if IS_SMALL else (24, 1536)
    shape = (total, 3, encoder.image_format.size, encoder.image_format.size)
    bytes_NCHW = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)
    # A bias of keys moves all logits of a query alike: its gradient is nothing but rounding.
    named = encoder.vision.named_parameters()
    parameters = [each for name, each in named if not name.endswith("k_proj.bias")]
    dtype = torch.float32 if IS_SMALL else torch.bfloat16

    def plain(pictures: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = encoder.image_features(encoder.image_format.normalise(pictures))
        return features

    def by_kernels(pictures: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = encoder._train_on_bytes(pictures, encoder._vision_parts(), dtype=dtype)
        return features

    def gradients(features: torch.Tensor) -> list[torch.Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(0)
        weights = torch.randn(features.shape, generator=generator, device=DEVICE)
        return [features.detach(), *torch.autograd.grad(features.float(), parameters, weights)]

    def distance(found: list[torch.Tensor]) -> dict[str, float]:
        shares = [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]
        return {"features": shares[0], "median": statistics.median(shares[1:]), "worst": max(shares[1:])}

    exact = [each.double() for each in gradients(plain(bytes_NCHW[:few]))]
    result: dict[str, Any] = {}
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not IS_SMALL):
        result["difference_by_kernels"] = distance(gradients(by_kernels(bytes_NCHW[:few])))
        result["difference_by_torch"] = distance(gradients(plain(bytes_NCHW[:few])))
        print(json.dumps(result), flush=True)
        for compiled in (False, True):
            if compiled:
                encoder.compile_towers()
            name = "by_kernels_compiled_ends" if compiled else "by_kernels"
            result |= _memory_and_ms(name, lambda: gradients(by_kernels(bytes_NCHW)))
            result[f"{name}_forward_ms"] = median_ms(lambda: by_kernels(bytes_NCHW), DEVICE)
            print(json.dumps(result), flush=True)
        return result | _kernels(lambda: gradients(by_kernels(bytes_NCHW)), most=40)


def _encoder() -> ClipEncoder:
    """ViT-B/32 with random weights, or something tiny."""
    if not IS_SMALL:
        return ClipEncoder(ClipEncoderConfig())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    architecture = {
        "model_type": "clip",
        "projection_dim": 16,
        "vision_config": {**sizes, "image_size": 32, "patch_size": 8},
        "text_config": {**sizes, "vocab_size": 100},
    }
    return ClipEncoder(ClipEncoderConfig(architecture=architecture))


def _memory_and_ms(name: str, call: Callable[[], object], *, seconds: float = 1.0) -> dict[str, float]:
    milliseconds = median_ms(call, DEVICE, seconds=seconds)
    if IS_SMALL:
        return {f"{name}_ms": milliseconds}
    torch.cuda.reset_peak_memory_stats()
    call()
    return {f"{name}_ms": milliseconds, f"{name}_gb": torch.cuda.max_memory_allocated() / 1e9}


def _alone_ms(call: Callable[[], object]) -> float:
    """Of a kernel, with an empty cache, without what asking for it takes."""
    if IS_SMALL:
        return median_ms(call, DEVICE, seconds=0.1)
    from triton.testing import do_bench

    return float(do_bench(call, warmup=5, rep=40, return_mode="median"))


@torch.no_grad()
def encode_now() -> dict[str, Any]:
    """128 videos at once: with each change off and on, in turn; each kernel; the widest product by shapes."""
    model = random_clip().to(DEVICE).eval()
    encoder, total = model.encoder, 4 if IS_SMALL else 1536
    bytes_NCHW = torch.randint(256, (total, 3, 224, 224), dtype=torch.uint8, device=DEVICE)
    some = bytes_NCHW[:24]
    exact_ND = encoder.image_features(encoder.image_format.normalise(some)).double()
    result: dict[str, Any] = {}

    def cosine() -> float:
        found_ND = encoder.encode_frames(bytes_NCHW)[: len(some)].double()
        return float(F.cosine_similarity(found_ND, exact_ND).min())

    has_product = bfloat16_layers.has_active_product
    variants = [(by_product, dtype) for by_product in (True, False) for dtype in ("float16", "float32")]
    turns = 1 if IS_SMALL else 3
    for turn, (by_product, dtype) in product(range(turns), variants):
        name = f"activation in {'its product' if by_product else 'a kernel'}, states in {dtype}"
        bfloat16_layers.has_active_product = has_product if by_product else lambda *_: False
        ClipEncoder.STATES_DTYPE = getattr(torch, dtype)
        try:
            if turn == 0:
                result[name] = {"least_cosine": cosine(), "ms": []}
            ms = median_ms(lambda: encoder.encode_frames(bytes_NCHW), DEVICE, seconds=0.5)
            result[name]["ms"].append(round(ms, 3))
        except Exception as error:
            result[name] = {"error": str(error)[:300], "ms": []}
        print(json.dumps(result), flush=True)
    bfloat16_layers.has_active_product, ClipEncoder.STATES_DTYPE = has_product, torch.float16
    result |= _kernels(lambda: encoder.encode_frames(bytes_NCHW))
    print(json.dumps(result), flush=True)
    _measure_products(result)
    _measure_norms(result)
    return result


def _measure_products(result: dict[str, Any]) -> None:
    """The widest product of a layer with its activation, apart and in one kernel of several shapes."""
    from gare.encoders.active_product_cuda import SHAPE, Shape, active_product

    rows, wide, dtype = (70, 256, torch.float32) if IS_SMALL else (1536 * 50, 3072, torch.bfloat16)
    x, weight = (torch.randn(n, 768, device=DEVICE).to(dtype) for n in (rows, wide))
    bias, weight = torch.randn(wide, device=DEVICE).to(dtype), weight / 28
    expected = F.silu(F.linear(x, weight, bias))
    result["product_ms"] = _alone_ms(lambda: F.linear(x, weight, bias))
    result["product_then_activation_ms"] = _alone_ms(lambda: F.silu(F.linear(x, weight, bias), inplace=True))
    for shape in (
        SHAPE,
        Shape(256, 128, 64, 1, 8, 4, True),
        Shape(128, 128, 64, 2, 4, 3, False),
    ):
        name = " ".join(map(str, shape))
        try:
            found = active_product(x, weight, bias, shape=shape)
            share = float((found.float() - expected.float()).norm() / expected.float().norm())
            milliseconds = _alone_ms(partial(active_product, x, weight, bias, shape=shape))
            result[name] = {"ms": milliseconds, "difference": share}
        except Exception as error:
            result[name] = str(error)[:200]
        print(json.dumps(result), flush=True)


def _measure_norms(result: dict[str, Any]) -> None:
    """The memory-bound kernels of encoding by how many warps have a row; `floor_ms` is 4.3 TB/s."""
    from gare.encoders import add_norm_cuda

    pictures = 1 if IS_SMALL else 1536
    states = torch.randn(pictures, 50, 768, device=DEVICE).half()
    one, other = torch.randn(2, pictures, 50, 768, device=DEVICE).bfloat16()
    weight, bias = torch.randn(2, 768, device=DEVICE)
    patches, moved = one[:, 1:].contiguous(), torch.randn(50, 768, device=DEVICE)
    norm, unit = (weight, bias, 1e-5), states.numel() * 2
    kept = add_norm_cuda._warps
    for warps in (1, 2, 4):
        add_norm_cuda._warps = lambda _, warps=warps: warps  # type: ignore[misc]
        for name, moves, call in (
            ("two branches", 5, lambda: add_norm_cuda.add_norm(states, (one, other), *norm)),
            ("sum not kept", 3, lambda: add_norm_cuda.add_norm(states, (one,), *norm, keeps_sum=False)),
            (
                "embedding",
                3,
                lambda: add_norm_cuda.embed_norm(patches, moved, norm, norm, states_dtype=torch.float16),
            ),
        ):
            result[f"norm, {name}, {warps} warps"] = {
                "ms": _alone_ms(call),
                "floor_ms": moves * unit / 4.3e9,
            }
        print(json.dumps(result), flush=True)
    add_norm_cuda._warps = kept


def encode() -> dict[str, Any]:
    """`gare bench encode --backbone clip --videos 128`, as shipped."""
    return vars(benchmark_encode("clip", frames=12, device=DEVICE, batch=2 if IS_SMALL else 128))


def _kernels(function: Callable[[], object], most: int = 22) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    function()
    activity = ProfilerActivity.CPU if IS_SMALL else ProfilerActivity.CUDA
    with profile(activities=[activity]) as run:
        function()
        if not IS_SMALL:
            torch.cuda.synchronize()
    totals = [
        (event.key[:90], event.count, event.self_cpu_time_total if IS_SMALL else event.self_device_time_total)
        for event in run.key_averages()
    ]
    totals.sort(key=lambda row: -row[2])
    kernels = [(name, count, round(us / 1000, 3)) for name, count, us in totals[:most]]
    return {"kernels_ms": kernels, "all_kernels_ms": sum(us for _, _, us in totals) / 1000}


PARTS: list[Callable[[], dict[str, Any]]] = [
    train_graph,
    encode_now,
    train_now,
    exactness,
    tower,
    encode,
    train,
    train_with_bare,
    attention,
]


# --- the run ------------------------------------------------------------------------------------------------


def main() -> None:
    """Every part in turn, or those that are named; in a child process one of them."""
    words = [word for word in sys.argv[1:] if word != "--small"]
    if words and words[0] == "--part":
        part = next(part for part in PARTS if part.__name__ == words[1])
        print(json.dumps(part(), default=str))
        return
    out = None
    if "--out" in words:
        place = words.index("--out")
        out, words = Path(words[place + 1]), words[:place] + words[place + 2 :]
    end = time.monotonic() + (float(words[0]) if words else 600.0)
    names = words[1:] or [part.__name__ for part in PARTS]
    lines: list[dict[str, Any]] = []
    for name in names:
        left = end - time.monotonic()
        started = time.monotonic()
        line = {"error": "no time left"} if left < 5 else _in_process(name, min(left, MOST_S))
        lines.append({"part": name, "took_s": round(time.monotonic() - started, 1)} | line)
        print(json.dumps(lines[-1]), flush=True)
        if out is not None:
            out.write_text(json.dumps({"command": " ".join(sys.argv), "lines": lines}, indent=1))


def _in_process(name: str, seconds: float) -> dict[str, Any]:
    """The last line that a part printed, whether it came to its end or not."""
    command = [sys.executable, __file__, "--part", name, *(["--small"] if IS_SMALL else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        printed, failed = done.stdout, None if done.returncode == 0 else done.stderr[-1500:]
    except subprocess.TimeoutExpired as late:
        found = late.stdout or b""
        printed = found.decode() if isinstance(found, bytes) else found
        failed = f"more than {seconds:.0f} s"
    result = last_result(printed)
    return result if failed is None else result | {"error": failed}


def last_result(printed: str) -> dict[str, Any]:
    """The last whole line of JSON: a part that is stopped may leave half of one."""
    for line in reversed(printed.splitlines()):
        try:
            result: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict):
            return result
    return {}


if __name__ == "__main__":
    main()

"""Training and encoding on a GPU, one change at a time: what docs/benchmarks.md says of both comes from here.

    python experiments/gpu_train.py [SECONDS] [PART …] [--out FILE] [--small]

Prints a JSON line for each part as it is ready, the most telling first, and writes all of them to FILE. Each
part is a process of its own, ended when its time is over; the next one follows. `--small` runs everything on
a CPU, to try it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gare.bench.bench_timing import median_ms
from gare.bench.encode_bench import benchmark_encode, random_clip
from gare.bench.train_bench import benchmark_train
from gare.encoders import bfloat16_layers, short_attention
from gare.encoders.clip_encoder import ClipEncoder, FirstPlaceLayer
from gare.encoders.encoder import Encoder
from gare.model import GareConfig

IS_SMALL = "--small" in sys.argv
DEVICE = torch.device("cpu" if IS_SMALL else "cuda")
MOST_S = 110.0


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
    return train_with_bare() | _kernels(taken[-1])


def train_with_bare() -> dict[str, Any]:
    """`gare bench train`, as shipped."""
    model = GareConfig.load({"encoder": {"name": "clip"}} if not IS_SMALL else {"encoder": {"name": "tiny"}})
    size = {"batch_size": 4, "frames": 2} if IS_SMALL else {"batch_size": 128, "frames": 12}
    result = benchmark_train(model=model, device=DEVICE, compiled=not IS_SMALL, chunk_size=None, **size)
    return vars(result)


def train_with_short_attention() -> dict[str, Any]:
    """With the kernels of attention, which encoding alone uses."""
    short_attention.is_short = lambda *_: True
    return train()


def train_keeping_more() -> dict[str, Any]:
    """Backward keeps what torch.compile chooses."""
    ClipEncoder.compile_towers = Encoder.compile_towers  # type: ignore[method-assign]
    return train()


def train_tuned() -> dict[str, Any]:
    """Shapes of the compiled kernels are tried one by one."""
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = True
    return train()


def train_cudnn() -> dict[str, Any]:
    """Attention by cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return train()


def train_keeping_more_cudnn() -> dict[str, Any]:
    """Both."""
    ClipEncoder.compile_towers = Encoder.compile_towers  # type: ignore[method-assign]
    return train_cudnn()


def train_all_places() -> dict[str, Any]:
    """The last layer computes every place, as it did before."""
    FirstPlaceLayer.make = staticmethod(lambda layer: None)  # type: ignore[method-assign]
    return train()


@torch.no_grad()
def encode_variants() -> dict[str, Any]:
    """128 videos at once: as shipped, as a CUDA graph, compiled; the least cosine with vectors in float32."""
    model = random_clip().to(DEVICE).eval()
    encoder, total = model.encoder, 24 if IS_SMALL else 1536
    bytes_NCHW = torch.randint(256, (total, 3, 224, 224), dtype=torch.uint8, device=DEVICE)
    some = bytes_NCHW[:24]
    exact_ND = encoder.image_features(encoder.image_format.normalise(some)).double()

    def cosine(found_ND: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(found_ND[:24].double(), exact_ND).min())

    def shipped() -> torch.Tensor:
        return encoder.encode_frames(bytes_NCHW)

    result: dict[str, Any] = {"least_cosine": cosine(shipped()), "shipped_ms": median_ms(shipped, DEVICE)}
    result |= _kernels(shipped)
    if not IS_SMALL:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept_ND = shipped()
            result["graph_ms"] = median_ms(graph.replay, DEVICE)
            result["graph_cosine"] = cosine(kept_ND)
        except Exception as error:
            result["graph_error"] = str(error)[:300]
    print(json.dumps(result), flush=True)  # what follows may take too long
    encoder.compile_towers()

    def compiled() -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return encoder.encode_frames(bytes_NCHW)

    result["compiled_cosine"] = cosine(compiled())
    result["compiled_ms"] = median_ms(compiled, DEVICE)
    return result


def encode() -> dict[str, Any]:
    """`gare bench encode --backbone clip --videos 128`, as shipped."""
    return vars(benchmark_encode("clip", frames=12, device=DEVICE, batch=2 if IS_SMALL else 128))


def encode_in_parts() -> dict[str, Any]:
    """Fewer pictures at a time, so that what passes between kernels stays in the cache; and the kernels."""
    model = random_clip().to(DEVICE).eval()
    total = 24 if IS_SMALL else 1536
    bytes_NCHW = torch.randint(256, (total, 3, 224, 224), dtype=torch.uint8, device=DEVICE)
    result: dict[str, Any] = {"is_fast": bfloat16_layers.is_wanted(DEVICE)}
    with torch.no_grad():
        for size in (12, 24) if IS_SMALL else (96, 128, 192, 256, 384, 768, 1536):

            def call(size: int = size) -> object:
                return [model.encoder.encode_frames(part) for part in bytes_NCHW.split(size)]

            result[f"ms_by_{size}"] = median_ms(call, DEVICE)
        return result | _kernels(lambda: model.encoder.encode_frames(bytes_NCHW))


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
    encode_variants,
    train,
    train_keeping_more,
    train_cudnn,
    train_keeping_more_cudnn,
    train_all_places,
    train_with_short_attention,
    train_tuned,
    train_with_bare,
    encode,
    encode_in_parts,
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
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return result if failed is None else result | {"error": failed}


if __name__ == "__main__":
    main()

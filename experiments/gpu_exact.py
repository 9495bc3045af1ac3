"""Everything about exact search that only a GPU can tell, in one run of less than three minutes.

    python experiments/gpu_exact.py [SECONDS]

Prints a JSON line for each result as it comes, the most important first: scores in one kernel beside the bare
matrix product, then a million videos in the GPU's memory beside the bare reading of their bytes. Every part
has its own time, and what fails is a line with its error. Kernels are compiled before, a process for each.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gare.bench.resident_bench import ResidentCase, benchmark_resident
from gare.interaction import GapAware, GapAwareConfig, gap_aware_cuda
from gare.types import TextFeatures, VideoFeatures

STARTED = time.perf_counter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def say(name: str, **values: Any) -> None:
    """One line of results."""
    print(
        json.dumps({"part": name, "at_s": round(time.perf_counter() - STARTED, 1)} | values, default=str),
        flush=True,
    )


def run(name: str, part: Callable[[], dict[str, Any]], seconds: float) -> None:
    """A part of the run, for so long at most; whatever happens, the next one follows."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        say(name, **part())
    except BaseException as error:
        say(name, error=f"{type(error).__name__}: {error}"[:500], where=traceback.format_exc()[-700:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def event_ms(function: Callable[[], object], repeats: int = 30) -> float:
    """Median milliseconds on the device, by events; every call begins with an empty queue."""
    function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def wall_ms(function: Callable[[], object], repeats: int = 30) -> float:
    """Median milliseconds by the clock, as `gare bench scoring` takes them."""
    function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


# --- scores -------------------------------------------------------------------------------------------------


@torch.no_grad()
def scores(num_texts: int, num_videos: int, dtype: torch.dtype) -> dict[str, Any]:
    """One head, text-conditioned pooling; the first 64 × 64 pairs compared with float64."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    text, frames_VFD = TextFeatures.from_vectors(random(num_texts, 512)), random(num_videos, 12, 512)
    mask_VF = torch.ones(num_videos, 12, dtype=torch.bool, device=DEVICE)
    torch.manual_seed(0)
    exact = GapAware(GapAwareConfig(pooling="text_conditioned"), 512).eval().to(DEVICE, dtype)
    cards = exact.cards(VideoFeatures(frames_VFD, mask_VF))
    found_TV = exact.score(text, cards)
    some = VideoFeatures(frames_VFD[:64].double(), mask_VF[:64])
    true_TV = exact.to(torch.float64).score_pairs(text[:64].to(torch.float64), some).scores_TV
    error = (found_TV[:64, :64].double() - true_TV).abs().max().item()
    exact.to(dtype)
    rows_ND, text_DT = random(36 * num_videos, 512), text.text_TD.mT.contiguous()
    floor_ms = event_ms(lambda: rows_ND @ text_DT)
    kernel = gap_aware_cuda._score_kernel
    return {
        "texts": num_texts,
        "videos": num_videos,
        "dtype": str(dtype),
        "wall_ms": wall_ms(lambda: exact.score(text, cards)),
        "device_ms": event_ms(lambda: exact.score(text, cards)),
        "floor_ms": floor_ms,
        "largest_error": error,
        "shape": str(getattr(kernel, "best_config", "")),
        "shapes_ms": {str(config): ms[0] for config, ms in getattr(kernel, "configs_timings", {}).items()},
    }


def resident(case: ResidentCase, check: int) -> dict[str, Any]:
    """Proven lists of a table on the device."""
    torch.cuda.reset_peak_memory_stats()
    result = benchmark_resident(case, device=DEVICE, check=check, say=lambda line: None)
    peak_gb = torch.cuda.max_memory_allocated() / 1e9
    return dataclasses.asdict(result) | {"peak_gb": peak_gb}


# --- compiling ----------------------------------------------------------------------------------------------

KERNELS = [
    *[f"scores:bfloat16:many:{number}" for number in range(len(gap_aware_cuda.MANY))],
    *[f"scores:bfloat16:few:{number}" for number in range(len(gap_aware_cuda.FEW))],
    "resident:wide",
    "resident:bytes",
]


def compile_kernel(name: str) -> None:
    """Run a kernel once, small: it is then in Triton's cache for the process that times it."""
    kind, *rest = name.split(":")
    if kind == "resident":
        case = ResidentCase(256, 16, 10, wide_keys=rest[0] == "wide")
        benchmark_resident(case, device=DEVICE, check=0, say=lambda line: None)
        return
    kernel = gap_aware_cuda._score_kernel
    shapes = gap_aware_cuda.configs(gap_aware_cuda.MANY if rest[1] == "many" else gap_aware_cuda.FEW)
    kernel.configs = [shapes[int(rest[2])]]
    scores(64 if rest[1] == "many" else 1, 64, getattr(torch, rest[0]))


def start_compiling() -> dict[str, subprocess.Popen[str]]:
    """All kernels at once, a process each."""
    command = [sys.executable, __file__, "--compile"]
    return {name: subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in KERNELS}


def wait_for_kernels(running: dict[str, subprocess.Popen[str]], kind: str, seconds: float) -> dict[str, Any]:
    """Until those of a kind are compiled; what is late is compiled again by whoever needs it."""
    until, failed = time.perf_counter() + seconds, {}
    for name, process in running.items():
        if not name.startswith(kind):
            continue
        try:
            _, error = process.communicate(timeout=max(0.1, until - time.perf_counter()))
            if process.returncode:
                failed[name] = error[-400:]
        except subprocess.TimeoutExpired:
            process.kill()
            failed[name] = "not in time"
    return {"kind": kind, "failed": failed}


def main(seconds: float) -> None:
    """All parts, as long as there is time."""

    def left() -> float:
        return seconds - (time.perf_counter() - STARTED)

    half = torch.bfloat16
    running = start_compiling()
    run("compile", lambda: wait_for_kernels(running, "scores", 45), left())
    run("scores", lambda: scores(1000, 1000, half), min(25, left()))
    run("scores", lambda: scores(1000, 10_000, half), min(25, left()))
    run("scores", lambda: scores(1, 10_000, half), min(25, left()))
    run("compile", lambda: wait_for_kernels(running, "resident", min(45, left() / 2)), left())
    for wide in (True, False):
        case = ResidentCase(1_000_000, 16, 100, wide_keys=wide)
        run("resident", lambda case=case: resident(case, 4), min(60, left()))  # type: ignore[misc]
    larger = ResidentCase(100_000, 16, 10, scale=10)
    run("resident", lambda: resident(larger, 16), left())
    run("resident", lambda: resident(ResidentCase(1_000_000, 16, 100, host_frames=True), 0), left())
    run("scores", lambda: scores(1000, 1000, torch.float32), left())
    for process in running.values():
        process.kill()


if __name__ == "__main__":
    if "--compile" in sys.argv:
        compile_kernel(sys.argv[-1])
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 160)

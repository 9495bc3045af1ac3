"""Everything about exact search that only a GPU can tell, in one run of less than four minutes.

    PYTHONPATH=src python experiments/gpu_exact.py [SECONDS [SHRINK]] [--out FILE] [--only WORD]

Prints a JSON line for each result as soon as it is there, and writes all of them to FILE: scores in one
kernel beside the bare matrix product; a million videos and 100,000 in the GPU's memory beside the bare
reading of their bytes, which step and which kernel takes how long, the search without one of its shortcuts,
each shape of a kernel, lists compared with float64 of every pair; a library on the GPU, where a store is
installed. Every part has its own time. What fails or is late is a line with its
error and what it had measured, and the next one follows. Kernels are compiled before, a process for each.
`--only` runs the parts whose names have WORD in them, to go on after an error that a device does not
survive. SHRINK divides all sizes: with 20,000 and TRITON_INTERPRET=1 it runs on a CPU, to be tried before a
GPU is lent.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gare.bench.bench_timing import wait_for
from gare.bench.resident_bench import ResidentCase, ResidentRun
from gare.interaction import (
    GapAware,
    GapAwareConfig,
    ball_bounds_cuda,
    gap_aware_cuda,
    kernel_calls_cuda,
    key_bounds_cuda,
    pair_scores_cuda,
    resident_table,
)
from gare.types import TextFeatures, VideoFeatures

STARTED = time.perf_counter()
LINES: list[dict[str, Any]] = []
KEPT: dict[str, Any] = {}
"""What the present part has measured so far: it is said even if the part does not come to its end."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def option(name: str) -> str | None:
    """What stands after the name of an option."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


OUT, ONLY = option("--out"), option("--only") or ""


def say(name: str, **values: Any) -> None:
    """One line of results."""
    LINES.append({"part": name, "at_s": round(time.perf_counter() - STARTED, 1)} | values)
    print(json.dumps(LINES[-1], default=str), flush=True)
    if OUT is not None:
        Path(OUT).write_text(
            json.dumps({"command": " ".join(sys.argv), "lines": LINES}, indent=1, default=str)
        )


def run(name: str, part: Callable[[], dict[str, Any]], seconds: float) -> None:
    """A part of the run, for so long at most; whatever happens, the next one follows."""
    if ONLY not in name:
        return
    KEPT.clear()
    if seconds < 2:
        say(name, skipped="no time is left")
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        say(name, **part())
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"[:500]
        say(name, **KEPT, error=what, where=traceback.format_exc()[-700:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def event_ms(function: Callable[[], object], repeats: int = 30) -> float:
    """Median milliseconds on the device, by events; every call begins with an empty queue."""
    if DEVICE.type != "cuda":
        return wall_ms(function, 3)
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
        wait_for(DEVICE)
        begin = time.perf_counter()
        function()
        wait_for(DEVICE)
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def host_us(function: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds that a call keeps the host, the device behind it still at work."""
    wait_for(DEVICE)
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    passed = time.perf_counter() - begin
    wait_for(DEVICE)
    return 1e6 * passed / repeats


# --- scores -------------------------------------------------------------------------------------------------


def random_case(num_texts: int, num_videos: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """One head, text-conditioned pooling, videos of 12 frames; the last are numbers for a bare product."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    text, frames_VFD = TextFeatures.from_vectors(random(num_texts, 512)), random(num_videos, 12, 512)
    mask_VF = torch.ones(num_videos, 12, dtype=torch.bool, device=DEVICE)
    torch.manual_seed(0)
    exact = GapAware(GapAwareConfig(pooling="text_conditioned"), 512).eval().to(DEVICE, dtype)
    return exact, text, VideoFeatures(frames_VFD, mask_VF), random


@torch.no_grad()
def scores(num_texts: int, num_videos: int, dtype: torch.dtype) -> dict[str, Any]:
    """All scores in one kernel; the first 64 × 64 pairs compared with float64."""
    exact, text, video, random = random_case(num_texts, num_videos, dtype)
    cards = exact.cards(video)
    found_TV = exact.score(text, cards)
    some = video[:64].to(torch.float64)
    true_TV = exact.to(torch.float64).score_pairs(text[:64].to(torch.float64), some).scores_TV
    error = (found_TV[:64, :64].double() - true_TV).abs().max().item()
    exact.to(dtype)
    rows_ND, text_DT = random(36 * num_videos, 512), text.text_TD.mT.contiguous()
    KEPT.update(texts=num_texts, videos=num_videos, dtype=str(dtype), largest_error=error)
    KEPT["floor_ms"] = event_ms(lambda: rows_ND @ text_DT)
    KEPT["device_ms"] = event_ms(lambda: exact.score(text, cards))
    KEPT["wall_ms"] = wall_ms(lambda: exact.score(text, cards))
    KEPT["host_us"] = host_us(lambda: exact.score(text, cards))
    kernel = gap_aware_cuda._score_kernel
    KEPT["shape"] = str(getattr(kernel, "best_config", ""))
    timings = getattr(kernel, "configs_timings", None) or {}
    KEPT["shapes_ms"] = {str(config): ms[0] for config, ms in timings.items()}
    if DEVICE.type == "cuda":
        KEPT["kernels_ms"] = kernel_ms(lambda: exact.score(text, cards))["kernels_ms"]
    return KEPT


# --- a table on the GPU -------------------------------------------------------------------------------------


def resident(
    name: str,
    case: ResidentCase,
    check: int,
    left: Callable[[], float],
    *,
    looks_inside: bool = False,
) -> None:
    """Fill a table, time it, look into it, check its lists: a line for each."""
    made: list[ResidentRun] = []

    def fill() -> dict[str, Any]:
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        filled = ResidentRun(case, DEVICE)
        seconds = filled.fill()
        made.append(filled)
        return {"case": dataclasses.asdict(case), "seconds": seconds, "gb": filled.table_bytes / 1e9}

    def times() -> dict[str, Any]:
        peak = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if DEVICE.type == "cuda" else {}
        return dataclasses.asdict(made[0].time()) | peak

    run(f"{name}: fill", fill, min(60, left()))
    if not made:
        return
    run(f"{name}: times", times, min(25, left()))
    if DEVICE.type == "cuda":
        run(f"{name}: kernels", lambda: kernel_ms(made[0].search), min(15, left()))
    if check:
        run(f"{name}: check", lambda: dataclasses.asdict(made[0].check(check)), min(40, left()))
    if looks_inside:
        run(f"{name}: steps", lambda: steps_ms(made[0]), min(20, left()))
        run(f"{name}: without", lambda: without(made[0]), min(30, left()))
        run(f"{name}: shapes", lambda: shapes_ms(made[0]), min(40, left()))


@torch.no_grad()
def steps_ms(made: ResidentRun) -> dict[str, Any]:
    """Each step of a search alone: what it gives the next is made before."""
    table, text_TD, top = made._table, made.text.text_TD, made.case.top
    used = tuple(chunk.used for chunk in table._chunks)
    for _ in range(3):  # recorded, where there is a GPU
        begun = table._replayed(table._begin, text_TD, top, used)
    rows_U = begun.is_left_V.nonzero()[:, 0]
    lower_TU, upper_TU = table._bounds_at(begun.planes, rows_U)
    upper_TU = torch.minimum(upper_TU, begun.upper_TV[:, rows_U])
    least_T = torch.maximum(begun.least_T, resident_table._last_of(lower_TU, top))
    search = resident_table.ProvenPairs(upper_TU, rows_U, least_T, top)
    pair_P2, _ = search.left(least_T)
    own_P = pair_P2[:, 0].contiguous()
    video, text_TD64 = made._fetch(rows_U[pair_P2[:, 1]]), text_TD.double()
    score_P = table._scorer(text_TD64, own_P, video)
    reference_P = table._double.score_each(
        TextFeatures.from_vectors(text_TD64[own_P]), video.to(torch.float64)
    )
    steps: dict[str, Callable[[], object]] = {
        "texts as integers": lambda: table._planes(text_TD),
        "first rung": lambda: table._first_rung(begun.planes, top),
        "begin, replayed": lambda: table._replayed(table._begin, text_TD, top, used),
        "begin, not replayed": lambda: table._begin(text_TD, top, used),
        "rows left": lambda: begun.is_left_V.nonzero(),
        "bounds by keys": lambda: table._bounds_at(begun.planes, rows_U),
        "pairs left": lambda: search.left(least_T),
        "frames": lambda: made._fetch(rows_U[pair_P2[:, 1]]),
        "scores": lambda: table._scorer(text_TD64, own_P, video),
        "lists": lambda: resident_table.ProvenPairs(upper_TU.clone(), rows_U, least_T, top).add(
            pair_P2, score_P
        ),
    }
    KEPT.update(rows=len(rows_U), pairs=len(pair_P2), device_ms={}, host_us={})
    KEPT["largest_difference"] = (score_P - reference_P).abs().max().item()
    for name, step in steps.items():
        KEPT["device_ms"][name], KEPT["host_us"][name] = event_ms(step), host_us(step)
    return KEPT


def without(made: ResidentRun) -> dict[str, Any]:
    """A search as it is, and without one of the things that are to make it faster."""
    table, found = made._table, KEPT.setdefault("search_ms", {})
    found["as shipped"] = wall_ms(made.search)
    replayed = table._replayed
    table.__dict__["_replayed"] = lambda function, *arguments: function(*arguments)
    try:
        found["kernels launched one by one"] = wall_ms(made.search)
    finally:
        table.__dict__["_replayed"] = replayed
    largest = pair_scores_cuda._LARGEST_TILE
    pair_scores_cuda._LARGEST_TILE, resident_table._WHOLE_AT_ONCE = 0, 4096
    try:
        found["pairs scored by torch"] = wall_ms(made.search)
    finally:
        pair_scores_cuda._LARGEST_TILE = largest
    found["as shipped, again"] = wall_ms(made.search)
    return KEPT


TUNED = {
    "first": (ball_bounds_cuda._first_kernel, ball_bounds_cuda.FIRST_CONFIGS),
    "product": (key_bounds_cuda._product_kernel, key_bounds_cuda.PRODUCT_CONFIGS),
    "bounds": (key_bounds_cuda._bounds_kernel, key_bounds_cuda.BOUNDS_CONFIGS),
}


def choose(kernel: Any, shapes: list[Any]) -> None:
    """From now on a kernel has one of these shapes."""
    kernel.configs = shapes
    kernel.cache.clear()
    kernel_calls_cuda._chosen.clear()
    kernel_calls_cuda._compiled.clear()


def shapes_ms(made: ResidentRun) -> dict[str, Any]:
    """Each shape of the kernels of both rungs over all videos, the others as they were chosen."""
    table, text = made._table, made.text
    passes: dict[str, Callable[[], object]] = {
        "first": lambda: table.first_rung(text, made.case.top),
        "product": lambda: table.bounds(text),
        "bounds": lambda: table.bounds(text),
    }
    for name, (kernel, shapes) in TUNED.items():
        found = KEPT[name] = {"chosen": str(getattr(kernel, "best_config", ""))}
        try:
            for shape in shapes:
                choose(kernel, [shape])
                found[str(shape)] = event_or_error(passes[name])
        finally:
            choose(kernel, shapes)
    return KEPT


def event_or_error(function: Callable[[], object]) -> float | str:
    """Milliseconds on the device; where a shape does not fit it, what it says."""
    try:
        return event_ms(function, 5)
    except TimeoutError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def kernel_ms(function: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of a call by kernel, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    function()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    times = {event.key[:80]: event.self_device_time_total / 1000 for event in found.key_averages()}
    longest = sorted(times, key=times.__getitem__, reverse=True)[:12]
    return {
        "total_ms": sum(times.values()),
        "kernels_ms": {name: times[name] for name in longest},
        "shapes": {name: str(getattr(kernel, "best_config", "")) for name, (kernel, _) in TUNED.items()},
    }


def on_library(num_items: int) -> dict[str, Any]:
    """A library in a folder, exact searches from the GPU's memory beside exhaustive ones."""
    missing = [name for name in ("pyarrow", "lance") if find_spec(name) is None]
    if missing:
        return {"skipped": f"{' and '.join(missing)} are not installed here"}
    from gare.bench.exact_bench import ExactCase, compare_library

    case = ExactCase(
        num_items=num_items,
        dim=512,
        frames=12,
        top=10,
        scale=1.0,
        pooling="text_conditioned",
        corrected_side="text",
    )
    compared = compare_library(case, queries=10, folder=None, say=lambda line: None, device=DEVICE.type)
    return dataclasses.asdict(compared) | {"items": case.num_items}


# --- compiling ----------------------------------------------------------------------------------------------

SIZES = {"bfloat16": ("40:40", "40:48", "1:48"), "float32": ("40:40",)}
"""Sizes that Triton compiles for as for those that are timed: multiples of 16 or not, one text or many."""
SHAPES = 2
"""Of the kernel of all scores, for such videos."""
KERNELS = [
    *[
        f"scores:{dtype}:{size}:{number}"
        for dtype, sizes in SIZES.items()
        for size in sizes
        for number in range(SHAPES)
    ],
    *[f"resident:wide:{number}" for number in range(3)],
    "resident:bytes:0",
]


@torch.no_grad()
def compile_kernel(name: str) -> None:
    """Run a kernel once, small: it is then in Triton's cache for the process that times it."""
    kind, *rest = name.split(":")
    if kind == "resident":
        made = ResidentRun(ResidentCase(2048, 16, 100, wide_keys=rest[0] == "wide"), DEVICE)
        made.fill()
        # One shape: who searches later times them in peace.
        for kernel, all_shapes in TUNED.values():
            choose(kernel, [all_shapes[min(int(rest[1]), len(all_shapes) - 1)]])
        made.search()
        return
    dtype, num_texts, num_videos, number = rest
    kernel = gap_aware_cuda._score_kernel
    fitting = gap_aware_cuda.fitting(kernel.configs, {}, FRAMES=16, HEADS=1, FEW=num_texts == "1")
    assert len(fitting) == SHAPES
    kernel.configs = [fitting[int(number)]]
    exact, text, video, _ = random_case(int(num_texts), int(num_videos), getattr(torch, dtype))
    exact.score(text, exact.cards(video))


def start_compiling(names: list[str]) -> dict[str, subprocess.Popen[str]]:
    """All kernels at once, a process each."""
    command = [sys.executable, __file__, "--compile"]
    return {name: subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in names}


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


def main(seconds: float, shrink: int) -> None:
    """All parts, as long as there is time; `shrink` divides the sizes."""

    def left() -> float:
        return seconds - (time.perf_counter() - STARTED)

    half = torch.bfloat16
    few, many = max(2, 1000 // shrink), max(2, 10_000 // shrink)
    names = [name for name in KERNELS if ONLY in name and DEVICE.type == "cuda"]
    running = start_compiling(names)
    smaller = ResidentCase(100_000 // shrink, 16, 100)
    million = replace(smaller, num_items=1_000_000 // shrink)
    run("compile scores", lambda: wait_for_kernels(running, "scores", min(45, 0.6 * left())), left())
    run("scores", lambda: scores(few, few, half), min(25, left()))
    run("scores", lambda: scores(few, many, half), min(25, left()))
    run("scores", lambda: scores(1, many, half), min(25, left()))
    run("compile resident", lambda: wait_for_kernels(running, "resident", min(45, left() / 2)), left())
    resident("1,000,000", million, 2, left, looks_inside=True)
    resident("100,000, weights × 10", replace(smaller, scale=10), 16, left)
    resident("1,000,000, keys of one byte", replace(million, wide_keys=False), 0, left)
    for scale in (1, 10):  # the lists of many texts
        asked = replace(smaller, num_texts=few, top=10, scale=scale)
        resident(f"100,000 for {few:,} texts, weights × {scale}", asked, few, left)
    resident("100,000", smaller, 16, left, looks_inside=DEVICE.type != "cuda")
    run("library", lambda: on_library(20_000 // shrink), min(40, left()))
    if DEVICE.type == "cuda":
        resident("1,000,000, frames in main memory", replace(million, host_frames=True), 0, left)
    run("scores", lambda: scores(few, few, torch.float32), left())
    for process in running.values():
        process.kill()


if __name__ == "__main__":
    if "--compile" in sys.argv:
        compile_kernel(sys.argv[-1])
    else:
        given = {OUT, ONLY, "--out", "--only"}
        words = [word for word in sys.argv[1:] if word not in given]
        main(float(words[0]) if words else 230.0, int(words[1]) if len(words) > 1 else 1)

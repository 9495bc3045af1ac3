"""Variants of the kernel of all scores beside each other, on one GPU in less than 90 seconds. Temporary.

    PYTHONPATH=src python experiments/score_variants.py --out FILE [--seconds 85] [--shrink 1]

Each variant is compiled by a process of its own, then held to float64, then timed at 1,000 × 1,000,
1,000 × 10,000 and 1 × 10,000. `device_ms` is a whole call whose queue is empty (events), `busy_ms` one of
twenty calls in a row (kernels alone, as good as), `host_us` what a call keeps the host. Every line is printed
and written at once. With TRITON_INTERPRET=1 and --shrink 250 it runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from gare.interaction import GapAware, GapAwareConfig, gap_aware_cuda, kernel_calls_cuda
from gare.types import TextFeatures, VideoFeatures

STARTED = time.perf_counter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LINES: list[dict[str, Any]] = []
WORKERS = 16
FAILED: dict[Any, str] = {}
"""Variants that are not compiled, and why."""


@dataclass(frozen=True)
class Variant:
    shape: tuple[int, int, int, int, int]
    warm: str = "prefetch"
    hoist: str = "memory"
    regs: bool = False
    numbers: str = "own loop"
    maxnreg: int | None = None
    dtype: str = "bfloat16"
    config: tuple[tuple[str, Any], ...] = ()
    frames: int = 12

    @property
    def is_few(self) -> bool:
        return self.shape[0] == 16

    def choose(self) -> None:
        """From now on the kernel is this one."""
        texts, columns, step, warps, stages = self.shape
        sizes = {"TEXTS": texts, "COLUMNS": columns, "STEP": step}
        more = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        kernel: Any = gap_aware_cuda._score_kernel
        kernel.configs = [triton.Config(sizes, num_warps=warps, num_stages=stages, **more)]
        kernel.cache.clear()
        kernel_calls_cuda._chosen.clear()
        kernel_calls_cuda._compiled.clear()
        gap_aware_cuda.WARM = "no" if INTERPRETED else self.warm
        gap_aware_cuda.HOIST = "memory" if INTERPRETED and self.hoist == "registers" else self.hoist
        gap_aware_cuda.REGS = self.regs and not INTERPRETED
        gap_aware_cuda.FEW_NUMBERS = self.numbers


TILE = (128, 32, 64, 4, 3)
KEEP = "registers"
MANY = [
    Variant(TILE, warm="no", hoist="no"),
    Variant(TILE, hoist="no"),
    Variant(TILE),
    Variant(TILE, hoist=KEEP),
    Variant(TILE, regs=True),
    Variant(TILE, hoist=KEEP, regs=True),
    Variant(TILE, warm="no", hoist=KEEP, regs=True),
    Variant(TILE, warm="load", hoist=KEEP, regs=True),
    Variant((128, 32, 64, 4, 4), hoist=KEEP, regs=True),
    Variant((128, 64, 64, 8, 3), hoist="no", regs=True),
    Variant((128, 64, 64, 8, 3), regs=True),
    Variant((128, 64, 64, 8, 3), hoist=KEEP, regs=True),
    Variant((128, 64, 64, 8, 4), regs=True),
    Variant((64, 64, 64, 4, 3), hoist="no", regs=True),
    Variant((64, 32, 64, 4, 3), hoist=KEEP),
    Variant((64, 32, 64, 4, 3), hoist=KEEP, regs=True),
    Variant((64, 32, 64, 4, 3), hoist=KEEP, regs=True, maxnreg=128),
    Variant((256, 32, 64, 8, 3), hoist=KEEP, regs=True),
]
FEW = [
    Variant((16, 32, 64, 2, 4), warm="no", hoist="no"),
    Variant((16, 32, 64, 2, 4), hoist="no", numbers="kernel"),
    Variant((16, 16, 64, 1, 4), warm="no", hoist="no", numbers="kernel"),
    Variant((16, 16, 64, 1, 4), hoist="no", numbers="kernel"),
    Variant((16, 16, 64, 1, 4), numbers="kernel"),
    Variant((16, 16, 64, 1, 4), hoist=KEEP, numbers="kernel"),
    Variant((16, 16, 64, 1, 4), warm="load", hoist=KEEP, numbers="kernel"),
    Variant((16, 16, 64, 1, 3), hoist=KEEP, numbers="kernel"),
    Variant((16, 16, 128, 1, 3), hoist=KEEP, numbers="kernel"),
    Variant((16, 16, 128, 1, 2), hoist=KEEP, numbers="kernel"),
    Variant((16, 16, 64, 1, 4), hoist=KEEP),
    Variant((16, 16, 64, 1, 4), hoist=KEEP, numbers="in loop"),
]
FULL = [
    Variant(TILE, warm="no", dtype="float32"),
    Variant(TILE, dtype="float32"),
    Variant((64, 32, 64, 4, 3), warm="no", dtype="float32"),
    Variant((64, 32, 64, 4, 3), dtype="float32"),
]
AXES = [
    replace(Variant(TILE, hoist=KEEP, regs=True), config=tuple(changes.items()), frames=frames)
    for changes, frames in [
        ({"pooling": "mean", "query": "text"}, 5),
        ({"mask_frames": False, "corrected_side": "video"}, 7),
        ({"num_heads": 2, "normalise": True}, 12),
        ({"gap_direction": "text_minus_video"}, 17),
    ]
]
AXES += [replace(AXES[1], shape=(16, 16, 64, 1, 4), numbers="kernel")]


def say(out: str | None, **values: Any) -> None:
    LINES.append({"at_s": round(time.perf_counter() - STARTED, 1)} | values)
    print(json.dumps(LINES[-1], default=str), flush=True)
    if out is not None:
        told = {"command": " ".join(sys.argv), "lines": LINES}
        Path(out).write_text(json.dumps(told, indent=1, default=str))


class Case:
    """Texts, videos and their cards; some of their pairs in float64."""

    def __init__(self, num_texts: int, num_videos: int, variant: Variant) -> None:
        dtype = getattr(torch, "float16" if INTERPRETED and variant.dtype == "bfloat16" else variant.dtype)
        generator = torch.Generator(DEVICE).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

        self.text = TextFeatures.from_vectors(random(num_texts, 512))
        frames_VFD = random(num_videos, variant.frames, 512)
        mask_VF = torch.ones(num_videos, variant.frames, dtype=torch.bool, device=DEVICE)
        mask_VF[::3, -2:] = False
        torch.manual_seed(0)
        config = replace(GapAwareConfig(pooling="text_conditioned"), **dict(variant.config))
        self.exact = GapAware(config, 512).eval().to(DEVICE, dtype)
        self.cards = self.exact.cards(VideoFeatures(frames_VFD, mask_VF))
        self.t = torch.cat([torch.arange(min(num_texts, 40)), torch.arange(num_texts)[-40:]]).to(DEVICE)
        self.v = torch.cat([torch.arange(min(num_videos, 24)), torch.arange(num_videos)[-24:]]).to(DEVICE)
        some = VideoFeatures(frames_VFD[self.v].double(), mask_VF[self.v])
        text = TextFeatures.from_vectors(self.text.text_TD[self.t].double())
        self.true_TV = self.exact.to(torch.float64).score_pairs(text, some).scores_TV
        self.exact.to(dtype)
        self.first_TV: Tensor | None = None
        self.num_rows = 3 * num_videos * variant.frames

    def score(self) -> Tensor:
        if DEVICE.type == "cpu":  # as if there were a GPU
            return gap_aware_cuda.score(self.text.text_TD, self.cards, self.exact.config)
        return self.exact.score(self.text, self.cards)

    def errors(self) -> dict[str, float]:
        """The largest error of three runs into poisoned memory, the largest difference of variants."""
        error = difference = 0.0
        for _ in range(1 if INTERPRETED else 3):
            poison = torch.full((len(self.text), len(self.cards)), float("nan"), device=DEVICE)
            del poison
            found_TV = self.score()
            part_TV = found_TV[self.t][:, self.v].double()
            error = max(error, (part_TV - self.true_TV).abs().nan_to_num(9).max().item())
            if self.first_TV is None:
                self.first_TV = found_TV
            difference = max(difference, (found_TV - self.first_TV).abs().nan_to_num(9).max().item())
        return {"largest_error": error, "largest_difference": difference}

    def times(self, repeats: int) -> dict[str, float]:
        return {
            "device_ms": event_ms(self.score, repeats),
            "busy_ms": busy_ms(self.score),
            "host_us": host_us(self.score),
        }


def event_ms(function: Any, repeats: int) -> float:
    """Median milliseconds by events; every call begins with an empty queue."""
    if DEVICE.type != "cuda":
        return 1e-3 * host_us(function, 1)
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


def busy_ms(function: Any, calls: int = 20) -> float:
    """Milliseconds a call where the device never waits for the host."""
    if DEVICE.type != "cuda":
        return 0.0
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # meanwhile the host is ahead
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def host_us(function: Any, calls: int = 20) -> float:
    """Microseconds that a call keeps the host, the device behind it still at work."""
    times = []
    for _ in range(3):
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        times.append(1e6 * (time.perf_counter() - begin) / calls)
    return statistics.median(times)


@torch.no_grad()
def compile_variant(number: int) -> None:
    """Run small what is timed later, with sizes that Triton compiles alike."""
    variant = every()[number]
    variant.choose()
    sizes = [(1, 48)] if variant.is_few else [(40, 40), (40, 48)]
    if variant.config or variant.dtype == "float32":
        sizes = [(5, 9)] if variant.is_few else [(40, 40)]
    for num_texts, num_videos in sizes:
        Case(num_texts, num_videos, variant).score()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compile_share(index: int) -> None:
    """Every sixteenth of them; a line for each."""
    for number in range(index, len(every()), WORKERS):
        try:
            compile_variant(number)
            print(json.dumps([number, None]), flush=True)
        except Exception as error:
            print(json.dumps([number, f"{type(error).__name__}: {error}"[:300]]), flush=True)


def every() -> list[Variant]:
    return [*MANY, *FEW, *FULL, *AXES]


def compile_all(seconds: float) -> dict[int, str]:
    """In sixteen processes; which of them failed, and why."""
    command = [sys.executable, __file__, "--compile"]
    workers = [
        subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for index in range(WORKERS)
    ]
    until, told = time.perf_counter() + seconds, {}
    for worker in workers:
        try:
            output = worker.communicate(timeout=max(0.1, until - time.perf_counter()))[0]
        except subprocess.TimeoutExpired:
            worker.kill()
            output = worker.communicate()[0]
        told |= dict(json.loads(line) for line in output.splitlines() if line.startswith("["))
    reasons = {number: told.get(number, "not in time") for number in range(len(every()))}
    return {number: reason for number, reason in reasons.items() if reason is not None}


@torch.no_grad()
def measure(out: str | None, left: Any, num_texts: int, num_videos: int, variants: list[Variant]) -> None:
    """All variants at one size."""
    case = Case(num_texts, num_videos, variants[0])
    size = {"texts": num_texts, "videos": num_videos}
    if not variants[0].config:
        rows_ND = torch.randn(case.num_rows, 512, device=DEVICE).to(case.text.text_TD.dtype)
        text_DT = case.text.text_TD.mT.contiguous()
        rows_ND @ text_DT
        say(out, **size, floor_ms=event_ms(lambda: rows_ND @ text_DT, 20))
        del rows_ND
    for variant in variants:
        if left() < 2 or variant in FAILED:
            reason = FAILED.get(variant, "no time is left")
            say(out, **size, variant=asdict(variant), skipped=reason)
            continue
        variant.choose()
        found: dict[str, Any] = {}
        try:
            found = case.errors()
            if not variant.config and not INTERPRETED:
                found |= case.times(20)
            say(out, **size, **found, variant=asdict(variant))
        except Exception as error:
            say(out, **size, **found, variant=asdict(variant), error=f"{type(error).__name__}: {error}"[:300])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--seconds", type=float, default=85)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--compile", type=int)
    given = parser.parse_args()
    if given.compile is not None:
        compile_share(given.compile)
        return

    def left() -> float:
        return float(given.seconds - (time.perf_counter() - STARTED))

    few, many = max(18, 1000 // given.shrink), max(2, 10_000 // given.shrink)
    if DEVICE.type == "cuda":
        failed = compile_all(given.seconds * 0.55)
        FAILED.update({every()[number]: reason for number, reason in failed.items()})
        say(given.out, failed=failed, variants=len(every()))
    measure(given.out, left, few, few, MANY)
    measure(given.out, left, few, many, MANY)
    measure(given.out, left, 1, many, FEW)
    for variant in AXES:
        measure(given.out, left, 5 if variant.is_few else 70, 9, [variant])
    measure(given.out, left, few, few, FULL)


if __name__ == "__main__":
    main()

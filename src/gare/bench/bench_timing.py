"""Wall-clock times and peak memory on a CPU and on a GPU, for every benchmark."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def median_ms(
    function: Callable[[], object], device: torch.device, *, seconds: float = 1.0, least: int = 3
) -> float:
    """Median milliseconds of a call: one warm-up, then at least `least` calls, for about `seconds`."""
    function()
    times: list[float] = []
    while len(times) < least or (sum(times) < 1000 * seconds and len(times) < 200):
        wait_for(device)
        start = time.perf_counter()
        function()
        wait_for(device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def describe_device(device: torch.device) -> str:
    """The name of a GPU, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def peak_memory_gb() -> float:
    """The most main memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9


def held_memory() -> int:
    """Bytes of main memory that this process holds now; what it held at most, where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return int(1e9 * peak_memory_gb())


def wait_for(device: torch.device) -> None:
    """Until all that was asked of a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

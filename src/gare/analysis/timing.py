"""Time and memory of a model beside its baseline, measured in turns so that both meet the same machine."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of a call, and the most memory its tensors held at a time, inputs not counted."""

    milliseconds: float
    peak_mb: float


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors made inside, alive at the same time; works on every device.

    >>> with PeakMemory() as memory:
    ...     for _ in range(3):
    ...         x = torch.zeros(1000, dtype=torch.float64)
    ...         del x
    >>> memory.peak
    8000
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in before | self._known:
                self._add(tensor.untyped_storage())
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._known.clear()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _add(self, storage: torch.UntypedStorage) -> None:
        size, address = storage.nbytes(), storage.data_ptr()
        if not size:
            return
        self._known.add(address)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self._known.discard(address)
        self._live -= size


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def measure_costs(
    functions: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int = 5
) -> dict[str, Cost]:
    """Each call once a round, in turn: what slows the machine down slows all of them."""
    peaks: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad():
        for name, function in functions.items():
            with PeakMemory() as memory:  # warms up as well
                function()
            peaks[name] = memory.peak / 1e6
        for _ in range(rounds):
            for name, function in functions.items():
                _wait(device)
                start = time.perf_counter()
                function()
                _wait(device)
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: Cost(statistics.median(times[name]), peaks[name]) for name in functions}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Calls of a GPU's kernels that cost the host little: launched as compiled, or many of them replayed as one.

Triton looks at every argument of a launch, and its autotuner at every shape: that takes longer than a small
kernel runs. Torch takes about five microseconds for each of its own.

Imports Triton, so others import this file only when it can run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

_log = logging.getLogger("gare.interaction")
_MOST_GRAPHS = 8

_chosen: dict[tuple[Any, ...], dict[str, Any]] = {}  # what the autotuner chose, by kernel and kind of call
_compiled: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}
"""Kernels as they were launched, with their constants, by all that they are compiled for."""


def launch(
    kernel: Any,
    num_programs: Callable[[dict[str, Any]], int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    *,
    kind: tuple[Any, ...] = (),
    **options: int,
) -> None:
    """Launch a kernel as it was compiled the last time; its parameters stand in the order of the arguments.

    Args:
        num_programs: how many, by the shape that the autotuner chose.
        kind: what the autotuner looks at besides the constants.
        options: warps and stages, where no autotuner chooses them.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    is_aligned = not any([address & 15 for address in addresses])
    known = (id(kernel), tensors[0].dtype, tensors[0].device, *kind, *constants.values())
    special = (*known, *options.values(), *[_specialised(number) for number in numbers])
    compiled, all_constants = _compiled.get(special, (None, constants)) if is_aligned else (None, constants)
    if compiled is not None:
        # Addresses are taken as they are, whereas of a tensor the launcher asks the driver where it lies.
        compiled.run(
            num_programs(all_constants), 1, 1, _stream(), compiled.function, compiled.packed_metadata,
            None, None, None, *addresses, *numbers, *all_constants.values(),
        )  # fmt: skip
        return
    shape: dict[str, Any] = {}
    if isinstance(kernel, Autotuner):
        found = _chosen.get(known)
        if found is None:
            kernel[lambda meta: (num_programs(meta),)](*tensors, *numbers, **constants)
            _chosen[known] = kernel.best_config.all_kwargs()
            return
        kernel = kernel.fn
        shape = {name: value for name, value in found.items() if name in kernel.arg_names}
        options = {name: value for name, value in found.items() if name not in shape}
    constants = constants | shape
    compiled = kernel[(num_programs(constants),)](*tensors, *numbers, **constants, **options)
    if is_aligned and hasattr(compiled, "packed_metadata"):  # the interpreter has nothing to keep
        _compiled[special] = (compiled, constants)


def _stream() -> int:
    device = driver.active.get_current_device()
    return int(driver.active.get_current_stream(device))


def _specialised(number: int | float) -> int:
    """What Triton compiles a number for: floats alike, ones apart, multiples of 16, those of eight bytes."""
    if number.__class__ is float:
        return 0
    return (number == 1) + 2 * (not number % 16) + 4 * (number >= 2**31)


class Replayed:
    """Calls of a function whose kernels, from the second call of a kind on, are launched all at once.

    The first call compiles what is missing. What a call gives is overwritten by the next. Where a GPU cannot
    record them, the log says so, and kernels are launched one by one.
    """

    def __init__(self) -> None:
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor, Any] | None] = {}
        self._can_record = True

    def __call__(self, function: Callable[..., Any], tensor: Tensor, *settings: Any) -> Any:
        """What the function gives.

        Args:
            function: always the same one. It waits for nothing, and launches the same kernels for tensors of
                one shape and equal settings.
        """
        kind = (tensor.shape, tensor.dtype, tensor.device, *settings)
        if tensor.device.type != "cuda" or not self._can_record:
            return function(tensor, *settings)
        if kind not in self._graphs:
            while len(self._graphs) >= _MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[kind] = None
            return function(tensor, *settings)
        stream = torch.cuda.current_stream(tensor.device)
        try:
            graph, own, found = self._graphs[kind] or self._record(kind, function, tensor, *settings)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch stays on that of the recording
            _log.warning("the first pass of exact searches is not replayed, which costs time: %s", error)
            self._can_record = False
            return function(tensor, *settings)
        own.copy_(tensor)
        graph.replay()
        return found

    def _record(
        self, kind: tuple[Any, ...], function: Callable[..., Any], tensor: Tensor, *settings: Any
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Any]:
        own, graph = tensor.clone(), torch.cuda.CUDAGraph()
        # Other threads go on allocating.
        with torch.cuda.device(tensor.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = function(own, *settings)
        self._graphs[kind] = made = (graph, own, found)
        return made

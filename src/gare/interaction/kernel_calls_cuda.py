"""Calls of a GPU's kernels that cost the host little: launched as compiled, or many of them replayed as one.

Triton looks at every argument of a launch, and its autotuner at every shape: that takes longer than a small
kernel runs. Torch takes about five microseconds for each of its own.

Imports Triton, so others import this file only when it can run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

_log = logging.getLogger("gare.interaction")
_MOST_GRAPHS = 8
_LAYOUT = "iiiKKppOOOOOO"
"""How Triton 3.6 passes a grid, a stream, a function, four settings, its data and three hooks."""
ALIGNMENT = 16
"""Triton compiles for addresses that are multiples of it."""

_chosen: dict[tuple[Any, ...], dict[str, Any]] = {}  # what the autotuner chose, by kernel and kind of call
_compiled: dict[tuple[Any, ...], Launch] = {}
"""Kernels as they were launched, by all that they are compiled for."""


class Launch:
    """A kernel as it was compiled: what is left to say is how many programs, where tensors lie, and numbers.

    Addresses, not tensors: of a tensor Triton's launcher asks the driver where it lies.
    """

    def __init__(self, compiled: Any, constants: dict[str, Any]) -> None:
        self.constants = constants
        self._run, self._settled = _launcher_of(compiled)
        self._values = tuple(constants.values())
        self._stream_of = driver.active.get_current_stream

    def __call__(
        self, num_programs: int, device: int, addresses: Sequence[int], numbers: tuple[float, ...]
    ) -> None:
        """Launch it on torch's stream; a graph that is being recorded gets it instead.

        Args:
            device: the index of the present one.
        """
        stream = self._stream_of(device)
        self._run(num_programs, 1, 1, stream, *self._settled, *addresses, *numbers, *self._values)


def _launcher_of(compiled: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """What launches a kernel, and what it is told between the stream and the kernel's own arguments.

    That is Triton's function in C, where it takes what it takes in Triton 3.6; else the method around it.
    """
    run = compiled.run
    no_hooks = (None, None, None)
    layout = getattr(sys.modules.get(type(run).__module__), "_BASE_ARGS_FORMAT", None)
    needs_room = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if layout != _LAYOUT or needs_room or not hasattr(run, "launch"):
        return run, (compiled.function, compiled.packed_metadata, *no_hooks)
    kind = (run.launch_cooperative_grid, run.launch_pdl, None, None)  # no room for its own use
    return run.launch, (compiled.function, *kind, compiled.packed_metadata, *no_hooks)


def is_watched() -> bool:
    """Whether a profiler asked Triton to be told of every launch: an ordinary one tells it."""
    hook = getattr(knobs.runtime, "launch_enter_hook", None)
    return bool(getattr(hook, "calls", hook))


def launch(
    kernel: Any,
    num_programs: Callable[[dict[str, Any]], int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    *,
    kind: tuple[Any, ...] = (),
    **options: int,
) -> Launch | None:
    """Launch a kernel as it was compiled the last time; its parameters stand in the order of the arguments.

    Args:
        num_programs: how many, by the shape that the autotuner chose.
        kind: what the autotuner looks at besides the constants.
        options: warps and stages, where no autotuner chooses them.

    Returns:
        What launches it again on tensors of the same types whose addresses are multiples of ALIGNMENT, and
        with numbers that Triton compiles alike. None the first time, or where there is nothing of the kind.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    is_ordinary = any([address % ALIGNMENT for address in addresses]) or is_watched()
    known = (id(kernel), tensors[0].dtype, tensors[0].device, *kind, *constants.values())
    special = (*known, *options.values(), *[_specialised(number) for number in numbers])
    again = None if is_ordinary else _compiled.get(special)
    if again is not None:
        again(num_programs(again.constants), tensors[0].get_device(), addresses, numbers)
        return again
    shape: dict[str, Any] = {}
    if isinstance(kernel, Autotuner):
        found = _chosen.get(known)
        if found is None:
            kernel[lambda meta: (num_programs(meta),)](*tensors, *numbers, **constants)
            _chosen[known] = kernel.best_config.all_kwargs()
            return None
        kernel = kernel.fn
        shape = {name: value for name, value in found.items() if name in kernel.arg_names}
        options = {name: value for name, value in found.items() if name not in shape}
    constants = constants | shape
    compiled = kernel[(num_programs(constants),)](*tensors, *numbers, **constants, **options)
    if not is_ordinary and hasattr(compiled, "packed_metadata"):  # the interpreter has nothing to keep
        _compiled[special] = Launch(compiled, constants)
    return None


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

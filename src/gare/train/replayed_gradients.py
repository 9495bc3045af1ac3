"""Gradients of a step whose kernels a GPU launches all at once: recorded as a CUDA graph, then replayed.

A step has more than a thousand kernels, and most are short. A CPU takes longer to ask for those one by one
than the GPU takes to run them. In a graph nothing on the host may depend on a batch: not its shape, not its
address, not the number of frames that the image tower is shown. So a batch is copied to where the first of
its kind lay, and whatever else could differ is compared before a replay.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gare.model import GARE
from gare.objective import Loss, ObjectiveConfig
from gare.train.distributed import Processes
from gare.train.gradient_step import Encode, PairBatch, compute_gradients, random_state

_log = logging.getLogger("gare.train")
_MOST_RECORDINGS = 3
"""Each keeps the gradients of all parameters and a batch; what lies between is in memory that they share."""
_EAGER_STEPS = 2
"""Steps of a kind of batch before it is recorded: kernels are compiled, libraries make their workspaces."""

Step = Callable[[], Loss]
Kind = tuple[Any, ...]


class Recording(Protocol):
    """A step as it was recorded. It writes its gradients and its loss to the same place every time."""

    @property
    def loss(self) -> Loss:
        """Where it writes its loss."""

    def replay(self, seed: int) -> None:
        """Run it again, with random numbers that follow from the seed; no other generator moves."""


class Recorder(Protocol):
    """What records steps."""

    def warm_up(self, step: Step) -> Loss:
        """Run a step in the way it will be recorded."""

    def record(self, step: Step) -> Recording:
        """Record a step, whether that runs it or not. `.grad` of the parameters is what replays write to.

        Raises:
            RuntimeError: it cannot be recorded.
        """

    def start_anew(self) -> None:
        """Called when every recording is gone."""


class ReplayedGradients:
    """`compute_gradients` for the batches of a run: replayed where that gives the same, as it is elsewhere.

    Recorded are steps of one process, of the whole batch at once, without teachers, into a model without
    gradients, in which nothing but the interaction draws random numbers. The first steps of each kind of
    batch run as they are. What cannot be recorded is said in the log once, and that batch and all others get
    their gradients without.

    A replay leaves its gradients in buffers that the next one overwrites: `.grad` may be changed in place and
    set to None, but who keeps a gradient over a step must copy it.

    Args:
        recorder: from `recorder_for`; None replays nothing.
        model, objective, processes, encode, chunk_size, average_towers, rounds_products: as in
            `compute_gradients`.
    """

    def __init__(
        self,
        model: GARE,
        objective: ObjectiveConfig,
        processes: Processes,
        *,
        encode: Encode,
        chunk_size: int | None = None,
        average_towers: bool = False,
        rounds_products: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._model, self._objective, self._processes = model, objective, processes
        self._options: dict[str, Any] = {
            "encode": encode,
            "chunk_size": chunk_size,
            "average_towers": average_towers,
            "rounds_products": rounds_products,
        }
        self._recorder = recorder if processes.world_size == 1 and chunk_size is None else None
        self._parameters, self._buffers = list(model.parameters()), list(model.buffers())
        self._tensors = [*self._parameters, *self._buffers]
        self._places: Kind = ()
        self._seen: Counter[Kind] = Counter()
        self._recorded: dict[Kind, _RecordedStep] = {}

    def __call__(
        self, batch: PairBatch, *, interaction_seed: int = 0, teacher_logits_TV: Tensor | None = None
    ) -> Loss:
        """Add the gradient of the loss to `.grad`. The loss is the caller's, for as long as it wants."""

        def step() -> Loss:
            return self._compute(batch, interaction_seed, teacher_logits_TV)

        if self._recorder is None or teacher_logits_TV is not None or self._has_gradients():
            return step()
        kind, places = self._kind_of(batch), self._places_of_tensors()
        if places != self._places:  # weights have been moved, frozen or thawed: kernels may be compiled again
            self.forget()
            self._seen.clear()
            self._places = places
        if (recorded := self._recorded.get(kind)) is not None:
            return recorded.replay(batch, interaction_seed)
        self._seen[kind] += 1
        try:
            if self._seen[kind] <= _EAGER_STEPS:
                return self._warm_up(self._recorder, step)
            if len(self._recorded) >= _MOST_RECORDINGS:
                return step()
            recorded = self._recorded[kind] = self._record(self._recorder, batch)
            return recorded.replay(batch, interaction_seed)
        except RuntimeError as error:  # out of memory is one
            if self._seen[kind] == 1 and not self._recorded:
                raise  # not for want of what recordings hold
            reason = str(error)
        # Here, because the error keeps alive what the step had made until then.
        self._give_up(reason)
        return step()

    def forget(self) -> None:
        """Give the memory of recordings back; the next batch of each kind is recorded anew."""
        if self._recorder is None or not self._recorded:
            return
        ours = {id(gradient) for each in self._recorded.values() for gradient in each.gradients}
        for parameter in self._parameters:
            if id(parameter.grad) in ours:
                parameter.grad = None
        self._recorded.clear()
        self._recorder.start_anew()

    def _compute(self, batch: PairBatch, seed: int | None, teacher_logits_TV: Tensor | None = None) -> Loss:
        return compute_gradients(
            self._model,
            batch,
            self._objective,
            self._processes,
            interaction_seed=seed,
            teacher_logits_TV=teacher_logits_TV,
            **self._options,
        )

    def _warm_up(self, recorder: Recorder, step: Step) -> Loss:
        """A step as it is; nothing is recorded any more if it does what a recording cannot repeat."""
        before = random_state(self._processes.device)
        loss = recorder.warm_up(step)
        after = random_state(self._processes.device)
        reason = None
        if not all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
            reason = "the towers or the loss draw random numbers"
        buffers = zip(self._buffers, self._model.buffers(), strict=True)
        if self._places_of_tensors() != self._places or any(one is not other for one, other in buffers):
            reason = "a part of the model replaces its tensors"
        if reason is not None:
            _log.info("steps are not replayed as a CUDA graph: %s", reason)
            self.forget()
            self._recorder = None
        return loss

    def _record(self, recorder: Recorder, batch: PairBatch) -> _RecordedStep:
        tokens, mask_TW, frames, mask_VF, video_index = (each.clone() for each in _tensors_of(batch))
        # As many frames as the image tower is shown of any batch of this kind.
        own = PairBatch(tokens, mask_TW, frames, mask_VF, video_index, self._num_shown(batch))
        recording = recorder.record(lambda: self._compute(own, None))
        gradients = [parameter.grad for parameter in self._parameters]
        return _RecordedStep(own, recording, self._parameters, gradients)

    def _give_up(self, reason: str) -> None:
        for parameter in self._parameters:  # there were none, so these are of what failed
            parameter.grad = None
        self.forget()
        self._recorder = None
        _log.warning("steps are not replayed as a CUDA graph, which costs time: %s", reason)

    def _kind_of(self, batch: PairBatch) -> Kind:
        """All that a recording holds for, besides the places of the weights."""
        tensors = [(each.shape, each.dtype, each.device) for each in _tensors_of(batch)]
        return (self._model.training, self._num_shown(batch), *tensors)

    def _num_shown(self, batch: PairBatch) -> int | None:
        if batch.frames.ndim == 3:  # features: the tower is done with them
            return None
        num_real = batch.num_real_frames
        if num_real is None:  # waits for the GPU
            num_real = int(batch.mask_VF.sum())
        return self._model.num_frames_shown(num_real, batch.mask_VF.numel())

    def _places_of_tensors(self) -> Kind:
        return tuple([(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors])

    def _has_gradients(self) -> bool:
        return any([parameter.grad is not None for parameter in self._parameters])


@dataclass(frozen=True)
class _RecordedStep:
    """A recording with what it reads and writes."""

    batch: PairBatch
    recording: Recording
    parameters: list[torch.nn.Parameter]
    gradients: list[Tensor | None]

    def replay(self, batch: PairBatch, seed: int) -> Loss:
        for own, given in zip(_tensors_of(self.batch), _tensors_of(batch), strict=True):
            own.copy_(given)
        self.recording.replay(seed)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        loss = self.recording.loss
        return Loss(loss.total.clone(), {name: term.clone() for name, term in loss.terms.items()})


def _tensors_of(batch: PairBatch) -> tuple[Tensor, ...]:
    return (batch.token_ids_TW, batch.mask_TW, batch.frames, batch.mask_VF, batch.video_index)


# --- a GPU --------------------------------------------------------------------------------------------------


def recorder_for(device: torch.device) -> Recorder | None:
    """What records steps on a device; None where nothing does."""
    return _GraphRecorder(device) if device.type == "cuda" else None


class _GraphRecorder:
    """CUDA graphs that share memory: they never run at the same time, and none reads what another left.

    Steps are tried and recorded on a stream of their own, as torch asks for: where something keeps a part of
    a former step alive, autograd goes on adding the gradient of a parameter on the stream of that step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Step) -> Loss:
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                return step()
        finally:
            outside.wait_stream(self._stream)

    def record(self, step: Step) -> Recording:
        graph, generator = torch.cuda.CUDAGraph(), torch.Generator(self._device)
        # Random numbers come from a generator of its own, whose seed a replay reads again. So that of the
        # device is as it was, also after a recording that fails.
        default = torch.cuda.default_generators[self._index]
        kept, on_host = default.graphsafe_get_state(), torch.get_rng_state()
        outside = torch.cuda.current_stream(self._device)
        gc.collect()  # a former step that is still alive would have its gradients added on another stream
        try:
            default.graphsafe_set_state(generator)
            # Other threads go on allocating.
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                loss = step()
            if not torch.equal(torch.get_rng_state(), on_host):
                raise RuntimeError("it draws random numbers on the CPU")
        except BaseException:
            torch.cuda.set_stream(outside)  # torch stays on that of a recording that fails
            with suppress(RuntimeError):  # and goes on keeping memory for it, unless it has come to its end
                torch._C._cuda_endAllocateToPool(self._index, self._pool)
                torch._C._cuda_releasePool(self._index, self._pool)
            raise
        finally:
            default.graphsafe_set_state(kept)
            torch.set_rng_state(on_host)
        return _Graph(graph, generator, loss)

    def start_anew(self) -> None:
        # A pool that no graph uses any more is not taken up again.
        self._pool = torch.cuda.graph_pool_handle()


@dataclass(frozen=True)
class _Graph:
    """A step as a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    generator: torch.Generator
    loss: Loss

    def replay(self, seed: int) -> None:
        self.generator.manual_seed(seed)
        self.graph.replay()

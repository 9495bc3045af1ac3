"""Many small models trained as one: tasks, seeds, temperatures and rows of one program share every kernel.

`Head` is gare's own interaction and loss on cached vectors. `Stack` trains M of them at once: `torch.func`
maps the gradient of `Head` over stacked weights, so what is computed is gare's code, and AdamW, which treats
every number by itself, is M optimisers in one. `tests/integration/test_decisive.py` holds it to one model.

Shapes: M models, B pairs of a batch, F frames, D embedding, T texts, V videos.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from decisive_data import NUM_FRAMES, Task
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from gare.interaction import build_interaction
from gare.interaction.gap_aware import GapAwareConfig
from gare.interaction.interaction import InteractionConfig
from gare.interaction.mean_pooling import MeanPoolingConfig
from gare.interaction.text_conditioned import TextConditionedConfig
from gare.objective import ObjectiveConfig, training_loss
from gare.train.optimizers import NOT_DECAYED
from gare.train.run_config import OptimizerConfig
from gare.types import TextFeatures, VideoFeatures

OPTIMIZER = OptimizerConfig(learning_rate=3e-4, weight_decay=0.1)
"""As in recipes/gare_mini_stage2.toml."""
WARMUP_STEPS = 25
DECAY_SHARE = 0.2
PROJECTIONS = ("text_projection.", "frame_projection.")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    interaction: InteractionConfig
    has_terms: bool = False
    """Train with the bottleneck and both regularisers too."""
    mean_frame_only: bool = False
    """psi sees the mean frame alone: its increment is an offset for the video."""

    @property
    def is_trained(self) -> bool:
        """Whether anything is left to train once towers and projections are frozen."""
        return isinstance(self.interaction, GapAwareConfig)

    @property
    def program(self) -> tuple[InteractionConfig, bool]:
        """Rows with the same one share their compiled program; where a run starts does not matter to it."""
        config = self.interaction
        if isinstance(config, GapAwareConfig):
            config = replace(config, init="normal")
        return config, self.has_terms


ZERO, NORMAL = GapAwareConfig(init="zero_output"), GapAwareConfig(init="normal")
ROWS = {
    row.name: row
    for row in (
        Row("baseline", MeanPoolingConfig()),
        Row("offset", ZERO, mean_frame_only=True),
        Row("psi zero", ZERO),
        Row("psi normal", NORMAL),
        Row("psi + losses", NORMAL, has_terms=True),
        Row("psi + losses, dropout 0", replace(NORMAL, dropout=0.0), has_terms=True),
        Row("text-conditioned", TextConditionedConfig()),
        Row("text-conditioned + psi", replace(ZERO, pooling="text_conditioned")),
    )
}


@dataclass(frozen=True)
class ZeroPadded(VideoFeatures):
    """Padding is zero already: nothing to look for, which a mapped program could not do."""

    def without_padding(self) -> VideoFeatures:
        return self


class Head(nn.Module):
    """A row on cached vectors: projections, an interaction, the loss of a batch.

    Projections are x + W x + b with W = 0, b = 0 at the start: the vectors as they are, to the last bit.
    """

    def __init__(self, row: Row, dim: int) -> None:
        super().__init__()
        self.text_projection, self.frame_projection = nn.Linear(dim, dim), nn.Linear(dim, dim)
        for module in (self.text_projection, self.frame_projection):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        self.interaction = build_interaction(row.interaction, dim)
        self._has_terms, self._objective = row.has_terms, ObjectiveConfig()

    def features(self, text_BD: Tensor, video: VideoFeatures) -> tuple[TextFeatures, VideoFeatures]:
        """Both sides after their projections."""
        frames_BFD = video.frames_VFD + self.frame_projection(video.frames_VFD)
        frames_BFD = frames_BFD * video.mask_VF[..., None]
        text = TextFeatures.from_vectors(text_BD + self.text_projection(text_BD))
        return text, ZeroPadded(frames_BFD, video.mask_VF)

    def forward(
        self, text_BD: Tensor, frames_BFD: Tensor, mask_BF: Tensor, item_B: Tensor, logit_scale: Tensor
    ) -> Tensor:
        """The loss of a batch whose text i belongs to video i."""
        text, video = self.features(text_BD, ZeroPadded(frames_BFD, mask_BF))
        pairs = self.interaction.score_pairs(text, video)
        if not self._has_terms:  # without increments the contrastive term is all there is
            pairs = replace(pairs, increment_TVD=None)
        return training_loss(pairs, logit_scale, self._objective, video_index=item_B).total


def new_heads(row: Row, dim: int, seeds: Sequence[int]) -> list[Head]:
    """A head a seed; the weights of rows that have the same parts are the same for the same seed."""
    heads = []
    for seed in seeds:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            heads.append(Head(row, dim))
    return heads


# --- one step ----------------------------------------------------------------------------------------------

Program = Callable[..., tuple[Weights, Tensor]]


def make_program(row: Row, dim: int, *, compiled: bool = False, backend: str = "inductor") -> Program:
    """Gradients [M, …] of stacked weights, each model's clipped by its own norm, and losses [M].

    The last input [M] is one where projections are trained and zero where they are frozen: one program for
    both, because compiling takes half a minute.
    """
    head = Head(row, dim).train()

    def loss_of(weights: Weights, *batch: Tensor) -> Tensor:
        loss: Tensor = functional_call(head, weights, batch)
        return loss

    mapped = vmap(grad_and_value(loss_of), randomness="different")

    def program(weights: Weights, *inputs: Tensor) -> tuple[Weights, Tensor]:
        *batch, moves_M = inputs
        gradients, losses_M = mapped(weights, *batch)
        kept = {
            name: _times(gradient, moves_M) if name.startswith(PROJECTIONS) else gradient
            for name, gradient in gradients.items()
        }
        square_M = torch.stack([gradient.flatten(1).square().sum(dim=1) for gradient in kept.values()])
        factor_M = (OPTIMIZER.clip_norm / (square_M.sum(dim=0).sqrt() + 1e-6)).clamp(max=1)
        return {name: _times(gradient, factor_M) for name, gradient in kept.items()}, losses_M

    if not compiled:
        return program
    torch._dynamo.config.recompile_limit = 64  # all programs are one function to the compiler
    return torch.compile(program, dynamic=False, fullgraph=True, backend=backend)


def _times(gradient: Tensor, factor_M: Tensor) -> Tensor:
    return gradient * factor_M.view(-1, *[1] * (gradient.ndim - 1))


class Programs:
    """Every program once: compiling one takes half a minute."""

    def __init__(self, dim: int, *, compiled: bool) -> None:
        self.dim, self.compiled = dim, compiled
        self._made: dict[tuple[InteractionConfig, bool], Program] = {}

    def get(self, row: Row) -> Program:
        if row.program not in self._made:
            self._made[row.program] = make_program(row, self.dim, compiled=self.compiled)
        return self._made[row.program]


def gather(task: Task, row: Row, item_MBS: Tensor, text_MB: Tensor) -> tuple[Tensor, ...]:
    """Texts [M, B, D], frames [M, B, F, D], mask and items of a batch for every model."""
    train = task.train
    frames_MBFD = train.video.frames_VFD[item_MBS].flatten(2, 3)
    mask_MBF = train.video.mask_VF[item_MBS].flatten(2, 3)
    if row.mean_frame_only:
        frames_MBFD, mask_MBF = _mean_frame(frames_MBFD, mask_MBF)
    missing = NUM_FRAMES - mask_MBF.shape[2]
    frames_MBFD = nn.functional.pad(frames_MBFD, (0, 0, 0, missing))
    return train.text_TD[text_MB], frames_MBFD, nn.functional.pad(mask_MBF, (0, missing)), item_MBS[..., 0]


def _mean_frame(frames_MBFD: Tensor, mask_MBF: Tensor) -> tuple[Tensor, Tensor]:
    flat = VideoFeatures(frames_MBFD.flatten(0, 1), mask_MBF.flatten(0, 1)).mean()
    return flat.view(*frames_MBFD.shape[:2], 1, -1), mask_MBF[..., :1]


def mean_frame_only(video: VideoFeatures) -> VideoFeatures:
    """Videos whose only frame is their mean, with as much room as before."""
    frames_V1D = video.mean()[:, None]
    return VideoFeatures(frames_V1D, video.mask_VF[:, :1]).pad(video.mask_VF.shape[1]).without_padding()


# --- a run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """One model of a stack."""

    task: Task
    row: Row
    temperature: float
    seed: int
    trains_projections: bool = False


class Stack:
    """M models whose rows share a program, on any tasks, and their optimisers.

    Frozen projections beside trained ones start at zero and have no gradient: AdamW leaves them there.
    """

    def __init__(
        self, models: Sequence[Model], *, batch_size: int, milestones: Sequence[int], programs: Programs
    ) -> None:
        if len({model.row.program for model in models}) != 1:
            raise ValueError("the rows of a stack must share a program")
        device = models[0].task.train.text_TD.device
        self.models, self.milestones = list(models), milestones
        self._program = programs.get(models[0].row)
        heads = [new_heads(model.row, programs.dim, (model.seed,))[0] for model in models]
        stacked, _ = stack_module_state([head.to(device) for head in heads])
        self.weights = {name: weight.detach() for name, weight in stacked.items()}
        moves = [model.trains_projections for model in models]
        self._trained = [name for name in self.weights if any(moves) or not name.startswith(PROJECTIONS)]
        self._optimizer = _optimizer({name: self.weights[name] for name in self._trained}, device)
        self._scale_M = torch.tensor([1 / model.temperature for model in models], device=device)
        self._moves_M = torch.tensor(moves, dtype=torch.float32, device=device)
        self._blocks = _blocks(models, steps=max(milestones), batch_size=batch_size)

    def batch(self, number: int) -> tuple[Tensor, ...]:
        """Texts, frames, mask and items of a step for every model."""
        parts = [gather(task, row, items[number], texts[number]) for task, row, items, texts in self._blocks]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def train(self) -> Iterator[int]:
        """Yields each milestone when the weights are those of a run of that many steps.

        Runs of all lengths share a trunk with a constant rate. From four fifths of a milestone a branch with
        a falling rate leads to it; the trunk then goes on from where the branch left it.
        """
        done = 0
        for milestone in self.milestones:
            num_decay = max(1, round(DECAY_SHARE * milestone))
            for step in range(done, milestone - num_decay):
                self.step(step, min(1.0, (step + 1) / WARMUP_STEPS))
            done = milestone - num_decay
            is_last = milestone == self.milestones[-1]
            kept = None if is_last else self._snapshot()
            for number in range(num_decay):
                self.step(done + number, 1 - number / num_decay)
            yield milestone
            if kept:
                self._restore(*kept)

    def step(self, number: int, rate: float) -> Tensor:
        """One step of every model; their losses before it, [M]."""
        inputs = (*self.batch(number), self._scale_M, self._moves_M)
        gradients, losses_M = self._program(self.weights, *inputs)
        for name in self._trained:
            self.weights[name].grad = gradients[name]
        for group in self._optimizer.param_groups:
            group["lr"].fill_(OPTIMIZER.learning_rate * rate)
        self._optimizer.step()
        self._optimizer.zero_grad()  # the program sees plain weights, every time the same
        return losses_M

    def heads(self) -> Iterator[Head]:
        """Each model by itself, ready to score."""
        for number, model in enumerate(self.models):
            head = Head(model.row, model.task.train.text_TD.shape[1]).to(self._scale_M.device).eval()
            head.load_state_dict({name: weight[number] for name, weight in self.weights.items()})
            yield head.requires_grad_(False)

    def _snapshot(self) -> tuple[Weights, list[dict[str, Tensor]]]:
        moments = [
            {key: value.clone() for key, value in self._optimizer.state[self.weights[name]].items()}
            for name in self._trained
        ]
        return {name: weight.clone() for name, weight in self.weights.items()}, moments

    def _restore(self, weights: Weights, moments: list[dict[str, Tensor]]) -> None:
        for name, weight in weights.items():
            self.weights[name].copy_(weight)
        for name, moment in zip(self._trained, moments, strict=True):
            for key, value in moment.items():
                self._optimizer.state[self.weights[name]][key].copy_(value)


Block = tuple[Task, Row, Tensor, Tensor]
"""Neighbouring models of one task and row: items [steps, M, B, S] and texts [steps, M, B]."""


def _blocks(models: Sequence[Model], *, steps: int, batch_size: int) -> list[Block]:
    drawn: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # the same for every row
    for model in models:
        if (model.task.name, model.seed) not in drawn:
            drawn[model.task.name, model.seed] = model.task.batches(
                model.seed, steps=steps, batch_size=batch_size
            )
    blocks = []
    for _, each in groupby(models, key=lambda model: (model.task.name, model.row.name)):
        same = list(each)
        device = same[0].task.train.text_TD.device
        items, texts = zip(*(drawn[model.task.name, model.seed] for model in same), strict=True)
        stacked = (torch.stack(items, dim=1).to(device), torch.stack(texts, dim=1).to(device))
        blocks.append((same[0].task, same[0].row, *stacked))
    return blocks


def _optimizer(weights: Weights, device: torch.device) -> torch.optim.AdamW:
    def is_decayed(
        name: str, weight: Tensor
    ) -> bool:  # as gare.train.optimizers; one dimension is the stack's
        return weight.ndim > 2 and not any(word in name for word in NOT_DECAYED)

    groups = [
        {
            "params": [weight for name, weight in weights.items() if is_decayed(name, weight) == decayed],
            "weight_decay": OPTIMIZER.weight_decay if decayed else 0.0,
            "lr": torch.tensor(OPTIMIZER.learning_rate, device=device),
        }
        for decayed in (True, False)
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        fused=True,
    )


def seconds_a_step(stack: Stack, *, steps: int = 20) -> float:
    """Measured after a few steps to warm up, the first of which compiles."""
    for number in range(3):
        stack.step(number, 1.0)
    _wait(stack)
    start = time.perf_counter()
    for number in range(steps):
        stack.step(number, 1.0)
    _wait(stack)
    return (time.perf_counter() - start) / steps


def _wait(stack: Stack) -> None:
    if stack.weights["text_projection.weight"].is_cuda:
        torch.cuda.synchronize()

"""A training run from top to bottom. `gare train` calls `train`; under torchrun every process does."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from gare import atomic
from gare.data.loader import FrameSource, mix_seeds
from gare.errors import CheckpointError, ConfigError, TrainingError
from gare.evaluate.caption_protocols import TwoWayMetrics, evaluate_scores
from gare.evaluate.card_results import results_of_training
from gare.evaluate.model_evaluation import score_split
from gare.interrupts import note_interrupt
from gare.model import GARE
from gare.objective import Loss
from gare.train.distributed import Processes, join, leave, refuse_different_steps
from gare.train.gradient_step import Encode, PairBatch, make_encode
from gare.train.log_sinks import open_sinks
from gare.train.optimizers import build_optimizer, learning_rate_factor, set_learning_rate
from gare.train.replayed_gradients import ReplayedGradients, recorder_for
from gare.train.run_config import RunConfig
from gare.train.run_log import RunLog
from gare.train.starting_model import build_model
from gare.train.teachers import open_teachers
from gare.train.train_state import TrainState, has_checkpoint, remove_unfinished
from gare.train.training_frames import TrainingFrames, open_frames, open_source

CONFIG_FILE, CHECKPOINTS, BEST, LAST = "config.toml", "checkpoints", "best", "last"
RELEASED_SCHEDULE_EPOCHS = 5


@dataclass(frozen=True)
class TrainingRun:
    """What an observer may read. It must leave the model, the optimiser and random numbers as they are."""

    folder: Path
    config: RunConfig
    state: TrainState
    encode: Encode
    num_steps: int


class Observer(Protocol):
    """Called around every step of a training run, in the main process alone."""

    def start(self, run: TrainingRun) -> None:
        """Called once, before the first step of a run that starts or resumes."""

    def before_step(self, step: int, batch: PairBatch) -> None:
        """Called when the gradients of a step are there and the weights have not moved yet."""

    def after_step(self, step: int, loss: Loss) -> None:
        """Called when the weights have moved."""


def train(
    config: RunConfig,
    folder: str | os.PathLike[str],
    *,
    resume: bool = False,
    device: torch.device | None = None,
    observers: Sequence[Observer] = (),
    log_to: Sequence[str] = (),
) -> Path:
    """Train as the recipe says, and return the folder of the best model.

    In `folder`: config.toml, metrics.jsonl, tensorboard/, checkpoints/ (to resume), last/ and best/ (models).

    Args:
        resume: go on from the last checkpoint, as if nothing had happened.
        observers: called around every step.
        log_to: trackers that get the metrics too, "wandb" or "trackio"; they have their extras.
    """
    folder = Path(folder)
    processes = join(device)
    _claim(folder, config, resume, processes)
    source = open_source(config.data)
    model = build_model(config, processes)
    teachers = open_teachers(config, model, processes)
    encode = make_encode(model, autocast=config.precision == "bfloat16")
    state = TrainState(model, build_optimizer(model, config.optimizer), ema_decay=config.ema_decay)
    damage = None
    if resume and has_checkpoint(folder / CHECKPOINTS):
        damage = state.load(folder / CHECKPOINTS)
    refuse_different_steps(state.progress.step, processes)
    if resume and processes.is_main:  # now that everyone has read
        remove_unfinished(folder / CHECKPOINTS)
    observers = observers if processes.is_main else ()

    sinks = open_sinks(log_to, folder, config.to_values()) if processes.is_main else []
    is_main = processes.is_main
    with _explain_full_disk(folder), RunLog(folder, state.progress, enabled=is_main, sinks=sinks) as log:
        if damage and processes.is_main:
            log.say(damage)
        frames = open_frames(model, source, config, processes, log.preparing)
        compute_gradients = ReplayedGradients(
            model,
            config.objective,
            processes,
            encode=encode,
            chunk_size=config.chunk_size,
            average_towers=config.numerics == "released",
            rounds_products=config.precision == "bfloat16",
            recorder=recorder_for(processes.device) if config.cuda_graph else None,
        )
        parameters = list(model.parameters())
        num_steps = config.epochs * len(frames)
        schedule_steps = schedule_epochs(config) * len(frames)
        for observer in observers:
            observer.start(TrainingRun(folder, config, state, encode, num_steps))
        log.start(num_steps, state.progress.step, missing=len(source.missing))
        with note_interrupt() as interrupted:  # obeyed between steps, where model and optimiser agree
            while True:
                epoch, position = divmod(state.progress.step, len(frames))
                # First, because a run may have been stopped after an epoch's last step: this is still owed.
                if processes.is_main and epoch > 0 and position == 0 and not state.progress.is_closed:
                    if state.progress.step == num_steps or epoch % config.evaluate_every == 0:
                        compute_gradients.forget()  # an evaluation may need the memory
                        metrics = _evaluate(state, source, frames, config)
                        log.evaluation(state.progress.step, config.selection_split, metrics)
                        _keep_if_best(state, metrics, config, source, folder / BEST)
                    state.close_epoch()
                    log.flush()
                    state.save(folder / CHECKPOINTS)
                if state.progress.step >= num_steps:
                    break
                for batch in frames.batches(epoch, position):
                    step, started = state.progress.step, time.perf_counter()
                    _begin_step(state, config, schedule_steps, processes)
                    loss = compute_gradients(
                        batch,
                        interaction_seed=mix_seeds(config.seed, step, -1),
                        teacher_logits_TV=None if teachers is None else teachers(batch),
                    )
                    norm = nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
                    _refuse_not_finite(loss, norm, batch, source, model, step)
                    for observer in observers:
                        observer.before_step(step, batch)
                    state.step()
                    for observer in observers:
                        observer.after_step(step, loss)
                    if (step + 1) % config.log_every == 0 or step + 1 == num_steps:
                        speed = config.batch_size / (time.perf_counter() - started)
                        log.step(step + 1, epoch, loss, state.optimizer, norm, speed)
                    log.advance()
                    is_due = (step + 1) % config.checkpoint_every == 0
                    if processes.is_main and (is_due or interrupted.is_set()):
                        log.flush()
                        state.save(folder / CHECKPOINTS)
                    if interrupted.is_set():
                        log.say(f"stopped after step {step + 1}; go on with --resume")
                        raise KeyboardInterrupt
        if processes.is_main:
            with atomic.replacing_folder(folder / LAST) as part, state.averaged():
                model.save_pretrained(part)
            if not (folder / BEST).is_dir():
                raise CheckpointError(
                    f"{folder / BEST} is missing: it was removed after step {state.progress.best_step} had "
                    f"filled it. {folder / LAST} has the final model"
                )
    leave()
    return folder / BEST


def _claim(folder: Path, config: RunConfig, resume: bool, processes: Processes) -> None:
    """A run folder belongs to one config; starting over it by accident is refused."""
    stored = folder / CONFIG_FILE
    if resume:
        if not stored.is_file():
            raise CheckpointError(f"{folder} is not a run that can be resumed: it has no {CONFIG_FILE}")
        if RunConfig.load(stored) != config:
            raise ConfigError(
                f"the run in {folder} has other settings than those asked for; resume it with its own "
                f"recipe ({stored}), or start a new run in another folder"
            )
        return
    if has_checkpoint(folder / CHECKPOINTS) or (folder / LAST).exists():
        raise CheckpointError(
            f"{folder} already holds a run; pass --resume to go on, or choose another --out"
        )
    if processes.is_main:
        with _explain_full_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_text(stored, config.to_toml())


@contextmanager
def _explain_full_disk(folder: Path) -> Iterator[None]:
    """Turn a full disk, or a quota that is used up, into a message."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has the number in its text alone
        number = getattr(error, "errno", None)
        full = (errno.ENOSPC, errno.EDQUOT)
        if number not in full and not any(f"(os error {each})" in str(error) for each in full):
            raise
        raise TrainingError(
            f"the disk is full: the run in {folder} cannot be written. Its last checkpoint is intact; "
            "free some space, then go on with --resume"
        ) from None


def schedule_epochs(config: RunConfig) -> int:
    """How many epochs the learning rate is planned for: all of them, but in the released code always five."""
    is_released = config.numerics == "released" and config.optimizer.kind == "bert_adam"
    return RELEASED_SCHEDULE_EPOCHS if is_released else config.epochs


def _begin_step(state: TrainState, config: RunConfig, schedule_steps: int, processes: Processes) -> None:
    """Everything a step depends on follows from its number, so that a resumed run goes the same way."""
    step, optim = state.progress.step, config.optimizer
    set_learning_rate(state.optimizer, learning_rate_factor(step, schedule_steps, optim.warmup, optim.kind))
    torch.manual_seed(mix_seeds(config.seed, step, processes.rank))
    if not state.model.training:  # it asks every module
        state.model.train()
    state.optimizer.zero_grad(set_to_none=True)


def _evaluate(
    state: TrainState, source: FrameSource, frames: TrainingFrames, config: RunConfig
) -> TwoWayMetrics:
    """Metrics on the selection split, of the averaged weights if there are."""
    split, num_workers = config.selection_split, config.data.num_workers
    with state.averaged() as model:
        model.eval()
        try:
            scored = score_split(model, source, split, num_workers=num_workers, videos=frames.videos(split))
        except ValueError as error:
            raise TrainingError(f"step {state.progress.step}: {error}; lower the learning rate") from None
        return evaluate_scores(scored.scores_TV, scored.video_of_text)


def _keep_if_best(
    state: TrainState, metrics: TwoWayMetrics, config: RunConfig, source: FrameSource, folder: Path
) -> None:
    score = metrics.text_to_video["pessimistic"].recall_at_1
    if not state.improved(score):
        return
    selection = {"selected_on": config.selection_split, "step": state.progress.step, "recall_at_1": score}
    with atomic.replacing_folder(folder) as part:  # the model and what is said of it change together
        with state.averaged() as model:
            results = results_of_training(
                metrics,
                model,
                dataset=source.manifest.header.name,
                split=config.selection_split,
                seed=config.seed,
            )
            model.save_pretrained(part, model_card_kwargs={"results": results})
        (part / "selection.json").write_text(json.dumps({**selection, "seed": config.seed}) + "\n")


def _refuse_not_finite(
    loss: Loss, norm: Tensor, batch: PairBatch, source: FrameSource, model: GARE, step: int
) -> None:
    """Stop a run before NaN reaches the weights, and name the term and videos, or the parameter, at fault."""
    if torch.isfinite(loss.total + norm):  # both at once: each question waits for the device
        return
    if not torch.isfinite(loss.total):
        bad = [name for name, term in loss.terms.items() if not torch.isfinite(term)]
        videos = source.manifest.videos("train")
        ids = ", ".join(videos[i].video_id for i in batch.video_index[:8].tolist())
        raise TrainingError(
            f"step {step}: the loss is not finite ({', '.join(bad) or 'total'}) for the videos {ids}, …; "
            "the last checkpoint is intact. Lower the learning rate, or run 'gare data check' on them"
        )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            raise TrainingError(
                f"step {step}: the gradient of {name} is not finite, although the loss is; "
                "the last checkpoint is intact. Lower the learning rate or use precision = 'float32'"
            )

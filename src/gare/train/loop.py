"""A training run from top to bottom. `gare train` calls `train`; under torchrun every process does."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from gare.data.loader import FrameSource, mix_seeds
from gare.data.manifest import find_manifest
from gare.errors import CheckpointError, ConfigError, TrainingError
from gare.evaluate.protocols import evaluate_scores
from gare.evaluate.similarity import score_split
from gare.interrupts import note_interrupt
from gare.model import GARE
from gare.model.files import TOKENIZER_FOLDER, load_state
from gare.objective import Loss
from gare.train.batches import Batches, FeatureBatches, PixelBatches, PreloadedBatches
from gare.train.config import RunConfig
from gare.train.distributed import Processes, join, leave
from gare.train.features import FrozenFeatures
from gare.train.optim import build_optimizer, learning_rate_factor, set_learning_rate
from gare.train.report import RunLog
from gare.train.sources import open_source
from gare.train.state import Progress, has_checkpoint, load_checkpoint, save_checkpoint
from gare.train.step import PairBatch, compute_gradients, make_encode
from gare.train.teachers import Teachers, load_teachers, make_teachers

CONFIG_FILE, CHECKPOINTS = "config.toml", "checkpoints"


def train(
    config: RunConfig,
    folder: Path,
    *,
    resume: bool = False,
    device: torch.device | None = None,
    probe_every: int | None = None,
) -> Path:
    """Train as the recipe says; everything about the run is in `folder`. Returns that of the best model.

    It holds config.toml, metrics.jsonl, tensorboard/, checkpoints/ (to resume), last/ and best/ (models).

    Args:
        resume: go on from the last checkpoint, as if nothing had happened.
        probe_every: record what `gare analyze` shows of training in probe.jsonl; 0 chooses the distance.
    """
    processes = join(device)
    _claim(folder, config, resume, processes)
    source = open_source(config)
    model = _build_model(config, processes)
    teachers = _teachers(config, model, processes)
    optimizer = build_optimizer(model, config.optimizer)
    average = _start_average(model, config)
    progress = Progress()
    if resume and has_checkpoint(folder / CHECKPOINTS):
        progress, stored = load_checkpoint(folder / CHECKPOINTS, model, optimizer)
        average = None if stored is None else {name: x.to(processes.device) for name, x in stored.items()}

    with RunLog(folder, progress.step, enabled=processes.is_main) as log:
        features = frozen_features(model, source, config, on_progress=log.caching)
        batches: Batches
        if features is not None:
            batches = FeatureBatches(model, source, config, processes, features)
        elif config.data.preload:
            batches = PreloadedBatches(model, source, config, processes, log.caching)
        else:
            batches = PixelBatches(model, source, config, processes)
        num_steps = config.epochs * len(batches)
        encode = make_encode(model, autocast=config.precision == "bfloat16")
        probe = None
        if probe_every is not None and processes.is_main:
            from gare.train.probe import Probe

            probe = Probe(folder, model, encode, num_steps=num_steps, step=progress.step, every=probe_every)
        log.start(num_steps, progress.step, missing=len(source.missing))
        with note_interrupt() as interrupted:  # obeyed between steps, where model and optimiser agree
            while progress.step < num_steps:
                epoch, position = divmod(progress.step, len(batches))
                for batch in batches.batches(epoch, position):
                    started = time.perf_counter()
                    optim = config.optimizer
                    set_learning_rate(
                        optimizer, learning_rate_factor(progress.step, num_steps, optim.warmup, optim.kind)
                    )
                    torch.manual_seed(mix_seeds(config.seed, progress.step, processes.rank))
                    model.train()
                    optimizer.zero_grad(set_to_none=True)
                    loss = compute_gradients(
                        model,
                        batch,
                        config.objective,
                        processes,
                        encode=encode,
                        chunk_size=config.chunk_size,
                        psi_seed=mix_seeds(config.seed, progress.step, -1),
                        average_towers=config.numerics == "released",
                        teacher_logits_TV=None if teachers is None else teachers(batch),
                    )
                    norm = nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
                    if not torch.isfinite(loss.total + norm):  # both at once: each look waits for the device
                        _refuse_nan(loss, batch, source, progress.step)
                        _refuse_nan_gradient(model, progress.step)
                    if probe is not None:
                        probe.before(progress.step, batch)
                    optimizer.step()
                    _after_step(model, average, config)
                    if probe is not None:
                        probe.after(progress.step, loss)
                    progress = replace(progress, step=progress.step + 1)
                    seconds = time.perf_counter() - started
                    if progress.step % config.log_every == 0 or progress.step == num_steps:
                        log.step(progress.step, epoch, loss, optimizer, norm, config.batch_size / seconds)
                    log.advance()
                    is_due = progress.step % config.checkpoint_every == 0
                    if processes.is_main and (is_due or interrupted.is_set()):
                        save_checkpoint(folder / CHECKPOINTS, model, optimizer, average, progress)
                    if interrupted.is_set():
                        log.say(f"stopped after step {progress.step}; go on with --resume")
                        raise KeyboardInterrupt
                is_last = progress.step >= num_steps
                if is_last or (epoch + 1) % config.evaluate_every == 0:
                    progress = _look(
                        model, average, source, features, config, folder, progress, log, processes
                    )
                if processes.is_main:
                    save_checkpoint(folder / CHECKPOINTS, model, optimizer, average, progress)
        with _averaged(model, average):
            if processes.is_main:
                model.save_pretrained(folder / "last")
    leave()
    return folder / "best"


def frozen_features(
    model: GARE,
    source: FrameSource,
    config: RunConfig,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> FrozenFeatures | None:
    """The feature cache of a recipe that asks for one, beside its manifest."""
    if not config.data.cache_features:
        return None
    folder = find_manifest(Path(config.data.manifest)).parent / "features"
    return FrozenFeatures(model, source, folder, num_workers=config.data.num_workers, on_progress=on_progress)


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
    if has_checkpoint(folder / CHECKPOINTS) or (folder / "last").exists():
        raise CheckpointError(
            f"{folder} already holds a run; pass --resume to go on, or choose another --out"
        )
    if processes.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        stored.write_text(config.to_toml(), encoding="utf-8")


def _build_model(config: RunConfig, processes: Processes) -> GARE:
    torch.manual_seed(config.seed)
    if config.init_from is None:
        model = GARE(config.model)
    else:
        start = GARE.from_pretrained(config.init_from)
        tokenizer = Path(config.init_from) / TOKENIZER_FOLDER
        model = GARE(
            config.model, pretrained_towers=False, tokenizer_folder=tokenizer if tokenizer.is_dir() else None
        )
        _copy_weights(start, model, config.init_from)
    model = model.to(processes.device)
    if config.numerics == "released" and processes.device.type == "cuda":
        model.backbone.half()
    if config.gradient_checkpointing:
        for tower in model.backbone.children():
            enable: Any = getattr(tower, "gradient_checkpointing_enable", None)
            if enable is not None:
                enable({"use_reentrant": False})
    if config.compile:
        compile_towers(model)
    return model


def _teachers(config: RunConfig, student: GARE, processes: Processes) -> Teachers | None:
    if not config.teachers:
        return None
    models = load_teachers(config.teachers, student)
    if config.compile:
        for model in models:
            compile_towers(model)
    autocast = config.precision == "bfloat16"
    return make_teachers(models, processes, autocast=autocast, chunk_size=config.chunk_size)


def compile_towers(model: GARE) -> None:
    """torch.compile both towers; the rest is a few large matrix products."""
    # Compute the cheapest twentieth of the activations again in backward rather than keep them.
    functorch_config.activation_memory_budget = 0.95
    # A model and its teachers share code, and each is a variant of it; at the eighth torch would give up.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    towers: Any = model.backbone
    towers.image_features = torch.compile(towers.image_features)
    towers.encode_text = torch.compile(towers.encode_text)


def _copy_weights(start: GARE, model: GARE, name: str) -> None:
    """Everything the two share; what only the new model has (psi, say) keeps its own start."""
    state, found = model.state_dict(), start.state_dict()
    shared = {key for key in state.keys() & found.keys() if state[key].shape == found[key].shape}
    if not (model.config.temperature.learnable and start.config.temperature.learnable):
        shared -= {"log_logit_scale"}  # a fixed temperature is a setting, not a weight
    if not any(key.startswith("backbone.") for key in shared):
        raise CheckpointError(
            f"init_from {name} shares no towers with this model; check backbone in the recipe"
        )
    load_state(model, {**state, **{key: found[key] for key in shared}}, source=name)


def _look(
    model: GARE,
    average: dict[str, Tensor] | None,
    source: FrameSource,
    features: FrozenFeatures | None,
    config: RunConfig,
    folder: Path,
    progress: Progress,
    log: RunLog,
    processes: Processes,
) -> Progress:
    """Evaluate on the selection split; keep the model if it is the best so far. One process looks for all."""
    if not processes.is_main:
        return progress
    with _averaged(model, average):
        model.eval()
        videos = None
        if features is not None:
            with torch.no_grad():
                videos = model.video_features_from_cache(*features.of(config.selection_split))
        try:
            split = score_split(
                model, source, config.selection_split, num_workers=config.data.num_workers, videos=videos
            )
        except ValueError as error:
            raise TrainingError(f"step {progress.step}: {error}; lower the learning rate") from None
        metrics = evaluate_scores(split.scores_TV, split.video_of_text)
        score = metrics.text_to_video["pessimistic"].recall_at_1
        log.evaluation(progress.step, config.selection_split, metrics)
        if score > progress.best_score:
            progress = replace(progress, best_score=score, best_step=progress.step)
            model.save_pretrained(folder / "best")
            selection = {"selected_on": config.selection_split, "step": progress.step, "recall_at_1": score}
            selection["seed"] = config.seed
            (folder / "best" / "selection.json").write_text(json.dumps(selection) + "\n")
    return progress


def _start_average(model: GARE, config: RunConfig) -> dict[str, Tensor] | None:
    if not config.ema_decay:
        return None
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def _after_step(model: GARE, average: dict[str, Tensor] | None, config: RunConfig) -> None:
    if config.model.temperature.learnable:
        model.log_logit_scale.clamp_(max=4.6052)  # a logit scale of 100, as everywhere in this field
    if average is not None:
        state = {name: x for name, x in model.state_dict().items() if x.is_floating_point()}
        averages = [average[name] for name in state]
        torch._foreach_lerp_(averages, list(state.values()), 1 - config.ema_decay)


@contextmanager
def _averaged(model: GARE, average: dict[str, Tensor] | None) -> Iterator[None]:
    """The model with its averaged weights, for a look or for saving."""
    if average is None:
        yield
        return
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(average)
    yield
    model.load_state_dict(own)


def _refuse_nan(loss: Loss, batch: PairBatch, source: FrameSource, step: int) -> None:
    if torch.isfinite(loss.total):
        return
    bad = [name for name, term in loss.terms.items() if not torch.isfinite(term)]
    videos = source.manifest.videos("train")
    ids = ", ".join(videos[i].video_id for i in batch.video_index[:8].tolist())
    raise TrainingError(
        f"step {step}: the loss is not finite ({', '.join(bad) or 'total'}) for the videos {ids}, …; "
        "the last checkpoint is intact. Lower the learning rate, or look at them with 'gare data check'"
    )


def _refuse_nan_gradient(model: GARE, step: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            raise TrainingError(
                f"step {step}: the gradient of {name} is not finite, although the loss is; "
                "the last checkpoint is intact. Lower the learning rate or use precision = 'float32'"
            )

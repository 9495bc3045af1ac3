"""gare-mini once more, on a GPU that is lent for minutes: students see larger pictures than their teachers.

    python experiments/better_mini.py run --start runs/former        # in a folder with data/: helper, r1, r2
    python experiments/better_mini.py receive PARTS --out runs/r1.safetensors       # at home, for each run
    python experiments/better_mini.py build runs/r1.safetensors runs/r2.safetensors --start runs/former \\
        --out runs/mini

`run` decodes every training picture into the memory of the GPU, compiles towers meanwhile, and trains what
PLANS says, one run after the other; --only names some. A run that would take longer than its seconds has
fewer steps, so that its schedule ends in time. `build` mixes the students with the model that they started
from and gives it a bank of captions: what `gare.model.shipped.pack` takes. docs/models/gare-mini.md has all
commands.

It is no recipe of `gare train`: there a student and its teachers see the same pixels, and captions are drawn
and tokenised by other processes. Here nothing waits for a CPU.

Shapes: V videos, C captions, R rows of an epoch, B pairs of a batch, N pictures, W words.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fill_caption_bank import with_bank
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gare import GARE, GareConfig, retrieval_metrics
from gare.data.colour_jitter import jitter_colours
from gare.data.loader import FrameSource, load_gallery
from gare.data.manifest import Row
from gare.data.preload import cut_out
from gare.objective.contrastive_term import same_video_cells
from gare.objective.teacher_term import distillation
from gare.train.optimizers import build_optimizer, learning_rate_factor, set_learning_rate
from gare.train.run_config import RunConfig
from gare.train.starting_model import compile_towers

SETS = {"msrvtt_frames": 1, "flickr8k": 2, "coco": 1}
"""What is learned from, and how often an epoch shows each caption."""
VAL = ("msrvtt_frames", "flickr8k")
RECIPE = Path(__file__).parents[1] / "recipes" / "gare_mini_stage1.toml"
"""Whose encoder and optimiser these runs have."""
WORDS = 24
HEIGHT, WIDTH = 192, 256
"""Of the canvas that each picture lies on, in its top left corner: the sets have no larger ones."""
TEACHERS_SIZE, TEACHERS_SCALE = 160, 20.0
SHARE, SIZE = 0.5, 256
"""Of the shipped model, chosen on val: how much of the students is in it, and the size of its pictures."""
BANK = ("encoder.bank_share=0.5", "encoder.bank_temperature=0.04")
NUM_CAPTIONS = 5000
PART_BYTES = 16_000_000
State = dict[str, Tensor]


@dataclass(frozen=True)
class Look:
    """How pictures and captions are changed before they are shown."""

    least_area: float = 0.25
    mixed_share: float = 0.0
    """How many pairs are blended with others; their captions are joined."""
    word_dropout: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One run."""

    name: str
    seed: int
    steps: int
    seconds: float
    look: Look
    teacher_weight: float
    teachers: tuple[str, ...]
    size: int
    """Of the pictures that it sees; teachers see the same ones smaller."""
    rates: float = 1.0
    """Times the learning rates of the recipe."""
    is_helper: bool = False
    """A small model from the packages, of 128 dimensions, of which only the upper layers are trained.
    Otherwise a run goes on from the model of before."""


PLANS = (
    Plan("helper", 1, 2378, 150, Look(), 4.0, ("start",), 160, is_helper=True),
    Plan("r1", 1, 2232, 270, Look(0.25, 0.25, 0.05), 8.0, ("start", "helper"), 224, rates=0.5),
    Plan("r2", 2, 2318, 275, Look(0.35, 0.25, 0.1), 8.0, ("start", "helper"), 224, rates=0.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="everything that needs the GPU")
    run.add_argument("--data", type=Path, default=Path("data"))
    run.add_argument("--start", default="gare-mini", help="the model of before")
    run.add_argument("--only", nargs="+", default=[plan.name for plan in PLANS])
    run.add_argument("--batch", type=int, default=1024)
    run.add_argument("--val-sizes", type=int, nargs="+", default=[224, 256, 288])
    run.add_argument("--workers", type=int, default=15)
    run.add_argument("--plain", action="store_true", help="without torch.compile")
    run.add_argument("--steps", type=int, help="fewer than planned, for a trial")
    run.add_argument("--limit", type=int, help="videos of each set, for a trial")
    receive = verbs.add_parser("receive", help="put the weights of a run together again")
    receive.add_argument("parts", type=Path, nargs="+")
    receive.add_argument("--out", type=Path, required=True)
    build = verbs.add_parser("build", help="the model from its students; then pack it")
    build.add_argument("students", type=Path, nargs="+")
    build.add_argument("--data", type=Path, default=Path("data"))
    build.add_argument("--start", default="gare-mini", help="the model of before")
    build.add_argument("--captions", type=int, default=NUM_CAPTIONS)
    build.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.verb == "run":
        run_all(chosen)
    elif chosen.verb == "receive":
        chosen.out.write_bytes(b"".join(part.read_bytes() for part in sorted(chosen.parts)))
        print(f"saved {chosen.out}: {len(load_file(chosen.out))} tensors")
    else:
        build_mixture(chosen.students, chosen.start, chosen.data, chosen.captions, chosen.out)


def run_all(chosen: argparse.Namespace) -> None:
    began = time.monotonic()
    plans = [plan for plan in PLANS if plan.name in chosen.only]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    pairs = Pairs(
        chosen.data, device, chosen.limit, chosen.workers
    )  # before anything touches the GPU: it forks
    config = RunConfig.load(RECIPE)
    models = Models(config, chosen.start, device)
    say("models", began)
    if not chosen.plain:
        models.compile({(plan.is_helper, plan.size) for plan in plans}, chosen.batch)
        say("compiled", began)
    pairs.finish(models.start.encoder.tokenize)
    vals = {size: Val(chosen.data, device, size, min(4, chosen.workers)) for size in chosen.val_sizes}
    say("pictures", began)
    for size, val in vals.items():
        val.show(f"start, {size} pixels", models.start)
    Path("runs").mkdir(exist_ok=True)
    for plan in plans:
        plan = replace(plan, steps=min(plan.steps, chosen.steps or plan.steps))
        state, start = train(models, pairs, plan, config, chosen.batch)
        save(plan.name, state, start)
        say(plan.name, began)
        shown, _ = models.as_teacher(plan.name, state, is_helper=plan.is_helper)
        for size, val in vals.items():
            val.show(f"{plan.name}, {size} pixels", shown)


# --- pairs on the device ------------------------------------------------------------------------------------

_SOURCES: dict[str, tuple[FrameSource, list[Row]]] = {}
_ALL_FRAMES, _VIDEOS_A_JOB = 10_000, 100


def _decode(job: tuple[str, int, str]) -> tuple[str, list[list[tuple[int, int]]]]:
    """The frames of some videos of a set into a file, each on a canvas; heights and widths."""
    name, first, target = job
    source, videos = _SOURCES[name]
    canvases, sizes = [], []
    for video in videos[first : first + _VIDEOS_A_JOB]:
        own = []
        for frame in source.read(video, num_frames=_ALL_FRAMES):
            picture = np.array(frame.convert("RGB"))
            canvas = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
            canvas[: picture.shape[0], : picture.shape[1]] = picture
            canvases.append(canvas)
            own.append(picture.shape[:2])
        sizes.append(own)
    np.save(target, np.stack(canvases))
    return target, sizes


@dataclass(frozen=True)
class Batch:
    """Pairs as models take them; the first `num_mixed` are blended with as many that follow them."""

    pixels_BCHW: Tensor
    ids_BW: Tensor
    mask_BW: Tensor
    video_B: Tensor
    num_mixed: int


class Pairs:
    """Captions as tokens and pictures as bytes, all on the device, where batches are drawn from them."""

    def __init__(self, data: Path, device: torch.device, limit: int | None, num_workers: int) -> None:
        self._device = device
        scratch = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("runs")
        jobs = []
        for name in SETS:
            source = FrameSource.open(data / name, 1, "uniform")
            videos = list(source.manifest.videos("train"))[:limit]
            _SOURCES[name] = source, videos
            starts = range(0, len(videos), _VIDEOS_A_JOB)
            jobs += [(name, at, str(scratch / f"better-mini-{name}-{at}.npy")) for at in starts]
        self._pool = multiprocessing.get_context("fork").Pool(num_workers)
        self._coming = self._pool.map_async(_decode, jobs, chunksize=1)

    def finish(self, tokenize: Any) -> None:
        """Wait for the pictures, and put everything on the device."""
        decoded = self._coming.get()
        self._pool.close()
        device = self._device
        sizes = [size for _, videos in decoded for video in videos for size in video]
        self._canvas_NHWC = torch.empty(len(sizes), HEIGHT, WIDTH, 3, dtype=torch.uint8, device=device)
        at = 0
        for path, _ in decoded:
            part = torch.from_numpy(np.load(path))
            self._canvas_NHWC[at : at + len(part)].copy_(part)
            at += len(part)
            Path(path).unlink()
        self._size_N2 = torch.tensor(sizes, device=device, dtype=torch.float32)
        self._count_V = torch.tensor([len(video) for _, videos in decoded for video in videos], device=device)
        self._first_V = self._count_V.cumsum(0) - self._count_V
        captions: list[str] = []
        video_C: list[int] = []
        times_C: list[int] = []
        offset = 0
        for name, (source, videos) in _SOURCES.items():
            known = source.manifest.captions("train"), source.manifest.video_index("train")
            for caption, video in zip(*known, strict=True):
                if video < len(videos):
                    captions.append(caption)
                    video_C.append(video + offset)
                    times_C.append(SETS[name])
            offset += len(videos)
        ids_CW, mask_CW = tokenize(captions)
        every_C, length_C = torch.arange(len(captions)), mask_CW.sum(dim=1)
        last_C = ids_CW[every_C, length_C - 1]
        length_C = length_C.clamp(max=WORDS)
        ids_CW = F.pad(ids_CW, (0, max(0, WORDS - ids_CW.shape[1])))[:, :WORDS].clone()
        ids_CW[every_C, length_C - 1] = last_C  # a caption that is cut ends as the others do
        self._ids_CW, self._length_C = ids_CW.to(device), length_C.to(device)
        self._video_C = torch.tensor(video_C, device=device)
        self._rows_R = torch.repeat_interleave(every_C, torch.tensor(times_C)).to(device)
        print(f"{len(sizes)} pictures of {offset} videos, {len(captions)} captions", flush=True)

    def rows(self, batch_size: int, seed: int) -> Iterator[Tensor]:
        """Captions of one batch after another, for ever, in a new order every epoch."""
        chance = torch.Generator(self._device).manual_seed(1000 + seed)
        while True:
            order = torch.randperm(len(self._rows_R), generator=chance, device=self._device)
            yield from self._rows_R[order][: len(order) // batch_size * batch_size].split(batch_size)

    def draw(self, row_B: Tensor, look: Look, size: int, chance: torch.Generator) -> Batch:
        """The pictures and tokens of these captions, changed as the look says."""
        number, device = len(row_B), self._device

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=chance, device=device)

        video_B = self._video_C[row_B]
        frame_B = self._first_V[video_B] + (rand(number) * self._count_V[video_B]).long()
        # As `data.transforms.random_crop` does it, and then the middle square.
        height_B, width_B = self._size_N2[frame_B].unbind(dim=1)
        side_B = (look.least_area + (1 - look.least_area) * rand(number)).sqrt()
        side_B = side_B * torch.minimum(height_B, width_B)
        ratio_B = torch.exp((2 * rand(number) - 1) * math.log(4 / 3)).sqrt()
        crop_width_B = torch.minimum(side_B * ratio_B, width_B)
        crop_height_B = torch.minimum(side_B / ratio_B, height_B)
        left_B, top_B = rand(number) * (width_B - crop_width_B), rand(number) * (height_B - crop_height_B)
        square_B = torch.minimum(crop_width_B, crop_height_B)
        left_B, top_B = left_B + (crop_width_B - square_B) / 2, top_B + (crop_height_B - square_B) / 2
        flip_B = (rand(number) < 0.5).float()
        crop_B5 = torch.stack([left_B, top_B, square_B, square_B, flip_B], dim=1)
        pixels = cut_out(self._canvas_NHWC[frame_B].permute(0, 3, 1, 2), crop_B5, size)
        # As `data.colour_jitter.draw_colour_jitter`.
        swing_B3 = 1 + 0.4 * (2 * rand(number, 3) - 1)
        swing_B3[:, 2] *= rand(number) >= 0.1
        patch_B2 = (rand(number, 1) < 0.25) * (0.2 + 0.3 * rand(number, 2))
        corner_B2 = rand(number, 2) * (1 - patch_B2)
        jitter_B7 = torch.cat([swing_B3, corner_B2, corner_B2 + patch_B2], dim=1)
        pixels = jitter_colours(pixels[:, None], jitter_B7)[:, 0]
        ids_BW, length_B = self._ids_CW[row_B], self._length_C[row_B]
        mixed = int(look.mixed_share * number)
        if mixed:
            blended = ((pixels[:mixed].short() + pixels[mixed : 2 * mixed]) // 2).to(torch.uint8)
            pixels = torch.cat([blended, pixels[mixed:]])
            ids_BW, length_B = join_captions(ids_BW, length_B, mixed)
        place_W = torch.arange(WORDS, device=device)
        mask_BW = place_W < length_B[:, None]
        if look.word_dropout:
            is_word_BW = (place_W > 0) & (place_W < length_B[:, None] - 1)
            mask_BW &= ~(is_word_BW & (rand(number, WORDS) < look.word_dropout))
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return Batch(pixels, ids_BW, mask_BW, video_B, mixed)


def join_captions(ids_BW: Tensor, length_B: Tensor, mixed: int) -> tuple[Tensor, Tensor]:
    """The first captions followed by as many others; tokens that no longer fit are left out.

    >>> ids = F.pad(torch.tensor([[1, 5, 2], [1, 7, 2]]), (0, WORDS - 3))
    >>> ids, length = join_captions(ids, torch.tensor([3, 3]), 1)
    >>> ids[:, :5].tolist(), length.tolist()
    ([[1, 5, 7, 2, 0], [1, 7, 2, 0, 0]], [4, 3])
    """
    place_W = torch.arange(WORDS, device=ids_BW.device)
    own_M1, other_M = length_B[:mixed, None] - 1, length_B[mixed : 2 * mixed]
    from_other_MW = (place_W - own_M1 + 1).clamp(0, WORDS - 1)
    others_MW = ids_BW[mixed : 2 * mixed].gather(1, from_other_MW)
    joined_MW = torch.where(place_W < own_M1, ids_BW[:mixed], others_MW)
    joined_M = (own_M1[:, 0] + other_M - 1).clamp(max=WORDS)
    return torch.cat([joined_MW, ids_BW[mixed:]]), torch.cat([joined_M, length_B[mixed:]])


# --- models -------------------------------------------------------------------------------------------------


class Models:
    """A model to train and one to show of each kind, into which weights are copied: so each compiles once."""

    def __init__(self, config: RunConfig, start: str, device: torch.device) -> None:
        settings = ["encoder.frozen_image_blocks=5", "encoder.stochastic_depth=0.1"]
        values = GareConfig.load(config.model.to_values(), settings)
        torch.manual_seed(0)
        self.start = GARE.from_pretrained(start).to(device).eval().requires_grad_(False)
        self._kinds = {}
        for is_helper in (True, False):
            own = GareConfig.load(values.to_values(), ["encoder.dim=128"] if is_helper else [])
            trained = GARE(own, pretrained_towers=is_helper).to(device)
            shown = GARE(own, pretrained_towers=False).to(device).eval().requires_grad_(False)
            if is_helper:
                text = trained.encoder.text
                with torch.no_grad():
                    round_words(text.embeddings.word_embeddings.weight)
                for layer in text.encoder.layer[:4]:
                    layer.requires_grad_(False)
            else:
                first = self.start.state_dict()
                kept = {name: first.get(name, x) for name, x in trained.state_dict().items()}
                trained.load_state_dict({**kept, "log_logit_scale": trained.log_logit_scale.detach()})
            self._kinds[is_helper] = (trained, shown, copy_state(trained))
        self._teachers: dict[str, tuple[GARE, State]] = {"start": (self.start, copy_state(self.start))}

    def to_train(self, *, is_helper: bool) -> tuple[GARE, State]:
        """The model of this kind at its start, and that start."""
        trained, _, start = self._kinds[is_helper]
        trained.load_state_dict(start)
        return trained.train(), start

    def as_teacher(
        self, name: str, state: State | None = None, *, is_helper: bool = True
    ) -> tuple[GARE, State]:
        """A finished run: the model to show, with its weights in it, and these."""
        if state is not None:
            self._teachers[name] = (self._kinds[is_helper][1], state)
        elif name not in self._teachers:
            start = self._kinds[is_helper][2]
            found = load_file(f"runs/{name}.safetensors")
            device = self.start.device
            state = {**start, **{key: x.to(device, start[key].dtype) for key, x in found.items()}}
            self._teachers[name] = (self._kinds[is_helper][1], state)
        model, state = self._teachers[name]
        own = model.state_dict()
        torch._foreach_copy_([own[key] for key in state], list(state.values()))
        return model, state

    def compile(self, wanted: set[tuple[bool, int]], batch: int) -> None:
        """Compile for the shapes of these runs and of teachers."""
        torch._dynamo.config.automatic_dynamic_shapes = False
        for model in (self.start, *(model for kind in self._kinds.values() for model in kind[:2])):
            compile_towers(model)
        for is_helper, size in sorted(wanted):
            model, _ = self.to_train(is_helper=is_helper)
            texts, pictures = vectors(model, self._sample(batch, size))
            (texts @ pictures.mT).square().sum().backward()
            model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for model in (self.start, self._kinds[True][1]):
                vectors(model, self._sample(batch, TEACHERS_SIZE))

    def _sample(self, batch: int, size: int) -> Batch:
        device = self.start.device
        pixels = torch.zeros(batch, 3, size, size, dtype=torch.uint8, device=device)
        ids_BW = torch.full((batch, WORDS), 2000, device=device)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return Batch(pixels, ids_BW, torch.ones_like(ids_BW, dtype=torch.bool), ids_BW[:, 0], 0)


def round_words(words: Tensor, group: int = 32) -> None:
    """Round to four bits, in place. (It was meant to save room; the helper is in no shipped file.)"""
    parts = words.unflatten(1, (-1, group))
    step = (parts.abs().amax(dim=2, keepdim=True) / 7).half().float().clamp(min=1e-7)
    words.copy_(((parts / step).round().clamp(-7, 7) * step).flatten(1))


def vectors(model: GARE, batch: Batch, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Texts and pictures as unit vectors; pictures made smaller first where a size is given."""
    encoder: Any = model.encoder
    with torch.autocast(batch.pixels_BCHW.device.type, torch.bfloat16):
        pixels = encoder.image_format.normalise(batch.pixels_BCHW)
        if size is not None and size != pixels.shape[-1]:
            pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        pictures = encoder.project_images(encoder.image_features(pixels))
        texts, _ = encoder.encode_text(batch.ids_BW, batch.mask_BW)
    return F.normalize(texts.float(), dim=-1), F.normalize(pictures.float(), dim=-1)


def copy_state(model: nn.Module) -> State:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


# --- training -----------------------------------------------------------------------------------------------


def train(
    models: Models, pairs: Pairs, plan: Plan, config: RunConfig, batch_size: int
) -> tuple[State, State]:
    """The average of the weights after the run, and where it started."""
    model, start = models.to_train(is_helper=plan.is_helper)
    torch.manual_seed(plan.seed)
    if plan.is_helper:
        model.encoder.image_projection.reset_parameters()
        model.encoder.text_projection.reset_parameters()
    optimizer = build_optimizer(model, config.optimizer)
    for group in optimizer.param_groups:
        group["base_lr"] *= plan.rates
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    weights = list(trained.values())
    average = [weight.detach().clone() for weight in weights]
    chance = torch.Generator(model.device).manual_seed(plan.seed)
    rows = pairs.rows(batch_size, plan.seed)
    num_steps, step, began, warm = plan.steps, 0, time.monotonic(), 0.0
    while step < num_steps:
        batch = pairs.draw(next(rows), plan.look, plan.size, chance)
        set_learning_rate(optimizer, learning_rate_factor(step, num_steps, config.optimizer.warmup))
        with torch.no_grad():
            taught = torch.zeros((), device=model.device)
            for name in plan.teachers:
                teacher, _ = models.as_teacher(name)
                their_texts, their_pictures = vectors(teacher, batch, TEACHERS_SIZE)
                taught = taught + their_texts @ their_pictures.mT / len(plan.teachers)
        loss = loss_of(model, batch, TEACHERS_SCALE * taught, plan.teacher_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, config.optimizer.clip_norm)
        optimizer.step()
        decay = min(config.ema_decay or 0.0, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [weight.detach() for weight in weights], 1 - decay)
        step += 1
        if step == 40 or step % 200 == 0:
            print(f"  {plan.name} {step}/{num_steps} loss {loss.item():.3f}", flush=True)
            spent = time.monotonic() - began
            if step == 40:
                warm = spent
            elif step == 200:  # no more steps than there is time for
                num_steps = min(
                    num_steps, max(201, step + int((plan.seconds - spent) * 160 / (spent - warm)))
                )
    return {**copy_state(model), **dict(zip(trained, average, strict=True))}, start


def loss_of(model: GARE, batch: Batch, taught_BB: Tensor, teacher_weight: float) -> Tensor:
    """InfoNCE, and agreement with the teachers."""
    texts, pictures = vectors(model, batch)
    scale = model.logit_scale.clamp(max=100)
    scores_BB = texts @ pictures.mT
    skipped_BB = same_video_cells(batch.video_B)
    mixed = torch.arange(batch.num_mixed, device=scores_BB.device)
    skipped_BB[mixed, batch.num_mixed + mixed] = True  # a blended picture shows its partner, too
    skipped_BB[batch.num_mixed + mixed, mixed] = True
    logits_BB = (scores_BB * scale).masked_fill(skipped_BB, float("-inf"))
    target = torch.arange(len(logits_BB), device=logits_BB.device)
    contrastive = (F.cross_entropy(logits_BB, target) + F.cross_entropy(logits_BB.mT, target)) / 2
    return contrastive + teacher_weight * distillation(scores_BB, scale, taught_BB)


class Val:
    """The frames and captions of both validation sets, on the device."""

    def __init__(self, data: Path, device: torch.device, size: int, num_workers: int) -> None:
        self._sets = []
        for name in VAL:
            source = FrameSource.open(data / name, 12, "uniform")
            clips = load_gallery(source, "val", image_size=size, batch_size=25, num_workers=num_workers)
            clips = [clip.to(device) for clip in clips]
            target = torch.tensor(source.manifest.video_index("val"))
            self._sets.append((clips, source.manifest.captions("val"), target))

    @torch.no_grad()
    def show(self, name: str, model: GARE) -> None:
        """R@1, R@5, R@10 of the mean frame on both sets, and the mean of the four recalls that have goals."""
        encoder: Any = model.eval().encoder
        plain = type(encoder)  # not what was compiled for other shapes
        found: list[float] = []
        for clips, captions, target in self._sets:
            videos, texts = [], []
            with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                for clip in clips:
                    pixels = encoder.image_format.normalise(clip.pixels_VFCHW[clip.mask_VF])
                    frames_VFD = torch.zeros(*clip.mask_VF.shape, model.dim, device=model.device)
                    pictures_ND = encoder.project_images(plain.image_features(encoder, pixels)).float()
                    frames_VFD[clip.mask_VF] = F.normalize(pictures_ND, dim=-1)
                    videos.append(F.normalize(frames_VFD.sum(dim=1), dim=-1))
                for at in range(0, len(captions), 500):
                    ids_TW, mask_TW = (x.to(model.device) for x in encoder.tokenize(captions[at : at + 500]))
                    texts.append(plain.encode_text(encoder, ids_TW, mask_TW)[0].float())
            scores_TV = F.normalize(torch.cat(texts), dim=-1) @ torch.cat(videos).mT
            metrics = retrieval_metrics(scores_TV.cpu(), target)
            found += [100 * x for x in (metrics.recall_at_1, metrics.recall_at_5, metrics.recall_at_10)]
        goal = (found[0] + found[2] + found[3] + found[5]) / 4
        print(f"{goal:.2f}  {name:20}" + " / ".join(f"{x:.1f}" for x in found), flush=True)


# --- the way home -------------------------------------------------------------------------------------------


def save(name: str, state: State, start: State) -> None:
    """What has changed since the start, matrices in half precision, whole and in parts that travel."""
    changed = {
        key: (x.half() if x.ndim > 1 else x).cpu().contiguous()
        for key, x in state.items()
        if not torch.equal(x, start[key])
    }
    whole = Path("runs") / f"{name}.safetensors"
    save_file(changed, whole)
    with whole.open("rb") as file:
        for number, part in enumerate(iter(lambda: file.read(PART_BYTES), b"")):
            whole.with_suffix(f".part{number}").write_bytes(part)


def build_mixture(students: Sequence[Path], start: str, data: Path, num_captions: int, out: Path) -> None:
    """Half of the students' mean and half of where they started, whose psi stays as it is; with a bank."""
    former = GARE.from_pretrained(start)
    values = GareConfig.load(former.config.to_values(), [f"encoder.image_size={SIZE}"])
    model = GARE(values, pretrained_towers=False)
    state = former.state_dict()
    found = [load_file(student) for student in students]
    for name, tensor in state.items():
        if name.startswith("encoder.") and name in found[0]:
            mean = torch.stack([each[name].float() for each in found]).mean(dim=0)
            state[name] = torch.lerp(tensor, mean, SHARE)
    model.load_state_dict(state)
    plain = out.with_name(out.name + "-without-bank")
    model.save_pretrained(plain)
    with_bank(str(plain), [data / name for name in VAL], num_captions, BANK).save_pretrained(out)
    print(f"saved {out}")


def say(what: str, began: float) -> None:
    print(f"{time.monotonic() - began:.0f} s: {what}", flush=True)


if __name__ == "__main__":
    main()

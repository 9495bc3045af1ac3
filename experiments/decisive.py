"""The decisive experiment: do increments correct by text, or are they an offset for each video?

    python experiments/decisive.py all --data data --out runs/decisive --minutes 13   # about 20 min on a GPU
    python experiments/decisive.py table --out runs/decisive                          # again, from its ranks

`all` is these steps; each is skipped where its result is there, so a run that was cut off goes on:

    halves   towers.csv and psi.csv beside the manifests of flickr8k, coco and msrvtt_frames
    towers   OUT/towers: trained on the first half (decisive_towers.toml); psi is compiled beside it
    vectors  OUT/vectors-01 …: frames and texts of the second half
    psi      OUT/cells: every row and task, many models at once, the primary first, or what --first says.
             When --minutes are over, what is left is not run and the table says so
    table    OUT/ranks.npz, OUT/shares.json, OUT/table.md, OUT/table.json, from OUT/cells where it is there

experiments/decisive.md is the protocol: what is compared and how it is read, fixed before it was run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decisive_data import (
    PICTURE_SETS,
    VIDEO_SET,
    Items,
    Task,
    encode_half,
    load_vectors,
    make_tasks,
    random_vectors,
    save_vectors,
    write_halves,
)
from decisive_stack import ROWS, Head, Model, Programs, Row, Stack, mean_frame_only, new_heads, seconds_a_step
from decisive_table import FREE, FROZEN, TASKS, TEMPERATURES, TRAINED, Cell, write_table
from torch import Tensor

from gare import GARE
from gare.atomic import replacing
from gare.errors import GareError
from gare.evaluate.caption_protocols import video_to_text_rivals
from gare.evaluate.rank_metrics import as_matrix, count_rivals
from gare.evaluate.rescoring import querybank_norm
from gare.train import RunConfig, train
from gare.types import TextFeatures

HERE = Path(__file__).resolve().parent
SEEDS = (0, 1, 2, 3, 4)
MILESTONES = (250, 2_000, 7_000)
BATCH_SIZES = (96, 64)
"""The first one whose plan fits the minutes, measured before the first run."""
IMAGE_SIZE = 224
FROZEN_ROWS = (
    "offset",
    "psi zero",
    "psi normal",
    "psi + losses",
    "text-conditioned + psi",
    "psi + losses, dropout 0",
)
TRAINED_ROWS = ("baseline", "offset", "psi zero", "psi + losses")
"""Rows with trained projections, at the first temperature."""
RESCORED_ROWS = ("baseline", "offset", "psi zero")
"""Rows that are compared after QB-Norm, at the end of a run."""
SHARE_TEXTS, SHARE_VIDEOS = 256, 128
RANKS, SHARES, CELLS = "ranks.npz", "shares.json", "cells"


@dataclass(frozen=True)
class Scale:
    """How large the experiment is; anything but the default is a trial."""

    seeds: tuple[int, ...] = SEEDS
    milestones: tuple[int, ...] = MILESTONES
    batch_sizes: tuple[int, ...] = BATCH_SIZES


# --- plan --------------------------------------------------------------------------------------------------


Group = tuple[Cell, ...]
"""One row on all tasks, trained together. All groups have one size: a program is compiled once for every row
that uses it, and rows that start alike meet the same dropout."""


def make_plan(last: int, first: str = FROZEN) -> list[Group]:
    """Every run, in the order in which time is given to them. Each has the shorter runs on its way."""

    def group(row: str, projections: str, temperature: float) -> Group:
        return tuple(Cell(task, row, temperature, projections, last) for task in TASKS)

    def frozen(rows: Sequence[str]) -> list[Group]:
        return [group(row, FROZEN, temperature) for temperature in TEMPERATURES for row in rows]

    trained = [group(row, TRAINED, TEMPERATURES[0]) for row in TRAINED_ROWS]
    if first == TRAINED:
        return [*trained, *frozen(FROZEN_ROWS)]
    primary, others = FROZEN_ROWS[:2], FROZEN_ROWS[2:]
    return [*frozen(primary), *(each for row in others for each in frozen((row,))), *trained]


def all_cells(milestones: Sequence[int]) -> list[Cell]:
    """Every line of the table."""
    free = [Cell(task, row, TEMPERATURES[0], FROZEN, milestones[-1]) for task in TASKS for row in FREE]
    planned = [cell for group in make_plan(milestones[-1]) for cell in group]
    planned.sort(key=lambda cell: (cell.projections, TASKS.index(cell.task), cell.row))
    return [*free, *(replace(cell, steps=steps) for cell in planned for steps in milestones)]


# --- measuring ---------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(head: Head, row: Row, task: Task, *, with_bank: bool) -> dict[str, Tensor]:
    """Ranks of every query in both directions, pessimistic where scores tie."""
    text, video = _test_features(head, row, task.test)
    scores_TV = as_matrix(head.interaction.score(text, video))  # refuses what is not finite
    target_T = task.test.item_of_text
    ranks = {
        "text_to_video": count_rivals(scores_TV, target_T).ranks("pessimistic"),
        "video_to_text": video_to_text_rivals(scores_TV, target_T, "max_caption").ranks("pessimistic"),
    }
    if with_bank:
        bank, _ = head.features(task.bank.text_TD, task.test.video)
        rescored_TV = querybank_norm(scores_TV, head.interaction.score(bank, video))
        ranks["qb_norm"] = count_rivals(rescored_TV, target_T).ranks("pessimistic")
    return ranks


@torch.no_grad()
def variance_shares(head: Head, row: Row, task: Task) -> dict[str, float]:
    """What the variance of the increments depends on.

    "text": of the variance of all increments of the test pairs, without dropout, the share within a video.
    "dropout": of the variance over texts that the bottleneck sees while training, the share that two draws
    of dropout differ by on the same pair.
    """
    if not head.interaction.has_increments:
        return {}
    number, few = min(SHARE_TEXTS, len(task.test.text_TD)), min(SHARE_VIDEOS, len(task.test))
    chosen_T = torch.linspace(0, len(task.test.text_TD) - 1, number).long().to(task.test.text_TD.device)
    part = Items(task.test.video[:few], task.test.text_TD[chosen_T], task.test.num_texts_N[:few])
    text, video = _test_features(head, row, part)
    plain_TVD = head.interaction.score_pairs(text, video).increment_TVD
    devices = [plain_TVD.device] if plain_TVD.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        head.train()
        first_TVD, second_TVD = (head.interaction.score_pairs(text, video).increment_TVD for _ in range(2))
        head.eval()
    spread = float(plain_TVD.flatten(0, 1).double().var(dim=0, correction=0).sum())
    within = float(plain_TVD.double().var(dim=0, correction=0).sum(dim=-1).mean())
    seen = float(first_TVD.double().var(dim=0).sum(dim=-1).mean())
    noise = float((first_TVD - second_TVD).double().square().sum(dim=-1).mean()) / 2
    length = float(plain_TVD.norm(dim=-1).mean())
    return {"text": _share(within, spread), "dropout": _share(noise, seen), "length": length}


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _test_features(head: Head, row: Row, test: Items) -> tuple[TextFeatures, Any]:
    video = mean_frame_only(test.video) if row.mean_frame_only else test.video
    return head.features(test.text_TD, video)


# --- psi ---------------------------------------------------------------------------------------------------


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Products of float32: TF32 ("high") in training, as the protocol says; "highest" for what is told."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@products_in("high")
def run_psi(
    out: Path,
    tasks: dict[str, Task],
    scale: Scale,
    *,
    minutes: float,
    compiled: bool,
    plan: Sequence[Group] | None = None,
) -> None:
    """Every cell of the plan that fits into the minutes; what is there already is not run again."""
    start = time.monotonic()
    folder = out / CELLS
    folder.mkdir(parents=True, exist_ok=True)
    dim = next(iter(tasks.values())).train.text_TD.shape[1]
    programs = Programs(dim, compiled=compiled)
    for task in tasks.values():
        for name in FREE:
            _run_free(folder, task, ROWS[name], dim)
    plan = make_plan(scale.milestones[-1]) if plan is None else plan
    batch_size = _choose_batch_size(out, plan, tasks, scale, programs, 60 * minutes)
    left = [group for group in plan if not all(_file(folder, cell).is_file() for cell in group)]
    slowest = 0.0  # seconds a model
    for number, group in enumerate(left, start=1):
        name, began = _name(group), time.monotonic()
        num_models = len(group) * len(scale.seeds)
        if began - start + slowest * num_models >= 60 * minutes:
            print(f"not run: {name} (the {minutes:g} minutes are over)", flush=True)
            continue
        try:
            _run_group(folder, group, tasks, scale, batch_size, programs)
        except ValueError as error:  # a run that diverged costs its own lines of the table
            print(f"failed: {name}: {error}", flush=True)
        now = time.monotonic()
        slowest = max(slowest, (now - began) / num_models)
        took = f"{num_models} models, {now - began:.1f} s; {now - start:.0f} s gone"
        print(f"[{number}/{len(left)}] {name}: {took}", flush=True)


def _name(group: Group) -> str:
    return group[0].key.replace(group[0].task, " ".join(cell.task for cell in group), 1)


def _stack(
    group: Group,
    tasks: dict[str, Task],
    scale: Scale,
    batch_size: int,
    programs: Programs,
    steps: Sequence[int],
) -> Stack:
    models = [
        Model(tasks[cell.task], ROWS[cell.row], cell.temperature, seed, cell.projections == TRAINED)
        for cell in group
        for seed in scale.seeds
    ]
    return Stack(models, batch_size=batch_size, milestones=steps, programs=programs)


def _run_group(
    folder: Path, group: Group, tasks: dict[str, Task], scale: Scale, batch_size: int, programs: Programs
) -> None:
    """Train the cells of a group; what each says after each number of steps is saved at once."""
    torch.manual_seed(0)  # dropout
    stack = _stack(group, tasks, scale, batch_size, programs, scale.milestones)
    for steps in stack.train():
        heads = iter(zip(stack.models, stack.heads(), strict=True))
        for cell in group:
            found, depends = [], []
            for model, head in islice(heads, len(scale.seeds)):
                with_bank = steps == scale.milestones[-1] and model.row.name in RESCORED_ROWS
                with products_in("highest"):
                    found.append(measure(head, model.row, model.task, with_bank=with_bank))
                    depends.append(variance_shares(head, model.row, model.task))
            at = replace(cell, steps=steps)
            arrays = {f"{at.key}/{way}": _as_ranks([ranks[way] for ranks in found]) for way in found[0]}
            shares = {name: float(np.mean([each[name] for each in depends])) for name in depends[0]}
            _save_cell(_file(folder, at), arrays, {at.key: shares})


def _run_free(folder: Path, task: Task, row: Row, dim: int) -> None:
    cell = Cell(task.name, row.name, TEMPERATURES[0], FROZEN, 0)
    if not _file(folder, cell).is_file():
        (head,) = new_heads(row, dim, (0,))
        with products_in("highest"):
            ranks = measure(head.to(task.train.text_TD.device).eval(), row, task, with_bank=True)
        arrays = {f"{cell.key}/{direction}": _as_ranks([found]) for direction, found in ranks.items()}
        arrays[f"{task.name}/video_of_text"] = task.test.item_of_text.cpu().numpy().astype(np.uint16)
        _save_cell(_file(folder, cell), arrays, {})


def _choose_batch_size(
    out: Path, plan: Sequence[Group], tasks: dict[str, Task], scale: Scale, programs: Programs, most: float
) -> int:
    """By time alone, once; the choice is kept beside the results before the first run."""
    path = out / "batch.json"
    if path.is_file():
        return int(json.loads(path.read_text(encoding="utf-8"))["batch_size"])
    needed = None
    for size in scale.batch_sizes:
        if len(scale.batch_sizes) == 1:  # fixed in advance: no trial
            break
        took = {}
        for program, group in _by_program(plan).items():
            took[program] = seconds_a_step(_stack(group, tasks, scale, size, programs, (30,)))
            print(f"batch {size}, {_name(group)}: {1000 * took[program]:.2f} ms a step", flush=True)
        steps = scale.milestones[-1] + sum(round(0.2 * step) for step in scale.milestones[:-1])
        needed = steps * sum(took[ROWS[group[0].row].program] for group in plan)
        print(f"batch {size}: the plan takes {needed / 60:.1f} min", flush=True)
        if needed < 0.9 * most:
            break
    chosen = {"batch_size": size, "needed_s": needed and round(needed, 1), "minutes": most / 60}
    with replacing(path) as part:
        part.write_text(json.dumps(chosen) + "\n", encoding="utf-8")
    return size


def _by_program(plan: Sequence[Group]) -> dict[object, Group]:
    """The first group that uses each program, in the order of the plan."""
    firsts: dict[object, Group] = {}
    for group in plan:
        firsts.setdefault(ROWS[group[0].row].program, group)
    return firsts


def _file(folder: Path, cell: Cell) -> Path:
    return folder / (cell.key.replace("/", "_").replace(" ", "-") + ".npz")


def _as_ranks(ranks: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return torch.stack(list(ranks)).cpu().numpy().astype(np.uint16)


def _save_cell(path: Path, arrays: dict[str, Any], shares: dict[str, Any]) -> None:
    with replacing(path) as part, part.open("wb") as file:
        np.savez_compressed(file, shares=np.array(json.dumps(shares)), **arrays)


def collect(out: Path, scale: Scale) -> None:
    """All cells as two files: ranks.npz (uint16) and shares.json."""
    arrays: dict[str, Any] = {}
    shares: dict[str, Any] = {}
    for path in sorted((out / CELLS).glob("*.npz")):
        with np.load(path) as file:
            shares |= json.loads(str(file["shares"]))
            arrays |= {name: file[name] for name in file.files if name != "shares"}
    shares["run"] = {
        "milestones": scale.milestones,
        "seeds": scale.seeds,
        **json.loads((out / "batch.json").read_text(encoding="utf-8")),
        "cells": [asdict(cell) for cell in all_cells(scale.milestones)],
    }
    with replacing(out / RANKS) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    with replacing(out / SHARES) as part:
        part.write_text(json.dumps(shares, indent=0) + "\n", encoding="utf-8")
    print(f"{out / RANKS}: {(out / RANKS).stat().st_size / 1e6:.1f} MB", flush=True)


# --- steps of `all` ----------------------------------------------------------------------------------------


def train_towers(recipe: Path, data: Path, out: Path, settings: Sequence[str], device: torch.device) -> None:
    """On the first half of every set; Flickr8k twice, as in stage 1 of gare-mini."""
    if (out / "towers" / "last").is_dir():
        return
    paths = {name: str(data / name / "towers.csv") for name in (*PICTURE_SETS, VIDEO_SET)}
    also = [paths["flickr8k"], paths["flickr8k"], paths["coco"]]
    ours = [f"data.manifest={json.dumps(paths[VIDEO_SET])}", f"data.also_train={json.dumps(also)}"]
    config = RunConfig.load(recipe, [*ours, *settings])
    train(config, out / "towers", resume=(out / "towers" / "checkpoints").is_dir(), device=device)


def make_vectors(data: Path, out: Path, *, device: torch.device, num_workers: int) -> None:
    """The towers at the end of their run: no choice among checkpoints."""
    if list(out.glob("vectors-[0-9][0-9]")):
        return
    model = GARE.from_pretrained(str(out / "towers" / "last")).to(device).eval()
    if model.config.encoder.name == "mini":
        model.encoder.image_format = replace(model.encoder.image_format, size=IMAGE_SIZE)
    for path in save_vectors(out, encode_half(model, data, num_workers=num_workers)):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


@products_in("high")
def compile_programs(dim: int, device: torch.device, scale: Scale, first: str) -> None:
    """Fill the compiler's cache while the towers train; nothing is kept."""
    need = 2 * 3 * 4 * max(scale.batch_sizes)
    vectors = random_vectors(dim=dim, pictures=need, videos=need)
    tasks = {name: task.to(device) for name, task in make_tasks(vectors).items()}
    programs = Programs(dim, compiled=True)
    for size in scale.batch_sizes:
        for group in _by_program(make_plan(scale.milestones[-1], first)).values():
            began = time.monotonic()
            seconds = seconds_a_step(_stack(group, tasks, scale, size, programs, (30,)))
            took = f"{time.monotonic() - began:.0f} s; {1000 * seconds:.2f} ms a step beside other work"
            print(f"compiled: batch {size}, {_name(group)}: {took}", flush=True)


def run_all(chosen: argparse.Namespace, scale: Scale, device: torch.device) -> None:
    begin = time.monotonic()

    def say(step: str) -> None:
        print(f"--- {step}, {time.monotonic() - begin:.0f} s", flush=True)

    say("halves")
    if not (chosen.data / "coco" / "psi.csv").is_file():
        write_halves(chosen.data, most=chosen.most)
    say("towers")
    chosen.out.mkdir(parents=True, exist_ok=True)
    compiling = None
    if device.type == "cuda" and not list(chosen.out.glob("vectors-*")):
        sizes = ["--batch", *map(str, chosen.batch), "--seeds", str(chosen.seeds), "--first", chosen.first]
        command = [sys.executable, str(HERE / "decisive.py"), "compile", "--dim", str(chosen.dim), *sizes]
        compiling = subprocess.Popen(command)
    try:
        train_towers(chosen.recipe, chosen.data, chosen.out, chosen.set, device)
        say("vectors")
        make_vectors(chosen.data, chosen.out, device=device, num_workers=chosen.workers)
    finally:
        if compiling:
            compiling.terminate()
            compiling.wait()
    say("psi")
    psi_and_table(chosen, scale, device)
    say("done")


def psi_and_table(chosen: argparse.Namespace, scale: Scale, device: torch.device) -> None:
    tasks = {name: task.to(device) for name, task in make_tasks(load_vectors(chosen.out)).items()}
    plan = make_plan(scale.milestones[-1], chosen.first)
    run_psi(chosen.out, tasks, scale, minutes=chosen.minutes, compiled=device.type == "cuda", plan=plan)
    table(chosen.out, scale)


def table(out: Path, scale: Scale) -> None:
    """From the cells that are there, or from ranks that were collected before."""
    if (out / CELLS).is_dir():
        collect(out, scale)
    print(write_table(out))


def main() -> None:
    chosen = read_options()
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    scale = Scale(tuple(range(chosen.seeds)), tuple(chosen.milestones), tuple(chosen.batch))
    try:
        if chosen.step == "halves":
            write_halves(chosen.data, most=chosen.most)
        elif chosen.step == "compile":
            compile_programs(chosen.dim, device, scale, chosen.first)
        elif chosen.step == "psi":
            psi_and_table(chosen, scale, device)
        elif chosen.step == "table":
            table(chosen.out, scale)
        else:
            run_all(chosen, scale, device)
    except GareError as error:
        print(f"decisive.py: {error}", file=sys.stderr)
        sys.exit(1)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("step", choices=("all", "halves", "psi", "table", "compile"))
    parser.add_argument("--data", type=Path, default=Path("data"), help="with flickr8k, coco, msrvtt_frames")
    parser.add_argument("--out", type=Path, default=Path("runs/decisive"))
    parser.add_argument("--minutes", type=float, default=13.0, help="for psi")
    parser.add_argument("--first", choices=(FROZEN, TRAINED), default=FROZEN, help="what time is given to")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=BATCH_SIZES, help="one: fixed; two: the first that fits"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=15, help="processes that decode pictures")
    trial = parser.add_argument_group("for trials: the experiment itself has the defaults")
    trial.add_argument("--recipe", type=Path, default=HERE / "decisive_towers.toml", help="of the towers")
    trial.add_argument("--most", type=int, help="items of a half, of each set")
    trial.add_argument("--set", action="append", default=[], help="settings of the towers' recipe")
    trial.add_argument("--seeds", type=int, default=len(SEEDS))
    trial.add_argument("--milestones", type=int, nargs="+", default=MILESTONES)
    trial.add_argument("--dim", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    main()

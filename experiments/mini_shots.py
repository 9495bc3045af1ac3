"""gare-mini's increments, trained on pseudo-videos of several pictures, and judged again.

    python experiments/mini_shots.py frames val train-0 train-1 --data data --out runs/shots   # and `texts`
    python experiments/mini_shots.py train 0 1 --out runs/shots                                # seeds
    python experiments/mini_shots.py judge val --out runs/shots
    python experiments/mini_shots.py table val --out runs/shots

Every step goes on where it was cut off. experiments/mini_shots.md is the protocol, fixed before it was run.
Towers and projections stay as they are: all of it is done with cached vectors, the tasks and rows of the
decisive experiment, and a gradient that forms no increment.

Shapes: B pairs of a batch, S shots or seeds, T texts, V videos, D embedding, Q queries.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decisive import measure
from decisive_data import SHOTS, Items, Task
from decisive_stack import DECAY_SHARE, OPTIMIZER, ROWS, WARMUP_STEPS, Head, Row, mean_frame_only, new_heads
from decisive_table import paired_resamples
from mini_shots_data import SETS, Progress, encode, load_tasks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gare import GARE
from gare.atomic import replacing
from gare.errors import DataError
from gare.interaction.gap_aware import GapAwareConfig
from gare.interaction.text_conditioned import TextConditionedConfig
from gare.objective import ObjectiveConfig, symmetric_infonce, training_loss
from gare.train.optimizers import NOT_DECAYED
from gare.types import TextFeatures, VideoFeatures

TEMPERATURE = 0.05
BATCH_SIZE = 32
STEPS = (250, 1_000, 2_000)
KINDS = (*SHOTS, "B")
"""Kinds of batches take turns."""
SHARE_PAIRS = 64
"""Texts, and videos, whose increments are formed to tell what they depend on."""
SHIPPED = "shipped"
FROM_SHIPPED = "psi from shipped"
PLAIN = GapAwareConfig(init="zero_output", dropout=0.0)
TRAINED = {
    row.name: row
    for row in (
        Row("psi", PLAIN),
        Row(FROM_SHIPPED, PLAIN),
        replace(ROWS["offset"], interaction=PLAIN),
        Row("text-conditioned + psi", replace(PLAIN, pooling="text_conditioned")),
        Row("psi + losses", PLAIN, has_terms=True),
    )
}
FREE = {
    row.name: row
    for row in (
        Row(SHIPPED, PLAIN),
        replace(ROWS["baseline"], name="no increments"),
        *(
            Row(f"text-conditioned, {value:g}", TextConditionedConfig(pooling_temperature=value))
            for value in (1.5, 3.0, 6.0)
        ),
    )
}
"""Rows that nothing is trained of."""

Part = tuple[str, str, tuple[int, ...]]
MEASURES: dict[str, tuple[Part, ...]] = {
    "mean of four": (("B", "text_to_video", (1, 10)), ("A1", "text_to_video", (1, 10))),
    "MSR-VTT R@1": (("B", "text_to_video", (1,)),),
    "MSR-VTT R@10": (("B", "text_to_video", (10,)),),
    "Flickr8k R@1": (("A1", "text_to_video", (1,)),),
    "Flickr8k R@10": (("A1", "text_to_video", (10,)),),
    "two pictures R@1": (("A2", "text_to_video", (1,)),),
    "four pictures R@1": (("A4", "text_to_video", (1,)),),
    "one gallery R@1": (("all", "text_to_video", (1,)),),
    "MSR-VTT v→t R@1": (("B", "video_to_text", (1,)),),
    "Flickr8k v→t R@1": (("A1", "video_to_text", (1,)),),
}
"""The mean of parts: (gallery, direction, the K of its recalls)."""


# --- training ----------------------------------------------------------------------------------------------


class Run:
    """A row and a seed. Runs of all lengths share a trunk of constant rate; their last fifth is a branch."""

    def __init__(self, row: Row, seed: int, tasks: dict[str, Task], start: Head) -> None:
        self.row, self.head, self.step = row, start.train(), 0
        steps = -(-STEPS[-1] // len(KINDS))  # the same draws for runs of any length
        self.batches = {
            kind: (tasks[kind], *tasks[kind].batches(seed, steps=steps, batch_size=BATCH_SIZE))
            for kind in KINDS
        }
        named = list(self.head.interaction.named_parameters())
        decayed = [p for name, p in named if p.ndim > 1 and not any(word in name for word in NOT_DECAYED)]
        kept = {id(parameter) for parameter in decayed}
        groups = [
            {"params": decayed, "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for _, p in named if id(p) not in kept], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps
        )

    def state(self) -> dict[str, Any]:
        """What the trunk goes on from."""
        parts = {"psi": self.head.interaction.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**parts, "step": self.step})

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        state = copy.deepcopy(state)  # the optimiser would change the tensors that it is given
        self.head.interaction.load_state_dict(state["psi"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def loss(self) -> Tensor:
        """The loss of the batch of this step."""
        task, items, texts = self.batches[KINDS[self.step % len(KINDS)]]
        item_BS, text_B = items[self.step // len(KINDS)], texts[self.step // len(KINDS)]
        train = task.train.video
        video = VideoFeatures(train.frames_VFD[item_BS].flatten(1, 2), train.mask_VF[item_BS].flatten(1, 2))
        if self.row.mean_frame_only:
            video = VideoFeatures(video.mean()[:, None], video.mask_VF[:, :1])
        text = TextFeatures.from_vectors(task.train.text_TD[text_B])
        if not self.row.has_terms:
            return symmetric_infonce(self.head.interaction.score(text, video), 1 / TEMPERATURE)
        pairs = self.head.interaction.score_pairs(text, video)
        return training_loss(pairs, 1 / TEMPERATURE, ObjectiveConfig(), video_index=item_BS[:, 0]).total

    def advance(self, rate: float) -> float:
        """One step; the loss before it."""
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.interaction.parameters(), OPTIMIZER.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIMIZER.learning_rate * rate
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())


def train_to(run: Run, milestone: int, trunk: Path, title: str) -> dict[str, Tensor]:
    """psi after a run of so many steps. The trunk is saved on its way and left where the branch began."""
    if trunk.is_file():
        run.restore(torch.load(trunk))
    num_decay = max(1, round(DECAY_SHARE * milestone))
    first, progress, losses = run.step, Progress(title), []
    while run.step < milestone - num_decay:
        losses.append(run.advance(min(1.0, (run.step + 1) / WARMUP_STEPS)))
        progress(run.step - first, milestone - first)
        if run.step % 100 == 0 or run.step == milestone - num_decay:
            _save_trunk(trunk, run)
    before = run.state()
    for number in range(num_decay):
        losses.append(run.advance(1 - number / num_decay))
        progress(run.step - first, milestone - first)
    print(f"{title}: mean loss of the last 40 steps {np.mean(losses[-40:]):.3f}", flush=True)
    psi = copy.deepcopy(run.head.interaction.state_dict())
    run.restore(before)
    return psi


def _save_trunk(path: Path, run: Run) -> None:
    with replacing(path) as part:
        torch.save(run.state(), part)


def train(
    seed: int,
    out: Path,
    pieces: Sequence[str],
    names: Sequence[str],
    model_name: str,
    milestones: Sequence[int] = STEPS,
) -> None:
    """All rows to the first number of steps, then all to the second, …"""
    torch.manual_seed(seed)
    tasks = load_tasks(out, "val", pieces)
    print(f"{len(tasks['A1'].train)} pictures, {len(tasks['B'].train)} videos to train on", flush=True)
    for milestone in milestones:
        for name in names:
            path = psi_file(out, name, seed, milestone)
            if not path.is_file():
                run = Run(TRAINED[name], seed, tasks, new_head(TRAINED[name], seed, tasks, model_name))
                trunk = path.with_name(f"trunk-{_slug(name)}-{seed}.pt")
                psi = train_to(run, milestone, trunk, f"{name}, seed {seed}, {milestone} steps")
                with replacing(path) as part:
                    save_file(psi, part)


def new_head(row: Row, seed: int, tasks: dict[str, Task], model_name: str) -> Head:
    """A row where it starts."""
    (head,) = new_heads(row, tasks["B"].train.text_TD.shape[1], (seed,))
    if row.name in (SHIPPED, FROM_SHIPPED):
        head.interaction.load_state_dict(GARE.from_pretrained(model_name).interaction.state_dict())
    return head


def psi_file(out: Path, name: str, seed: int, steps: int) -> Path:
    """Where a trained psi is."""
    return out / f"psi-{_slug(name)}-{seed}-{steps}.safetensors"


def _slug(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


# --- judging -----------------------------------------------------------------------------------------------


def judge(split: str, out: Path, names: Sequence[str], model_name: str) -> None:
    """Measure rows that are there: ranks-SPLIT.npz has every query's rank, shares-SPLIT.json `text_share`.

    What other rows had is kept.
    """
    tasks = load_tasks(out, split, [])
    arrays, shares = read_judged(split, out)
    for name, task in tasks.items():
        arrays[f"{name}/video_of_text"] = task.test.item_of_text.numpy().astype(np.uint16)
    for name in names:
        row = {**FREE, **TRAINED}[name]
        for steps in (0,) if name in FREE else _steps_there(out, name):
            heads = _trained_heads(row, steps, out, tasks, model_name)
            for task in tasks.values():
                found = [measure(head, row, task, with_bank=False) for head in heads]
                for way in found[0]:
                    ranks = torch.stack([each[way] for each in found]).numpy().astype(np.uint16)
                    arrays[f"{name}/{steps}/{task.name}/{way}"] = ranks
            for kind in KINDS:
                depends = [text_share(head, row, tasks[kind].test) for head in heads]
                shares[f"{name}/{steps}/{kind}"] = float(np.mean(depends))
            print(f"{name}, {steps} steps: {len(heads)} seeds", flush=True)
            with replacing(out / f"ranks-{split}.npz") as part, part.open("wb") as file:
                np.savez_compressed(file, **arrays)
            with replacing(out / f"shares-{split}.json") as part:
                part.write_text(json.dumps(shares, indent=0) + "\n", encoding="utf-8")


def read_judged(split: str, out: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The ranks and shares that are there."""
    ranks, shares = out / f"ranks-{split}.npz", out / f"shares-{split}.json"
    if not shares.is_file():
        return {}, {}
    with np.load(ranks) as file:
        return {name: file[name] for name in file.files}, json.loads(shares.read_text(encoding="utf-8"))


def _steps_there(out: Path, name: str) -> list[int]:
    found = (re.fullmatch(rf"psi-{_slug(name)}-\d+-(\d+)\.safetensors", path.name) for path in out.iterdir())
    return sorted({int(match[1]) for match in found if match})


@torch.no_grad()
def text_share(head: Head, row: Row, test: Items) -> float:
    """Of the variance of the increments of some pairs, the share that lies within a video: between texts."""
    if not head.interaction.has_increments:
        return 0.0
    chosen_T = torch.linspace(0, len(test.text_TD) - 1, SHARE_PAIRS).long()
    video = mean_frame_only(test.video) if row.mean_frame_only else test.video
    text, video = head.features(test.text_TD[chosen_T], video[:SHARE_PAIRS])
    increment_TVD = head.interaction.score_pairs(text, video).increment_TVD.double()
    spread = float(increment_TVD.flatten(0, 1).var(dim=0, correction=0).sum())
    within = float(increment_TVD.var(dim=0, correction=0).sum(dim=-1).mean())
    return within / spread if spread > 0 else 0.0


def _trained_heads(row: Row, steps: int, out: Path, tasks: dict[str, Task], model_name: str) -> list[Head]:
    """Ready to score; a row that nothing is trained of is there once."""
    heads = []
    for seed in range(1 if steps == 0 else 9):
        path = psi_file(out, row.name, seed, steps)
        if steps == 0 or path.is_file():
            head = new_head(row, seed, tasks, model_name).eval().requires_grad_(False)
            if steps:
                head.interaction.load_state_dict(load_file(path))
            heads.append(head)
    return heads


# --- table -------------------------------------------------------------------------------------------------


def write_table(split: str, out: Path) -> str:
    """table-SPLIT.json and table-SPLIT.md from ranks-SPLIT.npz and shares-SPLIT.json."""
    arrays, shares = read_judged(split, out)
    if not shares:
        raise DataError(f"{out} has no ranks of {split}; make them with 'mini_shots.py judge {split}'")
    rows = list(dict.fromkeys(tuple(name.split("/")[:2]) for name in shares))
    found = [
        {
            "row": name,
            "steps": int(steps),
            "seeds": len(arrays[f"{name}/{steps}/B/text_to_video"]),
            "measures": {measure: compare(arrays, f"{name}/{steps}", measure) for measure in MEASURES},
            "shares": {task: shares[f"{name}/{steps}/{task}"] for task in KINDS},
        }
        for name, steps in rows
    ]
    text = "\n".join([f"# gare-mini's increments on pseudo-videos: {split}", "", *table_lines(found), ""])
    with replacing(out / f"table-{split}.md") as part:
        part.write_text(text, encoding="utf-8")
    with replacing(out / f"table-{split}.json") as part:
        part.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    return text


def compare(arrays: dict[str, Any], row: str, name: str) -> dict[str, float]:
    """Level of a measure, and its difference to the shipped row with its 95 % interval."""
    levels, changes, drawn = [], [], []
    for number, (task, way, depths) in enumerate(MEASURES[name]):
        ours, theirs = (
            np.mean([100.0 * (arrays[f"{each}/{task}/{way}"] <= depth) for depth in depths], axis=0)
            for each in (row, f"{SHIPPED}/0")
        )
        change_SQ = ours - theirs
        group_Q = arrays[f"{task}/video_of_text"].astype(np.int64)
        if way == "video_to_text":
            group_Q = np.arange(group_Q.max() + 1)
        levels.append(ours.mean())
        changes.append(change_SQ.mean())
        drawn.append(paired_resamples(change_SQ, group_Q, draw=number))
    low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
    numbers = {"level": np.mean(levels), "difference": np.mean(changes), "low": low, "high": high}
    return {key: round(float(value), 3) for key, value in numbers.items()}


def table_lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Levels and text-dependent shares, then differences to the shipped row."""
    head = ["row", "steps", "seeds"]
    lines = _header([*head, *MEASURES, *(f"text share {task}" for task in KINDS)])
    for one in found:
        levels = [f"{each['level']:.1f}" for each in one["measures"].values()]
        shares = [f"{100 * one['shares'][task]:.2f} %" for task in KINDS]
        lines.append(_line([one["row"], one["steps"] or "–", one["seeds"], *levels, *shares]))
    lines += ["", "Differences to the shipped row, points, 95 %:", "", *_header([*head, *MEASURES])]
    for one in found:
        if one["row"] != SHIPPED:
            changes = [
                f"{each['difference']:+.1f} [{each['low']:+.1f}, {each['high']:+.1f}]"
                for each in one["measures"].values()
            ]
            lines.append(_line([one["row"], one["steps"] or "–", one["seeds"], *changes]))
    return lines


def _header(cells: Sequence[str]) -> list[str]:
    return [_line(cells), _line(["---"] * len(cells))]


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# --- command line ------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("frames", "texts", "train", "judge", "table"))
    parser.add_argument("what", nargs="+", help="pieces to encode, seeds to train, or the split that judges")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="what is encoded")
    parser.add_argument("--pieces", nargs="+", default=["train-0", "train-1"], help="what is trained on")
    parser.add_argument("--rows", nargs="+", help="rows to train or judge; all but psi + losses, or all")
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help="at most 2,000")
    parser.add_argument("--model", default="gare-mini")
    chosen = parser.parse_args()
    if max(chosen.steps) > STEPS[-1]:
        parser.error(f"batches are drawn for {STEPS[-1]} steps; --steps asks for {max(chosen.steps)}")
    if chosen.step in ("frames", "texts"):
        encode(chosen.step, chosen.what, chosen.data, chosen.out, chosen.model, chosen.sets)
    elif chosen.step == "train":
        names = chosen.rows or [name for name in TRAINED if name != "psi + losses"]
        for seed in map(int, chosen.what):
            train(seed, chosen.out, chosen.pieces, names, chosen.model, chosen.steps)
    else:
        for split in chosen.what:
            if chosen.step == "judge":
                judge(split, chosen.out, chosen.rows or [*FREE, *TRAINED], chosen.model)
            else:
                print(write_table(split, chosen.out))


if __name__ == "__main__":
    main()

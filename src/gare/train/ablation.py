"""Rows × seeds of one recipe, and the table made of them. A finished cell is never computed again."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from gare import atomic
from gare.data.loader import FrameSource
from gare.data.manifest import Split
from gare.errors import ConfigError, TrainingError
from gare.evaluate.evaluation_results import EvaluationResult, format_metric, markdown_rows
from gare.evaluate.model_evaluation import evaluate_model
from gare.evaluate.rank_files import write_run_ranks
from gare.evaluate.rank_metrics import METRIC_NAMES
from gare.evaluate.significance import bootstrap_intervals, mean_and_std, paired_permutation_test
from gare.model import GARE
from gare.settings import NotEmpty, Settings
from gare.train.run_config import DataConfig, RunConfig
from gare.train.run_log import METRICS_FILE
from gare.train.scoring_costs import FAST, ScoringCosts, scoring_costs
from gare.train.training_frames import cached_videos, open_source
from gare.train.training_run import BEST, CONFIG_FILE, LAST, train

SHOWN = ("recall_at_1", "recall_at_5", "recall_at_10", "median_rank", "mean_rank")


@dataclass(frozen=True)
class AblationRow(Settings):
    """One line of the table: a name and what it changes."""

    name: Annotated[str, NotEmpty()]
    set: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ablation(Settings):
    """A table of the paper. The first row is what the others are compared with."""

    title: Annotated[str, NotEmpty()]
    rows: Annotated[tuple[AblationRow, ...], NotEmpty()]
    costs: bool = False
    """Add a table of what scoring costs: parameters, operations, milliseconds, exact fast scoring."""

    def without(self, names: Collection[str]) -> Ablation:
        """The table less the rows of these names: one that takes hours need not hold up the others."""
        known = [row.name for row in self.rows]
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no row {name!r} to leave out; the rows are {', '.join(known)}")
        kept = tuple(row for row in self.rows if row.name not in names)
        if not kept:
            raise ConfigError("every row is left out; keep at least one")
        return replace(self, rows=kept)


@dataclass(frozen=True)
class Cell:
    """One row with one seed: its recipe and its folder."""

    row: str
    seed: int
    overrides: tuple[str, ...]
    folder: Path

    @property
    def is_trained(self) -> bool:
        """Whether its final model is there."""
        return (self.folder / LAST).exists()


def run_ablation(
    ablation: Ablation,
    recipe: Path,
    folder: Path,
    *,
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    split: Split = "test",
    device: torch.device | None = None,
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> dict[str, list[EvaluationResult]]:
    """Train and evaluate every cell that has no result yet; returns the results by row.

    Args:
        jobs: cells trained at the same time, each in a process of its own; small models leave a GPU idle.
    """
    cells = [
        Cell(
            row.name, seed, (*overrides, *row.set, f"seed={seed}"), folder / _slug(row.name) / f"seed-{seed}"
        )
        for row in ablation.rows
        for seed in seeds
    ]
    say(f"{len(cells)} cells, {sum(cell.is_trained for cell in cells)} of them trained already")
    configs = {cell: RunConfig.load(recipe, cell.overrides) for cell in cells}
    sources: dict[DataConfig, FrameSource] = {}
    for config in configs.values():
        if config.data not in sources:
            sources[config.data] = open_source(config.data)
            sources[config.data].manifest.videos(split)  # a split that is not there is told before training

    def finish(cell: Cell) -> EvaluationResult:
        path, config = cell.folder / f"results-{split}.json", configs[cell]
        if not path.exists():
            if not cell.is_trained:
                say(f"training {cell.row}, seed {cell.seed}")
                if jobs > 1:
                    _train_in_process(cell, recipe, device)
                else:
                    train(config, cell.folder, resume=(cell.folder / CONFIG_FILE).exists(), device=device)
            _evaluate_cell(cell, config, sources[config.data], split, device).save(path)
            say(f"finished {cell.row}, seed {cell.seed}")
        return EvaluationResult.read(path)

    results: dict[str, list[EvaluationResult]] = {}
    if jobs > 1:
        with ThreadPoolExecutor(jobs) as pool:
            finished = list(pool.map(finish, cells))
    else:
        finished = [finish(cell) for cell in cells]
    for cell, result in zip(cells, finished, strict=True):
        results.setdefault(cell.row, []).append(result)
    return results


def measure_costs(
    ablation: Ablation, recipe: Path, folder: Path, *, seed: int, overrides: Sequence[str], device: Any
) -> dict[str, ScoringCosts]:
    """What scoring costs in each row, of the model of one seed; a measured row is not measured again."""
    found = {}
    for row in ablation.rows:
        place = folder / _slug(row.name) / "costs.json"
        if not place.exists():
            config = RunConfig.load(recipe, (*overrides, *row.set))
            model = GARE.from_pretrained(folder / _slug(row.name) / f"seed-{seed}" / "best")
            model = model.to(device or torch.device("cpu"))
            words = model.encoder.tokenize(["a"])[0].shape[1]
            scoring_costs(model, frames=config.data.num_frames, words=max(words, 16)).save(place)
        found[row.name] = ScoringCosts.read(place)
    return found


def cost_table(costs: Mapping[str, ScoringCosts]) -> str:
    """Markdown: what scoring costs in each row."""
    header = ["scoring", "parameters", "kFLOP a pair", "ms for 64 × 64", "exact fast scoring"]
    rows = [
        [
            name,
            f"{cost.parameters:,}",
            f"{cost.flops_per_pair / 1000:,.1f}",
            f"{cost.milliseconds:.1f}",
            FAST[cost.fast_scoring],
        ]
        for name, cost in costs.items()
    ]
    device = next(iter(costs.values())).device
    return markdown_rows(header, rows) + f"\n\nMilliseconds on {device}, the fastest of five.\n"


def _train_in_process(cell: Cell, recipe: Path, device: torch.device | None) -> None:
    command = [sys.executable, "-m", "gare", "train", str(recipe), "--out", str(cell.folder)]
    command += [part for override in cell.overrides for part in ("--set", override)]
    command += ["--resume"] if (cell.folder / CONFIG_FILE).exists() else []
    command += ["--device", str(device)] if device is not None else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise TrainingError(f"{cell.row}, seed {cell.seed} failed: {done.stderr.strip()[-2000:]}")


def _evaluate_cell(
    cell: Cell, config: RunConfig, source: FrameSource, split: Split, device: torch.device | None
) -> EvaluationResult:
    model = GARE.from_pretrained(cell.folder / "best").to(device or torch.device("cpu"))
    result, _ = evaluate_model(
        model,
        source,
        split,
        selected_on=config.selection_split,
        seed=cell.seed,
        num_workers=config.data.num_workers,
        allow_missing=config.data.allow_missing,
        videos=cached_videos(model, source, config.data, split),
    )
    return result


def ablation_table(
    ablation: Ablation,
    results: dict[str, list[EvaluationResult]],
    costs: Mapping[str, ScoringCosts] | None = None,
) -> str:
    """Markdown: mean ± sd over seeds, bootstrap interval of the mean, paired test against the first row."""
    summary = summarise(ablation, results)
    parts = [f"## {ablation.title}\n\n{summary['provenance']}\n"]
    for direction, arrow in (("text_to_video", "text→video"), ("video_to_text", "video→text")):
        rows = []
        for row in summary["rows"]:
            numbers = row[direction]
            cells = []
            for name in SHOWN:
                cell = numbers[name]
                sd = "" if cell["sd"] is None else f" ± {format_metric(name, cell['sd'])}"  # type: ignore[arg-type]
                cells.append(format_metric(name, cell["mean"]) + sd)  # type: ignore[arg-type]
            r1 = numbers["recall_at_1"]
            low, high = (format_metric("recall_at_1", r1[key]) for key in ("low", "high"))
            compared = "" if r1["p_value"] is None else f"{r1['p_value']:.3f}"
            rows.append([row["name"], *cells, f"[{low}, {high}]", compared])
        header = [
            arrow,
            "R@1",
            "R@5",
            "R@10",
            "MdR",
            "MnR",
            "95 % of R@1",
            f"p against {ablation.rows[0].name}",
        ]
        parts.append(markdown_rows(header, rows) + "\n")
    if costs:
        parts.append(cost_table(costs))
    return "\n".join(parts)


def summarise(
    ablation: Ablation,
    results: dict[str, list[EvaluationResult]],
    costs: Mapping[str, ScoringCosts] | None = None,
) -> dict[str, Any]:
    """The numbers of the table, for JSON."""
    first = results[ablation.rows[0].name]
    facts = first[0]
    rows = []
    for name, runs in results.items():
        entry: dict[str, Any] = {"name": name, "seeds": [run.seed for run in runs]}
        entry["weights"] = [run.weights_hash for run in runs]
        entry["config"] = [run.config_fingerprint for run in runs]
        for direction in ("text_to_video", "video_to_text"):
            ranks, groups = _pooled(runs, direction)
            intervals = bootstrap_intervals(ranks, groups=groups)
            tests = None
            if name != ablation.rows[0].name and len(runs) == len(first):
                tests = paired_permutation_test(_pooled(first, direction)[0], ranks, groups=groups)
            entry[direction] = {}
            for metric in METRIC_NAMES:
                spread = mean_and_std([getattr(getattr(run, direction).main, metric) for run in runs])
                entry[direction][metric] = {
                    "mean": spread.mean,
                    "sd": spread.std,
                    "low": intervals[metric].low,
                    "high": intervals[metric].high,
                    "p_value": None if tests is None else tests[metric].p_value,
                }
        if costs:
            entry["costs"] = asdict(costs[name])
        rows.append(entry)
    seeds = ", ".join(str(run.seed) for run in first)
    provenance = (
        f"{facts.dataset}, split {facts.split} ({facts.num_texts:,} texts, {facts.num_videos:,} videos), "
        f"selected on {facts.selected_on}; seeds {seeds}. Mean ± sd over seeds; intervals resample queries; "
        "p is a two-sided paired permutation test of R@1, all seeds of a query swapped together."
    )
    made_with = {"queries_hash": facts.queries_hash, "gare_version": facts.gare_version}
    return {"title": ablation.title, "provenance": provenance, **made_with, "rows": rows}


def _pooled(runs: Sequence[EvaluationResult], direction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks of all seeds, and the query of each: the same queries come back with every seed."""
    ranks = [getattr(run, direction).ranks for run in runs]
    groups = [range(len(each)) for each in ranks]
    flat_ranks = torch.tensor([rank for each in ranks for rank in each])
    return flat_ranks, torch.tensor([query for each in groups for query in each])


def save_table(
    ablation: Ablation,
    results: dict[str, list[EvaluationResult]],
    folder: Path,
    costs: Mapping[str, ScoringCosts] | None = None,
) -> Path:
    """Write table.md and table.json; ranks.csv: the rank of every query in every run; selection.csv: what
    every run said of the split that chose its checkpoint.
    """
    numbers = summarise(ablation, results, costs)
    runs = {f"{name}/{run.seed}": run for name, of_row in results.items() for run in of_row}
    write_run_ranks(runs, folder / "ranks.csv")
    _write_selection(results, folder)
    atomic.write_text(folder / "table.json", json.dumps(numbers, indent=1) + "\n")
    atomic.write_text(folder / "table.md", ablation_table(ablation, results, costs))
    return folder / "table.md"


def _write_selection(results: dict[str, list[EvaluationResult]], folder: Path) -> None:
    """A line an evaluation; "chosen" is 1 where its checkpoint is the one of the table."""
    measures = [f"{way}/{name}" for way in ("text_to_video", "video_to_text") for name in METRIC_NAMES]
    with atomic.replacing(folder / "selection.csv") as part, part.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "seed", "split", "step", "chosen", *measures])
        for name, runs in results.items():
            for run in runs:
                cell = folder / _slug(name) / f"seed-{run.seed}"
                selection = cell / BEST / "selection.json"
                if not selection.exists():  # results alone were kept
                    continue
                chosen = json.loads(selection.read_text(encoding="utf-8"))["step"]
                for line in (cell / METRICS_FILE).read_text(encoding="utf-8").splitlines():
                    record = json.loads(line)
                    if "split" in record:
                        facts = [name, run.seed, record["split"], record["step"]]
                        is_chosen = int(record["step"] == chosen)
                        writer.writerow([*facts, is_chosen, *(record.get(each) for each in measures)])


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")

"""`gare analyze`: every figure and table of the paper for a model, in one report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from gare.cli.options import choose_device
from gare.errors import EvaluationError
from gare.extras import require

if TYPE_CHECKING:
    from gare.analysis.analysis_run import Analysis


FALSE_NEGATIVES = "hard_negatives"
"""The probe behind --false-negatives."""


def analyze(
    model: str = typer.Argument(help="Folder of a saved model, or a hub id."),
    data: Path = typer.Option(..., help="What `gare data prepare` made."),
    out: Path = typer.Option(..., "--out", "-o", help="Folder of the report, its pictures and its numbers."),
    baseline: str = typer.Option("", help="A model to compare with, by default the same without increments."),
    run: Path | None = typer.Option(
        None, help="Folder of a `gare train … --probe`, for the dynamics of training."
    ),
    ablation: list[Path] = typer.Option([], help="Folder of a `gare ablate`; may be given several times."),
    split: str = typer.Option("test", help="train, val or test."),
    frames: int = typer.Option(12, min=1, help="Frames per video."),
    only: str = typer.Option("", help="Some probes, separated by commas: tension,geometry."),
    false_negatives: bool = typer.Option(
        False, "--false-negatives", help="Only list pairs of videos that may match without being annotated."
    ),
    force: bool = typer.Option(False, "--force", help="Measure again what is stored in --out."),
    allow_missing: bool = typer.Option(
        False, "--allow-missing", help="Analyse the videos there are, if some are missing."
    ),
    workers: int = typer.Option(0, min=0, help="Processes that decode."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print all numbers and claims as JSON."),
) -> None:
    """Analyse a model: gradients, geometry, training, hard negatives, coverage, cost, bottleneck.

    Numbers go to OUT/numbers, pictures to OUT/figures, and OUT/report.html shows them; it opens offline.
    What was measured before for the same model and data is kept.

    Examples:

        gare analyze runs/mini/best --data data/msrvtt_frames --out report

        gare analyze runs/a/best --data data/msrvtt_frames --baseline runs/b/best --run runs/a --out report

        gare analyze runs/mini/best --data data/msrvtt_frames --out report --only coverage,efficiency

        gare analyze runs/mini/best --data data/msrvtt_frames --split train --out report --false-negatives
    """
    require("analysis", "gare analyze")
    from gare.analysis.analysis_run import analyse, chosen
    from gare.analysis.html_report import write_report
    from gare.analysis.probes import PROBES
    from gare.analysis.study import Gallery, open_study
    from gare.data.loader import FrameSource
    from gare.model import GARE

    asked = [name.strip().replace("-", "_") for name in only.split(",") if name.strip()]
    probes = chosen(PROBES, [FALSE_NEGATIVES] if false_negatives else asked)
    place = choose_device(device)
    _open_folder(out)
    source = FrameSource.open(data, frames, allow_missing=allow_missing)
    gallery = Gallery.open(source, split)  # type: ignore[arg-type]
    loaded = GARE.from_pretrained(model).to(place)
    other = GARE.from_pretrained(baseline).to(place) if baseline else None
    with Progress(console=Console(stderr=True), transient=True) as bar:
        study = open_study(
            loaded,
            gallery,
            out,
            baseline=other,
            run=run,
            ablations=ablation,
            num_workers=workers,
            on_progress=_encoding(bar),
        )
        analysis = analyse(study, PROBES, out, only=probes, force=force, say=_probing(bar, len(probes)))
    name = "/".join(Path(model).parts[-2:])
    kind = "False negatives by" if false_negatives else "Analysis of"
    report = write_report(
        analysis,
        title=f"{kind} {name} on {source.manifest.header.name}",
        file="false-negatives.html" if false_negatives else "report.html",  # never in place of a whole report
    )
    if as_json:
        typer.echo(json.dumps(_to_json(analysis, report), ensure_ascii=False))
    elif false_negatives:
        typer.echo(_suspects(analysis))
    else:
        typer.echo(_summary(analysis, report))


def _open_folder(out: Path) -> None:
    """Now, not after minutes of encoding."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise EvaluationError(
            f"cannot write to {out} ({error.strerror}); give another folder with --out"
        ) from None


def _encoding(bar: Progress) -> Callable[[str, int, int], None]:
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)

    return show


def _probing(bar: Progress, total: int) -> Callable[[str], None]:
    task = bar.add_task("probes", total=total)

    def say(message: str) -> None:
        bar.console.print(message, highlight=False, markup=False, soft_wrap=True)
        bar.advance(task)

    return say


def _summary(analysis: Analysis, report: Path) -> str:
    width = max(len(claim.says) for claim in analysis.claims)
    lines = [f"{claim.says:<{width}}  {claim.verdict}: {claim.measured}" for claim in analysis.claims]
    return "\n".join([*lines, str(report)])


def _suspects(analysis: Analysis) -> str:
    from gare.analysis.probes.hard_negatives_probe import false_negative_lines

    found = analysis.sections[0].numbers
    return analysis.sections[0].reason if found is None else "\n".join(false_negative_lines(found))


def _to_json(analysis: Analysis, report: Path) -> dict[str, object]:
    return {
        "report": str(report),
        "claims": [
            {"claim": c.says, "holds": c.holds, "measured": c.measured, "rule": c.rule, "probe": c.section}
            for c in analysis.claims
        ],
        "numbers": {name: numbers.values for name, numbers in analysis.numbers.items()},
    }

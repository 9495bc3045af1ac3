"""`gare evaluate`: what a model can do, with the uncertainty beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.progress import Progress

from gare.cli.options import choose_device
from gare.errors import EvaluationError

RESCORINGS: dict[str, Literal["none", "dsl", "qb_norm"]] = {"none": "none", "dsl": "dsl", "qbnorm": "qb_norm"}


def evaluate(
    model: str = typer.Argument("", help="Folder, hub id or name of a model.", show_default=False),
    data: Path | None = typer.Option(
        None, help="What `gare data prepare` made; for moments, the annotations."
    ),
    task: str = typer.Option("retrieval", help="retrieval, or moments: the predictions of any system."),
    predictions: Path | None = typer.Option(
        None, help="For moments: JSON Lines with qid, pred_relevant_windows, pred_saliency_scores."
    ),
    dataset: str = typer.Option(
        "qvhighlights", help="For moments: qvhighlights, charades_sta, activitynet or didemo."
    ),
    split: str = typer.Option("test", help="train, val or test."),
    frames: int = typer.Option(12, min=1, help="Frames per video."),
    protocol: str = typer.Option("max_caption", help="max_caption, any_caption or one_caption."),
    rescore: str = typer.Option("none", help="none, or dsl or qbnorm as a second, labelled result."),
    querybank: str = typer.Option(
        "", help="Queries for qbnorm: MANIFEST, MANIFEST:SPLIT (default train) or a text file."
    ),
    drop_overlap: bool = typer.Option(
        False, "--drop-overlap", help="Leave out queries of the bank that are captions of this split."
    ),
    selected_on: str = typer.Option("", help="The split that chose this model, if not noted in its folder."),
    legacy_ties: bool = typer.Option(
        False, "--legacy-ties", help="Add rows that count ties as much published code does (a bug)."
    ),
    allow_missing: bool = typer.Option(
        False, "--allow-missing", help="Evaluate the videos there are, if some are missing."
    ),
    scores: Path | None = typer.Option(
        None, help="Instead of a model: scores of any system (matrix, TREC run, MTEB predictions)."
    ),
    qrels: Path | None = typer.Option(None, help="For --scores: which video is right for each text."),
    queries: str = typer.Option("", help="For --scores of a run: its queries are texts or videos."),
    subset: str = typer.Option("", help="For --scores: the first N videos, or a file of video ids."),
    bank_scores: Path | None = typer.Option(None, help="For --scores: a query bank's scores, .npy."),
    logit_scale: float = typer.Option(
        1.0, min=1e-6, help="For --scores: what cosines were multiplied by; rescoring needs cosines."
    ),
    out: Path | None = typer.Option(None, "--out", "-o", help="Write results.json here."),
    scores_out: Path | None = typer.Option(None, help="Write the score matrix here, .safetensors."),
    run_out: Path | None = typer.Option(None, help="Write text→video as a TREC run here."),
    run_depth: int = typer.Option(0, min=0, help="Videos a text in the run; 0: all of them."),
    qrels_out: Path | None = typer.Option(None, help="Write TREC qrels here."),
    ranks_out: Path | None = typer.Option(None, help="Write the rank of every query here, as CSV."),
    workers: int = typer.Option(0, min=0, help="Processes that decode."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="Print results.json instead of the table."),
) -> None:
    """Measure retrieval in both directions on a split, with confidence intervals.

    Examples:

        gare evaluate runs/mini/best --data data/msrvtt_frames --split test --out results.json

        gare evaluate runs/mini/best --data data/msrvtt_frames --split val --json

        gare evaluate runs/mini/best --data data/mine --rescore qbnorm --querybank data/mine:train

        gare evaluate runs/mini/best --data data/mine --run-out run.trec --qrels-out qrels.txt

        gare evaluate runs/mini/best --data data/mine --ranks-out ranks.csv --scores-out scores.safetensors

        gare evaluate --scores scores.npy --subset 500

        gare evaluate --scores run.trec --qrels qrels.txt --json

        gare evaluate --task moments --predictions preds.jsonl --data highlight_val_release.jsonl
    """
    _check_choice(task, ("retrieval", "moments"), "--task")
    if task == "moments":
        _evaluate_moments(predictions, data, dataset, out, as_json)
        return
    from gare.cli.score_options import ScoreInput, ScoreOutputs, evaluate_scores_file

    outputs = ScoreOutputs(scores_out, run_out, qrels_out, ranks_out, run_depth, result=out)
    given = {"--qrels": qrels, "--queries": queries, "--subset": subset, "--bank-scores": bank_scores}
    if scores is not None:
        _refuse_given(
            {"a model": model, "--querybank": querybank, "--rescore": rescore != "none"}, "--scores"
        )
        _check_protocol(protocol)
        read = ScoreInput(scores, qrels, data, split, queries, bank_scores, logit_scale, subset)
        evaluate_scores_file(read, outputs, protocol=protocol, selected_on=selected_on, as_json=as_json)
        return
    _refuse_given({**given, "--logit-scale": logit_scale != 1}, "a model; they are for --scores")
    if not model or data is None:
        raise typer.BadParameter(
            "name a model and its data: gare evaluate MODEL --data FOLDER; or --scores FILE"
        )
    from gare.data.loader import FrameSource
    from gare.evaluate import markdown_report, read_querybank
    from gare.evaluate.model_evaluation import evaluate_model
    from gare.model import GARE

    _check_choice(rescore, RESCORINGS, "--rescore")
    _check_protocol(protocol)
    outputs.check_places()
    bank = read_querybank(querybank) if querybank else None
    loaded = GARE.from_pretrained(model).to(choose_device(device))
    selection, seed = _selection(Path(model), selected_on)
    source = FrameSource.open(data, frames, allow_missing=allow_missing)
    if bank is not None and drop_overlap:
        bank = bank.without(source.manifest.captions(split))  # type: ignore[arg-type]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        encoding = bar.add_task("encoding", total=None)
        result, scored = evaluate_model(
            loaded,
            source,
            split,  # type: ignore[arg-type]
            selected_on=selection,
            seed=seed,
            protocol=protocol,  # type: ignore[arg-type]
            rescoring=RESCORINGS[rescore],
            querybank=bank,
            num_workers=workers,
            allow_missing=allow_missing,
            on_progress=lambda done, total: bar.update(encoding, completed=done, total=total),
        )
    if out is not None:
        result.save(out)
    outputs.write(scored.table(), result)
    if as_json:
        typer.echo(json.dumps(result.to_values()))
    else:
        typer.echo(markdown_report(result, legacy=legacy_ties))


def _evaluate_moments(
    predictions: Path | None, annotations: Path | None, dataset: str, out: Path | None, as_json: bool
) -> None:
    from gare.atomic import write_text
    from gare.data.moment_annotations import read_moments
    from gare.evaluate.moment_metrics import moment_metrics, read_predictions

    if predictions is None or annotations is None:
        raise typer.BadParameter("moments need --predictions FILE and --data FILE, the annotations")
    queries = read_moments(dataset, annotations)
    found = moment_metrics(queries, read_predictions(predictions))
    rounded = {name: round(value, 2) for name, value in found.summary().items()}
    text = json.dumps({"num_queries": found.num_queries, **rounded}, indent=None if as_json else 2)
    if out is not None:
        write_text(out, text + "\n")
    if as_json:
        typer.echo(text)
        return
    typer.echo(f"{found.num_queries:,} queries of {dataset}, in per cent\n\n| | |\n| --- | ---: |")
    for name, value in rounded.items():
        typer.echo(f"| {name} | {value:.2f} |")


def _selection(folder: Path, given: str) -> tuple[str, int | None]:
    """The split that chose the model, as given or as noted beside it, and the seed of its run."""
    from gare.evaluate.model_evaluation import read_selection

    noted, seed = read_selection(folder)
    if not given and noted is None:
        raise EvaluationError(
            "which split chose this model is not noted in its folder; say it with --selected-on "
            "(val, test, or none if nothing was chosen)"
        )
    return given or str(noted), seed


def _check_protocol(protocol: str) -> None:
    from gare.evaluate.caption_protocols import VIDEO_TO_TEXT

    _check_choice(protocol, VIDEO_TO_TEXT, "--protocol")


def _refuse_given(given: dict[str, object], beside: str) -> None:
    """Refuse options that would be ignored."""
    for name, value in given.items():
        if value:
            raise typer.BadParameter(f"{name} does not go with {beside}")


def _check_choice(value: str, choices: Iterable[str], option: str) -> None:
    if value not in choices:
        raise typer.BadParameter(f"'{value}' is not one of {', '.join(choices)}", param_hint=option)

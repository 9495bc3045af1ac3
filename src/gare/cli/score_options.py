"""Files of scores on the command line: what `gare evaluate` and `gare compare` read and write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gare.errors import EvaluationError
from gare.evaluate.evaluation_results import DIRECTIONS, Direction, EvaluationResult
from gare.evaluate.protocol_grid import Protocol, ProtocolGrid, read_subset
from gare.evaluate.score_files import file_digest, read_bank_scores, read_scores, write_scores
from gare.evaluate.score_table import ScoreTable


@dataclass(frozen=True)
class ScoreInput:
    """The options that say what a file of scores is."""

    path: Path
    qrels: Path | None = None
    data: Path | None = None
    split: str = "test"
    queries: str = ""
    bank_scores: Path | None = None
    logit_scale: float = 1.0
    subset: str = ""

    def read(self) -> ScoreTable:
        """The table, with its query bank, as cosines."""
        if self.queries not in ("", "texts", "videos"):
            raise typer.BadParameter(f"'{self.queries}' is not one of texts, videos", param_hint="--queries")
        table = read_scores(
            self.path,
            qrels=self.qrels,
            data=self.data,
            split=self.split,
            query_side=self.queries or None,  # type: ignore[arg-type]
        )
        if self.bank_scores is not None:
            table = table.with_bank(read_bank_scores(self.bank_scores))
        return table if self.logit_scale == 1 else table.scaled(self.logit_scale)

    def grid(self) -> ProtocolGrid:
        """The table under every protocol."""
        table = self.read()
        return ProtocolGrid(table, read_subset(self.subset, table.video_ids) if self.subset else None)


@dataclass(frozen=True)
class ScoreOutputs:
    """Files that an evaluation writes besides results.json."""

    scores: Path | None = None
    run: Path | None = None
    qrels: Path | None = None
    ranks: Path | None = None
    run_depth: int = 0
    result: Path | None = None
    """Where results.json goes; whoever measures writes it."""

    def check_places(self) -> None:
        """Refuse before the work what could not be written after it."""
        for path in (self.scores, self.run, self.qrels, self.ranks):
            if path is not None and not path.absolute().parent.is_dir():
                raise EvaluationError(f"there is no folder {path.parent} to write {path.name} to")
        for path in (self.result, self.scores, self.run, self.qrels, self.ranks):
            if path is not None and path.is_dir():
                raise EvaluationError(f"{path} is a folder; name a file, which may be in it")
        if self.result is not None:  # its folder is made if it is not there
            self.result.parent.mkdir(parents=True, exist_ok=True)
        if self.scores is not None and self.scores.suffix != ".safetensors":
            raise typer.BadParameter("name the file something.safetensors", param_hint="--scores-out")

    def write(self, table: ScoreTable, result: EvaluationResult | None) -> None:
        """Write what was asked for."""
        from gare.evaluate.rank_files import write_ranks
        from gare.evaluate.trec_files import write_qrels, write_run

        if self.scores is not None:
            write_scores(table, self.scores)
        if self.run is not None:
            write_run(table, self.run, depth=self.run_depth or None)
        if self.qrels is not None:
            write_qrels(table, self.qrels)
        if self.ranks is not None:
            write_ranks(table, self.ranks, "max_caption" if result is None else result.protocol)


def evaluate_scores_file(
    given: ScoreInput,
    outputs: ScoreOutputs,
    *,
    protocol: str,
    selected_on: str,
    as_json: bool,
) -> None:
    """`gare evaluate --scores`: the table of protocols, and the files that were asked for."""
    outputs.check_places()
    grid = given.grid()
    _warn_of_scale(grid.table)
    result = _result_of_scores(given, grid.table, protocol, selected_on)
    if outputs.result is not None:
        if result is None:
            raise EvaluationError("--out needs both directions, and the run lists only the best candidates")
        result.save(outputs.result)
    outputs.write(grid.table, result)
    _print_protocols(given, grid, protocol, as_json)


def _print_protocols(given: ScoreInput, grid: ProtocolGrid, protocol: str, as_json: bool) -> None:
    from gare.evaluate.protocol_table import legend, protocol_markdown, protocol_rows

    captions = {"one_caption": "first_caption"}.get(protocol, protocol)
    tables = {}
    for direction in grid.choices("direction"):
        # In text→video every caption is a query, whatever the protocol; with one a video all are the same.
        plain = direction == "text_to_video" or grid.one_caption
        base = Protocol(direction, captions="max_caption" if plain else captions)  # type: ignore[arg-type]
        with progress(f"{DIRECTIONS[base.direction]}, protocols") as advance:
            tables[base.direction] = protocol_rows(grid, base, advance)
    facts = describe_table(given, grid.table)
    if as_json:
        rows = {direction: [row.to_values() for row in of] for direction, of in tables.items()}
        left_out = {f"{name}: {value}": why for (name, value), why in grid.left_out.items()}
        typer.echo(json.dumps({**facts, **rows, "left_out": left_out}))
        return
    typer.echo(" · ".join(f"{name} {value}" for name, value in facts.items()))
    for direction, of in tables.items():
        typer.echo(f"\n{protocol_markdown(of, direction)}")
    typer.echo("\n" + legend([row for of in tables.values() for row in of]))
    for (name, value), why in grid.left_out.items():
        typer.echo(f"left out: {name} {value} ({why})", err=True)


def describe_table(given: ScoreInput, table: ScoreTable) -> dict[str, Any]:
    """What was read, with the hash of the file."""
    facts: dict[str, Any] = {
        "scores": given.path.name,
        "sha256": file_digest(given.path),
        "texts": len(table.text_ids),
        "videos": len(table.video_ids),
    }
    if not table.is_complete:
        facts["pairs not listed"] = table.num_unlisted
    return facts


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time that is left, on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def check_direction(value: str) -> Direction:
    """The direction of an option."""
    for direction in DIRECTIONS:
        if value == direction:
            return direction
    raise typer.BadParameter(f"'{value}' is not one of {', '.join(DIRECTIONS)}", param_hint="--direction")


def _result_of_scores(
    given: ScoreInput, table: ScoreTable, protocol: str, selected_on: str
) -> EvaluationResult | None:
    """A results.json of scores whose model is not known: hashes of the file stand for it."""
    from gare.evaluate import evaluate_scores, evaluation_result, hash_queries

    paired = len(table.video_T.unique()) == len(table.video_ids)
    if not table.is_complete or not paired:
        return None
    digest = file_digest(given.path)
    return evaluation_result(
        evaluate_scores(table.scores_TV, table.video_T, protocol=protocol),  # type: ignore[arg-type]
        dataset=given.path.stem if given.data is None else given.data.name,
        split=given.split,
        selected_on=selected_on or "unknown",
        config_fingerprint="unknown",
        weights_hash=f"scores:{digest}",
        queries_hash=hash_queries(table.text_ids, table.video_ids),
    )


def _warn_of_scale(table: ScoreTable) -> None:
    largest = float(table.scores_TV.abs().max())
    if largest > 1.5 and table.is_complete:
        typer.echo(
            f"note: scores reach {largest:.3g}; rescoring takes them for cosines. If they were multiplied "
            "by a logit scale, give it with --logit-scale",
            err=True,
        )

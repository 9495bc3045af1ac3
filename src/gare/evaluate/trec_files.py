"""TREC run and qrels files, out and in.

A run has six columns, `query Q0 document rank score tag`; qrels have four, `query 0 document relevance`. The
reader takes the scores and ignores the ranks, as trec_eval does, so ties stay ties and every tie policy can
be measured. The writer gives scores in full and orders equal scores by document id, the larger first (as
trec_eval orders them): two runs write the same bytes, and a table that is written and read again gives the
same numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gare.atomic import replacing
from gare.errors import EvaluationError
from gare.evaluate.score_table import Qrels, Run, ScoreTable

_SPACE = re.compile(r"[\s%]")


def write_run(table: ScoreTable, path: Path, *, tag: str = "gare", depth: int | None = None) -> None:
    """Write text→video as a TREC run; `depth` keeps the best so many videos of each text."""
    refuse_incomplete(table, "a run file")
    videos, texts = [_escaped(name) for name in table.video_ids], [_escaped(name) for name in table.text_ids]
    place_V = trec_places(table.video_ids)
    scores_TV = table.scores_TV.double()
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        for text, row_V in zip(texts, scores_TV, strict=True):
            order = _best_first(row_V, place_V)[:depth]
            scores = row_V[order].tolist()
            for rank, (column, score) in enumerate(zip(order.tolist(), scores, strict=True), start=1):
                file.write(f"{text} Q0 {videos[column]} {rank} {score!r} {tag}\n")


def write_qrels(table: ScoreTable, path: Path) -> None:
    """Write which video belongs to each text, in the order of the texts."""
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        for text, column in zip(table.text_ids, table.video_T.tolist(), strict=True):
            file.write(f"{_escaped(text)} 0 {_escaped(table.video_ids[column])} 1\n")


def read_run(path: Path) -> Run:
    """Scores by query and document; the rank column is ignored."""
    run: dict[str, dict[str, float]] = {}
    for number, line in _lines(path):
        cells = line.split()
        if len(cells) != 6:
            raise EvaluationError(
                f"{path}, line {number}: a TREC run has six columns (query Q0 document rank score tag), this "
                f"line has {len(cells)}; a matrix is read from .npy, .npz, .pt, .safetensors or .csv"
            )
        answers = run.setdefault(cells[0], {})
        if cells[2] in answers:
            raise EvaluationError(f"{path}, line {number}: '{cells[2]}' is listed twice for '{cells[0]}'")
        answers[cells[2]] = _number(cells[4], path, number)
    if not run:
        raise EvaluationError(f"{path} is empty; a TREC run has a line for each query and document")
    return run


def read_qrels(path: Path) -> Qrels:
    """Relevance by query and document: TREC (four columns), BEIR's TSV (three) or JSON."""
    if path.suffix == ".json":
        return _qrels_of_json(path)
    qrels: dict[str, dict[str, int]] = {}
    for number, line in _lines(path):
        cells = line.split("\t") if "\t" in line else line.split()
        if number == 1 and cells[0].lower() in ("query-id", "query_id", "qid", "query"):
            continue
        if len(cells) not in (3, 4):
            raise EvaluationError(
                f"{path}, line {number}: qrels have four columns (query 0 document relevance), or three with "
                f"tabs (query document relevance); this line has {len(cells)}"
            )
        try:
            qrels.setdefault(cells[0], {})[cells[-2]] = _whole(cells[-1])
        except ValueError:
            raise EvaluationError(
                f"{path}, line {number}: relevance must be a whole number, not {cells[-1]}"
            ) from None
    if not qrels:
        raise EvaluationError(f"{path} is empty; qrels have a line for each query and its document")
    return qrels


def trec_places(video_ids: tuple[str, ...]) -> Tensor:
    """The place of each video among equal scores: larger ids first, compared as trec_eval compares them.

    >>> trec_places(("a", "c", "b"))
    tensor([2, 0, 1])
    """
    escaped = [_escaped(name).encode() for name in video_ids]
    order = sorted(range(len(escaped)), key=lambda column: escaped[column], reverse=True)
    place_V = torch.empty(len(order), dtype=torch.int64)
    place_V[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))
    return place_V


def refuse_incomplete(table: ScoreTable, what: str) -> None:
    """Refuse to write scores that the file did not have."""
    if not table.is_complete:
        raise EvaluationError(
            f"the run does not list {table.num_unlisted:,} pairs; {what} of it would invent scores"
        )


def _best_first(row_V: Tensor, place_V: Tensor) -> Tensor:
    by_place = place_V.argsort()
    return by_place[row_V[by_place].argsort(descending=True, stable=True)]


def _escaped(name: str) -> str:
    """An id without spaces, which TREC files cannot hold.

    >>> _escaped("my clip.mp4")
    'my%20clip.mp4'
    """
    return _SPACE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EvaluationError(f"{path} is not a text file in UTF-8") from None


def _number(cell: str, path: Path, line: int) -> float:
    try:
        return float(cell)
    except ValueError:
        raise EvaluationError(f"{path}, line {line}: '{cell}' is not a number") from None


def _whole(relevance: float | str) -> int:
    value = float(relevance)
    if not value.is_integer():
        raise ValueError(f"{relevance} is not a whole number")
    return int(value)


def _qrels_of_json(path: Path) -> Qrels:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(q): {str(d): _whole(r) for d, r in of_q.items()} for q, of_q in values.items()}
    except OSError as error:
        raise EvaluationError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError):
        raise EvaluationError(
            f"{path} is not JSON of the form {{query: {{document: whole number}}}}"
        ) from None

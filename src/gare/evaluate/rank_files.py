"""The rank of every query as a small CSV: what stands behind a table, so that others can test it again.

Columns: `direction`, `query`, `video` (the target, or the query itself in video→text), `above` (candidates
that score higher) and `tied` (candidates level with the target). Every tie policy follows: optimistic
above + 1, average above + 1 + tied / 2, pessimistic above + 1 + tied.

Behind a table of several runs stands one file with a column a run, pessimistic ranks (`gare ablate`).
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from gare.atomic import write_text
from gare.errors import EvaluationError
from gare.evaluate.caption_protocols import CaptionProtocol, video_to_text_rivals
from gare.evaluate.evaluation_results import DIRECTIONS, Direction, EvaluationResult
from gare.evaluate.rank_metrics import Rivals, count_rivals
from gare.evaluate.score_table import ScoreTable

COLUMNS = ("direction", "query", "video", "above", "tied")


def write_ranks(table: ScoreTable, path: Path, protocol: CaptionProtocol = "max_caption") -> None:
    """Write the ranks of both directions; of a run that is not complete, those of its own direction."""
    rows: list[tuple[str, str, str, int, int]] = []
    if table.is_complete or table.query_side == "texts":
        videos = [table.video_ids[column] for column in table.video_T.tolist()]
        rivals = count_rivals(table.scores_TV, table.video_T)
        rows += _rows("text_to_video", table.text_ids, videos, rivals)
    if table.is_complete or table.query_side == "videos":
        columns, video_T = table.video_T.unique(return_inverse=True)
        names = [table.video_ids[column] for column in columns.tolist()]
        rivals = video_to_text_rivals(table.scores_TV[:, columns], video_T, protocol)
        rows += _rows("video_to_text", names, names, rivals)
    _write_csv(path, [COLUMNS, *rows])


def write_run_ranks(runs: Mapping[str, EvaluationResult], path: Path) -> None:
    """Write the pessimistic ranks of several runs of the same queries, a column each."""
    lines: list[list[object]] = [["direction", "query", *runs]]
    for direction in DIRECTIONS:
        columns = [getattr(run, direction).ranks for run in runs.values()]
        ranks = itertools.zip_longest(*columns, fillvalue="")  # a run with videos missing has fewer queries
        lines += [[direction, number, *row] for number, row in enumerate(ranks)]
    _write_csv(path, lines)


def read_ranks(path: Path) -> dict[Direction, Rivals]:
    """The ranks of a file that `write_ranks` made, by direction."""
    found: dict[Direction, list[tuple[int, int]]] = {"text_to_video": [], "video_to_text": []}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found[row["direction"]].append((int(row["above"]), int(row["tied"])))  # type: ignore[index]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise EvaluationError(f"{path} is not a file of 'gare evaluate --ranks-out' ({error!r})") from None
    return {
        direction: Rivals(*torch.tensor(counts).unbind(1)) for direction, counts in found.items() if counts
    }


def _write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    write_text(path, buffer.getvalue())


def _rows(
    direction: Direction, queries: tuple[str, ...] | list[str], videos: list[str], rivals: Rivals
) -> list[tuple[str, str, str, int, int]]:
    counts = zip(rivals.above_Q.tolist(), rivals.tied_Q.tolist(), strict=True)
    return [
        (direction, query, video, above, tied)
        for query, video, (above, tied) in zip(queries, videos, counts, strict=True)
    ]

"""Scores of any system from a file, whatever wrote it.

| file | what it holds |
| --- | --- |
| `.npy` | the matrix; rows are texts, columns are videos, higher is better |
| `.npz`, `.safetensors` | `scores`, and if there: `video_of_text`, `bank_scores`, `text_ids`, `video_ids` |
| `.pt`, `.pth` | the matrix, or a dict with the same names |
| `.csv`, `.tsv`, `.parquet` | a matrix, with ids or without, or a row for each pair: query, document, score |
| `.json` | predictions of MTEB, or `{query: {document: score}}` |
| anything else | a TREC run |
"""

from __future__ import annotations

import csv
import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gare.atomic import replacing
from gare.data.manifest import Manifest, Split, find_manifest
from gare.errors import EvaluationError
from gare.evaluate.reported_numbers import is_mteb_result
from gare.evaluate.score_table import (
    QuerySide,
    Run,
    ScoreTable,
    relabelled,
    table_of_manifest,
    table_of_matrix,
    table_of_run,
)
from gare.evaluate.trec_files import read_qrels, read_run, refuse_incomplete

_QUERY = ("query", "query_id", "query-id", "qid", "text", "text_id")
_DOCUMENT = ("document", "document_id", "doc", "doc_id", "docid", "corpus-id", "video", "video_id")
_SCORE = ("score", "similarity", "sim")
_IDS = "ids"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


def read_scores(
    path: Path,
    *,
    qrels: Path | None = None,
    data: Path | None = None,
    split: str = "test",
    query_side: QuerySide | None = None,
) -> ScoreTable:
    """Read a file of scores of any kind.

    Args:
        path: the file; its ending says what it is.
        qrels: which document is right for each query. A run needs it; a matrix has the diagonal by default.
            For a matrix also `.npy` with the column of each row's video.
        data: a prepared dataset whose captions and videos, in order, are the rows and columns of a matrix.
        split: of `data`.
        query_side: what the queries of a run are, if it cannot be told: "texts" or "videos".
    """
    if path.is_dir():
        raise EvaluationError(f"{path} is a folder; give a file: a matrix of scores or a run")
    if not path.is_file():
        raise EvaluationError(f"there is no file {path}; give a matrix of scores or a run file")
    if path.suffix.lower() in _COMPRESSED:
        raise EvaluationError(f"{path} is compressed; unpack it first")
    found = _READERS.get(path.suffix.lower(), read_run)(path)
    if isinstance(found, ScoreTable):
        return _with_pairs(found, qrels, data, split)
    if qrels is None:
        raise EvaluationError(
            f"{path} lists scores by query and document; say which document is right with --qrels FILE"
        )
    return table_of_run(found, read_qrels(qrels), query_side)


def write_scores(table: ScoreTable, path: Path) -> None:
    """Write a table as safetensors, which `read_scores` reads back as it was."""
    from safetensors.torch import save_file

    refuse_incomplete(table, "a matrix")
    tensors = {"scores": table.scores_TV.contiguous(), "video_of_text": table.video_T.contiguous()}
    if table.bank_BV is not None:
        tensors["bank_scores"] = table.bank_BV.contiguous()
    ids = json.dumps({"text_ids": table.text_ids, "video_ids": table.video_ids})
    with replacing(path) as part:
        save_file(tensors, str(part), metadata={_IDS: ids})


def read_bank_scores(path: Path) -> Tensor:
    """Scores of a query bank, [bank queries, videos], from a file that holds a matrix."""
    if not path.is_file():
        raise EvaluationError(f"there is no file {path}; give the scores of the bank's queries as a matrix")
    if path.suffix.lower() == ".npy":
        return torch.from_numpy(np.ascontiguousarray(_load_npy(path)))
    raise EvaluationError(
        f"{path}: give the bank's scores as .npy, or as 'bank_scores' in .npz or .safetensors"
    )


def file_digest(path: Path) -> str:
    """Twelve hex digits of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()[:12]


def _with_pairs(table: ScoreTable, qrels: Path | None, data: Path | None, split: str) -> ScoreTable:
    if qrels is not None and data is not None:
        raise EvaluationError("--qrels and --data both say which video a text belongs to; give one of them")
    if data is not None:
        manifest = Manifest.load(find_manifest(data), allow_missing=True)
        return table_of_manifest(table.scores_TV, manifest, _known_split(split, manifest))
    if qrels is None:
        return _refuse_unpaired(table)
    if qrels.suffix.lower() == ".npy":
        return table_of_matrix(
            table.scores_TV,
            video_of_text=_load_npy(qrels),
            text_ids=table.text_ids,
            video_ids=table.video_ids,
        )
    return relabelled(table, read_qrels(qrels))


def _refuse_unpaired(table: ScoreTable) -> ScoreTable:
    if len(table.video_T):
        return table
    return table_of_matrix(table.scores_TV)  # which says what is missing


def _known_split(split: str, manifest: Manifest) -> Split:
    for known in manifest.splits:
        if known == split:
            return known
    raise EvaluationError(f"the dataset has no split '{split}', it has {', '.join(manifest.splits)}")


def _table(
    path: Path,
    scores: Any,
    video_of_text: Any = None,
    text_ids: Sequence[str] | None = None,
    video_ids: Sequence[str] | None = None,
) -> ScoreTable:
    """A table whose pairs may still be unknown: then it has no `video_T` yet."""
    array = scores if isinstance(scores, Tensor) else np.asarray(scores)
    is_unpaired = video_of_text is None and array.ndim == 2 and array.shape[0] != array.shape[1]
    if is_unpaired:
        video_of_text = np.zeros(len(array), int)
    try:
        table = table_of_matrix(array, video_of_text=video_of_text, text_ids=text_ids, video_ids=video_ids)
    except EvaluationError as error:
        raise EvaluationError(f"{path}: {error}") from None
    return replace(table, video_T=torch.empty(0, dtype=torch.int64)) if is_unpaired else table


def _load_npy(path: Path) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise EvaluationError(f"{path} is not a numpy array of numbers ({error})") from None
    if not isinstance(array, np.ndarray):
        raise EvaluationError(f"{path} holds several arrays; name it .npz")
    return array


def _read_npy(path: Path) -> ScoreTable:
    return _table(path, _load_npy(path))


def _read_npz(path: Path) -> ScoreTable:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise EvaluationError(f"{path} is not a .npz of numbers and ids ({error})") from None
    return _of_arrays(path, arrays)


def _read_safetensors(path: Path) -> ScoreTable:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            arrays: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            arrays |= json.loads((file.metadata() or {}).get(_IDS, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise EvaluationError(f"{path} is not a .safetensors file ({error})") from None
    return _of_arrays(path, arrays)


def _read_torch(path: Path) -> ScoreTable:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
        raise EvaluationError(
            f"{path} holds no tensors alone, or is damaged; save the matrix with torch.save(scores.cpu(), …)"
        ) from None
    if not isinstance(found, (Tensor, dict)):
        raise EvaluationError(
            f"{path} holds a {type(found).__name__}; save the matrix of texts × videos alone"
        )
    return _table(path, found) if isinstance(found, Tensor) else _of_arrays(path, found)


def _of_arrays(path: Path, arrays: dict[str, Any]) -> ScoreTable:
    matrices = [
        name for name, array in arrays.items() if getattr(array, "ndim", 0) == 2 and name != "bank_scores"
    ]
    name = "scores" if "scores" in arrays else matrices[0] if len(matrices) == 1 else ""
    if not name:
        raise EvaluationError(
            f"{path} holds {', '.join(map(str, arrays)) or 'nothing'}; name the matrix of texts × videos "
            "'scores'"
        )
    table = _table(
        path, arrays[name], *(arrays.get(each) for each in ("video_of_text", "text_ids", "video_ids"))
    )
    bank = arrays.get("bank_scores")
    return table if bank is None else table.with_bank(torch.as_tensor(bank))


def _read_csv(path: Path) -> ScoreTable | Run:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
            rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EvaluationError(f"{path} is not a table in UTF-8 ({error})") from None
    if not rows:
        raise EvaluationError(f"{path} is empty")
    if all(_is_number(cell) for cell in rows[0]):
        return _table(path, _numbers(path, rows))
    return _of_columns(path, rows[0], rows[1:])


def _read_parquet(path: Path) -> ScoreTable | Run:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise EvaluationError(f"{path} is not a Parquet file ({error})") from None
    columns = [column.to_pylist() for column in table.columns]
    return _of_columns(path, table.column_names, list(zip(*columns, strict=True)))


def _of_columns(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> ScoreTable | Run:
    """A row for each pair if the names say so, else a matrix; ids of texts may stand in front."""
    lower = [name.strip().lower() for name in names]
    places = [
        next((lower.index(n) for n in wanted if n in lower), None) for wanted in (_QUERY, _DOCUMENT, _SCORE)
    ]
    if None not in places:
        return _run_of_rows(path, rows, *(place for place in places if place is not None))
    if len(names) < 2:
        raise EvaluationError(f"{path} has one column; cells are parted by commas in .csv, by tabs in .tsv")
    if not rows or any(len(row) != len(names) for row in rows):
        raise EvaluationError(
            f"{path}: the rows of the table are not all as long as its head, {len(names)} columns"
        )
    has_ids = any(not _is_number(row[0]) for row in rows) or lower[0] in (*_QUERY, "")
    numbers = _numbers(path, [row[1:] if has_ids else row for row in rows])
    text_ids = [str(row[0]) for row in rows] if has_ids else None
    return _table(path, numbers, None, text_ids, names[1:] if has_ids else names)


def _run_of_rows(path: Path, rows: Sequence[Sequence[Any]], query: int, document: int, score: int) -> Run:
    run: dict[str, dict[str, float]] = {}
    for row in rows:
        if len(row) <= max(query, document, score) or not _is_number(row[score]):
            raise EvaluationError(f"{path}: a row has no query, document and score: {row}")
        answers = run.setdefault(str(row[query]), {})
        if str(row[document]) in answers:
            raise EvaluationError(f"{path}: '{row[document]}' is listed twice for '{row[query]}'")
        answers[str(row[document])] = float(row[score])
    return run


def _read_json(path: Path) -> Run:
    """Predictions of MTEB: of its only subset and split. A result file has no scores."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path} is not JSON ({error})") from None
    if is_mteb_result(values):
        raise EvaluationError(
            f"{path} is a result of MTEB: it holds finished numbers, which no protocol can be applied to. "
            "Keep the scores with mteb.evaluate(…, prediction_folder=…) and give that file, or explain these "
            f"numbers with 'gare compare SCORES {path.name}'"
        )
    while _depth(values) > 2:
        parts = [part for name, part in values.items() if name != "mteb_model_meta"]
        if len(parts) != 1:
            raise EvaluationError(
                f"{path} has several subsets or splits ({', '.join(values)}); keep one of them"
            )
        values = parts[0]
    if _depth(values) != 2:
        raise EvaluationError(f"{path} is neither MTEB's predictions nor {{query: {{document: score}}}}")
    try:
        return {str(q): {str(d): float(score) for d, score in of_q.items()} for q, of_q in values.items()}
    except (TypeError, ValueError, AttributeError):
        raise EvaluationError(f"{path}: not every score is a number") from None


def _depth(values: object) -> int:
    """How many dicts deep the numbers are; 0 if it is no tree of numbers."""
    if not isinstance(values, dict):
        return 0
    inner = [part for name, part in values.items() if name != "mteb_model_meta"]
    return 1 + max(map(_depth, inner), default=0)


def _is_number(cell: object) -> bool:
    try:
        float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _numbers(path: Path, rows: Sequence[Sequence[Any]]) -> np.ndarray:
    try:
        return np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        raise EvaluationError(
            f"{path}: the cells of the matrix are not all numbers, or its rows not equally long"
        ) from None


_READERS: dict[str, Callable[[Path], ScoreTable | Run]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".json": _read_json,
}

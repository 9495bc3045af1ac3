"""Annotations of moments: which seconds of a video a sentence describes. One reader for each benchmark.

Apart from `datasets/`, whose readers make manifests of whole videos for retrieval.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gare.data.annotation_files import read_json
from gare.errors import DataError

_DIDEMO_SEGMENT_S = 5.0
_CLIP_S = 2.0  # QVHighlights rates clips of two seconds


@dataclass(frozen=True)
class MomentQuery:
    """A sentence and where in its video it is true."""

    id: str
    video: str
    sentence: str
    windows: tuple[tuple[float, float], ...]
    """Seconds from and to, one or more."""
    duration: float | None = None
    saliency: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """For some clips of two seconds, by number: what each annotator gave, 0 to 4 (QVHighlights)."""

    @property
    def num_clips(self) -> int:
        """How many clips of two seconds the video has."""
        return int((self.duration or 0) / _CLIP_S)


def read_moments(dataset: str, path: Path) -> list[MomentQuery]:
    """The queries of an annotation file of this dataset, in the order of the file."""
    if dataset not in MOMENT_READERS:
        raise DataError(f"no reader for moments of '{dataset}'; there are {', '.join(MOMENT_READERS)}")
    queries = list(MOMENT_READERS[dataset](path))
    if not queries:
        raise DataError(f"{path} has no moments")
    return queries


def _qvhighlights(path: Path) -> Iterator[MomentQuery]:
    """One JSON object a line: qid, query, vid, duration, relevant_windows, and the saliency of clips."""
    for number, row in read_json_lines(path):
        try:
            clips = zip(row.get("relevant_clip_ids", ()), row.get("saliency_scores", ()), strict=True)
            query = MomentQuery(
                id=str(row["qid"]),
                video=row["vid"],
                sentence=row["query"],
                windows=_windows(row["relevant_windows"]),
                duration=float(row["duration"]),
                saliency=tuple((int(clip), tuple(map(float, scores))) for clip, scores in clips),
            )
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"{path}, line {number}: expected qid, query, vid, duration and relevant_windows; it is not "
                "a file of QVHighlights with answers"
            ) from None
        yield query


def _charades_sta(path: Path) -> Iterator[MomentQuery]:
    """A line is `VIDEO START END##sentence`."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        found = re.fullmatch(r"(\S+) +([\d.]+) +([\d.]+)##(.+)", line.strip())
        if found is None:
            raise DataError(f"{path}, line {number}: expected 'VIDEO START END##sentence'")
        video, start, end, sentence = found.groups()
        window = sorted((float(start), float(end)))  # a few lines have them the wrong way round
        yield MomentQuery(str(number), video, sentence.strip(), ((window[0], window[1]),))


def _activitynet(path: Path) -> Iterator[MomentQuery]:
    """{video: {duration, timestamps, sentences}}: each sentence is a query of its own."""
    try:
        for video, row in read_json(path).items():
            pairs = zip(row["timestamps"], row["sentences"], strict=True)
            for number, (window, sentence) in enumerate(pairs):
                yield MomentQuery(
                    f"{video}#{number}",
                    video,
                    sentence.strip(),
                    _windows([sorted(window)]),
                    float(row["duration"]),
                )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(
            f'{path} must be {{"VIDEO": {{"duration": …, "timestamps": […], "sentences": […]}}, …}}'
        ) from None


def _didemo(path: Path) -> Iterator[MomentQuery]:
    """Segments of five seconds, as several people chose them; a window that most chose comes first."""
    try:
        for number, row in enumerate(read_json(path)):
            votes = [tuple(map(int, pair)) for pair in row["times"]]
            ranked = sorted(dict.fromkeys(votes), key=lambda pair: -votes.count(pair))
            windows = [(first * _DIDEMO_SEGMENT_S, (last + 1) * _DIDEMO_SEGMENT_S) for first, last in ranked]
            yield MomentQuery(
                str(row.get("annotation_id", number)),
                row["video"],
                row["description"].strip(),
                _windows(windows),
            )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(
            f'{path} must be [{{"video": …, "description": …, "times": [[0, 1], …]}}, …]'
        ) from None


MOMENT_READERS: dict[str, Callable[[Path], Iterator[MomentQuery]]] = {
    "qvhighlights": _qvhighlights,
    "charades_sta": _charades_sta,
    "activitynet": _activitynet,
    "didemo": _didemo,
}


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file with the numbers of their lines; empty lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise DataError(f"{path}, line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} is not a JSON object")
        yield number, row


def _windows(pairs: Any) -> tuple[tuple[float, float], ...]:
    windows = tuple((float(start), float(end)) for start, end in pairs)
    if not windows or any(end < start or start < 0 for start, end in windows):
        raise ValueError("no window, or one that ends before it begins")
    return windows

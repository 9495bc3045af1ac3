"""What is kept of an evaluation: `results.json`, and the table printed from it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from torch import Tensor

from gare.atomic import write_text
from gare.errors import ConfigError, EvaluationError
from gare.evaluate.caption_protocols import TIE_POLICIES, CaptionProtocol, TwoWayMetrics
from gare.evaluate.rank_metrics import METRIC_NAMES, RECALL_CUTOFFS, MetricName, RetrievalMetrics, TiePolicy
from gare.evaluate.rescoring import Rescoring
from gare.evaluate.significance import Interval, bootstrap_intervals
from gare.settings import NonNegativeInt, NotEmpty, PositiveInt, Range, Settings
from gare.version import __version__

Direction = Literal["text_to_video", "video_to_text"]

CONFIDENCE = 0.95
DIRECTIONS: dict[Direction, str] = {"text_to_video": "text→video", "video_to_text": "video→text"}
HEADINGS: dict[MetricName, str] = {
    "recall_at_1": "R@1",
    "recall_at_5": "R@5",
    "recall_at_10": "R@10",
    "recall_at_50": "R@50",
    "median_rank": "MdR",
    "mean_rank": "MnR",
}
RESCORING_NAMES: dict[Rescoring, str] = {"none": "none", "dsl": "DSL", "qb_norm": "QB-Norm"}

Fraction = Annotated[float, Range(least=0, most=1)]
Rank = Annotated[float, Range(least=1, below=float("inf"))]
Name = Annotated[str, NotEmpty()]


@dataclass(frozen=True)
class MetricNumbers(Settings):
    """One direction under one tie policy; recalls are fractions."""

    recall_at_1: Fraction
    recall_at_5: Fraction
    recall_at_10: Fraction
    recall_at_50: Fraction
    median_rank: Rank
    mean_rank: Rank
    num_ranks: PositiveInt
    """What the recalls divide by: the number of queries, except under "legacy" ties."""


@dataclass(frozen=True)
class DirectionResult(Settings):
    """One direction of retrieval."""

    num_queries: PositiveInt
    by_ties: dict[TiePolicy, MetricNumbers]
    """"pessimistic" is the main one; "legacy" reproduces a bug of the field, for comparison only."""
    intervals: dict[MetricName, Interval]
    """95% bootstrap intervals of the pessimistic numbers."""
    ranks: tuple[PositiveInt, ...]
    """The pessimistic rank of each query, for paired tests."""
    groups: tuple[NonNegativeInt, ...] | None
    """The video of each query where a video has several; its queries are resampled together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.by_ties) != set(TIE_POLICIES):
            raise ConfigError(f"by_ties must hold {', '.join(TIE_POLICIES)}")
        if set(self.intervals) != set(METRIC_NAMES):
            raise ConfigError(f"intervals must hold {', '.join(METRIC_NAMES)}")
        for name, values in (("ranks", self.ranks), ("groups", self.groups)):
            if values is not None and len(values) != self.num_queries:
                raise ConfigError(f"{self.num_queries} queries, but {len(values)} {name}")

    @property
    def main(self) -> MetricNumbers:
        """The numbers to quote: every tie counts against the target."""
        return self.by_ties["pessimistic"]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Settings):
    """Numbers and all one needs to judge them."""

    schema_version: Literal[1] = 1
    gare_version: Name
    dataset: Name
    split: Name
    selected_on: Name
    """The split that chose the checkpoint and its settings; "none" if nothing was chosen."""
    protocol: CaptionProtocol
    rescoring: Rescoring
    querybank: Name | None = None
    """The query bank of QB-Norm and its size. QB-Norm leaves video→text as it was."""
    seed: int | None
    """The seed of the training run; None without training."""
    config_fingerprint: Name
    weights_hash: Name
    queries_hash: Name | None
    """A hash of texts and video ids in order (`hash_queries`): equal hashes mean the same queries."""
    num_texts: PositiveInt
    num_videos: PositiveInt
    num_missing_videos: NonNegativeInt
    """Videos of the split that could not be used; above 0 the gallery is smaller than the published one."""
    text_to_video: DirectionResult
    video_to_text: DirectionResult
    rescored: tuple[EvaluationResult, ...] = ()
    """The same scores in the light of other queries, each labelled; never the numbers to quote."""

    def __post_init__(self) -> None:
        super().__post_init__()
        found = self.text_to_video.num_queries, self.video_to_text.num_queries
        if found != (self.num_texts, self.num_videos):
            raise ConfigError(f"{self.num_texts} texts and {self.num_videos} videos, but queries for {found}")

    def save(self, path: Path) -> None:
        """Write results.json; a killed process leaves the old file or the new one, never half of one."""
        # A list of ranks belongs on one line; JSON strings hold no raw newline, so nothing else matches.
        text = re.sub(r"\[\n[\d\s,]*\]", _on_one_line, json.dumps(self.to_values(), indent=2))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read results.json."""
        try:
            return cls.load(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise EvaluationError(
                f"cannot read {path}: {error.strerror}; give the path of a results.json from 'gare evaluate'"
            ) from None
        except (ConfigError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise EvaluationError(
                f"{path} is not a results.json of this version ({error}); make it again with 'gare evaluate'"
            ) from None


def evaluation_result(
    metrics: TwoWayMetrics,
    *,
    dataset: str,
    split: str,
    selected_on: str,
    config_fingerprint: str,
    weights_hash: str,
    seed: int | None = None,
    rescoring: Rescoring = "none",
    querybank: str | None = None,
    queries_hash: str | None = None,
    num_missing_videos: int = 0,
) -> EvaluationResult:
    """Metrics with bootstrap intervals and provenance; the arguments are the fields of EvaluationResult."""
    num_texts = metrics.text_to_video["pessimistic"].num_queries
    num_videos = metrics.video_to_text["pessimistic"].num_queries
    captions_share_videos = num_texts > num_videos
    return EvaluationResult(
        gare_version=__version__,
        dataset=dataset,
        split=split,
        selected_on=selected_on,
        protocol=metrics.protocol,
        rescoring=rescoring,
        querybank=querybank,
        seed=seed,
        config_fingerprint=config_fingerprint,
        weights_hash=weights_hash,
        queries_hash=queries_hash,
        num_texts=num_texts,
        num_videos=num_videos,
        num_missing_videos=num_missing_videos,
        text_to_video=_direction(
            metrics.text_to_video, metrics.video_of_text if captions_share_videos else None
        ),
        video_to_text=_direction(metrics.video_to_text, None),
    )


def check_gallery(*, expected: int, found: int, allow_missing: bool = False, what: str = "videos") -> int:
    """Refuse a gallery that is not the whole split; returns how many are missing, for the result.

    >>> check_gallery(expected=670, found=668, allow_missing=True)
    2
    """
    if found > expected:
        raise EvaluationError(
            f"found {found:,} {what}, but the split has {expected:,}; the manifest names another split or "
            "repeats rows: run 'gare data check'"
        )
    if found < expected and not allow_missing:
        raise EvaluationError(
            f"found {found:,} of {expected:,} {what} of the split; a smaller gallery is easier: its numbers "
            "are not comparable. Run 'gare data check' to list what is missing, or pass --allow-missing to "
            "measure what there is, with the count in the result"
        )
    return expected - found


def hash_queries(texts: Sequence[str], video_ids: Sequence[str]) -> str:
    """Twelve hex digits of the texts and video ids in order, so that two results can be paired safely."""
    return hashlib.sha256(json.dumps([list(texts), list(video_ids)]).encode()).hexdigest()[:12]


def markdown_report(
    result: EvaluationResult, *, rescored: Sequence[EvaluationResult] = (), legacy: bool = False
) -> str:
    """The table of an evaluation, in percent.

    Args:
        result: the evaluation; its pessimistic rows, with intervals, are the numbers to quote.
        rescored: the same model under DSL or QB-Norm, besides what the result brings along; these get a table
            of their own, whatever the order.
        legacy: add rows with the field's tie bug, labelled.
    """
    results = (result, *result.rescored, *rescored)
    plain = [each for each in results if each.rescoring == "none"]
    other = [each for each in results if each.rescoring != "none"]
    parts = [_provenance(result)]
    if plain:
        parts.append(_table(plain, legacy=legacy))
    if other:
        parts.append("Rescored in the light of other queries; not comparable with results that are not:")
        parts += [f"Query bank: {each.querybank}." for each in other if each.querybank]
        parts.append(_table(other, legacy=legacy))
    return "\n\n".join(parts) + "\n"


def format_metric(name: MetricName, value: float, *, spec: str = ".1f") -> str:
    """Recalls in percent, ranks as they are, one decimal unless told otherwise.

    >>> format_metric("recall_at_1", 0.48), format_metric("mean_rank", 13.129)
    ('48.0', '13.1')
    """
    return format(100 * value if name in RECALL_CUTOFFS else value, spec)


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(markdown_rows(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def _on_one_line(numbers: re.Match[str]) -> str:
    return "".join(numbers[0].split()).replace(",", ", ")


def _direction(by_ties: dict[TiePolicy, RetrievalMetrics], groups: Tensor | None) -> DirectionResult:
    main = by_ties["pessimistic"]
    return DirectionResult(
        num_queries=main.num_queries,
        by_ties={
            ties: MetricNumbers(**metrics.numbers, num_ranks=len(metrics.ranks))
            for ties, metrics in by_ties.items()
        },
        intervals=bootstrap_intervals(main.ranks, groups=groups, confidence=CONFIDENCE),
        ranks=tuple(main.ranks.tolist()),
        groups=None if groups is None else tuple(groups.tolist()),
    )


def _provenance(result: EvaluationResult) -> str:
    facts = [
        f"**{result.dataset}**, split {result.split}, selected on {result.selected_on}",
        f"{result.num_texts:,} texts, {result.num_videos:,} videos",
        f"video→text protocol {result.protocol}",
        f"seed {'none' if result.seed is None else result.seed}",
        f"config {result.config_fingerprint}",
        f"weights {result.weights_hash}",
        f"gare {result.gare_version}",
    ]
    if result.num_missing_videos:
        facts.insert(2, f"**{result.num_missing_videos:,} videos missing: a smaller, easier gallery**")
    return " · ".join(facts)


def _table(results: Sequence[EvaluationResult], *, legacy: bool) -> str:
    rows = []
    for result in results:
        for direction, arrow in DIRECTIONS.items():
            if result.querybank and direction == "video_to_text":
                continue  # a bank of texts says nothing about videos as queries
            label = "" if result.rescoring == "none" else f", rescored: {RESCORING_NAMES[result.rescoring]}"
            measured: DirectionResult = getattr(result, direction)
            for ties, numbers in measured.by_ties.items():
                if ties != "legacy" or legacy:
                    rows.append(
                        [arrow + label, _tie_label(ties, numbers, measured), *_cells(ties, numbers, measured)]
                    )
    return markdown_rows(["direction", "ties", *HEADINGS.values()], rows)


def _tie_label(ties: TiePolicy, numbers: MetricNumbers, measured: DirectionResult) -> str:
    if ties != "legacy":
        return ties
    return (
        f"legacy bug, for comparison only: {numbers.num_ranks:,} ranks for {measured.num_queries:,} queries"
    )


def _cells(ties: TiePolicy, numbers: MetricNumbers, measured: DirectionResult) -> list[str]:
    cells = {name: format_metric(name, getattr(numbers, name)) for name in METRIC_NAMES}
    if ties == "pessimistic":
        for name, interval in measured.intervals.items():
            low, high = format_metric(name, interval.low), format_metric(name, interval.high)
            cells[name] += f" [{low}, {high}]"
    return list(cells.values())

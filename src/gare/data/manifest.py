"""One table per dataset: which videos, which captions, which split, and how many of each there must be."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from gare.atomic import replacing
from gare.data.annotation_files import Problems, parse_csv, read_text, split_lines
from gare.data.object_storage import is_remote
from gare.errors import DataError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
VERSION = 1
FRAMES_FOLDER = "frames"
"""Name of the frame cache beside a prepared manifest."""
_FILE_NAMES = ("manifest.csv", "manifest.parquet")
_COLUMNS = ("video_id", "path", "caption", "split", "start", "end")
_QUOTED_ENDS = "\r\n"
_CSV_MARK = "# gare-manifest "


@dataclass(frozen=True, slots=True)
class Row:
    """One caption of one video."""

    video_id: str
    path: str
    """A source for `read_frames`, relative to the manifest's root."""
    caption: str
    split: Split
    start: float | None = None
    end: float | None = None
    """Seconds; None is the start or the end of the file."""


@dataclass(frozen=True)
class Counts:
    """How much a split holds."""

    videos: int
    captions: int

    def __str__(self) -> str:
        return f"{self.videos:,} videos, {self.captions:,} captions"


@dataclass(frozen=True)
class Header:
    """What the table is, apart from its rows."""

    name: str
    protocol: str = ""
    """How the dataset is used, in words: caption choice, split lists, paragraphs."""
    expected: Mapping[Split, Counts] = field(default_factory=dict)
    """What each split must hold; a gallery that is smaller gives numbers that compare with nothing."""
    root: str = "."
    """Folder that paths start from; a relative one starts from the manifest's own folder."""
    repeated_captions: bool = False
    """The dataset itself has a caption twice for one video; otherwise that is a mistake."""
    version: int = VERSION


@dataclass(frozen=True)
class Manifest:
    """Rows and header, checked.

    >>> rows = [Row("v1", "v1.mp4", "a dog", "train"), Row("v1", "v1.mp4", "a puppy", "train")]
    >>> manifest = Manifest(Header("pets"), tuple(rows))
    >>> manifest.captions("train"), manifest.video_index("train"), len(manifest.videos("train"))
    (['a dog', 'a puppy'], [0, 0], 1)
    """

    header: Header
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        problems = Problems(Path(self.header.name))
        _check_rows(enumerate(self.rows, start=1), problems, self.header.repeated_captions)
        problems.raise_if_any()

    # --- what it holds ------------------------------------------------------------------------------------

    @cached_property
    def _by_split(self) -> dict[Split, list[Row]]:
        table: dict[Split, list[Row]] = {}
        for row in self.rows:
            table.setdefault(row.split, []).append(row)
        return table

    @property
    def splits(self) -> list[Split]:
        """The splits that have rows: train, val, test, in this order."""
        return [split for split in SPLITS if split in self._by_split]

    def captions(self, split: Split) -> list[str]:
        """Every caption of a split, in the order of its rows."""
        return [row.caption for row in self._rows(split)]

    def videos(self, split: Split) -> list[Row]:
        """The first row of every video, in order of appearance: the gallery."""
        return list(_first_rows(self._rows(split)).values())

    def video_index(self, split: Split) -> list[int]:
        """For every caption, the position of its video in `videos(split)`."""
        rows = self._rows(split)
        position = {video_id: index for index, video_id in enumerate(_first_rows(rows))}
        return [position[row.video_id] for row in rows]

    def captions_per_video(self, split: Split) -> list[int]:
        """How many captions each video of the gallery has."""
        counts = [0] * len(self.videos(split))
        for index in self.video_index(split):
            counts[index] += 1
        return counts

    def all_videos(self) -> list[Row]:
        """The first row of every video of every split."""
        return [video for split in self.splits for video in self.videos(split)]

    @property
    def counts(self) -> dict[Split, Counts]:
        """How many videos and captions each split holds."""
        return {split: Counts(len(self.videos(split)), len(self.captions(split))) for split in self.splits}

    def source(self, row: Row) -> str:
        """Where `read_frames` finds the video of this row."""
        return row.path if _is_absolute(row.path) else f"{self.header.root}/{row.path}"

    def _rows(self, split: Split) -> list[Row]:
        if split not in self._by_split:
            raise DataError(
                f"{self.header.name} has no split '{split}', only {', '.join(self.splits)}; choose one "
                "of those, or hold videos out of train (--hold-out)"
            )
        return self._by_split[split]

    # --- variants -----------------------------------------------------------------------------------------

    def hold_out(self, num_videos: int, *, seed: int = 0) -> Manifest:
        """Move some training videos to `val`, for model selection; ids and seed alone decide which."""
        train = [video.video_id for video in self.videos("train")]
        if not 0 < num_videos < len(train):
            raise DataError(
                f"cannot hold out {num_videos} of {len(train)} training videos; hold out fewer, a fifth or so"
            )
        if "val" in self.splits:
            raise DataError(f"{self.header.name} already has a split 'val'; nothing needs to be held out")
        order = sorted(train, key=lambda video_id: hashlib.sha256(f"{seed}/{video_id}".encode()).digest())
        chosen = set(order[:num_videos])
        rows = tuple(replace(row, split="val") if row.video_id in chosen else row for row in self.rows)
        protocol = f"{self.header.protocol}; {num_videos} training videos held out as val (seed {seed})"
        num_captions = sum(row.split == "val" for row in rows)
        expected = dict(self.header.expected)
        if "train" in expected:
            videos, captions = expected["train"].videos, expected["train"].captions
            expected["train"] = Counts(videos - num_videos, captions - num_captions)
            expected["val"] = Counts(num_videos, num_captions)
        return Manifest(replace(self.header, protocol=protocol.lstrip("; "), expected=expected), rows)

    def select(self, *splits: Split) -> Manifest:
        """The manifest with these splits alone."""
        rows = tuple(row for split in splits for row in self._rows(split))
        expected = {split: counts for split, counts in self.header.expected.items() if split in splits}
        return Manifest(replace(self.header, expected=expected), rows)

    def without(self, video_ids: Iterable[str]) -> Manifest:
        """The manifest without these videos. The expected counts stay, so `check_counts` still notices."""
        dropped = set(video_ids)
        return Manifest(self.header, tuple(row for row in self.rows if row.video_id not in dropped))

    def check_counts(self) -> None:
        """Refuse a table that lost rows: a smaller gallery is an easier task."""
        found = self.counts
        wrong = [
            f"{split}: {found.get(split, Counts(0, 0))} instead of {expected}"
            for split, expected in self.header.expected.items()
            if found.get(split) != expected
        ]
        if wrong:
            raise DataError(
                f"{self.header.name} is not complete. {'; '.join(wrong)}. Get the full annotations, or pass "
                "--allow-missing and report the counts with every number."
            )

    # --- files --------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write `.csv` or `.parquet`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps(asdict(self.header), ensure_ascii=False)
        if path.suffix not in (".csv", ".parquet"):
            raise DataError(f"{path}: a manifest is a .csv or a .parquet file")
        with replacing(path) as part:
            if path.suffix == ".parquet":
                _write_parquet(part, header, self.rows)
            else:
                part.write_text(_to_csv(header, self.rows), encoding="utf-8", newline="")

    @classmethod
    def load(cls, path: Path, *, allow_missing: bool = False) -> Manifest:
        """Read and check; `allow_missing` accepts a table with other counts than its header promises."""
        path = Path(path)
        if not path.is_file():
            raise DataError(f"{path} does not exist; make a manifest with 'gare data prepare'")
        header_text, values = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
        header = _parse_header(header_text, path)
        problems = Problems(path)
        numbered = [(line, row) for line, value in values if (row := _parse_row(line, value, problems))]
        _check_rows(numbered, problems, header.repeated_captions)
        problems.raise_if_any()
        if not numbered:
            raise DataError(
                f"{path} has no rows; expected the columns {', '.join(_COLUMNS)} and a row per caption"
            )
        root = header.root if _is_absolute(header.root) else str(path.parent / header.root)
        manifest = cls(replace(header, root=root), tuple(row for _, row in numbered))
        if not allow_missing:
            manifest.check_counts()
        return manifest


def find_manifest(path: Path) -> Path:
    """The manifest itself, or the one in a prepared folder."""
    if not path.is_dir():
        return path
    for name in _FILE_NAMES:
        if (path / name).is_file():
            return path / name
    raise DataError(f"{path} has no {' or '.join(_FILE_NAMES)}; make one with 'gare data prepare'")


def join(name: str, manifests: Sequence[Manifest]) -> Manifest:
    """One manifest of several, to train on all of them; a video may be in one only; one may come twice."""
    rows = [replace(row, path=manifest.source(row)) for manifest in manifests for row in manifest.rows]
    owner: dict[str, str] = {}
    for manifest in manifests:
        for video in manifest.all_videos():
            other = owner.setdefault(video.video_id, manifest.header.name)
            if other != manifest.header.name:
                raise DataError(
                    f"{video.video_id} is in {other} and in {manifest.header.name}; rename one of them"
                )
    expected: dict[Split, Counts] = {}
    for manifest in manifests:
        for split, counts in manifest.header.expected.items():
            so_far = expected.get(split, Counts(0, 0))
            expected[split] = Counts(so_far.videos + counts.videos, so_far.captions + counts.captions)
    protocol = " + ".join(f"{manifest.header.name}: {manifest.header.protocol}" for manifest in manifests)
    names = [manifest.header.name for manifest in manifests]
    repeated = len(set(names)) < len(names) or any(each.header.repeated_captions for each in manifests)
    return Manifest(Header(name, protocol, expected, repeated_captions=repeated), tuple(rows))


def _is_absolute(path: str) -> bool:
    return is_remote(path) or Path(path).is_absolute()


def _first_rows(rows: Iterable[Row]) -> dict[str, Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.video_id, row)
    return first


def _check_rows(numbered: Iterable[tuple[int, Row]], problems: Problems, repeated_captions: bool) -> None:
    first: dict[str, tuple[int, Row]] = {}
    seen: dict[tuple[str, str], int] = {}
    for line, row in numbered:
        if not row.video_id:
            problems.add(line, "empty video_id; name the video")
        if not row.path:
            problems.add(line, f"empty path for {row.video_id}; say where the video is")
        if not row.caption.strip():
            problems.add(line, f"empty caption for {row.video_id}; write one or delete the line")
        if row.split not in SPLITS:
            problems.add(line, f"split '{row.split}' is not one of {', '.join(SPLITS)}")
        first_line, other = first.setdefault(row.video_id, (line, row))
        if row.split != other.split:
            problems.add(
                line,
                f"{row.video_id} is in '{row.split}', but line {first_line} has it in '{other.split}'; keep "
                "one, a video in two splits leaks",
            )
        elif (row.path, row.start, row.end) != (other.path, other.start, other.end):
            problems.add(
                line,
                f"{row.video_id} has another path, start or end than in line {first_line}; give parts of a "
                "video ids of their own",
            )
        same = seen.setdefault((row.video_id, row.caption), line)
        if same != line and not repeated_captions:
            problems.add(line, f"the same video and caption as line {same}; delete one of the two")


def _parse_row(line: int, value: Mapping[str, Any], problems: Problems) -> Row | None:
    try:
        start, end = _parse_seconds(value.get("start")), _parse_seconds(value.get("end"))
    except ValueError as error:
        problems.add(line, f"start or end: {error}; write seconds as a number, or nothing")
        return None
    if start is not None and end is not None and end <= start:
        problems.add(
            line, f"end {end} is not after start {start}; both are seconds from the start of the video"
        )
    return Row(
        value["video_id"] or "", value["path"] or "", value["caption"] or "", value["split"], start, end
    )


def _parse_seconds(value: str | float | None) -> float | None:
    if value is None or value == "":
        return None
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds} is not a time")
    return seconds


def _parse_header(text: str | None, path: Path) -> Header:
    if text is None:
        return Header(path.stem)
    try:
        values = json.loads(text)
        version = int(values.get("version", VERSION))
        if version > VERSION:
            raise DataError(
                f"{path} is of manifest version {version}, this gare reads {VERSION}; update gare"
            )
        expected = {split: Counts(**counts) for split, counts in values.pop("expected", {}).items()}
        return Header(**values, expected=expected)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}, line 1: the manifest header cannot be read ({error}); prepare it again"
        ) from None


def _to_csv(header: str, rows: Iterable[Row]) -> str:
    buffer = io.StringIO()
    buffer.write(f"{_CSV_MARK}{header}\n")
    writer = csv.writer(_ShortLineEnds(buffer), lineterminator=_QUOTED_ENDS)
    writer.writerow(_COLUMNS)
    writer.writerows([getattr(row, column) for column in _COLUMNS] for row in rows)
    return buffer.getvalue()


class _ShortLineEnds:
    """Rows of a CSV writer, each ended by a line feed alone.

    The writer quotes a field for the characters of its own line end only. Told the line feed alone, it leaves
    a caption with a carriage return bare, and whoever reads the file takes that for the end of the row.
    """

    def __init__(self, buffer: io.StringIO) -> None:
        self._buffer = buffer

    def write(self, row: str) -> None:
        self._buffer.write(row.removesuffix(_QUOTED_ENDS) + "\n")


def _read_csv(path: Path) -> tuple[str | None, Iterator[tuple[int, dict[str, str]]]]:
    lines = split_lines(read_text(path))
    header = None
    first_line = 1
    if lines and lines[0].startswith(_CSV_MARK):
        header, first_line = lines.pop(0).removeprefix(_CSV_MARK), 2
    return header, parse_csv(lines, path, _COLUMNS[:4], _COLUMNS[4:], first_line)


def _write_parquet(path: Path, header: str, rows: tuple[Row, ...]) -> None:
    arrow, parquet = _import_parquet()
    columns = {column: [getattr(row, column) for row in rows] for column in _COLUMNS}
    types = [arrow.float64() if column in ("start", "end") else arrow.string() for column in _COLUMNS]
    schema = arrow.schema(list(zip(_COLUMNS, types, strict=True)), metadata={"gare-manifest": header})
    parquet.write_table(arrow.table(columns, schema=schema), path)


def _read_parquet(path: Path) -> tuple[str | None, Iterator[tuple[int, dict[str, Any]]]]:
    arrow, parquet = _import_parquet()
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from None
    missing = [column for column in _COLUMNS[:4] if column not in table.column_names]
    if missing:
        raise DataError(f"{path}: no column {', '.join(missing)}; found {', '.join(table.column_names)}")
    header = (table.schema.metadata or {}).get(b"gare-manifest")
    return header and header.decode(), enumerate(table.to_pylist(), start=1)


def _import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("Parquet needs pyarrow: pip install pyarrow, or use a .csv manifest") from None
    return pyarrow, pyarrow.parquet

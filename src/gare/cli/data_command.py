"""`gare data`: build a manifest and its frame cache, and check them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gare.data.datasets import DATASETS, read_dataset
from gare.data.frame_sampling import Sampling
from gare.data.manifest import FRAMES_FOLDER, Manifest, find_manifest
from gare.data.packed_members import is_in_table
from gare.errors import DataError

if TYPE_CHECKING:
    from gare.data.dataset_check import Report
    from gare.data.frame_cache import CacheSettings, Entry

app = typer.Typer(
    name="data", help="Build a dataset's manifest and frame cache, and check them.", no_args_is_help=True
)
_stderr = Console(stderr=True, highlight=False)
_SHOWN = 20
_NUM_CORES = os.cpu_count() or 1

_NAMES = ", ".join(DATASETS)
_Workers = Annotated[int, typer.Option(min=1, help="Processes that decode.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help=f"One of {_NAMES}.", show_default=False)],
    annotations: Annotated[
        Path, typer.Option(help="Folder of annotation files, shards or tables; for 'csv', the file.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write manifest and frames to.")],
    videos: Annotated[Path | None, typer.Option(help="Folder of the videos, or of frames.")] = None,
    frames: Annotated[
        int, typer.Option(min=1, help="Frames kept of each video: 12, or 64 for paragraphs.")
    ] = 12,
    sampling: Annotated[
        Sampling, typer.Option(help="One frame a second, thinned; or evenly spaced.")
    ] = "grid",
    short_side: Annotated[int, typer.Option(min=16, help="Short side of the kept frames, in pixels.")] = 256,
    hold_out: Annotated[int, typer.Option(min=0, help="Training videos to set aside as split 'val'.")] = 0,
    table: Annotated[Literal["csv", "parquet"], typer.Option(help="Format of the manifest.")] = "csv",
    keep_damaged: Annotated[
        bool, typer.Option(help="Use what truncated or corrupt videos still give.")
    ] = False,
    allow_missing: Annotated[bool, typer.Option(help="Accept annotations that are not complete.")] = False,
    workers: _Workers = _NUM_CORES,
    as_json: _Json = False,
) -> None:
    """Read a dataset's annotations into a manifest and decode its videos once.

    Run it again after an interruption, or after mending videos: it goes on where it was.

    Examples:

        gare data prepare csv --annotations captions.csv --out prepared

        gare data prepare msrvtt-9k --annotations msrvtt --videos msrvtt/videos --out prepared --hold-out 250

        gare data prepare webdataset --annotations shards --out prepared

        gare data prepare webdataset --annotations s3://bucket/shards --out prepared

        gare data prepare huggingface --annotations saved-dataset --out prepared

        gare data prepare activitynet --annotations anet --videos anet/videos --out prepared --frames 64
    """
    if name not in DATASETS:
        raise typer.BadParameter(f"there is no dataset '{name}'; choose one of {', '.join(DATASETS)}")
    from gare.data.frame_cache import CacheSettings
    from gare.data.frame_images import is_frames_source

    manifest = read_dataset(name, annotations, videos=videos)
    if not allow_missing:
        manifest.check_counts()
    if hold_out:
        manifest = manifest.hold_out(hold_out)
    path = out / f"manifest.{table}"
    manifest.save(path)
    for other in ("csv", "parquet"):
        if other != table:
            (out / f"manifest.{other}").unlink(missing_ok=True)
    sources = [manifest.source(video) for video in manifest.all_videos()]
    if all(is_frames_source(source) and not is_in_table(source) for source in sources):
        _stderr.print("The sources are images already; no frame cache is needed.")
        entries = _missing_images(manifest)
    else:
        settings = CacheSettings(frames, sampling, short_side, keep_damaged)
        entries = _decode_all(manifest, out / FRAMES_FOLDER, settings, workers)
    _report_preparation(manifest, path, entries, len(sources), as_json=as_json)


@app.command()
def check(
    manifest: Annotated[Path, typer.Argument(help="A manifest, or a folder that 'prepare' made.")],
    decode: Annotated[bool, typer.Option(help="Decode the videos, not only look for them.")] = True,
    workers: _Workers = _NUM_CORES,
    as_json: _Json = False,
) -> None:
    """Report bad videos, duplicates and wrong counts; exit code 1 if there is something to mend.

    Bad is missing, unreadable, truncated, corrupt, audio only (no_video) or empty (zero_length).

    Examples:

        gare data check prepared/msrvtt

        gare data check prepared/manifest.csv --no-decode --json
    """
    from gare.data.dataset_check import check_manifest

    loaded = Manifest.load(find_manifest(manifest), allow_missing=True)
    with _progress() as progress:
        task = progress.add_task("checking", total=len(loaded.all_videos()))
        report = check_manifest(
            loaded, decode=decode, num_workers=workers, on_video=lambda: progress.advance(task)
        )
    if as_json:
        _print_json(report.to_json())
    else:
        _print_report(report)
    if not report.is_good:
        raise typer.Exit(1)


def _missing_images(manifest: Manifest) -> list[Entry]:
    """An entry for every video whose images are not there."""
    from gare.data.frame_cache import Entry
    from gare.data.video import source_exists

    sources = {video.video_id: manifest.source(video) for video in manifest.all_videos()}
    return [
        Entry(video_id, "missing", f"{source} does not exist")
        for video_id, source in sources.items()
        if not source_exists(source)
    ]


def _decode_all(manifest: Manifest, folder: Path, settings: CacheSettings, workers: int) -> list[Entry]:
    from gare.data.frame_cache import build_frame_cache, pending

    entries = []
    with _progress() as progress:
        task = progress.add_task("decoding", total=pending(manifest, folder, settings))
        for entry in build_frame_cache(manifest, folder, settings, num_workers=workers):
            entries.append(entry)
            if entry.status != "ok":
                _warn(f"{entry.status} {entry.video_id}: {entry.message}")
            progress.advance(task)
    return entries


def _report_preparation(
    manifest: Manifest, path: Path, entries: list[Entry], num_videos: int, *, as_json: bool
) -> None:
    folder = path.parent / FRAMES_FOLDER
    bad = [entry for entry in entries if entry.status != "ok"]
    num_without_frames = sum(not entry.has_frames for entry in bad)
    if as_json:
        failures = [
            {"video_id": entry.video_id, "kind": entry.status, "message": entry.message} for entry in bad
        ]
        _print_json(
            {
                "manifest": str(path),
                "name": manifest.header.name,
                "protocol": manifest.header.protocol,
                "counts": {split: vars(counts) for split, counts in manifest.counts.items()},
                "frames": str(folder) if folder.is_dir() else None,
                "num_with_frames": num_videos - num_without_frames,
                "failures": failures,
            }
        )
    else:
        print(f"{manifest.header.name}: {manifest.header.protocol}")
        for split, counts in manifest.counts.items():
            print(f"{split:5}  {counts}")
        print(f"manifest  {path}")
        if folder.is_dir():
            print(f"frames    {folder}")
        print(f"{num_videos - num_without_frames:,} of {num_videos:,} videos have frames")
    if num_without_frames == num_videos:
        raise DataError(f"not one of {num_videos:,} videos could be read; check --videos. {bad[0].message}")
    if bad:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(entry.status for entry in bad).items())
        _warn(f"{len(bad)} videos are not as they should be: {kinds}. Mend them and run this again.")


def _print_report(report: Report) -> None:
    from gare.data.dataset_check import WARNINGS

    for split, counts in report.counts.items():
        print(f"{split:5}  {counts}")
    print(f"{report.num_readable:,} videos are readable")
    kinds = Counter(finding.kind for finding in report.findings)
    for kind, count in kinds.items():
        print(f"{kind.replace('_', ' ')}: {count:,}" + (" (warning)" if kind in WARNINGS else ""))
        messages = [finding.message for finding in report.findings if finding.kind == kind]
        for message in messages[:_SHOWN]:
            print(f"  {message}")
        if count > _SHOWN:
            print(f"  … and {count - _SHOWN:,} more (--json lists all)")
    print("nothing to mend" if report.is_good else "not ready: mend the above and check again")


def _warn(message: str) -> None:
    _stderr.print(message, style="yellow", markup=False, soft_wrap=True)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=_stderr)

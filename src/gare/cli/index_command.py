"""`gare index`: make folders of videos searchable, and keep them so."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gare.cli.options import choose_device
from gare.errors import LibraryError
from gare.extras import require

if TYPE_CHECKING:
    from gare.library.index.index_report import IndexProgress, IndexReport
    from gare.library.index.index_run import IndexOptions
    from gare.library.library import Library

_SETTLE_S = 2.0
_SHOWN = 10
_LINE_EVERY_S = 10.0
_FOLDER_WIDTH = 40
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def index(
    dirs: Annotated[
        list[str] | None,
        typer.Argument(help="Folders of videos, single videos, s3://… or gs://….", metavar="DIR"),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(help="A folder, s3://… or postgresql://…; default: .gare in the first DIR."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder, hub id or name, of CLIP and others too; default: the library's own, or gare-mini. "
            "Another one than the library's own encodes everything again, and then the library has that one."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Segments: moments, whole, window:SECONDS, shots or auto; default: moments."),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(min=0.1, max=60, help="Seconds from one frame of a video to the next; default: 1."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Leave out names (with a slash: paths) like this: '*.tmp.mp4'."),
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag for the items that are added.")] = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="Index hidden files and folders too.")] = False,
    keep_damaged: Annotated[
        bool, typer.Option("--keep-damaged", help="Use what truncated or corrupt videos still give.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try files again that failed before.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove the items of a folder that is empty or gone.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode; 0 is one per core.")] = 0,
    seconds: Annotated[
        float, typer.Option(min=1, max=1e6, help="Give up on a file after so many seconds without a frame.")
    ] = 120.0,
    memory: Annotated[
        float, typer.Option(min=0.1, max=1e6, help="Memory limit of each decoding process, in GB.")
    ] = 2.0,
    scratch: Annotated[
        float,
        typer.Option(min=0.01, max=1e6, help="Disk space for videos fetched from s3:// or gs://, in GB."),
    ] = 16.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, max=1e6, help="Keep running; index changes every so many seconds."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Index on a Ray cluster: HOST:PORT, ray://HOST:PORT, auto, or local. See docs/scale.md.",
        ),
    ] = None,
    on_interrupt: Annotated[
        str, typer.Option(help="What Ctrl-C does with --ray: stop the run, or detach and leave it going.")
    ] = "stop",
    status: Annotated[
        bool, typer.Option("--status", help="Only say how far the run on a cluster is.")
    ] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Only stop the run on a cluster; the same command goes on with it.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only list the files that failed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Find the videos in folders, encode what is new or changed, and drop what is gone.

    Run it again whenever you like: what is known is not read again, and moved files are recognised. Ctrl-C,
    even a crash, costs at most the files that were being read. One bad file never stops it: see `--failed`.

    Examples:

        gare index ~/Videos

        gare index ~/Videos /mnt/camera --library ~/videos.gare --exclude '*.tmp.mp4'

        gare index ~/Lectures --every 5

        gare index ~/Videos --watch 30

        gare index ~/Videos --model runs/mine/best

        gare index /mnt/archive --library s3://bucket/archive --ray head:6379
    """
    place = _find_library(dirs or [], library)
    if status or stop:
        from gare.cli.cluster_options import show_status, stop_run

        return stop_run(place) if stop else show_status(place, as_json)
    if ray is not None:
        require("cluster", "gare index --ray")
        if watch is not None:
            raise typer.BadParameter("does not go with --ray", param_hint="--watch")
    if on_interrupt not in ("stop", "detach"):
        raise typer.BadParameter("is stop or detach", param_hint="--on-interrupt")
    if failed:
        return _list_failed(place, as_json)
    if not dirs and model is None:
        raise typer.BadParameter("name a folder of videos", param_hint="DIR")
    dirs = dirs or []
    from gare.data.sandbox import probe_box
    from gare.data.workers import Limits
    from gare.library.index.index_run import IndexOptions
    from gare.library.index.segment import parse_segmentation
    from gare.library.library import Library
    from gare.library.store.store_schema import DENSE

    if every is not None:
        if split not in (None, DENSE):
            raise typer.BadParameter(f"goes with --split {DENSE} only", param_hint="--every")
        split = f"{DENSE}:{every:g}"
    parse_segmentation(split or "whole")  # before a model is loaded
    options = IndexOptions(
        split=split,
        exclude=tuple(exclude or ()),
        hidden=hidden,
        tags=tuple(tag or ()),
        num_workers=workers,
        retry_failed=retry_failed,
        prune=prune,
        keep_damaged=keep_damaged,
        scratch_bytes=int(scratch * 1e9),
        settle_seconds=_SETTLE_S if watch else 0.0,
        limits=Limits(
            seconds=seconds,
            cpu_seconds=int(seconds) + 1,
            memory_bytes=int(memory * 1e9),
            file_seconds=5 * seconds,
        ),
    )
    if warning := probe_box().warning:
        _warn(warning)
    with Library.open(
        place, model=model, device=choose_device(device), create=bool(dirs), change_model=True
    ) as opened:
        for repair in opened.store.repairs:
            _warn(f"repaired: {repair}")
        if opened.wanted_model is not None:
            former = opened.store.stamp.name
            meanwhile = (
                "searches must wait until all is done"  # for the weights that the name stood for are gone
                if former == opened.wanted_model
                else f"until all is done, searches use the vectors of {former}"
            )
            _stderr.print(f"encoding with {opened.wanted_model}; {meanwhile}", markup=False)
        if ray is not None:
            from gare.cli.cluster_options import index_by_ray

            report = index_by_ray(
                opened, dirs, options, address=ray, device=device, detach=on_interrupt == "detach"
            )
            if report is not None:
                _end(opened, dirs, report, as_json)
        elif watch is None:
            _run(opened, dirs, options, as_json)
        else:
            _watch(opened, dirs, options, as_json, watch)


def _find_library(dirs: list[str], library: str | None) -> str:
    if library is not None:
        return library
    if not dirs:
        raise typer.BadParameter("name a folder of videos, or a --library", param_hint="DIR")
    from gare.data.object_storage import is_remote
    from gare.library.index.object_files import normal_source
    from gare.library.library import LIBRARY_FOLDER

    first = normal_source(dirs[0])
    if is_remote(first):
        raise typer.BadParameter(f"give one for the videos of {first}", param_hint="--library")
    if not os.path.exists(first):
        raise LibraryError(f"{first} does not exist; give a folder of videos, or a --library")
    return os.path.join(first if os.path.isdir(first) else os.path.dirname(first), LIBRARY_FOLDER)


def _run(library: Library, dirs: list[str], options: IndexOptions, as_json: bool) -> None:
    _end(library, dirs, _index_once(library, dirs, options), as_json)


def _end(library: Library, dirs: list[str], report: IndexReport, as_json: bool) -> None:
    """Print what a run did, and end with the code that says so."""
    _print_report(library, report, as_json)
    for message in report.skipped_roots.values():
        _warn(message)
    if report.interrupted:
        _warn("stopped; run the same command to go on")
        raise typer.Exit(130)
    is_given_up = any(failure.kind == "shard" for failure in report.failures)
    if is_given_up or (dirs and len(report.skipped_roots) == len(dirs)):
        raise typer.Exit(1)


def _watch(library: Library, dirs: list[str], options: IndexOptions, as_json: bool, seconds: float) -> None:
    is_first = True
    said: set[str] = set()
    while True:
        report = _index_once(library, dirs, options)
        closed = {f"{folder.path}: {folder.message}" for folder in report.failures if folder.is_folder}
        if is_first or report.did_something:
            _print_report(library, report, as_json)
            said |= closed
        messages = closed | set(report.skipped_roots.values())
        for message in sorted(messages - said):
            _warn(message)
        said = messages
        if report.interrupted:
            raise typer.Exit(130)
        is_first = False
        time.sleep(seconds)


def _index_once(library: Library, dirs: list[str], options: IndexOptions) -> IndexReport:
    with _show_progress(_stderr) as on_progress:
        return library.index(*dirs, options=options, on_progress=on_progress)


def _print_report(library: Library, report: IndexReport, as_json: bool) -> None:
    from gare.library.index.scan import on_one_line

    place = library.home.uri
    if as_json:
        typer.echo(json.dumps({"library": place, **report.to_json()}, ensure_ascii=False))
        return
    counts = {
        "encoded again": report.encoded_again,
        "new": report.new,
        "changed": report.changed,
        "moved": report.moved,
        "duplicate": report.duplicate,
        "unchanged": report.unchanged,
        "deleted": report.deleted,
        "failed": report.failed,
        "failed before": report.failed_before,
    }
    nothing = "nothing is done yet" if report.interrupted else "no videos found"
    shown = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or nothing
    typer.echo(f"{shown}; {report.seconds:.1f} s{_describe_rate(report)}")
    num_items = len(library)
    typer.echo(f"library {place}: {num_items:,} item{'s' * (num_items != 1)}")
    if report.changed_to:
        typer.echo(
            f"model {report.changed_to}; the vectors of others are kept: gare models --library {place}"
        )
    for failure in report.failures[:_SHOWN]:
        _warn(f"{failure.kind}  {on_one_line(failure.path)}: {failure.message}")
    if len(report.failures) > _SHOWN:
        _warn(f"… and {len(report.failures) - _SHOWN:,} more")
    num_files = report.failed_before + sum(not failure.is_folder for failure in report.failures)
    if num_files:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.failure_kinds().items())
        _warn(
            f"{num_files:,} {'file is' if num_files == 1 else 'files are'} not in the library"
            + (f" (now: {kinds})" if kinds else "")
            + f". See them: gare index --failed --library {place}; after mending: --retry-failed"
        )


def _describe_rate(report: IndexReport) -> str:
    """How fast it was, where videos were decoded."""
    if not report.video_seconds:
        return ""
    times = report.video_seconds / max(report.seconds, 1e-3)
    return f" ({report.video_seconds / 3600:.1f} hours of video, {times:.0f} times as fast as they play)"


def _list_failed(place: str, as_json: bool) -> None:
    from gare.library.index.scan import on_one_line
    from gare.library.library import Library

    library = Library.open(place, create=False, read_only=True)
    store = library.store
    columns = ["path", "state", "error_kind", "error"]
    rows: list[dict[str, Any]] = [
        {"path": row["path"], "kind": row["error_kind"], "message": row["error"]}
        for batch in store.scan_files(columns)
        for row in batch.to_pylist()
        if row["state"] == "failed"
    ]
    rows.sort(key=lambda row: os.fsencode(row["path"]))
    library.close()
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False))
        return
    for row in rows:
        typer.echo(f"{row['kind']}\t{on_one_line(row['path'])}\t{row['message']}")
    if not rows:
        _stderr.print("no file failed")


def _warn(message: str) -> None:
    _stderr.print(message, style="yellow", markup=False)


# --- progress -----------------------------------------------------------------------------------------------


@contextmanager
def _show_progress(console: Console) -> Iterator[Callable[[IndexProgress], None]]:
    """Show where a run is: a bar on a terminal, a line now and then elsewhere."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("indexing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.1f} files/s"),
        TimeRemainingColumn(),
        TextColumn("[yellow]{task.fields[failed]}[/]"),
        TextColumn("[dim]{task.fields[folder]}[/]"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar)


class _Bar:
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("indexing", total=None, rate=0.0, failed="", folder="", visible=False)
        self._started = time.monotonic()

    def __call__(self, progress: IndexProgress) -> None:
        self._bar.update(
            self._task,
            visible=True,
            completed=progress.done,
            total=progress.total,
            rate=progress.done / max(1e-3, time.monotonic() - self._started),
            failed=f"{progress.failed:,} failed" if progress.failed else "",
            folder=escape(_place(progress)),
        )


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._last = time.monotonic()

    def __call__(self, progress: IndexProgress) -> None:
        now = time.monotonic()
        if now - self._last < _LINE_EVERY_S:
            return
        self._last = now
        rate = progress.done / (now - self._started)
        minutes = (progress.total - progress.done) / rate / 60 if rate else 0.0
        to_go = f"{rate:.1f} files/s, {minutes:.0f} min to go, " if rate else ""
        self._console.print(
            f"{progress.done:,} of {progress.total:,} files, {progress.failed:,} failed, {to_go}"
            f"in {_place(progress)}",
            markup=False,
        )


def _place(progress: IndexProgress) -> str:
    """The folder that is being read; how far a long file is read."""
    from gare.library.index.scan import on_one_line

    if progress.at is None:
        return on_one_line(_shorten(os.path.dirname(progress.path)))
    minutes, seconds = divmod(int(progress.at), 60)
    name = on_one_line(_shorten(os.path.basename(progress.path)))
    return f"{name} at {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def _shorten(folder: str) -> str:
    return folder if len(folder) <= _FOLDER_WIDTH else "…" + folder[1 - _FOLDER_WIDTH :]

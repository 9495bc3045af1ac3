"""How `gare index` shows where it is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gare.library.report import IndexProgress

OnProgress = Callable[[IndexProgress], None]
_LINE_EVERY_S = 10.0
_FOLDER_WIDTH = 40


@contextmanager
def show_progress(console: Console) -> Iterator[OnProgress]:
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
            folder=escape(_shorten(os.path.dirname(progress.path))),
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
        minutes = (progress.total - progress.done) / rate / 60
        self._console.print(
            f"{progress.done:,} of {progress.total:,} files, {progress.failed:,} failed, {rate:.1f} files/s, "
            f"{minutes:.0f} min to go, in {_shorten(os.path.dirname(progress.path))}",
            markup=False,
        )


def _shorten(folder: str) -> str:
    return folder if len(folder) <= _FOLDER_WIDTH else "…" + folder[1 - _FOLDER_WIDTH :]

"""`gare clip`: cut moments out of video files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gare.cli.options import choose_device
from gare.errors import ClipError, GareError

if TYPE_CHECKING:
    from gare.data.boxed_cut import CutClip, OnCut
    from gare.library.editing.moments import Moment

_stderr = Console(stderr=True, highlight=False, soft_wrap=True)
_ITEM_ID = re.compile("[0-9a-f]{20}")
_EARLY_S = 0.1  # less is a frame, and not worth a word


def clip(
    what: Annotated[str, typer.Argument(help="A video file, the id of an item, or words to search for.")],
    start: Annotated[str | None, typer.Option(help="Where it begins: 75.5, 1:15.5 or 0:01:15.5.")] = None,
    end: Annotated[str | None, typer.Option(help="Where it ends, likewise.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Encode anew (H.264, AAC): the first and last frame are right.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A folder, or a new file such as clip.mp4; default: this folder.")
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(help="The library; default: $GARE_LIBRARY, or .gare here or in a folder above."),
    ] = None,
    top: Annotated[int, typer.Option("--top", "-n", min=1, max=500, help="Words: how many hits.")] = 1,
    where: Annotated[str | None, typer.Option(help="Words: a filter, such as 'folder:holidays'.")] = None,
    length: Annotated[
        float, typer.Option(min=0.1, help="Longest part of a hit, around its best second; an item too.")
    ] = 20.0,
    model: Annotated[str | None, typer.Option(help="Where the library's model is now, if it moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the clips as JSON.")] = False,
) -> None:
    """Cut moments out of videos, with all their sound. Nothing is ever overwritten.

    Without --exact nothing is encoded anew and nothing is lost: a clip begins at the keyframe before the
    start, and its real times are printed.

    Examples:

        gare clip film.mp4 --start 1:03 --end 1:15.5

        gare clip film.mp4 --start 63 --end 75.5 --exact --out scene.mp4

        gare clip "a dog catches a frisbee" --library ~/Videos/.gare --top 3 --out clips

        gare clip b2dfb3a0f077c5f81304 --exact --out clips
    """
    moments = _find_moments(what, start, end, library, top, where, length, model, device)
    if not moments:
        _stderr.print("nothing found", style="yellow")
        raise typer.Exit(1)
    if out is not None and _is_file_name(out) and len(moments) > 1:
        raise ClipError(f"{len(moments)} clips do not fit into one file; name a folder with --out")
    rows, num_failed = [], 0
    for moment in moments:
        try:
            with _showing(moment) as on_cut:
                made = _cut(moment, out or Path(), exact, on_cut)
        except GareError as error:
            if len(moments) == 1:
                raise
            num_failed += 1
            _stderr.print(f"not cut: {error}", style="yellow", markup=False)
            continue
        rows.append(_row(moment, made))
        if not as_json:
            typer.echo(_line(moment, made))
    if as_json:
        typer.echo(json.dumps(rows, ensure_ascii=False))
    if num_failed:
        raise typer.Exit(1)


def _find_moments(
    what: str,
    start: str | None,
    end: str | None,
    library: str | None,
    top: int,
    where: str | None,
    length: float,
    model: str | None,
    device: str,
) -> list[Moment]:
    """A file with two times, an item, or what words find."""
    from gare.library.editing.moments import Moment, read_clock
    from gare.library.library import Library, find_library

    times = None if start is None or end is None else (read_clock(start), read_clock(end))
    if Path(what).is_file() and not _ITEM_ID.fullmatch(what):
        if times is None:
            raise ClipError("of a file, say which part: add --start and --end")
        return [Moment(what, *times)]
    if (start is None) != (end is None):
        raise ClipError("add both --start and --end, or none of them")
    if times is not None and not _ITEM_ID.fullmatch(what):
        raise ClipError(f"there is no file '{what}'; --start and --end are for a file or an item")
    if not _ITEM_ID.fullmatch(what) and _names_a_file(what):
        raise ClipError(f"there is no file '{what}'; name one, the id of an item, or words to search for")
    with Library.open(
        library or find_library(), model=model, device=choose_device(device), create=False, read_only=True
    ) as opened:
        from gare.library.editing.library_moments import moment_of_item, moments_of_words

        if _ITEM_ID.fullmatch(what):
            return [moment_of_item(opened, what, times, length)]
        return moments_of_words(opened, what, top=top, where=where, length=length)


def _names_a_file(what: str) -> bool:
    """Whether this is the name of a video or a path, not words: a typing error must not cut another film."""
    from gare.data.containers import VIDEO_SUFFIXES

    return os.sep in what or (" " not in what and Path(what).suffix.lower() in VIDEO_SUFFIXES)


def _is_file_name(out: Path) -> bool:
    from gare.data.boxed_cut import CONTAINERS

    return out.suffix.lower() in CONTAINERS and not out.is_dir()


def _cut(moment: Moment, out: Path, exact: bool, on_cut: OnCut) -> CutClip:
    from gare.data.boxed_cut import cut_clip
    from gare.library.editing.clip_files import cut_moment

    moment.check_unchanged()
    if _is_file_name(out):
        return cut_clip(moment.path, out, moment.start, moment.end, exact=exact, on_cut=on_cut)
    return cut_moment(moment, out, exact=exact, on_cut=on_cut)


@contextmanager
def _showing(moment: Moment) -> Iterator[OnCut]:
    bar = Progress(
        TextColumn("cutting {task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        console=_stderr,
        transient=True,
        disable=not _stderr.is_terminal,
    )
    with bar:
        task = bar.add_task(moment.title, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _row(moment: Moment, made: CutClip) -> dict[str, Any]:
    return {
        "path": str(made.path),
        "source": moment.path,
        "id": moment.id,
        "asked": [moment.start, moment.end],
        "start": round(made.start, 6),
        "end": round(made.end, 6),
        "frames": made.num_frames,
        "bytes": made.num_bytes,
    }


def _line(moment: Moment, made: CutClip) -> str:
    from gare.library.editing.moments import write_clock
    from gare.library.index.scan import on_one_line

    early = moment.start - made.start
    why = f"  (begins {early:.2f} s before the start, at a keyframe)" if early > _EARLY_S else ""
    times = f"{write_clock(made.start)} to {write_clock(made.end)}"
    return f"{on_one_line(str(made.path))}  {times}{why}"

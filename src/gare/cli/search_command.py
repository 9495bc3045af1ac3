"""`gare search`: find videos by words, pictures or clips."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gare.cli.options import choose_device, read_lines
from gare.errors import QueryError

if TYPE_CHECKING:
    from gare.library.editing.list_formats import ListName
    from gare.library.library import Library
    from gare.library.search.search_hit import Certificate, SearchHit

_stderr = Console(stderr=True, highlight=False, soft_wrap=True)
_BARS = "▁▂▃▄▅▆▇█"
_NO_TERMINAL_WIDTH = 10_000  # in a pipe or a file a hit is a line, however long its path


def search(
    query: Annotated[str | None, typer.Argument(help='Words; also "dog - beach", "dog ^2 + snow".')] = None,
    image: Annotated[Path | None, typer.Option(help="Search with a picture.")] = None,
    video: Annotated[Path | None, typer.Option(help="Search with a clip.")] = None,
    like: Annotated[
        str | None, typer.Option(help="Search for what resembles this item.", metavar="ID")
    ] = None,
    captions: Annotated[
        Path | None,
        typer.Option(help="A text file: rank its lines for --video or --like, instead of videos."),
    ] = None,
    library: Annotated[
        str | None,
        typer.Option(help="The library; default: $GARE_LIBRARY, or .gare here or in a folder above."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Search the vectors of this model, if the library keeps them; or where its own is now."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", "-n", min=1, help="How many hits.")] = 10,
    where: Annotated[
        str | None, typer.Option(help="A filter: 'folder:holidays duration:>10 not tag:work'.")
    ] = None,
    min_score: Annotated[float | None, typer.Option(help="Leave out hits below this score.")] = None,
    candidates: Annotated[
        int | None, typer.Option(min=1, help="Items scored exactly; default: what 'gare audit' recommends.")
    ] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Score every item exactly.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="The true best, with a proof: as --exhaustive, much faster.")
    ] = False,
    by: Annotated[
        Literal["file", "moment"],
        typer.Option(help="file: a file once, with its best moment; moment: all its moments."),
    ] = "file",
    unique: Annotated[bool, typer.Option("--unique", help="Fold near-copies into one hit.")] = False,
    paths: Annotated[bool, typer.Option("--paths", help="Print the files alone, one a line.")] = False,
    zero: Annotated[
        bool, typer.Option("--print0", "-0", help="As --paths, with NUL after each path.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the hits as JSON.")] = False,
    list_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="A list for players or editors: m3u8, mpv, edl, fcpxml, otio, csv, chapters, webvtt.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write that list into this new file; its ending may say the format.")
    ] = None,
    length: Annotated[
        float, typer.Option(min=0.1, help="Longest part of a hit in that list, around its best second.")
    ] = 20.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Search a library. A hit has a score, its file, the second that matches best and the moment around it.

    Examples:

        gare search "a dog catches a frisbee"

        gare search "dog - beach" --where "duration:<60" --top 5

        gare search --image photo.jpg --unique

        gare search "a red car at night" --exact

        gare search "birthday cake" --paths --print0 | xargs -0 mpv

        gare search --video clip.mp4 --captions captions.txt

        gare search "a goal" --by moment --top 20 --out goals.edl
    """
    from gare.library.library import Library, find_library
    from gare.library.search.resident_search import search_with_files
    from gare.library.search.search_request import SearchRequest

    listed = None
    if list_format is not None or out is not None:
        listed = _check_list(list_format, out, is_other=captions is not None or paths or zero or as_json)
    place = library or find_library()
    with Library.open(
        place, model=model, device=choose_device(device), create=False, read_only=True
    ) as opened:
        if captions is not None:
            if query is not None:
                raise QueryError("captions are ranked for a video, not for words; leave out the query")
            _rank_captions(opened, captions, video, like, top, as_json)
            return
        request = SearchRequest(
            words=query,
            image=image,
            video=video,
            like=like,
            top=top,
            where=where,
            min_score=min_score,
            candidates=candidates,
            exhaustive=exhaustive,
            exact=exact,
            by=by,
            unique=unique,
        )
        opened.search_exactly_with(search_with_files)  # a table on a GPU would be filled for one search
        with _preparing(opened, exact):
            hits = opened.searcher.search(request)
        for notice in opened.searcher.notices(request):
            _stderr.print(notice, style="yellow", markup=False, soft_wrap=True)
        if listed is not None and hits:
            _write_list(hits, listed, out, length, query)
        elif as_json:
            typer.echo(json.dumps([dataclasses.asdict(hit) for hit in hits], ensure_ascii=False))
        elif paths or zero:
            files = dict.fromkeys(hit.path for hit in hits)  # several segments of a file are one line
            # Names as they are: an echo would take away what looks like a colour, and a locale the rest.
            sys.stdout.buffer.write("".join(path + ("\0" if zero else "\n") for path in files).encode())
            sys.stdout.buffer.flush()
        elif hits:
            Console(width=None if sys.stdout.isatty() else _NO_TERMINAL_WIDTH).print(_table(hits))
        if hits.certificate is not None:
            _stderr.print(_proof(hits.certificate), style="dim", markup=False)
        if not hits:
            _explain_nothing(opened, where, min_score)
            raise typer.Exit(1)


def _check_list(name: str | None, out: Path | None, *, is_other: bool) -> ListName:
    """The format of the list, before anything is searched."""
    from gare.library.editing.list_formats import choose_format

    if is_other:
        raise QueryError(
            "--format and --out write a list; leave out --json, --paths, --print0 and --captions"
        )
    return choose_format(name, out)


def _write_list(
    hits: list[SearchHit], name: ListName, out: Path | None, length: float, query: str | None
) -> None:
    from gare.library.editing.list_formats import save_list, write_list
    from gare.library.editing.moments import moments_of

    written = write_list(moments_of(hits, length), name, query or "gare")
    for notice in written.notices:
        _stderr.print(notice, style="yellow", markup=False, soft_wrap=True)
    if out is None:
        sys.stdout.buffer.write(written.text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
        return
    save_list(written.text, out)
    typer.echo(f"{out}: {len(hits)} hits")


@contextmanager
def _preparing(library: Library, exact: bool) -> Iterator[None]:
    """Show how far the bounds of new items are: the first exact search of a library makes them."""
    if not exact:
        yield
        return
    bar = Progress(
        TextColumn("preparing bounds, once"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=_stderr,
        transient=True,
        disable=not _stderr.is_terminal,
    )
    with bar:
        task = bar.add_task("", visible=False)
        library.searcher.proven.on_progress = lambda done, total: bar.update(
            task, completed=done, total=total, visible=True
        )
        yield


def _proof(proof: Certificate) -> str:
    """The proof in a line.

    >>> from gare.library.search.search_hit import Certificate
    >>> _proof(Certificate(100_000, 214, 0.46, 0.458))
    'nothing better is there: 214 of 100,000 items were scored, and no other can reach 0.460 (at most 0.458)'
    >>> _proof(Certificate(3, 3))
    'nothing better is there: all 3 items were scored'
    """
    if proof.next_bound is None:
        return f"nothing better is there: all {proof.num_items:,} items were scored"
    return (
        f"nothing better is there: {proof.num_scored:,} of {proof.num_items:,} items were scored, and no "
        f"other can reach {proof.last_score:.3f} (at most {proof.next_bound:.3f})"
    )


def _table(hits: list[SearchHit]) -> Table:
    from gare.library.index.scan import on_one_line

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("score", "at", "moment", "frames", "id"):
        table.add_column(name, justify="right" if name in ("score", "at") else "left", no_wrap=True)
    table.add_column("file", overflow="fold")
    for hit in hits:
        # As a plain string, its [brackets] would be markup.
        file = Text(on_one_line(hit.path) + _besides(hit))
        moment = f"{_clock(hit.start)}-{_clock(hit.end)}"
        table.add_row(f"{hit.score:.3f}", _clock(hit.moment), moment, _strip(hit.frame_scores), hit.id, file)
    return table


def _besides(hit: SearchHit) -> str:
    """What a hit stands for besides its moment."""
    moments = f"{len(hit.others)} more moment{'s' * (len(hit.others) != 1)}" if hit.others else ""
    copies = f"+{len(hit.duplicates)} alike" if hit.duplicates else ""
    return "".join(f"  ({words})" for words in (moments, copies) if words)


def _strip(scores: tuple[float, ...]) -> str:
    """Which frames matched, as a row of bars."""
    low, high = min(scores), max(scores)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((score - low) * scale)] if scale else _BARS[-1] for score in scores)


def _clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> _clock(3.2), _clock(75), _clock(3723)
    ('0:03', '1:15', '1:02:03')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _rank_captions(
    library: Library, captions: Path, video: Path | None, like: str | None, top: int, as_json: bool
) -> None:
    if (video is None) == (like is None):
        raise QueryError("captions are ranked for one video: add --video FILE or --like ID")
    ranked = library.describe(read_lines(captions), video=video, like=like, top=top)
    if as_json:
        rows = [{"caption": caption, "score": score} for caption, score in ranked]
        typer.echo(json.dumps(rows, ensure_ascii=False))
        return
    for caption, score in ranked:
        typer.echo(f"{score:.3f}  {caption}")


def _explain_nothing(library: Library, where: str | None, min_score: float | None) -> None:
    if not len(library):
        reason = "the library is empty; index a folder first: gare index FOLDER"
    elif where is not None and not any(True for _ in library.items(where)):
        reason = "no item passes the filter"
    elif min_score is not None:
        reason = f"no hit reaches a score of {min_score}"
    else:
        reason = "nothing found"
    _stderr.print(reason, style="yellow", markup=False)

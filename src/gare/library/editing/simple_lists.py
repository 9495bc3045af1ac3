"""Moments as playlists, a table and chapters: times in seconds, no file is opened."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from gare.library.editing.moments import Moment, write_clock
from gare.library.index.scan import on_one_line

COLUMNS = ("rank", "score", "path", "start", "end", "best", "start_clock", "end_clock", "id")
"""The columns of the table."""
_FFMETADATA_SIGNS = re.compile(r"[=;#\\\n]")


def write_m3u8(moments: Sequence[Moment], name: str) -> str:
    """A playlist that VLC plays part by part. Other players know no parts and play whole files.

    Files are addresses, in which no name can break a line.
    """
    lines = ["#EXTM3U", f"#PLAYLIST:{on_one_line(name)}"]
    for moment in moments:
        lines += [
            f"#EXTINF:{moment.end - moment.start:.3f},{moment.title}",
            f"#EXTVLCOPT:start-time={moment.start:.3f}",
            f"#EXTVLCOPT:stop-time={moment.end:.3f}",
            Path(moment.path).as_uri(),
        ]
    return "\n".join(lines) + "\n"


def write_mpv_edl(moments: Sequence[Moment], name: str) -> str:
    """A list in mpv's own format: it plays the parts one after another, each as a chapter."""
    lines = ["# mpv EDL v0"]
    for moment in moments:
        length = moment.end - moment.start
        lines.append(
            f"{_counted(moment.path)},{moment.start:.3f},{length:.3f},title={_counted(moment.title)}"
        )
    return "\n".join(lines) + "\n"


def _counted(text: str) -> str:
    """Text behind its number of bytes: no sign in it means anything.

    >>> _counted("a,b;é")
    '%6%a,b;é'
    """
    return f"%{len(text.encode('utf-8', 'surrogateescape'))}%{text}"


def write_table(moments: Sequence[Moment], name: str) -> str:
    """A table for spreadsheets and scripts (CSV), with a header."""
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerow(COLUMNS)
    for rank, moment in enumerate(moments, 1):
        score = "" if moment.score is None else f"{moment.score:.4f}"
        best = "" if moment.best is None else f"{moment.best:.3f}"
        clocks = (write_clock(moment.start), write_clock(moment.end))
        row = (rank, score, moment.path, f"{moment.start:.3f}", f"{moment.end:.3f}", best, *clocks, moment.id)
        table.writerow(row)
    return buffer.getvalue()


def chapters_of(moments: Sequence[Moment]) -> list[tuple[float, float, Moment]]:
    """Start and end of each chapter, in seconds.

    Moments of one file are chapters of that file, by time. Those of several are chapters of a film in which
    they follow each other, as mpv and editors play them.
    """
    if len({moment.path for moment in moments}) == 1:
        return sorted(
            ((moment.start, moment.end, moment) for moment in moments), key=lambda chapter: chapter[0]
        )
    chapters, at = [], 0.0
    for moment in moments:
        chapters.append((at, at + moment.end - moment.start, moment))
        at = chapters[-1][1]
    return chapters


def write_ffmetadata(moments: Sequence[Moment], name: str) -> str:
    """Chapters that FFmpeg puts into a file (`ffmpeg -i film.mp4 -i chapters.txt -map_chapters 1 …`)."""
    lines = [";FFMETADATA1", f"title={_escaped(on_one_line(name))}"]
    for start, end, moment in chapters_of(moments):
        times = [f"START={round(1000 * start)}", f"END={round(1000 * end)}"]
        lines += ["[CHAPTER]", "TIMEBASE=1/1000", *times, f"title={_escaped(moment.title)}"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return _FFMETADATA_SIGNS.sub(lambda found: "\\" + found[0], text)


def write_webvtt(moments: Sequence[Moment], name: str) -> str:
    """Chapters that browsers show (`<track kind="chapters">`)."""
    cues = [
        f"{number}\n{_vtt_clock(start)} --> {_vtt_clock(end)}\n{_vtt_text(moment.title)}\n"
        for number, (start, end, moment) in enumerate(chapters_of(moments), 1)
    ]
    return "\n".join(["WEBVTT\n", *cues])


def _vtt_clock(seconds: float) -> str:
    return write_clock(seconds).rjust(12, "0")


def _vtt_text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

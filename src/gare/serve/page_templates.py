"""Makes pages from templates, with numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from gare import __version__
from gare.serve.api_schemas import Hit, Moment
from gare.serve.library_contents import Contents

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
"""Scripts, styles and pictures of the pages."""
_LEVELS = 9


def render(
    request: Request,
    name: str,
    context: Mapping[str, Any],
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """Render a template with what every page needs."""
    service = request.app.state.service
    html = (
        _templates()
        .get_template(name)
        .render(
            **context,
            path=request.url.path,
            version=__version__,
            asset=asset,
            has_token=bool(service.options.token),
        )
    )
    return HTMLResponse(html, status, headers=dict(headers or {}))


@lru_cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        clock=clock, count=count, day=day, extent=extent, ordinal=ordinal, size=size, tail=tail
    )
    environment.globals.update(address=address)
    return environment


def asset(name: str) -> str:
    """The address of a file of ours. Scripts import each other by it, so it is always the same."""
    return f"/static/{name}"


def address(path: str, parameters: Sequence[tuple[str, str]]) -> str:
    """A path with its parameters; empty ones are left out.

    >>> address("/", [("q", "a dog"), ("folder", "")])
    '/?q=a+dog'
    """
    given = [(name, value) for name, value in parameters if value]
    return f"{path}?{urlencode(given)}" if given else path


def clock(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> clock(5.4), clock(65), clock(3723)
    ('0:05', '1:05', '1:02:03')
    """
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def count(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it needs one.

    >>> count(1, "video"), count(1204, "video")
    ('1 video', '1,204 videos')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ordinal(number: int) -> str:
    """A place in a ranking.

    >>> ordinal(1), ordinal(12), ordinal(23)
    ('1st', '12th', '23rd')
    """
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def size(num_bytes: int) -> str:
    """A size as people read it.

    >>> size(33_400_000), size(1200)
    ('33 MB', '1 kB')
    """
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.0f} kB"


def day(moment: str) -> str:
    """The day of an ISO date and time."""
    return moment[:10]


def tail(path: str, parts: int = 2) -> str:
    """The end of a folder's path, which tells most.

    >>> tail("/home/me/Videos/holidays/2024"), tail("/a")
    ('holidays/2024', '/a')
    """
    names = path.strip("/").split("/")
    return "/".join(names[-parts:]) if len(names) > parts else path


def extent(contents: Contents) -> str:
    """How much there is to search.

    >>> extent(Contents(47, 11_520)), extent(Contents(1, 42)), extent(Contents(2, 170))
    ('47 videos, 3 h 12 min', '1 video, 42 s', '2 videos, 3 min')
    """
    minutes = round(contents.seconds / 60)
    if contents.seconds < 60:
        length = f"{contents.seconds:.0f} s"
    else:
        length = f"{minutes // 60:,} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    return f"{count(contents.num_videos, 'video')}, {length}"


def moments_in_time(hit: Hit) -> list[Moment]:
    """All moments of a hit's file, in the order of time."""
    own = Moment(
        id=hit.id, score=hit.score, start=hit.start, end=hit.end, moment=hit.moment, picture=hit.picture
    )
    return sorted([own, *hit.others], key=lambda moment: moment.start)


# --- how well something matches -----------------------------------------------------------------------------


def heat_levels(hits: Sequence[Hit]) -> dict[str, list[int]]:
    """How well each frame matches, 0 to 9, on one scale for all hits; half of the frames are at 0."""
    scores = sorted(frame.score for hit in hits for frame in hit.frames)
    if not scores:
        return {}
    low, high = scores[len(scores) // 2], scores[-1]
    return {hit.id: [heat_level(frame.score, low, high) for frame in hit.frames] for hit in hits}


def heat_level(score: float, low: float, high: float) -> int:
    """How well something matches, 0 to 9.

    >>> heat_level(0.1, 0.2, 0.4), heat_level(0.3, 0.2, 0.4), heat_level(0.4, 0.2, 0.4)
    (0, 4, 9)
    """
    return round(_LEVELS * min(1.0, max(0.0, (score - low) / max(high - low, 1e-6))))


def level_runs(levels: Sequence[int]) -> list[tuple[int, int, int]]:
    """First place, number of places and level of each run of equal levels.

    >>> level_runs([0, 0, 3, 9, 9])
    [(0, 2, 0), (2, 1, 3), (3, 2, 9)]
    """
    runs: list[tuple[int, int, int]] = []
    for level, places in groupby(enumerate(levels), key=lambda pair: pair[1]):
        first, *rest = (place for place, _ in places)
        runs.append((first, 1 + len(rest), level))
    return runs

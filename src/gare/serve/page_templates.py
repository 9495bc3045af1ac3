"""Makes pages from templates, with numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from gare import __version__
from gare.serve.api_schemas import Hit

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
    environment.filters.update(clock=clock, count=count, day=day, ordinal=ordinal, size=size, tail=tail)
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


def heat_levels(hits: Sequence[Hit], *, cold: float = 0.5) -> dict[str, list[int]]:
    """How well each frame matches, 0 to 9, on one scale for all hits; `cold` is the share of frames at 0."""
    scores = sorted(frame.score for hit in hits for frame in hit.frames)
    if not scores:
        return {}
    low, high = scores[int(cold * len(scores))], scores[-1]
    spread = max(high - low, 1e-6)
    return {
        hit.id: [round(_LEVELS * min(1.0, max(0.0, (frame.score - low) / spread))) for frame in hit.frames]
        for hit in hits
    }

"""What an assistant may do with a library over MCP: search it and read about items. It can change nothing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from gare import __version__
from gare.errors import GareError
from gare.library.library import Library
from gare.library.search.search_hit import SearchHit
from gare.library.search.search_request import SearchRequest

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_ABOUT = """A library of videos that can be searched by what they show. Search first; hits have an id, a path
and the moment (in seconds) where the video matches best."""
_MOST = 50
_in_turn = threading.Lock()


def make_tool_server(library: Library) -> MCPServer:
    """The MCP server whose tools search this library."""
    server = MCPServer("gare", instructions=_ABOUT, version=__version__)

    def search(request: SearchRequest) -> list[dict[str, Any]]:
        return [_describe(hit) for hit in library.find(request)]

    @server.tool()
    @_explained
    def search_videos(
        query: Annotated[str, Field(description='What the video shows: "a dog", "dog ^2 + snow -people".')],
        top: Annotated[int, Field(ge=1, le=_MOST, description="How many hits.")] = 5,
        where: Annotated[
            str | None, Field(description='A filter: "folder:holidays duration:>10 date:2024 tag:family".')
        ] = None,
        exact: Annotated[
            bool, Field(description="The true best hits, proven; slower the first time.")
        ] = False,
    ) -> list[dict[str, Any]]:
        """Find videos by words. Hits come best first, with the moment where each matches best."""
        return search(SearchRequest(words=query, top=top, where=where or None, exact=exact))

    @server.tool()
    @_explained
    def find_similar_videos(
        item_id: Annotated[str, Field(description="The id of a hit.")],
        top: Annotated[int, Field(ge=1, le=_MOST, description="How many hits.")] = 5,
    ) -> list[dict[str, Any]]:
        """Find videos that look like one of the library."""
        return search(SearchRequest(like=item_id, top=top))

    @server.tool()
    @_explained
    def get_video(item_id: Annotated[str, Field(description="The id of a hit.")]) -> dict[str, Any]:
        """Everything known of one item: path, length, size, dates, tags."""
        row = library.get(item_id)
        if row is None:
            raise ToolError(f"there is no item '{item_id}'; search for ids first")
        return {
            name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in row.items()
        }

    @server.tool()
    @_explained
    def describe_library() -> dict[str, Any]:
        """How many videos there are, in which folders, and which model made the library."""
        return {"num_items": len(library), "folders": library.folders, "model": library.store.stamp.name}

    return server


def _explained(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """A mistake of the assistant is told to it in words it can use. One call at a time."""

    @functools.wraps(function)
    def wrapped(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            with _in_turn:  # calls come in threads of their own, and tokenisers are not made for two
                return function(*arguments, **named)
        except GareError as error:
            raise ToolError(str(error)) from None

    return wrapped


def _describe(hit: SearchHit) -> dict[str, Any]:
    return {
        "id": hit.id,
        "path": hit.path,
        "score": round(hit.score, 4),
        "moment": round(hit.moment, 2),
        "start": round(hit.start, 2),
        "end": round(hit.end, 2),
        "modified": hit.modified,
        "tags": list(hit.tags),
    }

"""What an assistant may do with a library over MCP: search it, read about items, and cut clips where it may.

It can change nothing. Clips go into the one folder that `gare mcp --clips` names; without it, there are none.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from gare import __version__
from gare.errors import GareError
from gare.library.editing.clip_files import cut_moment
from gare.library.editing.library_moments import moment_of_item
from gare.library.editing.list_formats import ListName, write_list
from gare.library.editing.moments import LENGTH_S, moments_of
from gare.library.library import Library
from gare.library.search.search_hit import SearchHit
from gare.library.search.search_request import By, SearchRequest
from gare.serve.library_contents import ContentsList

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_ABOUT = """A library of videos that can be searched by what they show. Search first; hits have an id, a path
and the moment (in seconds) where the video matches best."""
_MOST = 50
_LONGEST_S = 600.0
_in_turn = threading.Lock()


def make_tool_server(library: Library, clips: Path | None = None) -> MCPServer:
    """The MCP server whose tools search this library, and cut clips into a folder if there is one."""
    server = MCPServer("gare", instructions=_ABOUT, version=__version__)

    def search(request: SearchRequest) -> list[dict[str, Any]]:
        hits = library.find(request)
        proof = {"certificate": asdict(hits.certificate)} if request.exact and hits.certificate else {}
        return [_describe(hit) | proof for hit in hits]

    @server.tool()
    @_explained
    def search_videos(
        query: Annotated[str, Field(description='What the video shows: "a dog", "dog ^2 + snow -people".')],
        top: Annotated[int, Field(ge=1, le=_MOST, description="How many hits.")] = 5,
        where: Annotated[
            str | None, Field(description='A filter: "folder:holidays duration:>10 date:2024 tag:family".')
        ] = None,
        exact: Annotated[
            bool, Field(description="The true best hits, each with the proof; slower the first time.")
        ] = False,
        by: Annotated[
            By, Field(description="A hit is a file with its best moment, or every moment is one.")
        ] = "file",
    ) -> list[dict[str, Any]]:
        """Find videos by words. Hits come best first, each with its best moment (where it begins and ends,
        and its best second) and the other moments of the file."""
        return search(SearchRequest(words=query, top=top, where=where or None, exact=exact, by=by))

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
        contents = ContentsList(library).get(len(library))
        return {
            "num_videos": contents.num_videos,
            "hours": round(contents.seconds / 3600, 2),
            "num_items": len(library),
            "folders": library.folders,
            "model": library.store.stamp.name,
        }

    @server.tool()
    @_explained
    def export_search(
        query: Annotated[str, Field(description="What the videos show, as in search_videos.")],
        format: Annotated[ListName, Field(description="Playlist, cut list, table or chapters.")],
        top: Annotated[int, Field(ge=1, le=_MOST, description="How many hits.")] = 5,
        where: Annotated[str | None, Field(description="A filter, as in search_videos.")] = None,
        by: Annotated[By, Field(description="One moment of each file, or all moments.")] = "file",
        length: Annotated[
            float, Field(gt=0, le=_LONGEST_S, description="Longest part of a hit, in seconds.")
        ] = LENGTH_S,
    ) -> str:
        """The moments that were found as a text for a player or an editor; save it as a file."""
        hits = library.find(SearchRequest(words=query, top=top, where=where or None, by=by))
        return write_list(moments_of(hits, length), format, query).text

    if clips is not None:
        _add_clips(server, library, clips)
    return server


def _add_clips(server: MCPServer, library: Library, folder: Path) -> None:
    @server.tool()
    @_explained
    def cut_clip(
        item_id: Annotated[str, Field(description="The id of a hit.")],
        start: Annotated[float, Field(ge=0, description="Seconds into the file.")],
        end: Annotated[float, Field(gt=0, description="Seconds into the file.")],
        exact: Annotated[
            bool, Field(description="Encode anew, so that the first and last frame are right.")
        ] = False,
    ) -> dict[str, Any]:
        """Cut a part of a video out, with its sound, into the folder of clips. Nothing is overwritten."""
        if end - start > _LONGEST_S:
            raise ToolError(f"a clip has {_LONGEST_S:g} seconds at most")
        moment = moment_of_item(library, item_id, (start, end))
        moment.check_unchanged()
        made = cut_moment(moment, folder, exact=exact)
        return {"path": str(made.path), "start": made.start, "end": made.end, "bytes": made.num_bytes}


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
        "others": [
            {
                "id": other.id,
                "score": round(other.score, 4),
                "moment": round(other.moment, 2),
                "start": round(other.start, 2),
                "end": round(other.end, 2),
            }
            for other in hit.others
        ],
        "modified": hit.modified,
        "tags": list(hit.tags),
    }

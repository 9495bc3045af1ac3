"""`gare mcp` as an assistant starts it: a process, JSON-RPC over its pipes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from gare.library.library import Library
from serve_library import COLOURS
from serve_process import GARE


def test_an_assistant_searches_and_looks_up(served):
    answers = asyncio.run(_talk(served.library))
    with Library.open(served.library, read_only=True) as library:
        expected = library.search("a red ball", top=3)
    assert answers["tools"] == {"search_videos", "find_similar_videos", "get_video", "describe_library"}
    hits = answers["hits"]
    assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
    assert hits[0]["moment"] == expected[0].moment
    assert answers["item"]["path"] == expected[0].path
    assert answers["about"]["num_items"] == len(COLOURS)
    assert "no item" in answers["unknown"]
    assert "filter" in answers["bad filter"]


async def _talk(library: Path) -> dict:
    arguments = ["mcp", "--library", str(library)]
    parameters = StdioServerParameters(command=GARE, args=arguments, env=dict(os.environ))
    async with stdio_client(parameters) as (reading, writing), ClientSession(reading, writing) as session:
        await session.initialize()
        tools = await session.list_tools()

        async def call(name: str, **arguments: object) -> str:
            result = await session.call_tool(name, arguments)
            return "\n".join(part.text for part in result.content)

        async def call_all(name: str, **arguments: object) -> list:
            result = await session.call_tool(name, arguments)
            return [json.loads(part.text) for part in result.content]

        hits = await call_all("search_videos", query="a red ball", top=3)
        hits = hits[0] if isinstance(hits[0], list) else hits
        return {
            "tools": {tool.name for tool in tools.tools},
            "hits": hits,
            "item": json.loads(await call("get_video", item_id=hits[0]["id"])),
            "about": json.loads(await call("describe_library")),
            "unknown": await call("get_video", item_id="nothing"),
            "bad filter": await call("search_videos", query="x", where="colour:red"),
        }

"""`gare mcp` as an assistant starts it: a process, JSON-RPC over its pipes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from gare.interrupts import INTERRUPTED
from gare.library.library import Library
from serve_library import COLOURS
from serve_process import GARE
from servers import HANG_S

TOOLS = {"search_videos", "find_similar_videos", "get_video", "describe_library", "export_search"}


def test_an_assistant_searches_and_looks_up(served):
    answers = asyncio.run(_talk(served.library))
    with Library.open(served.library, read_only=True) as library:
        expected = library.search("a red ball", top=3)
        proven = library.search("a red ball", top=3, exact=True)
    assert [hit["id"] for hit in answers["proven"]] == [hit.id for hit in proven]
    assert [hit["score"] for hit in answers["proven"]] == [round(hit.score, 4) for hit in proven]
    assert [hit["certificate"] for hit in answers["proven"]] == 3 * [asdict(proven.certificate)]
    assert all("certificate" not in hit for hit in answers["hits"])
    assert answers["tools"] == TOOLS
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
        proven = await call_all("search_videos", query="a red ball", top=3, exact=True)
        return {
            "tools": {tool.name for tool in tools.tools},
            "hits": hits,
            "proven": proven[0] if isinstance(proven[0], list) else proven,
            "item": json.loads(await call("get_video", item_id=hits[0]["id"])),
            "about": json.loads(await call("describe_library")),
            "unknown": await call("get_video", item_id="nothing"),
            "bad filter": await call("search_videos", query="x", where="colour:red"),
        }


def test_an_assistant_cuts_clips_into_one_folder_alone(served, tmp_path):
    answers = asyncio.run(_cut(served.library, tmp_path / "clips"))
    assert answers["tools"] == TOOLS | {"cut_clip"}
    made = answers["clip"]
    assert Path(made["path"]).parent == tmp_path / "clips"
    assert made["bytes"] == Path(made["path"]).stat().st_size
    assert made["start"] <= 0.5 < 1.5 <= made["end"]
    assert answers["table"].splitlines()[0].startswith("rank,score,path,start,end")
    assert len(answers["table"].splitlines()) == 3
    assert "no item" in answers["unknown"]
    assert "600 seconds at most" in answers["too long"]
    assert "later end" in answers["backwards"]
    assert len(list((tmp_path / "clips").iterdir())) == 1


async def _cut(library: Path, folder: Path) -> dict:
    arguments = ["mcp", "--library", str(library), "--clips", str(folder)]
    parameters = StdioServerParameters(command=GARE, args=arguments, env=dict(os.environ))
    async with stdio_client(parameters) as (reading, writing), ClientSession(reading, writing) as session:
        await session.initialize()

        async def call(name: str, **arguments: object) -> str:
            result = await session.call_tool(name, arguments)
            return "\n".join(part.text for part in result.content)

        tools = await session.list_tools()
        table = await call("export_search", query="a red ball", format="csv", top=2)
        item = table.splitlines()[1].rpartition(",")[2]
        return {
            "tools": {tool.name for tool in tools.tools},
            "table": table,
            "clip": json.loads(await call("cut_clip", item_id=item, start=0.5, end=1.5)),
            "unknown": await call("cut_clip", item_id="nothing", start=0, end=1),
            "too long": await call("cut_clip", item_id=item, start=0, end=3600),
            "backwards": await call("cut_clip", item_id=item, start=2, end=1),
        }


def test_ctrl_c_ends_it_while_it_waits_for_the_next_line(served):
    hello = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "me", "version": "1"},
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gare", "mcp", "--library", str(served.library)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        process.stdin.write(
            json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}) + "\n"
        )
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == INTERRUPTED  # its input is still open
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()

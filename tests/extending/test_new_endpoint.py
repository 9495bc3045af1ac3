"""Endpoints of one's own, written here alone and in docs/how-to/add-an-endpoint.md.

They are included into the app and treated like any other.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI, Query
from pydantic import BaseModel

from gare.library.library import Library
from gare.library.search.search_request import SearchRequest
from gare.serve.app import create_app
from gare.serve.problems import Problem
from gare.serve.serve_options import ServeOptions
from gare.serve.service import SharedLibrary, SharedService
from serve_library import COLOURS, Served, make_served
from servers import free_port
from strangers import blocks

PAGE = "add-an-endpoint.md"

TOKEN = "a-token-of-sixteen-or-more"
KNOWN = {"authorization": f"Bearer {TOKEN}"}

# --- the extension ------------------------------------------------------------------------------------------

router = APIRouter(prefix="/api/v1/extra", tags=["extra"])


class LongItem(BaseModel):
    id: str
    seconds: float


class Pair(BaseModel):
    first: str
    second: str


@router.get("/longest")
def longest(library: SharedLibrary, top: Annotated[int, Query(ge=1, le=10)] = 3) -> list[LongItem]:
    """The longest items: what the library knows, without the model."""
    items = [LongItem(id=row["id"], seconds=row["end"] - row["start"]) for row in library.items()]
    return sorted(items, key=lambda item: -item.seconds)[:top]


@router.post("/both")
async def in_both(pair: Pair, service: SharedService) -> list[str]:
    """Items among the hits of two queries: searches go into the batches of everyone's."""
    requests = [SearchRequest(words=words, top=5) for words in (pair.first, pair.second)]
    first, second = await asyncio.gather(*map(service.engine.search, requests))
    common = {hit.id for hit in second}
    return [hit.id for hit in first if hit.id in common]


@router.get("/closed")
async def closed() -> None:
    raise Problem(409, "closed_today", "come back tomorrow")


# --- its tests ----------------------------------------------------------------------------------------------


@dataclass
class Answer:
    status: int
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


Ask = Callable[..., Coroutine[Any, Any, Answer]]


@asynccontextmanager
async def started(app: FastAPI) -> AsyncIterator[Ask]:
    """The app as a server runs it, without a socket."""

    async def ask(method: str, path: str, body: bytes = b"", headers: dict[str, str] = KNOWN) -> Answer:
        path, _, query = path.partition("?")
        sent: list[dict[str, Any]] = []
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not inbox:
                await asyncio.Event().wait()  # whoever asks stays: to leave would end the request
            return inbox.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        given = {"host": "localhost", "content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
            "scheme": "http",
        }
        await app(scope, receive, send)
        return Answer(sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]))

    async with app.router.lifespan_context(app):
        yield ask


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"))


def run(served: Served, talk: Callable[[Ask, Library], Coroutine[Any, Any, None]], **options: Any) -> None:
    with Library.open(served.library, read_only=True) as library:
        app = create_app(library, ServeOptions(token=TOKEN, **options))
        app.include_router(router)

        async def main() -> None:
            async with started(app) as ask:
                await talk(ask, library)

        asyncio.run(main())


def test_the_page_shows_this_code_and_its_lines_run(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, use, program = blocks(PAGE, "python")
    for part in (LongItem, Pair, longest, in_both, closed):
        assert inspect.getsource(part) in own
    monkeypatch.chdir(served.library.parent)
    names = {**globals(), "token": TOKEN}
    exec(compile(use, PAGE, "exec"), names)
    names["library"].close()
    assert "/api/v1/extra/longest" in names["app"].openapi()["paths"]
    (tmp_path / "my_routes.py").write_text(own)
    (tmp_path / "serve_mine.py").write_text(program)
    check_program([str(tmp_path / "serve_mine.py"), str(served.library)])


def check_program(words: list[str]) -> None:
    """The program of the page, asked what the page asks it."""
    port = str(free_port())
    with subprocess.Popen([sys.executable, *words, port], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{address}/api/v1/extra/longest?top=2") as answer:
                assert [item["seconds"] for item in json.load(answer)] == [2.0 * len(COLOURS), 18.0]
        finally:
            process.terminate()


def test_it_has_the_library_and_searches_in_batches(served: Served) -> None:
    async def talk(ask: Ask, library: Library) -> None:
        found = (await ask("GET", "/api/v1/extra/longest?top=2")).json
        assert [item["seconds"] for item in found] == [2.0 * len(COLOURS), 2.0 * len(COLOURS) - 2]
        body = {"first": "a red ball", "second": "red ^2 + pink"}
        answer = await ask("POST", "/api/v1/extra/both", json.dumps(body).encode())
        second = {hit.id for hit in library.search(body["second"], top=5)}
        assert answer.json == [hit.id for hit in library.search(body["first"], top=5) if hit.id in second]
        schema = (await ask("GET", "/api/v1/openapi.json")).json
        assert {"/api/v1/extra/longest", "/api/v1/extra/both"} <= schema["paths"].keys()
        metrics = (await ask("GET", "/metrics")).content.decode()
        assert 'route="/api/v1/extra/longest",status="200"' in metrics

    run(served, talk)


def test_it_asks_for_the_token_and_keeps_to_the_limits(served: Served) -> None:
    async def talk(ask: Ask, library: Library) -> None:
        refused = await ask("GET", "/api/v1/extra/longest", headers={})
        assert (refused.status, refused.code) == (401, "token_needed")
        foreign = await ask(
            "POST", "/api/v1/extra/both", b"{}", {**KNOWN, "origin": "https://elsewhere.example"}
        )
        assert (foreign.status, foreign.code) == (403, "foreign_origin")
        large = await ask("POST", "/api/v1/extra/both", b"x" * 5000)
        assert (large.status, large.code) == (413, "too_large")

    run(served, talk, body_bytes=4096)


def test_its_errors_have_the_shape_of_all_errors(served: Served) -> None:
    async def talk(ask: Ask, library: Library) -> None:
        assert (await ask("GET", "/api/v1/extra/longest?top=0")).code == "invalid_request"
        assert (await ask("GET", "/api/v1/extra/closed")).code == "closed_today"
        empty = await ask("POST", "/api/v1/extra/both", b'{"first": " ", "second": "red"}')
        assert (empty.status, empty.code) == (422, "bad_query")

    run(served, talk)

"""What people search for is in no log, whatever they ask and however it fails."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from serve_library import Served
from serve_process import PATIENT, ServeProcess
from servers import HANG_S

WORD = "Zwetschgenmus"
"""What somebody searches for: as words, in filters, as a file name, in an address that is not there."""
FILTERS = (f"tag:{WORD}", f"name:*{WORD}*", f"folder:{WORD}", f"id:{WORD}", f"duration:{WORD}", f"{WORD}:x",
           f'tag:"{WORD}', "not (" * 49 + f"tag:{WORD}" + ")" * 49,
           f"(tag:{WORD} or (tag:b " * 12 + "tag:c" + "))" * 12, f"date:{WORD}", f"tag:\0{WORD}")  # fmt: skip


def ask_everything(server: ServeProcess) -> set[int]:
    """The word in every text that every route takes; the statuses that came back."""
    described = server.get("/api/v1/openapi.json").json()
    statuses = {200 if server.get(path).status == 200 else 0 for path in ("/", "/library", "/settings")}
    paths = [*described["paths"], "/", "/results", "/watch/{item_id}", "/watch/{item_id}/part", "/login"]
    for path in paths:
        for name in (WORD, f"{WORD} with blanks") if "{" in path else (WORD,):
            place = path.replace("{item_id}", quote(name)).replace("{job_id}", quote(name))
            if place.endswith("/events"):
                continue
            for query in queries(described["paths"].get(path, {}).get("get", {}).get("parameters", [])):
                statuses.add(server.get(f"{place}?{query}").status)
    for where in FILTERS:
        for path in ("/api/v1/search?q=a&", "/api/v1/items?", f"/?q={WORD}&"):
            statuses.add(server.get(f"{path}where={quote(where)}&folder={WORD}").status)
        statuses.add(server.post("/api/v1/search", {"query": "a", "where": where}).status)
        statuses.add(server.upload(b"\x89PNG\r\n\x1a\n" + bytes(50), name=WORD, where=where).status)
    bodies: list[Any] = [
        {"query": WORD}, {"terms": [{"text": WORD, "weight": 99}]}, {"like": WORD}, {"upload": WORD},
        {"captions": [WORD] * 3}, {"captions": WORD}, {WORD: WORD}, WORD, [WORD], {"folder": WORD},
        {"kind": WORD}, {"terms": [{"text": WORD}], "top": 1}, {"query": WORD + "\ud800"},
        {"query": f"- {WORD}"}, {"query": f"{WORD} ^100000"}, {"query": WORD * 100},
    ]  # fmt: skip
    for path in ("search", "captions/search", f"items/{WORD}/captions", "jobs", f"jobs/{WORD}/cancel"):
        statuses |= {server.post(f"/api/v1/{path}", body).status for body in bodies}
    for method in ("PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        statuses.add(server.ask(method, f"/api/v1/items/{WORD}?q={WORD}").status)
    statuses.add(server.get(f"/{WORD}?{WORD}", Host=f"{WORD}.example", Referer=WORD, User_Agent=WORD).status)
    statuses.add(server.get("/", Origin=f"http://{WORD}", Cookie=f"gare_session={WORD}").status)
    for raw in (
        f"{WORD} / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"GET /{WORD} HTTP/9.9\r\n\r\n",
        f"{WORD}\r\n\r\n",
        f"GET / HTTP/1.1\r\n{WORD}\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), HANG_S) as link:
            link.sendall(raw.encode())
            link.recv(65536)
    return statuses


def queries(parameters: list[dict[str, Any]]) -> Iterator[str]:
    names = [one["name"] for one in parameters if one["in"] == "query"] or ["q"]
    yield from (urlencode({"q": WORD, "folder": WORD}), urlencode({"q": WORD, "not": WORD, "like": WORD}))
    yield from (urlencode({name: WORD}) for name in names)


def check(server: ServeProcess) -> list[dict[str, Any]]:
    text = server.log.read_text()
    assert WORD.lower() not in text.lower(), next(
        line for line in text.splitlines() if WORD.lower() in line.lower()
    )
    whole, _, _ = text.rpartition("\n")  # the server may be writing the next line
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def test_no_search_is_in_the_log(served):
    with ServeProcess(served.library, with_stdout=True) as server:
        statuses = ask_everything(server)
        assert {200, 403, 404, 405, 421, 422} <= statuses
        assert not {status for status in statuses if status in (500, 502)}
        assert server.interrupt() == 0
        lines = check(server)
        assert sum(line["event"] == "request" for line in lines) > 200


def test_nor_if_the_library_breaks_meanwhile(served: Served, tmp_path: Path):
    library = tmp_path / "broken"
    shutil.copytree(served.library, library)
    with ServeProcess(library, options=PATIENT, with_stdout=True) as server:
        for path in [*(library / "frames.lance/data").iterdir(), *(library / "items.lance/data").iterdir()]:
            path.write_bytes(path.read_bytes()[:100])
        statuses = ask_everything(server)
        assert 503 in statuses
        lines = check(server)
        told = [line for line in lines if line["event"] == "library"]
        assert told
        assert all(line["kind"].endswith("Error") and "traceback" in line for line in told)


def test_who_asks_for_queries_in_the_log_gets_them(served):
    with ServeProcess(served.library, "--log-queries") as server:
        server.get(f"/api/v1/search?q={WORD}")
        assert server.interrupt() == 0
        assert WORD in server.log.read_text()

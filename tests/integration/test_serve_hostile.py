"""Strangers, broken files, floods and slow clients: refused cleanly, and the server goes on."""

from __future__ import annotations

import io
import json
import os
import random
import socket
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from serve_library import Served, make_served
from serve_process import ServeProcess
from servers import wait_until

TOKEN = "a-token-of-sixteen-or-more"


@pytest.fixture(scope="module")
def guarded(served: Served) -> Iterator[ServeProcess]:
    with ServeProcess(served.library, "--host", "0.0.0.0", GARE_TOKEN=TOKEN, ready=True) as process:
        yield process


def is_alive(server: ServeProcess) -> bool:
    return server.get("/api/v1/search?q=red&limit=3").status == 200


# --- who ---------------------------------------------------------------------------------------------------


def test_only_the_token_opens_the_door(guarded):
    for path in ("/api/v1/search?q=x", "/api/v1/items", "/metrics", "/api/v1/openapi.json", "/api/v1/info"):
        assert guarded.get(path).status == 401
        assert guarded.get(path, Authorization="Bearer wrong").status == 401
        assert guarded.get(path, Authorization=f"Basic {TOKEN}").status == 401
        assert guarded.get(path, Authorization=f"Bearer {TOKEN}").status == 200
    assert guarded.get("/api/v1/search?q=x").headers["www-authenticate"] == "Bearer"
    assert guarded.get("/api/v1/health").status == 200
    page = guarded.get("/library", Accept="text/html")
    assert (page.status, page.headers["location"]) == (303, "/login?next=/library")


def test_logging_in_gives_a_cookie_that_scripts_cannot_read(guarded):
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    wrong = guarded.ask("POST", "/login", b"token=nonsense", {**form, "Accept": "text/html"})
    assert wrong.status == 401
    right = guarded.ask("POST", "/login", f"token={TOKEN}&next=//evil.example".encode(), form)
    cookie = right.headers["set-cookie"]
    assert (right.status, right.headers["location"]) == (303, "/")
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    assert guarded.get("/api/v1/items", Cookie=cookie.split(";")[0]).status == 200
    assert guarded.get("/api/v1/items", Cookie="gare_session=forged").status == 401


def test_other_names_and_other_pages_are_refused(server):
    assert server.get("/api/v1/items", Host="evil.example").json()["error"]["code"] == "wrong_host"
    assert server.get("/", Host="[").status == 421
    assert server.get("/api/v1/items", Host=f"localhost:{server.port}").status == 200
    order = json.dumps({"kind": "index"}).encode()
    foreign = [{"Origin": origin} for origin in ("http://evil.example", "null", "http://[", "")]
    for headers in (*foreign, {"Sec-Fetch-Site": "cross-site"}):
        refused = server.ask("POST", "/api/v1/jobs", order, {"Content-Type": "application/json", **headers})
        assert refused.json()["error"]["code"] == "foreign_origin"
    answer = server.get("/api/v1/items", Origin="http://evil.example")
    assert "access-control-allow-origin" not in answer.headers
    preflight = server.ask("OPTIONS", "/api/v1/jobs", headers={"Origin": "http://evil.example"})
    assert preflight.status == 405
    assert "access-control-allow-origin" not in preflight.headers


def test_every_answer_says_what_a_browser_may_do(server):
    for path in ("/", "/library", "/settings", "/nowhere", "/api/v1/items", "/static/gare.css"):
        headers = server.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = server.get("/?q=red", Accept="text/html").content.decode()
    assert "<script>" not in page
    assert "style=" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_what_is_typed_is_text(server):
    page = server.get(
        "/?q=%3Cscript%3Ealert(1)%3C/script%3E&not=%22%3E%3Cb%3E&folder=%3Ci%3E"
    ).content.decode()
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;alert(1)" in page


# --- paths -------------------------------------------------------------------------------------------------

TRAVERSALS = (
    "../../../../etc/passwd",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "....//....//etc/passwd",
    "/etc/passwd",
    "%00",
    "..%5c..%5cwindows%5cwin.ini",
    "file:///etc/passwd",
    "%c0%ae%c0%ae/etc/passwd",
)


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_parameter_is_a_path(server, path):
    quoted = path.replace("/", "%2f")
    places = [
        f"/api/v1/items/{part}{end}"
        for part in (path, quoted)
        for end in ("", "/video", "/thumbnail", "/strip")
    ]
    places += [f"/static/{path}", f"/static/{quoted}", f"/watch/{path}", f"/{path}", f"/api/v1/jobs/{quoted}"]
    places += [f"/api/v1/jobs/{quoted}/events"]
    for place in places:
        answer = _raw(
            server, f"GET {place} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        status = int(answer.split(b" ", 2)[1])
        assert status in (400, 404, 422), (place, answer[:300])
        assert b"root:" not in answer
    for name in ("folder", "where", "like", "upload", "after"):
        answer = server.get(f"/api/v1/search?q=x&{name}={quoted}")
        assert answer.status in (200, 410, 422)
        assert b"root:" not in answer.content
    assert server.post("/api/v1/jobs", {"folder": path}).status in (404, 422)


def _raw(server: ServeProcess, request: bytes, seconds: float = 20) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), seconds) as link:
        link.sendall(request)
        parts = []
        while part := link.recv(65536):
            parts.append(part)
        return b"".join(parts)


# --- uploads -----------------------------------------------------------------------------------------------


def test_broken_uploads_are_refused_and_nothing_breaks(server, served):
    video = (served.videos / "warm" / "red.mp4").read_bytes()
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "JPEG")
    image = buffer.getvalue()
    chance = random.Random(0)
    noisy = bytearray(video)
    for _ in range(200):
        noisy[chance.randrange(40, len(noisy))] = chance.randrange(256)
    cases = {
        "empty": (b"", 415),
        "text": (b"hello", 415),
        "html": (b"<script>alert(1)</script>", 415),
        "zip": (b"PK\x03\x04" + bytes(100), 415),
        "playlist": (b"ffconcat version 1.0\nfile '/etc/passwd'\n", 415),
        "hls": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", 415),
        "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', 415),
        "truncated image": (image[: len(image) // 2], 422),
        "truncated video": (video[: len(video) // 2], 422),
        "only a header": (video[:64], 422),
        "ftyp and noise": (bytes(4) + b"ftypisom" + chance.randbytes(5000), 422),
        "bomb": (_png_bomb(), 422),
        "gif bomb": (b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(20), 422),
        "polyglot": (image + b"<?php system($_GET['c']); ?>" + video, 200),  # read as the image it is
        "renamed": (image, 200),
    }
    for name, (content, status) in cases.items():
        answer = server.upload(content, name=f"../../{name}.mp4")
        assert answer.status == status, (name, answer.content[:300])
        if status != 200:
            assert answer.json()["error"]["message"]
    assert server.upload(bytes(noisy)).status in (200, 422)
    assert is_alive(server)


def _png_bomb() -> bytes:
    """A few kilobytes that say they are 30,000 × 30,000 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    content = zlib.compress(bytes(2_000_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


def test_what_is_no_form_is_refused(server):
    assert server.ask("POST", "/api/v1/search/upload", b"x", {"Content-Type": "image/png"}).status == 415
    no_file = b'--b\r\nContent-Disposition: form-data; name="other"\r\n\r\nx\r\n--b--\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    assert server.ask("POST", "/api/v1/search/upload", no_file, form).status == 422
    for broken in (b"", b"--b", b"--b\r\nnonsense", b"\x00" * 100):
        assert server.ask("POST", "/api/v1/search/upload", broken, form).status in (400, 422)
    assert (
        server.ask("POST", "/api/v1/search/upload", b"x", {"Content-Type": "multipart/form-data"}).status
        == 400
    )
    two = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n' * 2 + b"--b--\r\n"
    assert server.ask("POST", "/api/v1/search/upload", two, form).status in (400, 415)


def test_large_bodies_are_cut_off(server):
    assert _status_of(server, "/api/v1/search/upload", 65 * 2**20) == 413
    assert _status_of(server, "/api/v1/search", 2**20) == 413
    assert server.post("/api/v1/search", {"query": "x" * 100_000}).status == 413
    assert server.get("/api/v1/search?q=" + "x" * 40_000).status in (400, 422)
    chunked = (
        b"POST /api/v1/search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\n\r\n"
    )
    assert b" 413 " in _raw(
        server, chunked + b"8000\r\n" + b"x" * 0x8000 + b"\r\n" + b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    )
    assert is_alive(server)


def _status_of(server: ServeProcess, path: str, length: int) -> int:
    """Refused by its length alone, before the body is sent."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return int(_raw(server, head.encode()).split(b" ", 2)[1])


def test_many_uploads_at_once_are_told_to_wait(server, served):
    content = (served.videos / "cold" / "pink.mp4").read_bytes()
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(server.upload(content))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [answer.status for answer in answers]
    assert set(statuses) <= {200, 429, 503}
    assert statuses.count(200) >= 1
    assert 429 in statuses
    assert all("retry-after" in answer.headers for answer in answers if answer.status != 200)
    assert is_alive(server)


# --- load and slowness -------------------------------------------------------------------------------------


def test_slow_clients_do_not_hold_the_server(served):
    """Silence, half a header, half a body, and an answer that nobody reads."""
    with ServeProcess(served.library, options={"body_seconds": 1.0, "idle_seconds": 1.0}) as server:
        silent = [_open(server, b"") for _ in range(5)]
        silent += [_open(server, b"GET /api/v1/health HTTP/1.1\r\nHost: loc") for _ in range(5)]
        half_body = _open(
            server,
            b"POST /api/v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"
            b"Content-Type: application/json\r\n\r\n{",
        )
        assert b" 408 " in half_body.recv(65536)
        half_body.close()
        for link in silent:
            assert link.recv(65536) == b""  # closed by the server, within the time-out of the socket
            link.close()
        assert is_alive(server)


def test_who_does_not_read_is_cut_off(tmp_path):
    """Twenty clients ask for a large file and take nothing: neither files nor connections stay open."""
    served = make_served(tmp_path)
    path = served.videos / "warm" / "red.mp4"
    before = path.stat()
    os.truncate(path, 300 * 2**20)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with ServeProcess(served.library, options={"idle_seconds": 1.0}) as server:
        items = server.get("/api/v1/items").json()["items"]
        address = next(item["links"]["video"] for item in items if item["name"] == "red.mp4")
        open_files = Path(f"/proc/{server.process.pid}/fd")
        at_rest, memory = len(list(open_files.iterdir())), server.memory_mb()
        links = [
            _open(server, f"GET {address} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) for _ in range(20)
        ]
        wait_until(lambda: len(list(open_files.iterdir())) >= at_rest + 20, "the requests", 10)
        wait_until(lambda: len(list(open_files.iterdir())) <= at_rest + 1, "the cut", 20)
        assert server.memory_mb() < memory + 100
        assert is_alive(server)
        for link in links:
            link.close()
        assert "Traceback" not in server.log.read_text()


def _open(server: ServeProcess, sent: bytes) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", server.port), 10)
    link.sendall(sent)
    return link


def test_a_flood_is_answered_or_told_to_come_back(server):
    before = server.memory_mb()
    statuses: list[int] = []

    def flood(number: int) -> None:
        for turn in range(8):
            answer = server.get(f"/api/v1/search?q=query+{number}+{turn}&limit=5")
            statuses.append(answer.status)
            assert answer.status == 200 or "retry-after" in answer.headers

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 320
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) > 160
    assert server.memory_mb() < before + 150

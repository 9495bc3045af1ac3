"""Strangers, broken files, floods and slow clients: refused cleanly, and the server goes on."""

from __future__ import annotations

import contextlib
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
from urllib.parse import quote

import pytest
from PIL import Image

from gare.library.library import Library
from serve_library import Served, make_served
from serve_process import PATIENT, ServeProcess
from servers import HANG_S, wait_until

TOKEN = "a-token-of-sixteen-or-more"


@pytest.fixture(scope="module")
def guarded(served: Served) -> Iterator[ServeProcess]:
    with ServeProcess(served.library, "--host", "0.0.0.0", GARE_TOKEN=TOKEN, ready=True) as process:
        yield process


@pytest.fixture
def patient(served: Served) -> Iterator[ServeProcess]:
    """Guarded, too. It waits for a body as long as a busy machine may need for what happens meanwhile."""
    with ServeProcess(served.library, options={"host": "0.0.0.0", "token": TOKEN, **PATIENT}) as process:
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
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers
    preflight = server.ask("OPTIONS", "/api/v1/jobs", headers={"Origin": "http://evil.example"})
    assert preflight.status == 405
    assert "access-control-allow-origin" not in preflight.headers


def test_another_site_may_link_to_pages_and_embed_nothing(server):
    image = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    frame = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    link = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    paths = ("/api/v1/search?q=a", "/api/v1/items", "/?q=a", "/library")
    for site in ("cross-site", "same-site"):  # of the same site is, say, another port of localhost
        for path in paths:
            for kind in (image, frame, {}):
                refused = server.get(path, **{"Sec-Fetch-Site": site, **kind})
                assert refused.status == 403, (site, path, kind)
            is_page = not path.startswith("/api/")
            assert server.get(path, **{"Sec-Fetch-Site": site, **link}).status == (200 if is_page else 403)
    for path in paths:
        for site in ("none", "same-origin"):
            assert server.get(path, **{"Sec-Fetch-Site": site, **image}).status == 200
        assert server.get(path, Origin=server.url).status == 200
    before = _count(server, "gare_search_seconds_count")
    server.get("/api/v1/search?q=never+asked", **{"Sec-Fetch-Site": "cross-site", **image})
    assert _count(server, "gare_search_seconds_count") == before


def _count(server: ServeProcess, name: str) -> float:
    lines = server.get("/metrics").content.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_a_network_server_has_names_of_its_own(served):
    """DNS rebinding: a web page whose name was pointed at this machine listed folders and started jobs."""
    arguments = ("--host", "0.0.0.0", "--without-token", "--trusted-host", "Videos.example.org")
    with ServeProcess(served.library, *arguments, ready=False) as open_to_all:
        port = open_to_all.port
        for name in ("evil.com", "evil.com:80", f"127.0.0.1.evil.com:{port}", "videos.example.org.evil.com"):
            refused = open_to_all.get("/api/v1/folders", Host=name)
            assert (refused.status, refused.json()["error"]["code"]) == (421, "wrong_host"), name
        own = (socket.gethostname(), f"{socket.gethostname().split('.')[0]}.local", "videos.example.org")
        for name in ("localhost", "127.0.0.1", "192.168.1.7", "[fe80::1]", *own, "VIDEOS.example.org."):
            assert open_to_all.get("/api/v1/folders", Host=f"{name}:{port}").status == 200, name


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


# --- filters -----------------------------------------------------------------------------------------------


def test_a_filter_full_of_brackets_stops_nobody(server):
    """Each of them used to hold a thread of the server for good; after four, every search was a 503."""
    negated = "not (" * 49 + "tag:b" + ")" * 49
    deep = "(tag:a or (tag:b " * 15 + "tag:c" + "))" * 15
    for _ in range(5):
        for path in ("/api/v1/search?q=a&", "/api/v1/items?", "/?q=a&"):
            assert server.get(f"{path}where={quote(negated)}").status == 200
    refused = server.get(f"/api/v1/search?q=a&where={quote(deep)}")
    assert (refused.status, refused.json()["error"]["code"]) == (422, "bad_query")
    assert "fewer brackets" in refused.json()["error"]["message"]
    assert server.get(f"/api/v1/items?where={quote(deep)}").status == 422
    assert is_alive(server)


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


def _raw(server: ServeProcess, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), HANG_S) as link:
        link.sendall(request)
        parts = []
        with contextlib.suppress(ConnectionResetError):  # the end, too: the server left some of it unread
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


def test_an_unreadable_upload_does_not_tell_where_it_lay(server):
    broken = (
        bytes(4) + b"ftypisom" + bytes(500),
        b"\x89PNG\r\n\x1a\n" + bytes(500),
        b"\xff\xd8\xff" + bytes(500),
    )
    for content in broken:
        answer = server.upload(content)
        assert answer.status == 422
        assert "/" not in answer.json()["error"]["message"], answer.json()


def test_the_token_is_not_in_the_environment_of_a_decoder(guarded):
    guarded.headers["Authorization"] = f"Bearer {TOKEN}"
    try:
        assert guarded.upload(_png()).status == 200
    finally:
        del guarded.headers["Authorization"]
    others = []
    for pid in _descendants(guarded.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a decoder ends with its upload
            others.append(Path(f"/proc/{pid}/environ").read_bytes())
    assert any(others)  # that of a process which has ended is empty
    assert not any(TOKEN.encode() in environment for environment in others)


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "PNG")
    return buffer.getvalue()


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread has
                children += map(int, (task / "children").read_text().split())
    return [*children, *(one for child in children for one in _descendants(child))]


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
    begin = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n"
    )
    body = begin + content + b"\r\n--b--\r\n"
    head = (
        "POST /api/v1/search/upload HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    halves = [_open(server, head.encode() + body[:500]) for _ in range(2)]  # as many as one client may have
    answers = []

    def is_refused() -> bool:
        answers.append(server.upload(content))
        return answers[-1].status == 429

    wait_until(is_refused, "two uploads that are under way to be too many for a third")
    assert {answer.status for answer in answers} <= {200, 429}
    assert "retry-after" in answers[-1].headers
    for half in halves:
        half.sendall(body[500:])
        assert b" 200 " in half.recv(65536)
        half.close()
    assert server.upload(content).status == 200
    assert is_alive(server)


def test_made_up_methods_do_not_fill_the_metrics(server):
    def num_lines() -> int:
        return len(server.get("/metrics").content.splitlines())

    for method in ("MADE-UP", "PUT"):
        server.ask(method, "/api/v1/items")
    num_lines()
    before = num_lines()
    for number in range(200):
        assert server.ask(f"MADE-UP-{number}", "/api/v1/items").status == 405
    assert num_lines() == before
    assert "MADE-UP" not in server.log.read_text()


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
    os.truncate(path, 300 * 2**20)
    with Library.open(served.library) as library:
        library.index(served.videos)
    with ServeProcess(served.library, options={"idle_seconds": 1.0}) as server:
        items = server.get("/api/v1/items").json()["items"]
        address = next(item["links"]["video"] for item in items if item["name"] == "red.mp4")
        open_files = Path(f"/proc/{server.process.pid}/fd")
        at_rest, memory = len(list(open_files.iterdir())), server.memory_mb()
        links = [
            _open(server, f"GET {address} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) for _ in range(20)
        ]
        for link in links:
            assert link.recv(1, socket.MSG_PEEK)  # it was answered, and nothing is taken
        wait_until(lambda: len(list(open_files.iterdir())) <= at_rest + 1, "the cut")
        assert server.memory_mb() < memory + 100
        assert is_alive(server)
        for link in links:
            link.close()
        assert "Traceback" not in server.log.read_text()


def _open(server: ServeProcess, sent: bytes) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", server.port), HANG_S)
    link.sendall(sent)
    return link


# Addresses of this machine that stand for three: an attacker, a guest, and one with the token.
ATTACKER, GUEST = "127.0.0.1", "127.0.0.2"


def _ask_from(server: ServeProcess, address: str, path: str, header: str = "") -> int:
    source = (address, 0)
    with socket.create_connection(("127.0.0.1", server.port), HANG_S, source_address=source) as link:
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n"
        link.sendall(request.encode())
        return int(link.makefile("rb").readline().split()[1])


def _is_refused(server: ServeProcess, address: str) -> bool:
    """With 503; while all of its 128 connections are being answered, the newest one is cut instead."""
    try:
        return _ask_from(server, address, "/login") == 503
    except (ConnectionError, IndexError):
        return False


def test_slow_logins_of_a_stranger_lock_nobody_out(patient):
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n"
    slow = head + b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken="
    links = [_open(patient, slow) for _ in range(300)]
    token = f"Authorization: Bearer {TOKEN}\r\n"
    wait_until(lambda: _is_refused(patient, ATTACKER), "the attacker's places to be taken")
    assert _ask_from(patient, ATTACKER, "/api/v1/search?q=red", token) == 200
    assert _ask_from(patient, GUEST, "/api/v1/search?q=red", token) == 200
    assert _ask_from(patient, GUEST, "/login") == 200
    for link in links:
        link.close()
    wait_until(lambda: _ask_from(patient, ATTACKER, "/login") == 200, "the places to be free again")


def test_idle_connections_of_a_stranger_lock_nobody_out(guarded):
    links = [_open(guarded, b"GET / HTTP/1.1\r\nHost: loc" if n % 2 else b"") for n in range(1030)]
    token = f"Authorization: Bearer {TOKEN}\r\n"
    for address in (ATTACKER, GUEST):
        assert _ask_from(guarded, address, "/api/v1/search?q=red", token) == 200
        assert _ask_from(guarded, address, "/login") == 200
    kept = len(list(Path(f"/proc/{guarded.process.pid}/fd").iterdir()))
    assert kept < 400
    for link in links:
        link.close()


def test_connections_of_many_clients_make_room_for_new_ones(served):
    """Each keeps below its own limit: the one with the most loses its oldest idle one."""
    options = {"host": "0.0.0.0", "token": TOKEN, "max_requests": 8, "max_connections_per_client": 20}
    with ServeProcess(served.library, options=options, ready=False) as server:
        links = [
            socket.create_connection(("127.0.0.1", server.port), HANG_S, source_address=(f"127.0.0.{n}", 0))
            for n in range(3, 13) for _ in range(10)
        ]  # fmt: skip
        assert _ask_from(server, GUEST, "/login") == 200
        for link in links:
            link.close()


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

"""A hostile web page in a real browser, beside a server of this machine: it reads and costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import pytest

from browser import chromium
from serve_process import ServeProcess
from servers import HANG_S, wait_until

BOMB = quote("not (" * 49 + "tag:b" + ")" * 49)


@contextmanager
def page_of(html: str) -> Iterator[int]:
    """A web server with one page; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def hostile(url: str) -> str:
    images = "".join(f'<img src="{url}/api/v1/search?q=a{n}&where={BOMB}">' for n in range(4))
    return f"""<title>waiting</title>{images}<iframe src="{url}/"></iframe>
    <script>
      const end = what => document.title += " " + what;
      fetch("{url}/api/v1/items").then(r => r.text()).then(() => end("read"), () => end("unread"));
      fetch("{url}/api/v1/jobs", {{method: "POST", mode: "no-cors", body: "{{}}"}})
        .then(() => end("sent"), () => end("not sent"));
    </script>"""


def searches(server: ServeProcess) -> float:
    lines = server.get("/metrics").content.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("gare_search_seconds_count "))


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])  # of the same site, and of another
def test_a_hostile_page_reads_nothing_and_costs_nothing(server, name):
    before = searches(server)
    with page_of(hostile(server.url)) as port, chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(1000 * HANG_S)
        statuses: list[int] = []
        page.on(
            "response", lambda answer: statuses.append(answer.status) if server.url in answer.url else None
        )
        page.goto(f"http://{name}:{port}/")
        page.wait_for_function("document.title.includes('read') && document.title.includes('sent')")
        assert "unread" in page.title()
        page.wait_for_load_state("load")
        page.close()
    assert set(statuses) <= {403}
    wait_until(lambda: server.get("/api/v1/search?q=red").status == 200, "the next search")
    assert server.get("/api/v1/jobs").json() == []
    assert searches(server) == before + 1

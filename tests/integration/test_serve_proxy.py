"""A server behind a proxy with TLS: a real nginx with the configuration of docs/how-to/deploy.md."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from serve_library import Served
from serve_process import Answer, ServeProcess, _lower, _StayHere
from servers import HANG_S, free_port, stop, wait_until

TOKEN = "a-token-of-sixteen-or-more"
NAME = "videos.example.org"
DEPLOY = Path(__file__).parents[2] / "docs" / "how-to" / "deploy.md"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def behind(served: Served) -> Iterator[ServeProcess]:
    arguments = ("--behind-proxy", "--trusted-host", NAME)
    with ServeProcess(served.library, *arguments, GARE_TOKEN=TOKEN) as process:
        yield process


# --- what a proxy says -------------------------------------------------------------------------------------


def forwarded(**more: str) -> dict[str, str]:
    return {"X-Forwarded-Proto": "https", "X-Forwarded-Host": NAME, "X-Forwarded-For": "203.0.113.9", **more}


def log_in(server: ServeProcess, headers: dict[str, str]) -> Answer:
    return server.ask("POST", "/login", f"token={TOKEN}".encode(), {**FORM, **headers})


@pytest.mark.parametrize("kept", [True, False], ids=["host is kept", "host is rewritten"])
def test_people_log_in_under_the_public_name(behind, kept):
    headers = forwarded(Origin=f"https://{NAME}", **({"Host": NAME} if kept else {}))
    cookie = log_in(behind, headers).headers["set-cookie"]
    assert "; Secure" in cookie
    assert behind.get("/api/v1/items", Cookie=cookie.split(";")[0], **forwarded()).status == 200


def test_another_page_or_name_is_refused_whatever_the_headers_say(behind):
    assert log_in(behind, forwarded(Origin="https://evil.example")).status == 403
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for host in ({"Host": "evil.example"}, {"X-Forwarded-Host": "evil.example"}):
        assert behind.get("/api/v1/items", **forwarded(**host, **bearer)).status == 421
    # A page under a rebound name may write every header but Host.
    forged = {"Host": "evil.example", "X-Forwarded-Host": "localhost"}
    assert behind.get("/api/v1/items", **forged, **bearer).status == 421


def test_the_client_is_the_one_the_proxy_saw(behind):
    behind.get("/api/v1/health", **forwarded(**{"X-Forwarded-For": "198.51.100.1, 203.0.113.77"}))
    behind.get("/api/v1/health", **forwarded(**{"X-Forwarded-For": "nonsense"}))

    def clients() -> list[str]:
        lines = [json.loads(line) for line in behind.log.read_text().splitlines(True) if line.endswith("\n")]
        return [line["client"] for line in lines if line.get("route") == "/api/v1/health"]

    wait_until(lambda: len(clients()) >= 2, "the log")  # it is written after the answer
    assert clients()[-2:] == ["203.0.113.77", "127.0.0.1"]


def test_strangers_are_not_believed(served):
    """The proxy speaks from elsewhere: what this machine says of itself is not taken for the proxy's word."""
    arguments = ("--behind-proxy", "--trusted-host", NAME, "--proxy-address", "10.1.2.3")
    with ServeProcess(served.library, *arguments, ready=False, GARE_TOKEN=TOKEN) as server:
        cookie = log_in(server, forwarded()).headers["set-cookie"]
        assert "Secure" not in cookie
        whole, _, _ = server.log.read_text().rpartition("\n")  # the server may be writing the next line
        requests = [json.loads(line) for line in whole.splitlines()]
        assert {line["client"] for line in requests if "client" in line} == {"127.0.0.1"}


def test_without_the_option_nobody_is_believed(served):
    with ServeProcess(served.library, ready=False, GARE_TOKEN=TOKEN) as server:
        assert "Secure" not in log_in(server, forwarded()).headers["set-cookie"]
        assert server.get("/api/v1/health", Host=NAME, **forwarded()).status == 421


# --- a real nginx ------------------------------------------------------------------------------------------


@dataclass
class Nginx:
    port: int
    folder: Path

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _StayHere)
        url = f"https://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, body, {"Host": f"{NAME}:{self.port}", **headers}, method=method)
        try:
            with opener.open(request, timeout=HANG_S) as answer:
                return Answer(answer.status, _lower(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, _lower(error.headers), error.read())


@pytest.fixture(scope="module")
def nginx(behind: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed: the configuration in deploy.md was NOT tested here")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    folder.chmod(0o755)
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={NAME}"]
    made = [*make, "-keyout", str(folder / "videos.key"), "-out", str(folder / "videos.pem")]
    subprocess.run(made, check=True, capture_output=True)
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}} http {{ access_log off;\n"
        + "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in
                  ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        + documented(folder, port, behind.port) + "}\n"
    )  # fmt: skip
    process = subprocess.Popen([program, "-c", str(folder / "nginx.conf"), "-p", str(folder)])
    server = Nginx(port, folder)

    def is_up() -> bool:
        assert process.poll() is None, (folder / "error.log").read_text()
        try:
            return server.ask("GET", "/api/v1/health").status == 200
        except OSError:
            return False

    wait_until(is_up, "nginx")
    yield server
    stop(process)


def documented(folder: Path, port: int, upstream: int) -> str:
    """The `server` block of the page, with this test's ports and certificate."""
    block = re.search(r"```nginx\n(.*?)```", DEPLOY.read_text(), re.DOTALL)
    assert block is not None
    text = block[1]
    for old, new in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/videos", str(folder / "videos")),
        ("http://127.0.0.1:8080", f"http://127.0.0.1:{upstream}"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_through_nginx_people_log_in_and_search(nginx):
    origin = {"Origin": f"https://{NAME}:{nginx.port}", "Sec-Fetch-Site": "same-origin"}
    door = nginx.ask("GET", "/library", Accept="text/html")
    assert (door.status, door.headers["location"]) == (303, "/login?next=/library")
    entered = nginx.ask("POST", "/login", f"token={TOKEN}".encode(), **FORM, **origin)
    assert entered.status == 303
    cookie = entered.headers["set-cookie"]
    assert "; Secure" in cookie
    session = {"Cookie": cookie.split(";")[0]}
    assert nginx.ask("GET", "/api/v1/search?q=red", **session).status == 200
    items = json.loads(nginx.ask("GET", "/api/v1/items", **session).content)["items"]
    part = nginx.ask("GET", items[0]["links"]["video"], Range="bytes=0-9", **session)
    assert (part.status, len(part.content)) == (206, 10)


def test_through_nginx_other_pages_and_names_are_refused(nginx):
    foreign = nginx.ask("POST", "/login", b"token=x", **FORM, Origin="https://evil.example")
    assert foreign.status == 403
    assert nginx.ask("GET", "/api/v1/health", Host="evil.example").status in (421, 444)
    forged = {"X-Forwarded-Host": "evil.example", "X-Forwarded-For": "1.2.3.4"}
    assert nginx.ask("GET", "/api/v1/health", **forged).status == 200  # nginx writes them itself

"""A real `gare serve` in a process of its own, on a free port."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import HANG_S, free_port, kill_hard, stop, wait_until
from warm import WarmProcess

GARE = str(Path(sys.executable).with_name("gare"))
PATIENT = {"answer_seconds": HANG_S, "body_seconds": HANG_S}
"""A server that answers on a busy machine too, instead of asking to come back."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


class ServeProcess:
    """Of the command, or of `serve_driver` where options are given that the command has not."""

    def __init__(
        self,
        library: Path | str,
        *arguments: str,
        port: int = 0,
        ready: bool = True,
        options: dict[str, Any] | None = None,
        driver: str = "serve_driver.py",
        with_stdout: bool = False,
        log_folder: Path | None = None,
        **variables: str,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = (log_folder or Path(library).parent) / f"serve-{self.port}-{time.monotonic_ns()}.log"
        self.headers: dict[str, str] = {}
        command = ["gare", "serve", "--library", str(library), "--port", str(self.port), *arguments]
        if options is not None:
            command = [
                str(Path(__file__).with_name(driver)),
                str(library),
                json.dumps({"port": self.port, **options}),
            ]
        with open(self.log, "wb") as log:
            out = {"stdout": log} if with_stdout else {}
            self.process = WarmProcess(command, stderr=log, **out, env={**os.environ, **variables})
        wait_until(lambda: self.is_up(ready), "gare serve")

    def is_up(self, ready: bool) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.get("/api/v1/ready" if ready else "/api/v1/health").status == 200
        except OSError:
            return False

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.process)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = HANG_S,
    ) -> Answer:
        request = urllib.request.Request(
            self.url + path, body, {**self.headers, **(headers or {})}, method=method
        )
        try:
            with _opener.open(request, timeout=timeout) as answer:
                return Answer(answer.status, _lower(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, _lower(error.headers), error.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask(
            "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )

    def post(self, path: str, value: Any) -> Answer:
        return self.ask("POST", path, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def upload(self, content: bytes, name: str = "file.bin", **fields: str) -> Answer:
        mark = "gare-test-boundary"
        parts = [
            f'--{mark}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
            for key, value in fields.items()
        ]
        parts.append(
            f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        body = "".join(parts).encode() + content + f"\r\n--{mark}--\r\n".encode()
        return self.ask(
            "POST", "/api/v1/search/upload", body, {"Content-Type": f"multipart/form-data; boundary={mark}"}
        )

    def memory_mb(self) -> float:
        """Of the server itself."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_S)

    def kill(self) -> None:
        kill_hard(self.process)


class _StayHere(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_opener = urllib.request.build_opener(_StayHere)


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}

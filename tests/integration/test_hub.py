"""Hub ids, through the real client, against a stand-in for the hub: a network that does not exist here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

COMMIT = "a" * 40
CLIENT = """
import sys, torch, gare
model = gare.GARE.from_pretrained(sys.argv[1])
video = gare.VideoFeatures(torch.ones(1, 2, 16), torch.ones(1, 2, dtype=torch.bool))
print(model.score(model.encode_text(["a dog"]), video).item())
"""


@pytest.fixture
def hub(tmp_path, tiny_model):
    """Serves someone/tiny: the file list and the files, as the hub does."""
    folder = tmp_path / "served"
    tiny_model.save_pretrained(folder)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, *, body):
            path = self.path.split("?")[0]
            if path.startswith("/api/models/someone/tiny/tree/"):
                tree = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT}
                    for file in folder.iterdir()
                ]
                return self.send(json.dumps(tree).encode(), "application/json", body=body)
            if path.startswith("/api/models/someone/tiny"):
                files = [{"rfilename": file.name} for file in folder.iterdir()]
                content = json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": files}).encode()
                return self.send(content, "application/json", body=body)
            file = folder / Path(path).name
            if not path.startswith("/someone/tiny/resolve/") or not file.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            return self.send(file.read_bytes(), "application/octet-stream", body=body)

        def send(self, content, kind, *, body):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def load(name: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", CLIENT, name], capture_output=True, text=True, timeout=120, env=environment
    )


def test_a_hub_id_is_downloaded_and_loaded(hub, tmp_path, tiny_model):
    result = load("someone/tiny", hub, tmp_path / "cache")
    assert result.returncode == 0, result.stderr
    from gare import VideoFeatures

    video = VideoFeatures(torch.ones(1, 2, 16), torch.ones(1, 2, dtype=torch.bool))
    expected = tiny_model.score(tiny_model.encode_text(["a dog"]), video).item()
    assert float(result.stdout) == pytest.approx(expected, abs=1e-6)


def test_an_unknown_hub_id_says_what_to_do(hub, tmp_path):
    result = load("someone/else", hub, tmp_path / "cache")
    assert "CheckpointError: 'someone/else' is not a folder here" in result.stderr

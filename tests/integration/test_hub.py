"""Hub ids, through the real client, against a stand-in for the hub: a network that does not exist here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from dual_encoders import save_family
from servers import HANG_S

COMMIT, CONVERTED = "a" * 40, "b" * 40
CLIENT = """
import sys, torch, gare
model = gare.GARE.from_pretrained(sys.argv[1])
video = gare.VideoFeatures(torch.ones(1, 2, 16), torch.ones(1, 2, dtype=torch.bool))
print(model.score(model.encode_text(["a dog"]), video).item())
"""


@contextmanager
def serving(repositories: dict[str, Path], converted: dict[str, Path] | None = None, *, breaks_off: str = ""):
    """The hub's protocol: what a repository holds, its files, and its pull requests.

    Args:
        converted: what the hub's converter offers, in pull request 3 of a repository.
        breaks_off: a file of which half is sent; then there is no hub any more.
    """
    pull_requests, asked = converted or {}, []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, *, body):
            path = unquote(self.path.split("?")[0])
            asked.append(path)
            name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
            is_converted = "refs/pr/3" in path or CONVERTED in path
            folder = (pull_requests if is_converted else repositories).get(name)
            commit = CONVERTED if is_converted else COMMIT
            if folder is None:
                return self.refuse("RepoNotFound")
            files = [file for file in folder.rglob("*") if file.is_file()]
            if path.endswith("/discussions"):
                found = [discussion(name)] if name in pull_requests else []
                content = {"discussions": found, "count": len(found), "start": 0}
                return self.send(json.dumps(content).encode(), commit, body=body)
            if "/tree/" in path:
                tree = [
                    {
                        "type": "file",
                        "path": str(x.relative_to(folder)),
                        "size": x.stat().st_size,
                        "oid": commit,
                    }
                    for x in files
                ]
                return self.send(json.dumps(tree).encode(), commit, body=body)
            if path.startswith("/api/models/"):
                names = [{"rfilename": str(file.relative_to(folder))} for file in files]
                content = {"id": name, "sha": commit, "siblings": names}
                return self.send(json.dumps(content).encode(), commit, body=body)
            inside = path.split("/resolve/")[-1].removeprefix("refs/pr/3/").split("/", 1)[-1]
            file = folder / inside
            if "/resolve/" not in path or not file.is_file():
                return self.refuse("EntryNotFound")
            if body and file.name == breaks_off:
                server.verify_request = lambda *_: False  # nobody is let in from now on
            return self.send(file.read_bytes(), commit, body=body, half=file.name == breaks_off)

        def refuse(self, reason):
            self.send_response(404)
            self.send_header("X-Error-Code", reason)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, content, commit, *, body, half=False):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
            if body:
                self.wfile.write(content[: len(content) // 2] if half else content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def discussion(name: str) -> dict:
    return {
        "title": "Adding `safetensors` variant of this model",
        "num": 3,
        "author": {"name": "SFconvertbot"},
        "createdAt": "2023-01-01T00:00:00.000Z",
        "status": "open",
        "isPullRequest": True,
        "repo": {"name": name, "type": "model"},
    }


@pytest.fixture
def hub(tmp_path, tiny_model):
    """Serves someone/tiny."""
    tiny_model.save_pretrained(tmp_path / "served")
    with serving({"someone/tiny": tmp_path / "served"}) as (address, _):
        yield address


def load(
    name: str, endpoint: str, cache: Path, *, client: str = CLIENT, offline: str = "0"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": offline}
    return subprocess.run(
        [sys.executable, "-c", client, name], capture_output=True, text=True, timeout=HANG_S, env=environment
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
    message = "CheckpointError: 'someone/else' is not a folder here, and the hub has no model of that name"
    assert message in result.stderr


ENCODE = """
import sys, gare
print(gare.GARE.from_pretrained(sys.argv[1]).encode_text(["a dog"]).text_TD[0, 0].item())
"""


def test_a_dual_encoder_is_downloaded_without_what_it_does_not_need(tmp_path):
    folder = save_family("clip", tmp_path / "served")
    for name in ("pytorch_model.bin", "tf_model.h5", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    with serving({"someone/clip": folder}) as (address, asked):
        result = load("someone/clip", address, tmp_path / "cache", client=ENCODE)
        assert result.returncode == 0, result.stderr
        fetched = {path.rsplit("/", 1)[-1] for path in asked if "/resolve/" in path}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched
        assert not fetched & {"pytorch_model.bin", "tf_model.h5", "model.onnx"}
        assert "model.safetensors" in result.stderr or "Fetching" in result.stderr  # progress is shown
    from gare import GARE

    expected = GARE.from_pretrained(folder).encode_text(["a dog"]).text_TD[0, 0].item()
    assert float(result.stdout) == pytest.approx(expected, abs=1e-6)
    # Without a network what was downloaded is enough, and what was not is said to be brought along.
    again = load("someone/clip", "http://127.0.0.1:9", tmp_path / "cache", client=ENCODE, offline="1")
    assert again.stdout == result.stdout, again.stderr
    other = load("someone/other", "http://127.0.0.1:9", tmp_path / "cache", client=ENCODE, offline="1")
    assert "hf download someone/other --local-dir FOLDER), bring the folder along" in other.stderr


def test_a_network_that_breaks_off_is_an_error_and_the_next_call_goes_on(tmp_path):
    folder, cache = save_family("clip", tmp_path / "served"), tmp_path / "cache"
    with serving({"someone/clip": folder}, breaks_off="model.safetensors") as (address, _):
        broken = load("someone/clip", address, cache, client=ENCODE)
    error = broken.stderr[broken.stderr.rindex("CheckpointError: ") :]
    assert "the hub did not give it either" in error
    assert "bring the folder along" in error
    with serving({"someone/clip": folder}) as (address, asked):
        result = load("someone/clip", address, cache, client=ENCODE)
    assert result.returncode == 0, result.stderr
    assert {path.rsplit("/", 1)[-1] for path in asked if "/resolve/" in path} == {"model.safetensors"}


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_download_that_was_cut_off_before_the_weights_says_so_without_a_network(offline, tmp_path):
    """An older client left no list of files beside them, by which a newer one sees that some are missing."""
    repository = tmp_path / "hub" / "models--someone--clip"
    folder = save_family("clip", repository / "snapshots" / COMMIT)
    (folder / "model.safetensors").unlink()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    result = load("someone/clip", "http://127.0.0.1:9", tmp_path, client=ENCODE, offline=offline)
    error = result.stderr[result.stderr.rindex("CheckpointError: ") :]
    assert "hf download someone/clip --local-dir FOLDER), bring the folder along" in error
    assert "pickle" not in error
    expected = "its download was cut off" if offline == "1" else "the hub did not give it"
    assert expected in error


def test_a_pickle_on_the_hub_is_left_there(tmp_path):
    whole = save_family("clip", tmp_path / "whole")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for file in whole.iterdir():
        name = "pytorch_model.bin" if file.suffix == ".safetensors" else file.name
        (pickled / name).write_bytes(file.read_bytes())
    repositories = {"someone/pickled": pickled, "someone/converted": pickled}
    with serving(repositories, {"someone/converted": whole}) as (address, asked):
        refused = load("someone/pickled", address, tmp_path / "cache", client=ENCODE)
        assert "no weights of someone/pickled as safetensors" in refused.stderr
        assert "AutoModel.from_pretrained" in refused.stderr
        taken = load("someone/converted", address, tmp_path / "cache", client=ENCODE)
        assert taken.returncode == 0, taken.stderr  # the hub's own converter has put safetensors beside it
        assert not any(path.endswith(".bin") for path in asked)
    again = load("someone/converted", "http://127.0.0.1:9", tmp_path / "cache", client=ENCODE, offline="1")
    assert again.stdout == taken.stdout, again.stderr

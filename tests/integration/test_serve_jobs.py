"""Indexing from the page: followed, cancelled, and taken up again after kill −9."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gare.library.library import Library
from gare.serve.index_jobs import JOB_NOTE
from serve_library import Served, make_served, save_tiny_model, write_colour
from serve_process import ServeProcess
from servers import HANG_S

NUM_VIDEOS = 30
HELD_JOB = Path(__file__).parents[1] / "held_job.py"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "videos"
    for number in range(NUM_VIDEOS):
        path = folder / f"{number % 3}" / f"{number:03d}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_colour(path, number / NUM_VIDEOS, seconds=6, size=(320, 180))
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Served:
    """A library without items."""
    model = save_tiny_model(tmp_path / "model")
    Library.open(tmp_path / "library", model=model).close()
    return Served(tmp_path / "videos", tmp_path / "library", model)


def events(server: ServeProcess, job: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with urllib.request.urlopen(f"{server.url}/api/v1/jobs/{job}/events", timeout=HANG_S) as stream:
        kind = ""
        for line in stream:
            name, _, value = line.decode().strip().partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)


def test_a_job_is_followed_to_its_end(tmp_path):
    served = make_served(tmp_path, index=False)
    with ServeProcess(served.library, "--folder", str(served.videos)) as server:
        folders = server.get("/api/v1/folders").json()
        assert [folder["path"] for folder in folders] == [str(served.videos)]
        cancelled = server.post("/api/v1/jobs", {}).json()["id"]
        server.ask("POST", f"/api/v1/jobs/{cancelled}/cancel")
        assert list(events(server, cancelled))[-1][1]["state"] == "cancelled"
        started = server.post("/api/v1/jobs", {"folder": folders[0]["id"]})
        assert started.status == 202
        assert server.post("/api/v1/jobs", {}).json()["error"]["code"] == "job_running"
        said = list(events(server, started.json()["id"]))
        assert said[-1][0] == "end"
        assert [kind for kind, _ in said[:-1]] == ["progress"] * (len(said) - 1)
        job = said[-1][1]
        assert (job["state"], job["report"]["new"], job["failed"]) == ("done", 10, 1)
        failures = server.get("/api/v1/failures").json()
        assert [Path(failure["path"]).name for failure in failures] == ["broken.mp4"]
        assert server.get("/api/v1/info").json()["num_items"] == 10
        assert len(server.get("/api/v1/search?q=red").json()["hits"]) == 10

        audit = server.post("/api/v1/jobs", {"kind": "audit"}).json()
        assert list(events(server, audit["id"]))[-1][1]["state"] == "done"
        assert server.get("/api/v1/audit").json()["num_items"] == 10


def test_neither_an_end_in_order_nor_kill_9_loses_anything(many, empty, tmp_path):
    """The next server goes on by itself, and counts nothing twice."""
    (tmp_path / "held").mkdir()
    shutil.copy(HELD_JOB, tmp_path / "held" / "sitecustomize.py")
    held = {"PYTHONPATH": f"{tmp_path / 'held'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with ServeProcess(empty.library, "--folder", str(many), ready=False, **held) as server:
        job = server.post("/api/v1/jobs", {}).json()["id"]
        next(state for _, state in events(server, job) if state["done"] >= 2)
        assert server.interrupt() == 0
    with ServeProcess(empty.library, ready=False, **held) as server:  # the folder is part of the order
        resumed = server.get("/api/v1/jobs").json()[0]
        assert (resumed["id"], resumed["resumed"]) == (job, True)
        next(state for _, state in events(server, job) if state["done"] >= 2)
        server.kill()
    with ServeProcess(empty.library, ready=False) as server:
        last = list(events(server, job))[-1][1]
        assert last["state"] == "done"
        assert last["report"]["unchanged"] + last["report"]["new"] == NUM_VIDEOS
        assert last["report"]["unchanged"] > 0
        paths = Counter(item["path"] for item in server.get("/api/v1/items?limit=500").json()["items"])
        assert len(paths) == NUM_VIDEOS
        assert set(paths.values()) == {1}
        assert server.get("/api/v1/failures").json() == []
    with Library.open(empty.library, read_only=True) as library:
        assert library.store.get_notes()[JOB_NOTE] == ""  # crossed out


PASSWORD = "hunter2-hunter2"


def test_a_job_gets_the_password_of_the_database_and_nobody_sees_it(tmp_path, postgres, new_library):
    model = save_tiny_model(tmp_path / "model")
    write_colour(tmp_path / "videos.mp4", 0.1, seconds=2)
    address = new_library("postgres").replace("//gare@", f"//locked:{PASSWORD}@")
    with psycopg.connect(postgres.uri(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE locked SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
        rules = postgres.folder / "pg_hba.conf"
        rules.write_text("host all locked 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        connection.execute("SELECT pg_reload_conf()")
    Library.open(address, model=model).close()
    with ServeProcess(address, "--folder", str(tmp_path / "videos.mp4"), log_folder=tmp_path) as server:
        folder = server.get("/api/v1/folders").json()[0]["id"]
        job = server.post("/api/v1/jobs", {"folder": folder}).json()["id"]
        _, end = list(events(server, job))[-1]
        assert (end["state"], end["message"]) == ("done", "")
        for path in (f"/api/v1/jobs/{job}", "/api/v1/info", "/library", "/settings"):
            assert PASSWORD.encode() not in server.get(path).content
        assert PASSWORD not in server.log.read_text()

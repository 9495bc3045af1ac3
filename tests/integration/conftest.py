"""Servers that integration tests share: started once, when the first test asks for them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from filelock import FileLock

from browser import chromium
from gare.library.sample_videos import make_sample
from serve_library import Served, make_film_library, make_served
from serve_process import PATIENT, ServeProcess
from servers import HANG_S, Postgres, SeaweedFS, server_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NewLibrary = Callable[[str], str]
CopySample = Callable[[Path], object]


@pytest.fixture(scope="session")
def copy_sample(tmp_path_factory: pytest.TempPathFactory) -> CopySample:
    """Puts the sample videos of `gare demo` into a folder; they are made once for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sample-videos"
    with FileLock(f"{made}.lock"):
        make_sample(made)
    return lambda folder: shutil.copytree(made, folder)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with server_folder() as folder:
        server = Postgres(folder / "data").start()
        with psycopg.connect(server.uri(), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION vector")
        yield server
        server.stop()


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedFS]:
    with server_folder() as folder:
        server = SeaweedFS(folder)
        yield server
        server.stop()


@pytest.fixture(scope="session")
def new_library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NewLibrary]:
    """Makes the address of an empty library of a kind: folder, s3 or postgres."""
    with pytest.MonkeyPatch.context() as patch:

        def make(kind: str) -> str:
            name = f"lib{uuid.uuid4().hex[:12]}"
            if kind == "folder":
                return str(tmp_path_factory.mktemp("library") / "library of 'x' & ünï")
            if kind == "s3":
                for variable, value in request.getfixturevalue("seaweedfs").environment.items():
                    patch.setenv(variable, value)
                return f"s3://gare/{name}"
            uri = request.getfixturevalue("postgres").uri()
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute(f"CREATE SCHEMA {name}")
            return f"{uri}?options=-csearch_path%3D{name},public"

        yield make


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A small library that no test changes."""
    return make_served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def film(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A library with a film, that no test changes."""
    return make_film_library(tmp_path_factory.mktemp("film"))


@pytest.fixture(scope="session")
def film_server(film: Served) -> Iterator[ServeProcess]:
    """A server over it."""
    with ServeProcess(film.library, options=PATIENT) as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which every script error and every broken rule of the content policy fails the test."""
    opened = browser.new_page(viewport={"width": 1280, "height": 860})
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda said: problems.append(said.text) if "Content Security" in said.text else None)
    opened.set_default_timeout(1000 * HANG_S)
    yield opened
    opened.close()
    assert problems == []


@pytest.fixture(scope="session")
def server(served: Served) -> Iterator[ServeProcess]:
    """A server over it."""
    with ServeProcess(served.library, options=PATIENT) as process:
        yield process

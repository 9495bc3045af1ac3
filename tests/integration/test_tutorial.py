"""docs/tutorial.md and docs/how-to/export-results.md, followed from top to bottom."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gare.cli.main import app
from pages import ROOT, code_blocks, commands
from servers import free_port

TUTORIAL = ROOT / "docs/tutorial.md"
EXPORT = ROOT / "docs/how-to/export-results.md"
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory, copy_sample) -> Path:
    """`gare demo` finds its videos there; test_serve_demo.py has it make them."""
    folder = tmp_path_factory.mktemp("tutorial")
    copy_sample(folder / "sample")
    return folder


def run(command: str, folder: Path) -> str:
    """Here, where torch is loaded already; in a shell if there is a pipe."""
    with contextlib.chdir(folder):
        if "|" in command:
            command = f"{shlex.quote(str(PROGRAMS))}/{command}"
            return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
        result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, f"{command}: {result.output} {result.exception}"
    return result.stdout


def run_code(code: str, folder: Path) -> str:
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "example", "exec"), {})
    return printed.getvalue()


def test_the_tutorial_works(folder):
    """One test: each command needs what those before it made."""
    *earlier, serve, curl = commands(TUTORIAL)
    assert serve.startswith("gare serve")
    assert curl.startswith("curl")
    outputs = {command: run(command, folder) for command in earlier}
    assert "coffee.mp4" in outputs['gare search "a cup of coffee" --library sample/.gare']
    (code,) = code_blocks(TUTORIAL, "python")
    assert "coffee.mp4  at" in run_code(code, folder)
    hits = ask_server(serve, curl, folder)
    assert hits[0]["path"].endswith("coffee.mp4")


def ask_server(serve: str, curl: str, folder: Path) -> list[dict[str, str]]:
    """Starts the server on a free port and sends it the request that curl would send."""
    port = str(free_port())
    arguments = shlex.split(serve.replace("8080", port))[1:]
    with subprocess.Popen(
        [PROGRAMS / "gare", *arguments], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(f"http://127.0.0.1:{port}")
            with urllib.request.urlopen(shlex.split(curl.replace("8080", port))[1]) as answer:
                hits: list[dict[str, str]] = json.load(answer)["hits"]
        finally:
            process.terminate()
    return hits


def test_results_are_exported(folder):
    if not (folder / "sample/.gare").exists():
        run("gare demo --once --folder sample", folder)
    (listed,) = commands(EXPORT)
    assert "coffee.mp4" in run(listed, folder)
    cut_list, metrics = code_blocks(EXPORT, "python")
    rows = run_code(cut_list, folder).splitlines()
    assert rows[0] == "file,moment,score"
    assert "coffee.mp4" in rows[1]
    assert "recall_at_1" in run_code(metrics, folder)

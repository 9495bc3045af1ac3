"""What the docs say is run, and generated pages are fresh."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from servers import HANG_S
from warm import run_gare, run_python

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in code_blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, copy_sample):
    """Where the README is followed from top to bottom; test_serve_demo.py has the sample videos made."""
    folder = tmp_path_factory.mktemp("readme")
    copy_sample(folder / "sample")
    return folder


@pytest.mark.parametrize("command", commands())
def test_readme_commands_work(command, folder):
    """`make test` runs this test, so make targets are only resolved; CI runs them for real."""
    program, *arguments = shlex.split(command)
    if arguments[:2] == ["bench", "scoring"]:
        arguments += ["--texts", "20", "--videos", "20"]  # with the sizes it has, it takes its time
    if program == "gare":
        result = run_gare(*arguments, cwd=folder)
    elif program == "make":
        dry = ["make", "--dry-run", *arguments]
        result = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    else:
        here = [str(Path(sys.executable).with_name(program)), *arguments]
        result = subprocess.run(here, cwd=folder, capture_output=True, text=True, timeout=HANG_S)
    assert result.returncode == 0, result.stderr


def test_readme_python_works(folder):
    code = "\n".join(code_blocks("python"))
    result = run_python(["-c", code], cwd=folder, timeout=HANG_S)
    assert result.returncode == 0, result.stderr
    assert "coffee.mp4 at" in result.stdout
    assert "tensor([[" in result.stdout


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_reference_pages_are_fresh():
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs/generate_reference.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    for name, page in generator.PAGES.items():
        written = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")
        assert written == page(), f"docs/reference/{name} is stale: run python docs/generate_reference.py"

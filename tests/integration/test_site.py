"""The docs as a site: without a warning, with nothing from elsewhere, and with commands that exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import typer.main

import gare
from gare.cli.main import app
from gare.cli.recipes import RECIPES, TABLES, recipe_names
from pages import ROOT, commands

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_site_is_built_without_a_warning_and_is_whole(tmp_path):
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "mkdocs.yml"]
    result = subprocess.run(
        [*mkdocs, "--site-dir", tmp_path],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    fetched = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    for page in tmp_path.rglob("*.html"):
        assert fetched.findall(page.read_text(encoding="utf-8")) == [], f"{page.name} needs a network"
    for style in tmp_path.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8")
    reference = (tmp_path / "reference/python.html").read_text(encoding="utf-8")
    for name in gare.__all__:
        assert f'id="gare.{name}"' in reference, f"gare.{name} is not in the reference"


def gare_commands() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        if page.parent.name != "reference":
            for line in commands(page, "bash", "console", ""):
                for part in re.split(r"&&|\||;", line):
                    found = re.search(r"(?:^|[\s/])(gare (?!\W).*)", part.split("  ")[0])
                    if found:
                        yield page, found.group(1)


def test_commands_in_the_docs_exist():
    """Their verbs, options and recipes; that they work is for the tests of each command."""
    wrong = [f"{page.name}: {line}" for page, line in gare_commands() if not exists(line)]
    assert wrong == []


def exists(line: str) -> bool:
    _, *words = shlex.split(line.removesuffix("&"))
    command, verb = typer.main.get_command(app), ""
    while words and words[0] in getattr(command, "commands", {}):
        verb = f"{verb} {words[0]}".strip()
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}
    options = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    names = {"train": recipe_names(RECIPES), "ablate": recipe_names(TABLES)}.get(verb)
    is_name = bool(words) and re.fullmatch(r"[a-z_0-9]+", words[0]) is not None
    knows_recipe = names is None or not is_name or words[0] in names
    return not hasattr(command, "commands") and options <= known | {"--help"} and knows_recipe

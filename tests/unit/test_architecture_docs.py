"""What the docs name as a file, as `file:function` or as a folder's imports is so."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from test_imports import TIERS, import_graph

import gare

SOURCE = Path(gare.__file__).parent
ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?:[\w.-]+/)+\w+\.py\b")
_FUNCTION = re.compile(r"((?:[\w.-]+/)+\w+\.py): ?([\w.]+)")
_STEP = re.compile(r"^\| (\d+|[A-Z]) \| `([\w/]+)/\w+\.py:", re.MULTILINE)
_ROOM = re.compile(r"^\| `(\w+)/` \| [^|]* \| ([^|]*)\|$", re.MULTILINE)


def find(file: str) -> Path | None:
    """A file as a page may name it: below src/gare, or from the root of the repository."""
    places = [SOURCE / file, ROOT / file, SOURCE.parent / file]
    return next((place for place in places if place.is_file()), None)


def names_in(path: Path) -> set[str]:
    """Classes and functions of a file, methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{part.name}" for part in inside}
    return names


def walks() -> dict[str, list[tuple[str, str]]]:
    """The tables of steps: title of the section, then number and folder of each step."""
    sections = re.split(r"^##+ ", ARCHITECTURE.read_text(), flags=re.MULTILINE)[1:]
    return {section.splitlines()[0]: steps for section in sections if (steps := _STEP.findall(section))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_and_function_that_a_page_names_exists(page):
    wrong = []
    for code in _CODE.findall(page.read_text(encoding="utf-8")):
        wrong += [file for file in _FILE.findall(code) if find(file) is None and "NAME" not in file]
        for file, name in _FUNCTION.findall(code):
            place = find(file)
            if place is not None and name not in names_in(place):
                wrong.append(f"{file}:{name}")
    assert wrong == []


def test_the_walks_are_there():
    assert list(walks()) == [
        "From a video file to a hit on the page",
        "The words that find it",
        "From a recipe to a trained model",
        "From a manifest to results.json",
    ]


def test_a_walk_is_short_and_returns_into_no_folder():
    for title, steps in walks().items():
        numbers = [number for number, _ in steps]
        expected = [str(place + 1) if numbers[0] == "1" else chr(65 + place) for place in range(len(steps))]
        assert numbers == expected, title
        assert len(steps) < 20, title
        folders = [folder for _, folder in steps]
        changes = [here for before, here in zip(["", *folders], folders, strict=False) if here != before]
        assert len(changes) == len(set(changes)), f"{title}: {changes}"


def test_the_map_names_what_each_folder_imports():
    small = TIERS[-1] | {"gare"}
    imported: dict[str, set[str]] = defaultdict(set)
    for here, found in import_graph().items():
        room = here.split(".")[0]
        imported[room] |= {there.split(".")[0] for there in found} - small - {room}
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    stated = {room: set(re.findall(r"\w+", named)) for room, named in _ROOM.findall(ARCHITECTURE.read_text())}
    assert stated == {room: imported[room] for room in rooms}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_the_marks_of_an_unfinished_merge(page):
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(encoding="utf-8"), re.MULTILINE)

"""What people do who add to the package from outside: register, install a package, follow a page of docs."""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gare.registry import Registry

HOW_TO = Path(__file__).resolve().parents[1] / "docs" / "how-to"


@contextmanager
def as_it_was(registry: Registry[Any]) -> Iterator[Registry[Any]]:
    """Whatever is registered or loaded inside is gone afterwards."""
    before = registry._entries
    registry._entries = dict(before)
    try:
        yield registry
    finally:
        registry._entries = before


def install(folder: Path, name: str, module: str, points: str) -> None:
    """A package as pip leaves it: a module and its entry points."""
    (folder / f"{name}.py").write_text(module)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


@contextmanager
def installed(folder: Path, name: str, module: str, points: str) -> Iterator[None]:
    """The same, and to be imported in this process as long as it is needed."""
    install(folder, name, module, points)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


def blocks(page: str, language: str) -> list[str]:
    """The code of a how-to page, in its order."""
    text = (HOW_TO / page).read_text(encoding="utf-8")
    return [textwrap.dedent(code) for code in re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)]


def points(page: str) -> str:
    """The entry points that a how-to page tells people to write, as pip installs them."""
    (own,) = (block for block in blocks(page, "toml") if "entry-points" in block)
    ((group, named),) = tomllib.loads(own)["project"]["entry-points"].items()
    return f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in named.items())

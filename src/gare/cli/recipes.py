"""Recipes and tables that come with the package, by name. Standard library only: `--help` lists them."""

from __future__ import annotations

from pathlib import Path

import gare
from gare.errors import ConfigError

RECIPES, TABLES = "", "ablations"
"""Folders inside `recipes/`: those `gare train` takes, and those `gare ablate` takes."""


def recipes_folder() -> Path:
    """Inside an installed package, or beside the sources of a checkout."""
    package = Path(gare.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def recipe_names(kind: str) -> list[str]:
    """What can be asked for by name."""
    return sorted(path.stem for path in (recipes_folder() / kind).glob("*.toml"))


def find_recipe(name: str, kind: str) -> Path:
    """The file itself, or the one of that name that comes with the package.

    >>> find_recipe("losses", TABLES).name
    'losses.toml'
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = recipes_folder() / kind / f"{name}.toml"
    if path.parent == Path() and shipped.is_file():
        return shipped
    problem = "is a folder" if path.is_dir() else "does not exist"
    raise ConfigError(
        f"{name} {problem}; give the path of a TOML file, or one of {', '.join(recipe_names(kind))}"
    )

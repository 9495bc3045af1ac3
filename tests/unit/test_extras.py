"""A missing extra is named, with the command that installs it from where this package came from."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from gare import extras
from gare.errors import GareError, MissingExtraError
from gare.library.search.stage1_audit import Audit, save_audit
from gare.library.store import open_store
from gare.train.run_log import RunLog
from gare.train.train_state import Progress


class Installed:
    """Stands for this package's metadata."""

    requires = ("torch>=2", "fastapi>=0.130; extra == 'serve'", 'psycopg[binary]>=3.2; extra == "postgres"')

    def __init__(self, direct_url):
        self.direct_url = direct_url

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.direct_url and json.dumps(self.direct_url)


@pytest.fixture
def installed_from(monkeypatch):
    monkeypatch.setattr(extras, "_pip", lambda: "pip")

    def install(direct_url):
        monkeypatch.setattr(extras, "distribution", lambda name: Installed(direct_url))

    return install


def test_from_a_folder(installed_from, tmp_path):
    folder = tmp_path / "a clone"
    folder.mkdir()
    installed_from({"url": folder.as_uri(), "dir_info": {}})
    assert extras.install_command("serve") == f"pip install '{folder}[serve]'"
    installed_from({"url": folder.as_uri(), "dir_info": {"editable": True}})
    assert extras.install_command("serve") == f"pip install -e '{folder}[serve]'"


def test_from_a_wheel(installed_from, tmp_path):
    wheel = tmp_path / "gare-0.1.0-py3-none-any.whl"
    wheel.touch()
    installed_from({"url": wheel.as_uri(), "archive_info": {}})
    assert extras.install_command("mcp") == f"pip install '{wheel}[mcp]'"
    installed_from({"url": "https://host.example/gare.whl", "archive_info": {}})
    assert extras.install_command("mcp") == "pip install 'gare[mcp] @ https://host.example/gare.whl'"


def test_from_a_repository(installed_from):
    git = {"vcs": "git", "commit_id": "0123abc"}
    installed_from({"url": "https://host.example/gare.git", "vcs_info": git})
    wanted = "gare[serve] @ git+https://host.example/gare.git@0123abc"
    assert extras.install_command("serve") == f"pip install '{wanted}'"
    git["requested_revision"] = "v1"
    installed_from({"url": "https://host.example/x.git", "vcs_info": git, "subdirectory": "python"})
    wanted = "gare[serve] @ git+https://host.example/x.git@v1#subdirectory=python"
    assert extras.install_command("serve") == f"pip install '{wanted}'"


def test_an_upgrade_comes_from_the_same_place(installed_from, tmp_path):
    installed_from({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert extras.upgrade_advice() == f"upgrade gare where you got it, then run: pip install -e {tmp_path}"
    installed_from(None)
    assert extras.upgrade_advice() == "upgrade gare from where you got it"


BY_NAME = re.compile(
    r"(pip|pipx|uv pip|uv tool|uvx) install [^\n`]*?(?<![\w./-])gare(?![\w./-])(?!\S* @ )", re.I
)
"""An installation of whatever an index has under the name of this package, which anyone may have taken."""


def test_nothing_tells_people_to_install_this_package_by_its_name():
    assert BY_NAME.search("run pip install --upgrade gare, then")
    assert BY_NAME.search("pip install 'gare[serve]'")
    assert not BY_NAME.search("pip install 'gare[serve] @ git+https://host.example/gare.git'")
    root = Path(__file__).resolve().parents[2]
    folders = [path for name in ("src", "docs") for path in (root / name).rglob("*")]
    texts = [path for path in (*folders, *root.glob("*.md")) if path.suffix in (".py", ".md", ".html", ".js")]
    assert len(texts) > 100
    assert not [(path, found[0]) for path in texts if (found := BY_NAME.search(path.read_text("utf-8")))]


@pytest.mark.parametrize("direct_url", [None, {"url": "file:///no/such/folder", "dir_info": {}}])
def test_without_a_known_origin_the_packages_are_named_and_never_gare(installed_from, direct_url):
    installed_from(direct_url)
    assert extras.install_command("postgres") == "pip install 'psycopg[binary]>=3.2' pgvector"
    assert "gare" not in extras.install_command("serve")
    assert "'fastapi>=0.130'" in extras.install_command("serve")


def test_nothing_is_said_when_everything_is_there():
    for extra in extras.EXTRAS:
        if extra not in ("open-clip", "siglip", "wandb", "trackio"):  # which the tests do without
            extras.require(extra, "a test")


def test_a_library_in_postgresql_without_its_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        MissingExtraError, match=r"a library in PostgreSQL needs psycopg, .*\n  .*pip install"
    ) as caught:
        open_store("postgresql://localhost/videos")
    assert isinstance(caught.value, GareError)


def test_training_without_tensorboard_says_so_once_and_logs(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with RunLog(tmp_path, Progress(), enabled=True) as log:
        log.say("hello")
    said = capsys.readouterr().err
    assert said.count("TensorBoard is not installed; metrics.jsonl has everything") == 1
    assert (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "tensorboard").exists()
    with RunLog(tmp_path, Progress(), enabled=False):  # as in all processes of a run but the first
        pass
    assert "TensorBoard" not in capsys.readouterr().err


def test_an_audit_without_matplotlib_is_saved_without_its_picture(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    save_audit(Audit("here", "mini", 9, 2, "mine", (9,), (1.0,), (1.0,), 9, 0.99, 1.0, 1.0, 2.0), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.json", "audit.md"]

"""Running the tests changes nothing that the user has measured or keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gare.cache_folder import cache_folder
from warm import run_gare


def test_the_cache_of_the_tests_is_not_the_users():
    users = Path.home() / ".cache"
    assert not cache_folder().is_relative_to(users)
    assert os.environ["RAY_AUTH_TOKEN"]


def test_a_command_that_a_test_runs_keeps_its_constants_there():
    users = Path.home() / ".cache" / "gare" / "constants.json"
    before = users.read_bytes() if users.exists() else None
    small = ["--items", 300, "--dim", 16, "--frames", 3, "--candidates", 20, "--queries", 10]
    done = run_gare("bench", "search", *small, "--json")
    assert done.returncode == 0, done.stderr
    kept = json.loads((cache_folder() / "constants.json").read_text())
    assert "--items 300" in kept["item_bytes"]["command"]
    assert (users.read_bytes() if users.exists() else None) == before

"""experiments/verify_exact.py: lists of exact search on a real library, beside float64 over all its items."""

from __future__ import annotations

import json
from pathlib import Path

from warm import run_python

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "verify_exact.py"


def test_lists_of_a_library_are_compared_with_float64(tmp_path):
    sizes = ["--items", "300", "--queries", "3", "--folder", str(tmp_path / "library")]
    done = run_python([str(SCRIPT), "library", *sizes], cwd=tmp_path)
    done.check_returncode()
    result = json.loads(done.stdout)
    assert (result["queries"], result["same_lists"]) == (3, 3)
    assert 64 <= result["scored"] < 300

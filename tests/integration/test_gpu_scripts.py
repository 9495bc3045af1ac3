"""What is run on a lent GPU: it works at first try, and a part that is stopped keeps what it measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from warm import run_python

FOLDER = Path(__file__).parents[2] / "experiments"
pytest.importorskip("triton", reason="there is no Triton for this system")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("only", ["scores", "texts, weights × 10"])
def test_it_runs_in_the_interpreter(only: str, tmp_path: Path) -> None:
    """The smallest sizes; steps of a search and shapes of kernels are left out, which take minutes there."""
    out = tmp_path / "results.json"
    command = [str(FOLDER / "gpu_exact.py"), "300", "50000", "--out", str(out), "--only", only]
    done = run_python(command, cwd=tmp_path, env={"TRITON_INTERPRET": "1"})
    done.check_returncode()
    lines = json.loads(out.read_text(encoding="utf-8"))["lines"]
    assert len(lines) >= 3
    assert all(only in line["part"] for line in lines)
    assert lines == [json.loads(line) for line in done.stdout.splitlines()]
    # On a busy machine a part may not come to its end.
    assert [line for line in lines if "more than" not in line.get("error", "more than")] == []
    for line in lines:
        assert line.get("num_equal") == line.get("num_checked")
        assert line.get("largest_error", 0) < 1e-3


def test_a_part_that_fails_keeps_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    script = load("gpu_exact")

    def part() -> dict[str, object]:
        script.KEPT["first_ms"] = 1.5
        raise RuntimeError("the device is gone")

    script.run("steps", part, 60)
    script.run("next", lambda: {"rows": 2}, 60)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["part"], first["first_ms"], first["error"]) == (
        "steps",
        1.5,
        "RuntimeError: the device is gone",
    )
    assert "first_ms" not in second
    assert second["rows"] == 2


def test_of_a_process_that_is_stopped_the_last_whole_line_is_kept() -> None:
    script = load("gpu_train")
    assert script.last_result('words\n{"ms": 1}\n{"ms": 2, "gb": 3}\n{"ms": 4, "g') == {"ms": 2, "gb": 3}
    assert script.last_result("12\n") == script.last_result("") == {}

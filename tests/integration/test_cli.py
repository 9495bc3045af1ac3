"""The command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import gare
from clips import steady, write_video
from servers import HANG_S
from warm import WarmProcess
from warm import run_gare as run

GARE_COMMAND = str(Path(sys.executable).with_name("gare"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["models"], ["models", "--json"], ["plan", "--json"]])
def test_a_full_disk_under_the_output_is_told_in_words(arguments):
    with open("/dev/full", "wb") as full, tempfile.TemporaryFile("w+") as said:
        with WarmProcess(["gare", *arguments], stdout=full, stderr=said) as process:
            assert process.wait(HANG_S) == 1
        said.seek(0)
        assert said.read() == "error: the disk is full; free some space and run the same command again\n"


def test_a_folder_to_serve_that_is_not_there_is_said(tmp_path):
    result = run("serve", "--folder", tmp_path, "--folder", "none", "--host", "0.0.0.0", cwd=tmp_path)
    assert result.returncode == 1  # no token
    assert "--folder none: there is no such folder now" in result.stderr
    assert f"--folder {tmp_path}" not in result.stderr


def test_bench_scoring_prints_one_json_object():
    result = run(
        *["bench", "scoring", "--texts", "5", "--videos", "7", "--frames", "3", "--dim", "16", "--json"]
    )
    assert result.returncode == 0, result.stderr
    numbers = json.loads(result.stdout)
    assert {
        "dense_ms",
        "factored_ms",
        "cards_ms",
        "floor_ms",
        "speedup",
        "max_abs_difference",
    } <= numbers.keys()
    assert numbers["speedup"] == pytest.approx(numbers["dense_ms"] / numbers["factored_ms"])
    assert numbers["max_abs_difference"] < 2e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("bfloat16", 0.05)])
def test_bench_scoring_in_other_precisions(dtype, tolerance):
    result = run(*f"bench scoring --texts 4 --videos 4 --frames 2 --dim 32 --dtype {dtype} --json".split())
    assert json.loads(result.stdout)["max_abs_difference"] < tolerance


def test_bench_train_prints_its_reference():
    result = run(
        "bench", "train", "--backbone=tiny", "--batch-size=4", "--frames=2", "--no-compile", "--json"
    )
    assert result.returncode == 0, result.stderr
    numbers = json.loads(result.stdout)
    assert numbers["step_ms"] > 0 < numbers["bare_ms"]
    assert 0 < numbers["bare_tflop_per_step"] < numbers["tflop_per_step"]


def test_bench_search_times_every_stage(tmp_path):
    command = (
        f"bench search --items 300 --dim 16 --frames 3 --candidates 20 --queries 10 --folder {tmp_path / 'x'}"
    )
    result = run(*command.split(), "--json")
    assert result.returncode == 0, result.stderr
    numbers = json.loads(result.stdout)
    stages = ("search", "encode", "stage1", "fetch", "score", "plain_search", "dense_score")
    assert all(0 < numbers[stage]["p50"] <= numbers[stage]["p95"] for stage in stages)
    assert (numbers["num_items"], numbers["recall"]) == (300, 1.0)
    again = run(*command.split())  # the library is there already
    assert "words to hits" in again.stdout
    assert "making" not in again.stderr
    films = json.loads(run(*command.split(), "--hours", "1", "--json").stdout)
    assert films["num_with_films"] > films["num_items"] + 500
    assert all(0 < films[name]["p50"] <= films[name]["p95"] for name in ("with_films", "without_films"))


def test_bench_exact_compares_with_float64_and_with_a_real_library(tmp_path):
    sizes = "--items 300 --queries 6 --batch 4 --check 6 --dim 32 --frames 3 --scale 10 --device cpu"
    result = run(*f"bench exact {sizes} --library 2 --folder {tmp_path / 'x'} --json".split())
    assert result.returncode == 0, result.stderr
    numbers = json.loads(result.stdout)
    assert numbers["case"]["scale"] == 10
    assert (numbers["num_compared"], numbers["num_equal"], numbers["bounds_broken"]) == (6, 6, 0)
    assert 10 <= numbers["scored"] <= 300
    assert numbers["library"]["num_same"] == 2
    for name in ("first_pass_ms", "keys_ms", "rescoring_ms", "certificate_ms", "read_ms", "product_ms"):
        assert numbers[name] > 0


def test_bench_serve_asks_a_real_server():
    sizes = "--items 300 --dim 16 --frames 3 --clients 4 --seconds 0.5 --batch 4"
    result = run(*f"bench serve {sizes} --json".split())
    assert result.returncode == 0, result.stderr
    numbers = json.loads(result.stdout)
    steps = [*numbers["steps"], numbers["unbatched"]]
    assert [step["clients"] for step in steps] == [1, 2, 4, 4]
    assert all(step["searches_per_second"] > 0 and step["num_errors"] == 0 for step in steps)
    assert numbers["batching_gain"] == pytest.approx(
        numbers["steps"][-1]["searches_per_second"] / numbers["unbatched"]["searches_per_second"]
    )
    assert 0.1 < numbers["peak_memory_gb"] < 2


def test_bench_serve_compares_one_process_one_server_and_several_and_kills_one(tmp_path):
    sizes = "--items 300 --dim 16 --frames 3 --clients 4 --seconds 1 --batch 4 --replicas 2"
    result = run(*f"bench serve {sizes} --address {tmp_path / 'library'} --json".split())
    assert result.returncode == 0, result.stderr
    numbers = json.loads(result.stdout)
    steps = [numbers[name] for name in ("in_process", "one_client", "single", "replicas", "killed")]
    assert [step["clients"] for step in steps] == [1, 1, 4, 4, 4]
    assert all(step["num_answers"] > 0 for step in steps)
    assert [step["num_errors"] for step in steps] == [0, 0, 0, 0, 0]
    assert all(step["p50_ms"] <= step["p95_ms"] <= step["longest_ms"] for step in steps)
    assert [step["num_retried"] for step in steps[:4]] == [0, 0, 0, 0]
    assert numbers["killed"]["num_retried"] > 0  # the dead one was asked, and another one answered


def test_bench_index_and_encode(tmp_path):
    write_video(tmp_path / "a.mp4", steady(2))
    write_video(tmp_path / "b.mp4", steady(3))
    numbers = json.loads(run("bench", "index", str(tmp_path), "--json").stdout)
    assert (numbers["num_files"], numbers["num_items"]) == (2, 2)
    assert numbers["over_parts"] == pytest.approx(
        numbers["index_s"] / (numbers["decode_s"] + numbers["encode_s"])
    )
    numbers = json.loads(run("bench", "encode", "--frames", "2", "--videos", "2", "--json").stdout)
    assert numbers["videos_per_second"] == pytest.approx(2 * 1000 / numbers["batch_ms"])


def test_bench_scoring_prints_a_table():
    result = run(*["bench", "scoring", "--texts", "2", "--videos", "3", "--dim", "16"])
    assert result.returncode == 0, result.stderr
    assert "factored, cards ready" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench scoring --dtype int8", "is not one of float32"),
        ("bench scoring --device tpu", "is not a device"),
        ("bench exact --pooling maximum", "is not one of mean"),
        ("bench scoring --device cuda:9", "use --device cpu"),
        ("bench scoring --texts 0", "greater than or equal to 1"),
        ("bench scorign", "No such command"),
    ],
)
def test_misuse_is_explained_and_exits_with_2(arguments, message):
    result = run(*arguments.split())
    assert result.returncode == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_it_is_installed_as_a_command():
    """The one test that starts it as a shell does; the others start it warm."""
    done = subprocess.run([GARE_COMMAND, "--version"], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == f"{gare.__version__}\n"
    assert run("--version").stdout == done.stdout

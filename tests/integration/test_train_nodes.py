"""Training on two nodes: two launchers of torchrun that know of each other by an address alone, over gloo."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gare.train import RunConfig, train
from servers import HANG_S, free_port
from toy_data import recipe, write_dataset

CPU = torch.device("cpu")
NUM_STEPS, LAST_STEP_OF_THE_LOST = 8, 3
# The power of a node goes in the middle of a step: its launcher and its worker end at once, and say nothing.
DYING = f"""
import os, signal
from gare.cli.main import main
from gare.train.train_state import TrainState

step = TrainState.step

def step_or_die(state):
    if state.progress.step == {LAST_STEP_OF_THE_LOST}:
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGKILL)
    step(state)

TrainState.step = step_or_die
main()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process; its config.toml is the recipe of the others."""
    folder = tmp_path_factory.mktemp("nodes")
    settings = recipe(write_dataset(folder / "colours"), epochs=NUM_STEPS // 2, batch_size=4)
    train(RunConfig.load(settings), folder / "alone", device=CPU)
    return folder / "alone"


def start_node(
    rank: int, port: int, alone: Path, out: Path, *more: str, program: Sequence[str] = ("-m", "gare")
) -> subprocess.Popen[bytes]:
    """The launcher of one node."""
    launch = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = ["train", str(alone / "config.toml"), "--out", str(out), "--device", "cpu", *more]
    with open(f"{out}-{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launch, *program, *command],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def end(node: subprocess.Popen[bytes]) -> None:
    """End a launcher that is still there, with its worker, which has a session of its own."""
    if node.poll() is None:
        lists = Path(f"/proc/{node.pid}/task").glob("*/children")
        workers = [int(worker) for children in lists for worker in children.read_text().split()]
        for process in (node.pid, *workers):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.wait(HANG_S)


def said(out: Path, rank: int) -> str:
    return " ".join(Path(f"{out}-{rank}.log").read_text().split())


def assert_same_weights(run: Path, alone: Path) -> None:
    ours, theirs = (load_file(each / "last" / "model.safetensors") for each in (run, alone))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def lose(lost: int, alone: Path, out: Path) -> None:
    """Start two nodes; one is lost, and the other one says so and ends."""
    port, dying = free_port(), out.parent / "dying.py"
    dying.write_text(DYING)
    programs = [(str(dying),) if rank == lost else ("-m", "gare") for rank in range(2)]
    nodes = [start_node(rank, port, alone, out, program=program) for rank, program in enumerate(programs)]
    try:
        assert nodes[lost].wait(HANG_S) == -signal.SIGKILL
        assert nodes[1 - lost].wait(HANG_S) == 1, said(out, 1 - lost)
    finally:
        for node in nodes:
            end(node)
    assert "another process of this run is gone" in said(out, 1 - lost)
    assert "with --resume" in said(out, 1 - lost)
    assert (out / "checkpoints" / "latest").is_file()
    assert not (out / "last").exists()


def resume(outs: Sequence[Path], alone: Path) -> list[int]:
    """Start both nodes again, each with its folder of the run, and give how they ended."""
    port = free_port()
    nodes = [start_node(rank, port, alone, out, "--resume") for rank, out in enumerate(outs)]
    try:
        return [node.wait(HANG_S) for node in nodes]
    finally:
        for node in nodes:
            end(node)


def test_two_nodes_train_as_one_process_although_the_first_was_lost(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    lose(0, alone, out)
    assert resume([out, out], alone) == [0, 0], (said(out, 0), said(out, 1))
    assert_same_weights(out, alone)


def test_folders_that_are_not_shared_are_refused_and_one_node_goes_on_without_the_other(
    alone: Path, tmp_path: Path
) -> None:
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    lose(1, alone, out)
    elsewhere.mkdir()
    shutil.copy(out / "config.toml", elsewhere)
    assert resume([out, elsewhere], alone) == [1, 1]
    for each, rank in ((out, 0), (elsewhere, 1)):
        assert "would go on from different steps" in said(each, rank)
    train(RunConfig.load(out / "config.toml"), out, resume=True, device=CPU)
    assert_same_weights(out, alone)

"""Training on two nodes over gloo: two launchers of torchrun that know an address alone, or a Ray of two."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gare.cluster.ray_link import connected
from gare.cluster.train_cluster import train_on_cluster
from gare.errors import ClusterError, ConfigError
from gare.train import Observer, RunConfig, train
from ray_machines import Machines
from servers import HANG_S, free_port
from toy_data import recipe, write_dataset
from warm import WarmProcess, run_gare

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
) -> WarmProcess:
    """The launcher of one node, which is torchrun."""
    launch = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = ["train", str(alone / "config.toml"), "--out", str(out), "--device", "cpu", *more]
    with open(f"{out}-{rank}.log", "wb") as log:
        return WarmProcess(
            ["-c", "from torch.distributed.run import main; main()", *launch, *program, *command],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def end(node: WarmProcess) -> None:
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


class Dies(Observer):
    """Ends the first process of a run at once, in the middle of a step."""

    def start(self, run: object) -> None: ...

    def before_step(self, step: int, batch: object) -> None:
        if step == LAST_STEP_OF_THE_LOST:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, step: int, loss: object) -> None: ...


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray of two nodes with one core each."""
    with pytest.MonkeyPatch.context() as patch:
        here = str(Path(__file__).parent)
        patch.setenv("PYTHONPATH", os.pathsep.join([here, *sys.path]))  # what this process can import
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        machines = Machines(2)
        yield machines.address
        machines.cluster.shutdown()


def test_ray_starts_the_processes_and_a_lost_one_ends_the_run_which_then_goes_on(
    alone: Path, tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gare.cluster.train_cluster._LAST_WORDS_S", HANG_S)
    config, out = RunConfig.load(alone / "config.toml"), tmp_path / "run"
    machines: list[str] = []
    with connected(ray_address, user="a test"):
        with pytest.raises(ClusterError, match=r"process 0 of 2, on .* is lost .*with --resume"):
            train_on_cluster(
                config, out, num_workers=2, device="cpu", observers=[Dies()], on_start=machines.extend
            )
        assert len(machines) == 2
        changed = RunConfig.load(alone / "config.toml", ["seed=5"])
        with pytest.raises(ConfigError, match="has other settings"):  # what a process says is what we say
            train_on_cluster(changed, out, num_workers=2, device="cpu", resume=True)
    assert not (out / "last").exists()
    recipe_file = alone / "config.toml"
    done = run_gare(
        "train",
        recipe_file,
        "--out",
        out,
        "--resume",
        "--device",
        "cpu",
        "--ray",
        ray_address,
        "--workers",
        2,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / "best")
    assert_same_weights(out, alone)


def test_workers_without_ray_are_refused(alone: Path, tmp_path: Path) -> None:
    done = run_gare("train", alone / "config.toml", "--out", tmp_path / "run", "--workers", 2)
    assert done.returncode == 2
    assert "--nproc-per-node" in done.stderr
    assert not (tmp_path / "run").exists()

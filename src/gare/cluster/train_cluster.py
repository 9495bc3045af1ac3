"""`gare train --ray`: Ray starts the processes of a run, as torchrun would; the training code is the same.

Plain actors and not Ray Train: a process needs a place, its rank and the address of the first one. Ray Train
would bring checkpoints, retries and logs of its own beside those of a run.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gare.cluster.ray_link import alive_nodes, get
from gare.errors import ClusterError, LostPeerError
from gare.train import Observer, RunConfig, train

_LOOK_S = 1.0
_PLACE_S = 60.0
_START_S = 600.0
"""How long the processes of a run may take to start, on machines that are busy."""
_PORTS = range(20_000, 32_000)
"""Below those that a system hands out by itself: nobody gets one by chance before the run takes it."""
_LAST_WORDS_S = 30.0
"""When one process has failed: how long the others may take to say what they know of it."""


class TrainWorker:
    """One process of a run."""

    def place(self) -> tuple[str, int]:
        """The address of its machine, and a port that is free there."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        (name,) = (node.name for node in alive_nodes() if node.node_id == here)
        for port in random.Random().sample(_PORTS, len(_PORTS)):
            with suppress(OSError), socket.socket() as free:
                free.bind((name, port))
                return name, port
        raise ClusterError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free on {name}")

    def train(self, rank: int, world_size: int, first: tuple[str, int], cwd: str, **arguments: Any) -> None:
        """Be process `rank` of the run; arguments as for `train`."""
        try:
            os.chdir(cwd)  # a recipe may name its data relative to where the command was given
        except OSError as error:
            raise ClusterError(f"{cwd} is not on every machine ({error}); start where all share it") from None
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"})
        os.environ.update({"MASTER_ADDR": first[0], "MASTER_PORT": str(first[1])})
        train(**arguments)


def train_on_cluster(
    config: RunConfig,
    folder: Path,
    *,
    num_workers: int | None = None,
    resume: bool = False,
    device: str = "auto",
    observers: Sequence[Observer] = (),
    log_to: Sequence[str] = (),
    on_start: Callable[[Sequence[str]], None] = lambda machines: None,
) -> None:
    """Train on the cluster that this process is connected to; what is not said here is as for `train`.

    Args:
        folder: on a disk that every machine sees under the same name.
        num_workers: processes; default: one for each GPU of the cluster, or for each machine if it has none.
        device: `auto` gives each process a GPU where there are enough, else one core.
        on_start: called with the machine of every process.

    Raises:
        ClusterError: there is no room for so many, or one of them was lost.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    num_workers = num_workers or num_gpus or len(alive_nodes())
    on_gpu = device.startswith("cuda") or (device == "auto" and num_gpus >= num_workers)
    arguments = {
        "config": config,
        "folder": Path(os.path.abspath(folder)),
        "resume": resume,
        "device": torch.device("cuda" if on_gpu else "cpu"),
        "observers": observers,
        "log_to": log_to,
    }
    room = {"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}
    places = placement_group([room] * num_workers, strategy="SPREAD")
    try:
        workers = _start_workers(places, num_workers, room)
        asked = [worker.place.remote() for worker in workers]
        found = get(asked, "the workers of the run", seconds=_START_S)
        machines = [name for name, _ in found]
        on_start(machines)
        runs = [
            worker.train.remote(rank, num_workers, found[0], os.getcwd(), **arguments)
            for rank, worker in enumerate(workers)
        ]
        _wait(runs, machines, folder)
    finally:
        remove_placement_group(places)  # and what runs there


def _start_workers(places: Any, num_workers: int, room: dict[str, int]) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if not places.wait(_PLACE_S):
        raise ClusterError(
            f"the cluster has no room for {num_workers} processes with {room} each; give fewer --workers, or "
            "wait until others have finished"
        )
    actor = ray.remote(TrainWorker)
    return [
        actor.options(
            num_cpus=room["CPU"],
            num_gpus=room.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(places, index),
        ).remote()
        for index in range(num_workers)
    ]


def _wait(runs: Sequence[Any], machines: Sequence[str], folder: Path) -> None:
    """Wait until all processes have ended, or one has failed; raise the failure that caused the others."""
    import ray
    from ray.exceptions import RayError

    waiting = list(runs)
    while waiting:
        done, waiting = ray.wait(waiting, timeout=_LOOK_S)
        if any(_failure(run) for run in done):
            done, _ = ray.wait(list(runs), num_returns=len(runs), timeout=_LAST_WORDS_S)
            break
    failures = {runs.index(run): failure for run in done if (failure := _failure(run))}
    if not failures:
        return
    rank, cause = min(failures.items(), key=lambda each: (isinstance(each[1], LostPeerError), each[0]))
    if not isinstance(cause, RayError | LostPeerError):
        raise cause
    reason = str(cause).strip().partition("\n")[0][:300]
    raise ClusterError(
        f"process {rank} of {len(runs)}, on {machines[rank]}, is lost ({reason}). The last checkpoint in "
        f"{folder} is intact: give the same command with --resume"
    ) from cause


def _failure(run: Any) -> Exception | None:
    """Why a process ended, if it did not end well."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        ray.get(run, timeout=0)
    except RayTaskError as error:
        cause: Exception = error.cause
        return cause
    except RayError as error:
        lost: Exception = error
        return lost
    return None

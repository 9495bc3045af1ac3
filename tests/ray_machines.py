"""Machines of a Ray cluster, which are processes on this one.

Run as a script it is a cluster of its own, `python ray_machines.py NUM_NODES`: it prints its address.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import psutil

from servers import HANG_S, wait_until


class Machines:
    """Ray nodes of one core each.

    Args:
        client_port: where the head answers to machines that are none of them; 0 is nowhere.
    """

    def __init__(self, num_nodes: int = 3, *, client_port: int = 0) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        head = self._add(include_dashboard=False, ray_client_server_port=client_port or None)
        self.nodes = [head, *(self._add() for _ in range(num_nodes - 1))]
        self.address = self.cluster.address

    def _add(self, **more: Any) -> Any:
        from ray._private import services

        with patch.object(services, "get_node", partial(_wait_for_node, services.get_node)):
            node = self.cluster.add_node(wait=False, num_cpus=1, object_store_memory=80 * 2**20, **more)
        self.cluster._wait_for_node(node, HANG_S)  # by itself it would wait for half a minute
        return node

    def add(self) -> None:
        self.nodes.append(self._add())

    def kill_one(self) -> None:
        """As if its power was cut."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


def _wait_for_node(get_node: Callable[..., Any], *arguments: Any) -> Any:
    """What Ray knows of a node, once it has started. By itself, Ray gives up after half a minute."""
    found: list[Any] = []

    def is_there() -> bool:
        with suppress(RuntimeError):
            found.append(get_node(*arguments))
        return bool(found)

    wait_until(is_there, "a machine of Ray")
    return found[0]


class DoomedMachines:
    """A cluster to be killed altogether. Ray ends every process that was connected to it, so that this one
    may not be."""

    def __init__(self, num_nodes: int, **variables: str) -> None:
        command = [sys.executable, __file__, str(num_nodes)]
        self._process = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "no cluster was started"

    def kill(self) -> None:
        """Head, machines and all that runs on them."""
        doomed = psutil.Process(self._process.pid).children(recursive=True)
        for process in doomed:
            with suppress(psutil.NoSuchProcess):  # it has ended by itself meanwhile
                process.send_signal(signal.SIGKILL)
        self._process.kill()
        self._process.communicate(timeout=HANG_S)
        wait_until(lambda: not any(map(is_alive, doomed)), "the end of Ray")


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs; one that has ended may keep its number until its parent asks for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    machines = Machines(int(sys.argv[1]))
    print(machines.address, flush=True)
    sys.stdin.read()

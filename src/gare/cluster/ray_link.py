"""How we talk to Ray, in one place: connect, see the nodes, and never wait without a bound.

What Ray does by itself, and what that means for whoever uses this file:

- an actor whose process dies is gone (`max_restarts` is 0 unless set), and a call that was on its way is lost
  (`max_task_retries` is 0): say both where an actor is made;
- an actor dies with whoever made it, unless its lifetime is "detached";
- a call to an actor that is gone may never return, so that every answer is waited for with `get`, which ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from gare.errors import ClusterError, SlowClusterError
from gare.extras import require
from gare.version import __version__

NAMESPACE = "gare"
"""Where our named actors are, on every cluster."""
LOCAL = "local"
"""The address of a Ray of our own on this machine, which ends with the process."""
_ANSWER_S = 60.0
_CONNECT_S = 10.0
_HEAD_S = 30.0
_PROBE_ENDS_S = 180.0
_LOCAL_STARTS = 3
"""Ray gives a machine 30 s to start, which is too little for a busy one."""
_VERSION_S = 30.0
_PROBE = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1])
except Exception as error:
    print(type(error).__name__)
"""
"""Asks a head for its cluster. In a process of its own: Ray has settings that are read once, and ends
a process that has no token where it was told to have one."""
_TOKEN_HELP = (
    "set RAY_AUTH_MODE=token and give the token of the cluster in RAY_AUTH_TOKEN, in a file that "
    "RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token; 'ray get-auth-token' on its head prints it"
)
_LOCAL_OBJECTS_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is alive."""

    node_id: str
    name: str
    """Its address, as Ray knows it."""
    num_cpus: int
    num_gpus: int
    is_head: bool


@contextmanager
def connected(address: str, *, user: str, num_cpus: int | None = None) -> Iterator[None]:
    """Be connected to a cluster; a connection that the process has already is used and left open.

    Args:
        address: `HOST:PORT`, `ray://HOST:PORT`, `auto` for the cluster that this machine is part of, or
            `local` for a Ray of our own.
        user: what needs it, as a message calls it: "gare index --ray".
        num_cpus: of a Ray of our own; default: one for each core.

    Raises:
        ClusterError: there is no cluster at this address, or this machine is not part of it.
    """
    require("cluster", user)
    # Ray reports its use to its makers, and hides GPUs from what asks for none, unless told otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray.exceptions import AuthenticationError

    if ray.is_initialized():
        yield
        return
    own: dict[str, Any] = {}
    if address == LOCAL:
        # Ray would write a token to the user's home, and every later 'ray start' there would want it.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        own = {
            "num_cpus": num_cpus or os.cpu_count(),
            "include_dashboard": False,
            "object_store_memory": _LOCAL_OBJECTS_BYTES,
        }
    # Ray forks processes that become others at once; Lance's warning is not for these.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    has_answered = False
    try:
        has_answered = _knock(address)
        for start in range(1, _LOCAL_STARTS + 1):
            try:
                ray.init(address, namespace=NAMESPACE, logging_level="error", log_to_driver=False, **own)
                break
            except Exception:
                if address != LOCAL or start == _LOCAL_STARTS:
                    raise
                ray.shutdown()
    except AuthenticationError as error:
        raise ClusterError(
            f"the Ray cluster at {address} wants a token, or another one: {_TOKEN_HELP}"
        ) from error
    except Exception as error:  # Ray raises plain ones as well
        raise ClusterError(_explain(address, error, has_answered=has_answered)) from error
    try:
        yield
    finally:
        ray.shutdown()


def _explain(address: str, error: Exception, *, has_answered: bool) -> str:
    """Why there is no connection to an address, and what to do."""
    if address == LOCAL:
        return f"Ray does not start on this machine: {_first_line(error)}"
    if has_answered:
        host = address.rpartition(":")[0]
        return (
            f"the Ray cluster at {address} answers, but this machine cannot join in: {_first_line(error)}. "
            "One that is no part of the cluster takes the port for others: "
            f"--ray ray://{host}:10001"
        )
    return (
        f"there is no Ray cluster at {address}: {_first_line(error)}. Give HOST:PORT as 'ray start' printed "
        f"it, or --ray local for this machine alone. If the cluster wants a token, {_TOKEN_HELP}"
    )


def _knock(address: str) -> bool:
    """Whether the head of a cluster answers at HOST:PORT; other addresses are not asked.

    It raises where nobody listens, no Ray answers, or it wants a token; Ray itself would try for minutes.

    Raises:
        OSError: there is no Ray.
        AuthenticationError: it wants a token that this process does not have.
    """
    from ray.exceptions import AuthenticationError

    scheme, _, place = address.rpartition("://")
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdecimal():
        return False
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    if scheme:  # Ray's client has bounds of its own
        return False
    environment = os.environ | {"RAY_py_gcs_connect_timeout_s": f"{_HEAD_S:g}"}
    command = [sys.executable, "-c", _PROBE, place]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PROBE_ENDS_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError("something listens there, and does not answer") from None
    if done.stdout.strip() == "AuthenticationError":
        raise AuthenticationError("the token is missing or wrong")
    if done.stdout.strip() == "RpcError":
        raise OSError("something listens there that is not the head of a Ray cluster")
    return not done.stdout and done.returncode == 0  # whatever else it says, `ray.init` says better


def alive_nodes() -> list[Node]:
    """The machines that are there now, in the order of their ids."""
    import ray

    return sorted(
        (
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 0)),
                int(node["Resources"].get("GPU", 0)),
                "node:__internal_head__" in node["Resources"],
            )
            for node in ray.nodes()
            if node["Alive"]
        ),
        key=lambda node: node.node_id,
    )


def unfit_nodes(nodes: Sequence[Node]) -> dict[str, str]:
    """Machines that have another version than this one, or none: by name, what they have.

    One that does not answer in time is left out: it may be about to go.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def find_version() -> str:  # sent as it is: that machine may have no module of ours
        import importlib.util
        import pathlib
        import runpy

        found = importlib.util.find_spec("gare")  # importing it would take seconds on every machine
        if found is None or not found.origin:
            return "no gare"
        try:
            version = runpy.run_path(str(pathlib.Path(found.origin).with_name("version.py")))["__version__"]
        except (OSError, KeyError):
            return "another gare"
        return f"gare {version}"

    task = ray.remote(num_cpus=0, max_retries=0)(find_version)
    asked = {
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        ).remote(): node
        for node in nodes
    }
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_VERSION_S)
    found: dict[str, str] = {}
    for answer in answered:
        with suppress(RayError):
            found[asked[answer].name] = str(ray.get(answer, timeout=_VERSION_S))
    return {name: version for name, version in found.items() if version != f"gare {__version__}"}


def get(answers: Any, what: str, *, seconds: float = _ANSWER_S) -> Any:
    """The answer of a call, or of a list of calls.

    Args:
        what: what was asked for, as a message calls it: "the state of shard 12".

    Raises:
        SlowClusterError: it did not come in time.
        ClusterError: who was asked is dead.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError, WorkerCrashedError

    try:
        return ray.get(answers, timeout=seconds)
    except GetTimeoutError:
        message = f"{what} did not come within {seconds:g} s; is the cluster overloaded?"
        raise SlowClusterError(message) from None
    except (RayActorError, WorkerCrashedError) as error:
        reason, why = _first_line(error), str(error).strip().rpartition("\n")[2][:300]
        more = f" … {why}" if why and why not in reason else ""  # of what it died is in the last line
        raise ClusterError(f"{what} did not come: {reason}{more}") from error
    except RayTaskError as error:
        raise error.as_instanceof_cause() from None


def find_actor(name: str) -> Any | None:
    """The actor of this name in our namespace; None where there is none."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def end_actor(actor: Any) -> None:
    """End an actor for good, at once; one that is dead already is left out."""
    import ray

    ray.kill(actor, no_restart=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__

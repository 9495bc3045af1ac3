"""What Ray Serve adds as a front door, beside nginx and `gare serve --replica`, and beside no front door.

    python experiments/ray_serve_front.py [--replicas 3] [--clients 12] [--seconds 40]

The same application stands behind all of them, with a small synthetic library in a folder. They are asked in
turns, first at /health, where almost all the time is the front door's, then with searches. Then one replica
is killed under load behind each front door, and clients that do not retry count what failed.

It needs nginx and `ray[serve]`, which is not in the extra `cluster`: no test runs this file. Ray's own
packages may stand in an environment beside the project's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import ray
import torch
from ray import serve

from gare.bench import server_load
from gare.bench.server_load import LoadStep, Seen, load, started_server
from gare.bench.synthetic_library import make_library
from gare.bench.synthetic_vectors import synthetic_model
from gare.library.library import Library
from gare.serve.app import create_app
from gare.serve.http_server import bind
from gare.serve.serve_options import ServeOptions

TURNS = 4
BATCH = 16
DIM, FRAMES = 64, 4
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream replicas {{ least_conn; {servers} keepalive 64; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_set_header Host 127.0.0.1;
      proxy_next_upstream error timeout http_503 http_429;
    }}
  }}
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--items", type=int, default=2_000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="of load for each, and each kind of request"
    )
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        model = synthetic_model(DIM, FRAMES)
        make_library(folder / "library", model, given.items, print)
        model.save_pretrained(folder / "model")
        servers = [
            stack.enter_context(
                started_server(folder / "library", folder / "model", BATCH, "--replica", "--drain", "0")
            )
            for _ in range(given.replicas)
        ]
        urls = [server.url for server in servers]
        nginx_url, nginx = stack.enter_context(behind_nginx(urls, folder))
        started = time.monotonic()
        ray_url = stack.enter_context(behind_ray(folder, given.replicas))
        print(f"Ray and its replicas started in {time.monotonic() - started:.0f} s\n")
        doors = {
            "one server, no front door": urls[:1],
            f"{given.replicas} servers, no front door": urls,
            f"{given.replicas} servers behind nginx": [nginx_url],
            f"{given.replicas} replicas in Ray Serve": [ray_url],
        }
        print("| front door | asked | requests/s | p50 ms | p95 ms | 429, 503 | errors |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
        for kind in ("health", "search"):
            for name, step in asyncio.run(in_turns(doors, kind, given.clients, given.seconds)).items():
                print_row(name, kind, step)
        print("\n| killed under load | asked | requests/s | p50 ms | p95 ms | 429, 503 | errors |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
        ray_replica = ray_processes("ServeReplica")[-1]
        victims = {nginx_url: psutil.Process(servers[-1].process.pid), ray_url: ray_replica}
        for name, (url, *_) in list(doors.items())[2:]:
            step = asyncio.run(kill_one(url, victims[url], given.clients, given.seconds))
            print_row(name, "search", step)
        print(f"\nRay Serve had {given.replicas} replicas again after {wait_for(given.replicas):.0f} s")
        print_memory("gare serve, a process", [psutil.Process(server.process.pid) for server in servers[:-1]])
        print_memory("a replica of Ray Serve, a process", ray_processes("ServeReplica")[:-1])
        print_memory("nginx", [nginx, *nginx.children()], together=True)
        rest = [process for process in ray_processes("") if "ServeReplica" not in title(process)]
        print_memory("Ray without its replicas", rest, together=True)


@contextmanager
def behind_nginx(urls: Sequence[str], folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address of nginx in front of these servers, and its process."""
    port = free_port()
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, servers=servers))
    command = [
        shutil.which("nginx") or "/usr/sbin/nginx",
        "-c",
        str(folder / "nginx.conf"),
        "-p",
        str(folder),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def behind_ray(folder: Path, num_replicas: int) -> Iterator[str]:
    """The address of Ray Serve in front of so many replicas of the same application."""

    def build_app() -> object:
        torch.set_num_threads(os.cpu_count() or 1)  # as `gare serve` has them; Ray gives an actor one
        library = Library.open(str(folder / "library"), model=str(folder / "model"), read_only=True)
        return create_app(library, ServeOptions(is_replica=True, max_batch=BATCH))

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    port = free_port()
    ray.init("local", num_cpus=num_replicas + 1, include_dashboard=False, logging_level="error",
             log_to_driver=False, _node_ip_address="127.0.0.1", object_store_memory=256 * 2**20)  # fmt: skip
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False}
        )
        deployment = serve.deployment(
            num_replicas=num_replicas, max_ongoing_requests=128, ray_actor_options={"num_cpus": 0}
        )(serve.ingress(build_app)())
        serve.run(deployment.bind(), name="gare", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


async def in_turns(
    doors: dict[str, list[str]], kind: str, clients: int, seconds: float
) -> dict[str, LoadStep]:
    """What clients measured at each front door."""
    seen = {name: Seen() for name in doors}
    asked = server_load.search_path if kind == "search" else health_path
    for urls in doors.values():
        await load(urls, clients, min(5.0, seconds), Seen(), path=asked)
    for _ in range(TURNS):
        for name, urls in doors.items():
            await load(urls, clients, seconds / TURNS, seen[name], path=asked)
    return {name: seen[name].as_step(clients) for name in doors}


async def kill_one(url: str, victim: psutil.Process, clients: int, seconds: float) -> LoadStep:
    """Searches through a front door while a replica behind it is killed; no client retries."""

    async def kill() -> None:
        await asyncio.sleep(seconds / 2)
        victim.kill()

    step, _ = await asyncio.gather(load([url], clients, seconds, Seen()), kill())
    return step


def health_path(number: int, turn: int) -> str:
    return "/api/v1/health"


def free_port() -> int:
    with bind(ServeOptions(port=0)) as probe:
        return int(probe.getsockname()[1])


def title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def ray_processes(name: str) -> list[psutil.Process]:
    """Processes that Ray started here, whose command line holds this name."""
    ours = psutil.Process().children(recursive=True)
    is_rays = [process for process in ours if "ray" in title(process) and "gare serve" not in title(process)]
    return [process for process in is_rays if name in title(process)]


def wait_for(num_replicas: int) -> float:
    """Seconds until Ray Serve has so many replicas, counted from the end of the load; a minute at most."""
    started = time.monotonic()
    while len(ray_processes("ServeReplica")) < num_replicas and time.monotonic() < started + 60:
        time.sleep(0.5)
    return time.monotonic() - started


def print_row(name: str, kind: str, step: LoadStep) -> None:
    print(
        f"| {name} | {kind} | {step.searches_per_second:.1f} | {step.p50_ms:.1f} | {step.p95_ms:.1f} | "
        f"{step.num_busy} | {step.num_errors} |",
        flush=True,
    )


def print_memory(name: str, processes: Sequence[psutil.Process], *, together: bool = False) -> None:
    """Their memory, each page counted once among those that share it."""
    sizes = []
    for process in processes:
        with suppress(psutil.Error):
            sizes.append(process.memory_full_info().pss / 1e6)
    total = sum(sizes) if together else sum(sizes) / len(sizes)
    print(f"{name}: {len(sizes)} processes, {total:.0f} MB{'' if together else ' each'}")


if __name__ == "__main__":
    main()

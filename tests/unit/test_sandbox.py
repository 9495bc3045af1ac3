"""The box: what a decoder that was taken over can reach, tried from within."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from box_escapes import (
    attempts,
    send_raw,
    stall,
    tell_process,
    tell_surroundings,
    try_all,
    use_two_files,
)
from gare.data import fork_server, sandbox, workers
from gare.data.decoder_messages import HEADER, Facts, Failure, Kind
from gare.data.sandbox import LAYERS, landlock_rules, probe_box
from gare.data.seccomp_filter import _NUMBERS, make_filter
from gare.data.workers import Limits, Task, WorkerPool
from servers import HANG_S

LIMITS = Limits(seconds=HANG_S)


def need(*layers: str) -> None:
    """Skip, and say why, where this kernel lacks a layer."""
    missing = {layer: why for layer, why in probe_box().missing.items() if layer in layers}
    if missing:
        pytest.skip(f"this kernel does not hold decoders with {missing}")


def run(pool: WorkerPool[Any, Any], item: Any) -> tuple[list[Any], Any]:
    """The results of an item, and how its process was lost, if it was."""
    pool.submit(item)
    results = []
    while True:
        event = pool.next_event(HANG_S)
        assert event is not None
        if event.is_last:
            return results, event.lost
        results.append(event.result)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("a secret")
    return tmp_path


def try_to_escape(victim: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...]) -> dict[str, str]:
    """Every attempt and how it ended, in these layers alone."""
    real = sandbox.enter_box
    assert set(layers) <= set(LAYERS)
    reading, writing = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as server:
        item = (str(victim), server.getsockname()[1], os.getpid())
        child = os.fork()
        if not child:  # as a worker does, but with a choice of layers
            try:
                assert real(layers).layers == layers
                for name, deed in attempts(*item).items():
                    try:
                        deed()
                        os.write(writing, f"{name}: done\n".encode())
                    except OSError as error:
                        os.write(writing, f"{name}: {type(error).__name__}\n".encode())
                os.write(writing, b"all: tried\n")
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answers:
            found = dict(line.strip().split(": ") for line in answers)
        os.waitpid(child, 0)
    assert found.pop("all") == "tried"
    return found


def test_nothing_can_be_done_from_within(victim: Path) -> None:
    need(*LAYERS)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        WorkerPool(try_all, 1, limits=LIMITS) as pool,
    ):
        results, lost = run(pool, (str(victim), server.getsockname()[1], os.getpid()))
    assert lost is None
    assert results.pop() == Facts(1.0, 0, 0)  # a thread still works
    outcomes = [result.message for result in results]
    assert len(outcomes) == len(attempts("", 0, 0))
    assert [outcome for outcome in outcomes if outcome.endswith("done")] == []
    assert (victim / "secret").read_text() == "a secret"
    assert os.listdir(victim) == ["secret"]


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_alone_keeps_files_shut(victim: Path, monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    need(layer)
    outcomes = try_to_escape(victim, monkeypatch, (layer,))
    for deed in ("read a file", "list a folder", "write a file", "change a file", "remove a file"):
        assert outcomes[deed] != "done", outcomes
    if layer == "seccomp":
        assert "done" not in outcomes.values(), outcomes
    if layer == "namespaces":
        assert outcomes["connect"] != "done"
    assert (victim / "secret").read_text() == "a secret"
    assert os.listdir(victim) == ["secret"]


def test_a_worker_says_which_layers_hold_it() -> None:
    worker = workers._Worker(try_all, LIMITS, True)
    try:
        assert worker.layers == probe_box().layers
    finally:
        worker.kill()


def test_a_system_without_layers_is_told_and_still_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(libc: object) -> None:
        raise OSError(38, "Function not implemented")

    for name in ("_enter_namespaces", "_enter_landlock", "install_filter"):
        monkeypatch.setattr(sandbox, name, refuse)
    box = probe_box.__wrapped__()
    assert box.layers == ()
    assert box.describe().startswith("none (not namespaces: Function not implemented;")
    assert box.warning.startswith("this system has no sandbox for decoders")
    assert "in part" in sandbox.Box(("landlock",)).warning
    assert sandbox.Box(("seccomp",)).warning == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sandbox.enter_box().describe().count("darwin has none") == len(LAYERS)


def test_every_version_of_landlock_gets_the_rights_it_knows() -> None:
    expected = {
        1: (13, 8),
        2: (14, 8),
        3: (15, 8),
        4: (15, 16),
        5: (16, 16),
        6: (16, 24),
        7: (16, 24),
        99: (16, 24),
    }
    for version, (num_rights, length) in expected.items():
        rules = landlock_rules(version)
        assert len(rules) == length
        assert struct.unpack_from("=Q", rules)[0] == 2**num_rights - 1


def test_filters_have_no_call_that_opens_anything() -> None:
    forbidden = {
        "open",
        "openat",
        "openat2",
        "socket",
        "connect",
        "execve",
        "ptrace",
        "kill",
        "ioctl",
        "prctl",
    }
    assert not forbidden & set(_NUMBERS)
    for machine in ("x86_64", "aarch64"):
        code = make_filter(machine, 1234)
        assert len(code) % 8 == 0
        jumps = list(struct.iter_unpack("=HBBI", code))
        last = len(jumps) - 1
        for place, (kind, when_true, when_false, _) in enumerate(jumps):
            if kind & 7 == 5:  # a jump stays in the program
                assert place + 1 + max(when_true, when_false) <= last
        assert jumps[-1][0] == 6  # and it ends with an answer


# --- what a process begins with -----------------------------------------------------------------------------


class FileTask(Task[str, Any]):
    """Opens the file that the item names."""

    def open(self) -> int:
        self._descriptor = os.open(self.item, os.O_RDONLY)
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)


def test_no_secret_and_no_descriptor_goes_in(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "GARE_TOKEN": "t0ken-of-the-server",
        "AWS_SECRET_ACCESS_KEY": "aws-secret",
        "PGPASSWORD": "pg-secret",
        "HF_TOKEN": "hf-secret",
        "SSH_AUTH_SOCK": "/run/agent",
        "HOME": str(victim),
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    kept_open = open(victim / "secret")  # noqa: SIM115  # a descriptor that must not be inherited
    os.set_inheritable(kept_open.fileno(), True)
    monkeypatch.setattr(fork_server, "_server", None)  # one that starts now, with these set
    with kept_open, WorkerPool(tell_surroundings, 1, task=FileTask, limits=LIMITS) as pool:
        pool.submit(str(victim / "secret"))
        said: list[str] = []
        while True:
            event = pool.next_event(HANG_S)
            assert event is not None
            assert event.lost is None
            if isinstance(event.result, Facts):
                environ = Path(f"/proc/{int(event.result.duration)}/environ")
                seen_by_kernel = environ.read_bytes() if environ.parent.exists() else b""
            if event.is_last:
                break
            if isinstance(event.result, Failure):
                said.append(event.result.message)
    variables = {line.split()[1].partition("=")[0] for line in said if line.startswith("variable ")}
    assert variables <= {"PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"} | {
        name for name in variables if name.startswith(("LC_", "OPENBLAS_", "MKL_"))
    }
    for value in secrets.values():
        assert value not in "\n".join(line for line in said if line.startswith("variable "))
        assert value.encode() not in seen_by_kernel
    descriptors = {line.split()[1]: line.split()[2] for line in said if line.startswith("descriptor ")}
    file = next(line for line in said if line.startswith("file ")).split()[1]
    assert set(descriptors) == {"0", "1", "2", "3", file}
    assert int(descriptors[file]) == os.O_RDONLY
    assert "file 4 b'a secr'" in said
    assert "torch False" in said


class TwoFilesTask(Task[Path, Any]):
    """Opens a film to read and a clip to write."""

    def open(self) -> tuple[int, int]:
        self.payload = str(self.item)
        reading = os.open(self.item / "secret", os.O_RDONLY)
        self._descriptors = (
            reading,
            os.open(self.item / "clip.part", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600),
        )
        return self._descriptors

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def test_one_that_cuts_writes_its_clip_and_nothing_else(victim: Path) -> None:
    need("seccomp")
    with WorkerPool(use_two_files, 1, task=TwoFilesTask, limits=LIMITS) as pool:
        said, lost = run(pool, victim)
    assert lost is None
    messages = [each.message for each in said if isinstance(each, Failure)]
    assert [message for message in messages if message.startswith("done")] == [
        "done: read the film",
        "done: write the clip",
    ]
    assert len(messages) == 6
    assert (victim / "clip.part").read_bytes() == b"clip"
    assert not (victim / "clip.part").stat().st_mode & 0o111
    assert (victim / "secret").read_text() == "a secret"
    assert {path.name for path in victim.iterdir()} == {"clip.part", "secret"}


def test_an_upload_has_a_process_to_itself() -> None:
    with WorkerPool(tell_process, 1, limits=LIMITS, items_per_process=1) as pool:
        seen = [run(pool, number)[0][0].duration for number in range(3)]
    assert len(set(seen)) == 3
    with WorkerPool(tell_process, 1, limits=LIMITS) as pool:
        seen = [run(pool, number)[0][0].duration for number in range(3)]
    assert len(set(seen)) == 1


# --- what comes out of it is not believed -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\x80\x04cos\nsystem\n(S'touch here'\ntR.", "no message"),
        (HEADER.pack(200, 0), "unknown kind"),
        (HEADER.pack(Kind.FRAME, 2**32 - 1), "were allowed"),
        (HEADER.pack(Kind.FACTS, 3) + b"abc", "cannot be read"),
        (HEADER.pack(Kind.FACTS, 16) + struct.pack("<dII", float("nan"), 0, 0), "not a number"),
        (HEADER.pack(Kind.FAILURE, 3) + b"\x01\xff\xfe", "cannot be read"),
        (HEADER.pack(Kind.FAILURE, 2) + b"\x63a", "cannot be read"),
    ],
)
def test_what_is_no_message_ends_the_process_and_costs_one_file(sent: bytes, why: str) -> None:
    with WorkerPool(send_raw, 1, limits=LIMITS) as pool:
        results, lost = run(pool, sent)
        assert (results, lost.kind) == ([], "misbehaved")
        assert why in str(lost)
        assert run(pool, b"") == ([], None)


def test_half_a_message_does_not_hold_its_reader() -> None:
    with WorkerPool(stall, 1, limits=Limits(seconds=0.5)) as pool:
        _, lost = run(pool, b"half")
    assert lost.kind == "timeout"


def test_a_file_has_so_much_time_in_all_however_often_it_shows_life() -> None:
    from faults import show_life

    with WorkerPool(show_life, 1, limits=Limits(seconds=HANG_S, file_seconds=1, bytes_per_second=1)) as pool:
        _, lost = run(pool, None)
    assert lost.kind == "timeout"
    assert "in all" in str(lost)


def test_escape_sequences_do_not_reach_a_terminal() -> None:
    text = "\x1b]0;owned\x07\u202egpj".encode()
    with WorkerPool(send_raw, 1, limits=LIMITS) as pool:
        results, _ = run(pool, HEADER.pack(Kind.FAILURE, 1 + len(text)) + b"\x01" + text)
    assert results == [Failure("unreadable", "\\x1b]0;owned\\x07\\u202egpj")]


def test_many_pools_share_one_server_and_it_is_started_again() -> None:
    first = fork_server.get_fork_server()
    found = []
    threads = [threading.Thread(target=lambda: found.append(fork_server.get_fork_server())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [first] * 4
    os.kill(first.pid, 9)
    first._process.wait()
    with WorkerPool(send_raw, 1, limits=LIMITS) as pool:
        assert run(pool, b"") == ([], None)
    assert fork_server.get_fork_server() is not first

"""The process of a job: `python -m gare.serve.job_process`. It reads `{"kind": "index", …}` from stdin.

It says on stdout where it is, a JSON object a line. When stdin is closed (the server cancels, or was killed)
it ends where nothing is half done.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from typing import Any

_ended = threading.Event()


def main() -> None:
    """Do the job that the first line describes."""
    try:
        order = _read_order()
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        _do(order)
    except KeyboardInterrupt:
        _say(event="interrupted")


def _read_order() -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows is for the thread that waits for the end
        byte = os.read(0, 1)
        if not byte:
            raise KeyboardInterrupt
        line += byte
    order: dict[str, Any] = json.loads(line)
    return order


def _do(order: dict[str, Any]) -> None:
    from gare.errors import GareError
    from gare.library.library import Library

    if hasattr(os, "nice"):
        os.nice(5)  # searches come first
    try:
        is_change = order["kind"] == "change"
        with Library.open(
            order["library"], model=order["model"], create=False, change_model=is_change
        ) as library:
            if _ended.is_set():  # Python drops a Ctrl-C that comes in a callback, as imports have many
                raise KeyboardInterrupt
            {"index": _index, "change": _index, "audit": _audit}[order["kind"]](library, order)
    except GareError as error:
        _say(event="failed", message=str(error))


def _index(library: Any, order: dict[str, Any]) -> None:
    from gare.library.index.index_report import IndexProgress
    from gare.library.index.index_run import IndexOptions

    def on_progress(progress: IndexProgress) -> None:
        _say(
            event="progress",
            done=progress.done,
            total=progress.total,
            failed=progress.failed,
            path=progress.path,
        )

    options = IndexOptions(retry_failed=order["retry_failed"], num_workers=order["num_workers"])
    report = library.index(*order["folders"], options=options, on_progress=on_progress)
    summary = {**report.to_json(), "failures": len(report.failures)}
    _say(event="interrupted" if report.interrupted else "done", report=summary)


def _audit(library: Any, order: dict[str, Any]) -> None:
    def on_progress(done: int, total: int) -> None:
        _say(event="progress", done=done, total=total, failed=0, path="")

    _say(event="done", report=dataclasses.asdict(library.audit(on_progress=on_progress)))


def _say(**fields: Any) -> None:
    try:
        print(json.dumps(fields), flush=True)
    except BrokenPipeError:  # the server was killed; what is done is committed all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end_with_stdin() -> None:
    while os.read(0, 4096):  # not through sys.stdin, whose lock would be held when the process ends
        pass
    _ended.set()
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()

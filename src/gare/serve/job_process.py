"""The process of a job: `python -m gare.serve.job_process '{"kind": "index", …}'`.

It says on stdout where it is, a JSON object a line. When stdin is closed (the server cancels, or was killed)
it ends where nothing is half done.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from typing import Any


def main() -> None:
    try:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        _do(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        _say(event="interrupted")


def _do(order: dict[str, Any]) -> None:
    from gare.errors import GareError
    from gare.library.library import Library

    if hasattr(os, "nice"):
        os.nice(5)  # searches come first
    try:
        with Library.open(order["library"], model=order["model"], create=False) as library:
            {"index": _index, "audit": _audit}[order["kind"]](library, order)
    except GareError as error:
        _say(event="failed", message=str(error))


def _index(library: Any, order: dict[str, Any]) -> None:
    from gare.library.indexer import IndexOptions
    from gare.library.report import IndexProgress

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
    from gare.library.audit import audit

    def on_progress(done: int, total: int) -> None:
        _say(event="progress", done=done, total=total, failed=0, path="")

    _say(event="done", report=dataclasses.asdict(audit(library, on_progress=on_progress)))


def _say(**fields: Any) -> None:
    try:
        print(json.dumps(fields), flush=True)
    except BrokenPipeError:  # the server was killed; what is done is committed all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end_with_stdin() -> None:
    while os.read(0, 4096):  # not through sys.stdin, whose lock would be held when the process ends
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()

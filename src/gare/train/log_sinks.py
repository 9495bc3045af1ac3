"""Where else the metrics of a run go: Weights & Biases, trackio. metrics.jsonl always has everything.

Both have the same calls: `init`, `log`, `finish`. What goes wrong there when a run begins is an error,
because somebody waits for the curves; what goes wrong later is said once, and training goes on.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gare.atomic import write_text
from gare.errors import TrainingError
from gare.extras import require

PROJECT = "gare"
_ID_FILE = "run_id.txt"


class LogSink:
    """A run in a tracker.

    Args:
        name: a key of `SINKS`.
        folder: that of the run; it names the run, and keeps its id for `--resume`.
        config: every setting, to be shown beside the curves.

    Raises:
        MissingExtraError: the tracker is not installed.
        TrainingError: it does not start.
    """

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        require(name, f"gare train --log-to {name}")
        self.name = name
        self._module: Any = import_module(name)
        self._is_open = True
        try:
            with _quiet_stdout():
                self._module.init(project=PROJECT, config=dict(config), **SINKS[name](folder))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise TrainingError(
                f"{name} does not start: {_reason(error)}. Train without --log-to {name}, or see its own help"
                + (" (wandb login, or WANDB_MODE=offline)" if name == "wandb" else "")
            ) from None

    def log(self, metrics: Mapping[str, float], step: int) -> str | None:
        """Send numbers; what went wrong, once, after which the sink is silent."""
        return self._try(lambda: self._module.log(dict(metrics), step=step))

    def close(self) -> str | None:
        """Finish the run; what went wrong, if anything."""
        said = self._try(self._module.finish)
        self._is_open = False
        return said

    def _try(self, call: Callable[[], Any]) -> str | None:
        if not self._is_open:
            return None
        try:
            with _quiet_stdout():
                call()
        except Exception as error:  # of the tracker or its network: no reason to lose a run
            self._is_open = False
            return f"{self.name} failed ({_reason(error)}); training goes on, metrics.jsonl has everything"
        return None


def _wandb_options(folder: Path) -> dict[str, Any]:
    return {"name": folder.resolve().name, "id": _run_id(folder), "dir": str(folder), "resume": "allow"}


def _trackio_options(folder: Path) -> dict[str, Any]:
    # trackio knows a run by its name: a folder of the same name elsewhere is another run.
    return {"name": f"{folder.resolve().name}-{_run_id(folder)}", "resume": "allow"}


SINKS: dict[str, Callable[[Path], dict[str, Any]]] = {"wandb": _wandb_options, "trackio": _trackio_options}
"""What each tracker is told of a run."""


def open_sinks(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[LogSink]:
    """A sink for each name; those that have started are closed if a later one does not start."""
    opened: list[LogSink] = []
    try:
        for name in dict.fromkeys(names):
            opened.append(LogSink(name, folder, config))
    except BaseException:
        for sink in opened:
            sink.close()
        raise
    return opened


def _run_id(folder: Path) -> str:
    """The id of a run, the same when it is resumed."""
    path = folder / _ID_FILE
    if not path.is_file():
        write_text(path, uuid.uuid4().hex[:8] + "\n")
    return path.read_text(encoding="utf-8").strip()


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """What a tracker prints goes to stderr: stdout has results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

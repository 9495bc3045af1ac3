"""What one sees of a run: progress on the terminal, metrics.jsonl, TensorBoard, and sinks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from torch import Tensor
from torch.optim import Optimizer

from gare import atomic
from gare.evaluate.caption_protocols import TwoWayMetrics
from gare.extras import install_command
from gare.objective import Loss
from gare.train.log_sinks import LogSink
from gare.train.train_state import Progress

METRICS_FILE = "metrics.jsonl"


class RunLog:
    """Writes everything once; on resuming, lines past the checkpoint are dropped first."""

    def __init__(
        self, folder: Path, progress: Progress, *, enabled: bool, sinks: Sequence[LogSink] = ()
    ) -> None:
        self._enabled = enabled
        self._sinks = sinks
        self._console = Console(stderr=True)
        self._bar = ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not enabled,
        )
        self._task: TaskID | None = None
        self._preparation: TaskID | None = None
        self._file: TextIO | None = None
        self._board: Any = None
        if enabled:
            path = folder / METRICS_FILE
            kept = [line for line in atomic.whole_lines(path) if _is_before(progress, line)]
            atomic.write_text(path, "".join(line + "\n" for line in kept))
            self._file = path.open("a", encoding="utf-8")
            self._board = _tensorboard(folder / "tensorboard", progress.step)
            if self._board is None:
                message = f"TensorBoard is not installed; {METRICS_FILE} has everything. To have both:"
                self._console.print(f"{message} {install_command('train')}", markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        for sink in self._sinks:
            self._complain(sink.close())

    def say(self, message: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(message)

    def preparing(self, done: int, total: int) -> None:
        """Progress over videos before the first step or evaluation: decoding, or the frozen image tower."""
        if self._preparation is None:
            self._preparation = self._bar.add_task("preparing", total=total)
        self._bar.update(self._preparation, completed=done, total=total)
        if done >= total:
            self._bar.remove_task(self._preparation)
            self._preparation = None

    def start(self, num_steps: int, step: int, *, missing: int) -> None:
        """Begin the progress bar over steps."""
        if missing and self._enabled:
            self.say(f"[yellow]{missing} videos are missing; they are left out everywhere[/]")
        self._task = self._bar.add_task("training", total=num_steps, completed=step)

    def advance(self) -> None:
        """Count one step."""
        assert self._task is not None
        self._bar.advance(self._task)

    def step(
        self, step: int, epoch: int, loss: Loss, optimizer: Optimizer, norm: Tensor, pairs_per_second: float
    ) -> None:
        """Log the loss, its terms, the learning rates and the speed of a step."""
        if not self._enabled or self._task is None:
            return
        terms = {name: term.item() for name, term in loss.terms.items()}
        record: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "loss": loss.total.item(),
            **{f"term/{name}": value for name, value in terms.items()},
            "gradient_norm": norm.item(),
            "learning_rate": max(group["lr"] for group in optimizer.param_groups),
            "pairs_per_second": round(pairs_per_second, 1),
        }
        if torch.cuda.is_available():
            record["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in terms.items())
        memory = f"  {record['memory_gb']} GB" if "memory_gb" in record else ""
        self._bar.update(self._task, description=f"{shown}  {pairs_per_second:.0f} pairs/s{memory}")
        self._write(record)

    def evaluation(self, step: int, split: str, metrics: TwoWayMetrics) -> None:
        """Log and print the metrics of an evaluation."""
        text, video = metrics.text_to_video["pessimistic"], metrics.video_to_text["pessimistic"]
        record: dict[str, Any] = {"step": step, "split": split}
        record |= {f"text_to_video/{name}": value for name, value in text.numbers.items()}
        record |= {f"video_to_text/{name}": value for name, value in video.numbers.items()}
        self._write(record)
        recalls = " / ".join(
            f"{100 * x:.1f}" for x in (text.recall_at_1, text.recall_at_5, text.recall_at_10)
        )
        self.say(f"step {step}  {split}  text→video R@1/5/10 {recalls}  MdR {text.median_rank:g}")

    def flush(self) -> None:
        """Wait until every line is on the disk, so that no power cut leaves a checkpoint without them."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        prefix = f"{record['split']}/" if "split" in record else ""
        numbers = {prefix + name: value for name, value in record.items() if isinstance(value, float)}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, record["step"])
        for sink in self._sinks:
            self._complain(sink.log(numbers, record["step"]))

    def _complain(self, message: str | None) -> None:
        if message:
            self._console.print(message, style="yellow", markup=False, soft_wrap=True)


def _is_before(progress: Progress, line: str) -> bool:
    """Whether a resumed run will not write this again: an evaluation that is still owed comes again.

    A power cut may leave anything in lines that come after those the checkpoint waited for.
    """
    try:
        record = {**json.loads(line)}
    except (ValueError, TypeError):
        return False
    is_owed = "split" in record and not progress.is_closed
    return bool(record["step"] < progress.step + (not is_owed))


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)

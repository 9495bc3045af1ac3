"""What `gare plan` computes with: a few numbers that `gare bench` measures and keeps, each with its command.

Those that this machine has not measured yet are the defaults below. They say where they were measured, and
which of them are from elsewhere than the command that measures them anew.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gare.atomic import write_text
from gare.cache_folder import cache_folder
from gare.errors import GareError

HERE = "this machine"


@dataclass(frozen=True)
class Constant:
    """A measured number."""

    value: float
    unit: str
    command: str
    """What measures it again."""
    where: str
    """The machine it was measured on."""
    measured: str
    """The day; where the number is not from a run of the command, what it is from."""
    dim: int = 512
    """Width of the embedding it was measured with."""


_SEARCH = "gare bench search --items 100000 --hours 20"
_INDEX = "gare bench index FOLDER"
_SERVE = "gare bench serve"
_EXACT = "gare bench exact --items 10000"
_ENCODE_GPU = "gare bench encode --model clip --videos 128 --device cuda"
_EXACT_GPU = "gare bench exact --items 1000000 --device cuda"
_BUSY = "two busy CPU cores, D = 512"
_IDLE = "two idle CPU cores, D = 512"
_THREAD = "one thread of a busy machine, D = 512"
_CLIPS = "two busy CPU cores, 22 small clips, 16 MB, processor time"
_H200 = "one NVIDIA H200, D = 512, 16 texts at once"
_H200_ENCODE = "one NVIDIA H200, ViT-B/32, 128 videos at once"
_TODAY = "2026-11-18"
_BEFORE = "from docs/benchmarks.md, an earlier day"
_GPU_SCRIPT = "2026-11-19, by experiments/gpu_exact.py: results/gpu-exact/h200-2026-11-19.json, top 100"


def _default(value: float, unit: str, command: str, where: str, measured: str = _TODAY) -> Constant:
    return Constant(value, unit, command, where, measured)


CONSTANTS: dict[str, Constant] = {
    "item_bytes": _default(2_990, "bytes an item without its frames", _SEARCH, _BUSY),
    "items_an_hour": _default(1_575, "items an hour of film", _SEARCH, _BUSY),
    "search_memory": _default(2_470, "bytes of memory an item, for stage 1", _SEARCH, _BUSY),
    "process_memory": _default(616e6, "bytes of memory, before the library is opened", _SEARCH, _BUSY),
    "search_items": _default(100_000, "items, when the search was timed", _SEARCH, _IDLE, _BEFORE),
    "search_ms": _default(38.1, "ms, words to hits", _SEARCH, _IDLE, _BEFORE),
    "stage1_ms": _default(4.0, "ms of it, stage 1", _SEARCH, _IDLE, _BEFORE),
    "picture_bytes": _default(2_420, "bytes of small pictures a frame", _INDEX, _CLIPS),
    "frames_an_hour": _default(2_565, "frames an hour of video", _INDEX, _CLIPS),
    "decode_core_s": _default(23.3, "core seconds to decode an hour of video", _INDEX, _CLIPS),
    "index_core_s": _default(67.5, "core seconds to index an hour of video", _INDEX, _CLIPS),
    "replica_searches": _default(47.5, "searches a second of a server", _SERVE, _IDLE, _BEFORE),
    "replica_cores": _default(2, "cores of that server", _SERVE, _IDLE, _BEFORE),
    "card_bytes": _default(17_268, "bytes of cards an item, of 12 frames", _EXACT, _BUSY),
    "exact_ns": _default(1_340, "ns of a core, an item and text", _EXACT, _THREAD, _BEFORE),
    "exact_fixed_ms": _default(4.4, "ms a text besides", _EXACT, _THREAD, _BEFORE),
    "gpu_frames": _default(60_600, "frames encoded a second", _ENCODE_GPU, _H200_ENCODE, "2026-11-19"),
    "gpu_exact_ns": _default(0.073, "ns an item and text", _EXACT_GPU, _H200, _GPU_SCRIPT),
    "gpu_exact_fixed_ms": _default(0.2, "ms a text besides", _EXACT_GPU, _H200, _GPU_SCRIPT),
}
"""The defaults, by name."""


def constants_path() -> Path:
    """Where `gare bench` keeps what it measured: in the cache of the user."""
    return cache_folder() / "constants.json"


def read_constants(path: Path | None = None) -> dict[str, Constant]:
    """The defaults, and over them what was measured: here, or on the machine that a file came from.

    Raises:
        GareError: a file that was named cannot be read.
    """
    try:
        values = json.loads((path or constants_path()).read_text(encoding="utf-8"))
        known = {name: Constant(**value) for name, value in values.items() if name in CONSTANTS}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if path is None:  # nothing measured yet, or written by another version
            return dict(CONSTANTS)
        why = getattr(error, "strerror", None) or error
        raise GareError(
            f"cannot read constants from {path}: {why}; gare bench writes such a file to {constants_path()}"
        ) from None
    return CONSTANTS | known


def remember_constants(values: Mapping[str, float], *, where: str, dim: int = 512) -> None:
    """Keep what a benchmark measured, with the command that is running. Without a cache, nothing is kept.

    Args:
        dim: width of the embedding, where the numbers depend on it.
    """
    measured = datetime.now(UTC).date().isoformat()
    command = shlex.join(["gare", *sys.argv[1:]])
    here = {name: constant for name, constant in read_constants().items() if constant != CONSTANTS[name]}
    for name, value in values.items():
        here[name] = replace(
            CONSTANTS[name],
            value=value,
            command=command,
            where=f"{HERE}: {where}",
            measured=measured,
            dim=dim,
        )
    try:
        constants_path().parent.mkdir(parents=True, exist_ok=True)
        write_text(constants_path(), json.dumps(as_plain(here), indent=2) + "\n")
    except OSError:
        return


def as_plain(constants: Mapping[str, Constant]) -> dict[str, dict[str, Any]]:
    """The constants as plain values."""
    return {name: asdict(constant) for name, constant in constants.items()}

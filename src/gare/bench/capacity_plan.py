"""What a library of some size takes: storage, memory, machines, hours to index it, milliseconds to search it.

Arithmetic on measured constants (`measured_constants.py`), not a measurement. `limits` says where the design
does not hold any more at that size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gare.bench.measured_constants import Constant

_ROWS_A_PART = 1_000_000  # of the index of stage 1, as the store builds it
_MOST_PARTS = 8  # that a search reads
_FULL = 0.8  # of a machine's memory may be filled
_BUSY = 0.7  # of what a replica can answer, so that a burst does not wait
_SHORT_HOURS = 12 / 3600  # a video so long is one item
_BYTES_A_DIMENSION = {
    "item_bytes": 5,  # stage 1: a float, and a byte in its index
    "search_memory": 1,  # that byte
    "card_bytes": 28,  # of twelve frames; as `gare bench exact --dim` shows for 128 to 1,024
}
_LEDGER_BYTES = 500  # of memory a file, while an indexing run is planned


@dataclass(frozen=True)
class Demand:
    """What is to be searched, and how often."""

    videos: float
    hours: float
    """Hours of video, all of them together."""
    queries: float
    """Searches a second."""


@dataclass(frozen=True)
class Machines:
    """What a node has, and how long indexing may take."""

    cores: int = 16
    memory_gb: float = 64
    gpu_memory_gb: float = 80
    days: float = 7
    """Days for indexing."""
    dim: int = 512


@dataclass(frozen=True)
class Plan:
    """What it takes. Times of searches are medians, without waiting for others."""

    demand: Demand
    items: float
    frames: float
    storage_bytes: float
    index_cpu_hours: float
    """Hours of one node without a GPU."""
    index_cpu_nodes: int
    """Nodes that are done in time."""
    index_gpu_hours: float
    """Hours of one node whose cores decode for one GPU."""
    index_gpu_nodes: int
    search_ms: float
    search_memory_bytes: float
    """Main memory of each replica."""
    replicas: int
    """Nodes that serve, for the searches a second."""
    card_bytes: float
    """Cards of exact search, all shards together."""
    exact_cpu_shards: int
    exact_cpu_ms: float
    exact_gpu_shards: int
    exact_gpu_ms: float
    limits: tuple[str, ...]
    """Where the design does not hold at this size."""


def make_plan(demand: Demand, machines: Machines, constants: Mapping[str, Constant]) -> Plan:
    """What a library takes."""
    known = {name: _at_width(name, constant, constants, machines.dim) for name, constant in constants.items()}
    # The first seconds of a video are one item; a long one has moments besides.
    items = demand.videos + known["items_an_hour"] * max(0.0, demand.hours - demand.videos * _SHORT_HOURS)
    frames = max(demand.videos, demand.hours * known["frames_an_hour"])
    cpu_hours = demand.hours * known["index_core_s"] / machines.cores / 3600
    decoding = demand.hours * known["decode_core_s"] / machines.cores / 3600
    gpu_hours = max(decoding, frames / known["gpu_frames"] / 3600)
    search_memory = known["process_memory"] + items * known["search_memory"]
    cards = items * known["card_bytes"]
    cpu_shards = _shards(cards, machines.memory_gb)
    gpu_shards = _shards(cards, machines.gpu_memory_gb)
    a_node = known["replica_searches"] * machines.cores / known["replica_cores"] * _BUSY
    of_a_core = items / cpu_shards / machines.cores
    return Plan(
        demand=demand,
        items=items,
        frames=frames,
        storage_bytes=items * known["item_bytes"] + frames * (2 * machines.dim + known["picture_bytes"]),
        index_cpu_hours=cpu_hours,
        index_cpu_nodes=math.ceil(cpu_hours / (24 * machines.days)),
        index_gpu_hours=gpu_hours,
        index_gpu_nodes=math.ceil(gpu_hours / (24 * machines.days)),
        search_ms=_search_ms(items, known),
        search_memory_bytes=search_memory,
        replicas=max(1, math.ceil(demand.queries / a_node)),
        card_bytes=cards,
        exact_cpu_shards=cpu_shards,
        exact_cpu_ms=known["exact_fixed_ms"] + of_a_core * known["exact_ns"] / 1e6,
        exact_gpu_shards=gpu_shards,
        exact_gpu_ms=known["gpu_exact_fixed_ms"] + items / gpu_shards * known["gpu_exact_ns"] / 1e6,
        limits=tuple(_limits(demand, items, search_memory, machines)),
    )


def _at_width(name: str, constant: Constant, constants: Mapping[str, Constant], dim: int) -> float:
    """A constant for embeddings of this width; the time of exact search is that of reading the cards."""
    if name in _BYTES_A_DIMENSION:
        return max(1.0, constant.value + _BYTES_A_DIMENSION[name] * (dim - constant.dim))
    if name in ("exact_ns", "gpu_exact_ns"):
        cards = constants["card_bytes"]
        now, then = (_at_width("card_bytes", cards, constants, width) for width in (dim, constant.dim))
        return constant.value * now / then
    return constant.value


def num_parts(items: float) -> int:
    """Parts of the index of stage 1."""
    return max(1, round(items / _ROWS_A_PART))


def _search_ms(items: float, known: Mapping[str, float]) -> float:
    """Stage 1 walks a graph in every part that it reads; the rest does not depend on the size."""
    measured = known["search_items"]
    parts, before = num_parts(items), num_parts(measured)
    walk = math.log(max(2.0, items / parts)) / math.log(measured / before)
    growth = walk * min(parts, _MOST_PARTS) / min(before, _MOST_PARTS)
    return known["search_ms"] + known["stage1_ms"] * (growth - 1)


def _shards(num_bytes: float, memory_gb: float) -> int:
    return max(1, math.ceil(num_bytes / (_FULL * memory_gb * 1e9)))


def _limits(demand: Demand, items: float, search_memory: float, machines: Machines) -> list[str]:
    found = []
    if (parts := num_parts(items)) > _MOST_PARTS:
        found.append(
            f"stage 1 reads {_MOST_PARTS} of {parts:,} parts of its index: its recall falls, and an audit "
            "shows how far; --exact on shards does not depend on it"
        )
    if search_memory > _FULL * machines.memory_gb * 1e9:
        found.append(
            "the index of stage 1 does not fit into a replica: split the library, or take more memory"
        )
    if demand.videos * _LEDGER_BYTES > _FULL * machines.memory_gb * 1e9:
        found.append(
            "one process cannot compare that many files with the ledger: index parts of the source in turn"
        )
    return found

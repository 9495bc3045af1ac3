"""A million videos in the memory of a GPU: how long a proven top k takes, and what the memory's speed allows.

Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.bench.bench_timing import describe_device, median_ms, wait_for
from gare.interaction import GapAware, GapAwareConfig
from gare.interaction.resident_table import ResidentTable
from gare.types import TextFeatures, VideoFeatures, block_slices

_CLUSTERS = 400
_MADE_AT_ONCE = 8192


@dataclass(frozen=True)
class ResidentCase:
    """What is held and asked for."""

    num_items: int
    num_texts: int
    top: int
    dim: int = 512
    frames: int = 12
    scale: float = 1.0
    """How many times larger than they start all weights of the interaction are."""
    wide_keys: bool = True
    host_frames: bool = False
    """Frames in pinned main memory, from where the GPU reads those of what is scored."""


@dataclass(frozen=True)
class ResidentBenchmark:
    """Milliseconds are for all texts together."""

    case: ResidentCase
    device: str
    torch: str
    build_s: float
    table_gb: float
    search_ms: float
    """Texts to proven lists."""
    bounds_ms: float
    """Of these, the first pass over all cards."""
    read_ms: float
    """The floor: the bytes of the cards read once."""
    scored: float
    """Items scored in float64 for a list, on average."""
    num_checked: int
    """Lists compared with all items scored in float64."""
    num_equal: int
    bounds_broken: int
    """Scores outside their bounds, of those lists."""


class SyntheticVideos:
    """Clustered texts and videos, made on the device: block by block the same every time."""

    def __init__(self, case: ResidentCase, device: torch.device) -> None:
        self._case, self._device = case, device
        self._scale_D = 1 / (1 + torch.arange(case.dim, device=device) / 20).sqrt()
        self._centre_CD = self._draw(0, _CLUSTERS, case.dim) * self._scale_D

    def texts(self) -> TextFeatures:
        return TextFeatures.from_vectors(self._vectors(1, self._case.num_texts))

    def block(self, number: int, count: int) -> Tensor:
        """Frames [V, F, D] in float16."""
        mean_VD = self._vectors(2 * number + 2, count)
        noise_VFD = self._draw(2 * number + 3, count, self._case.frames, self._case.dim)
        noise_VFD *= 0.3 / math.sqrt(self._case.dim)
        return (mean_VD[:, None] + noise_VFD).half()

    def _vectors(self, seed: int, count: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(seed + 10**6)
        cluster_V = torch.randint(_CLUSTERS, (count,), generator=generator, device=self._device)
        noise_VD = self._draw(seed + 2 * 10**6, count, self._case.dim)
        return F.normalize(self._centre_CD[cluster_V] + 0.7 * noise_VD * self._scale_D, dim=-1)

    def _draw(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self._device)


@torch.no_grad()
def benchmark_resident(
    case: ResidentCase, *, device: torch.device, check: int, say: Callable[[str], None]
) -> ResidentBenchmark:
    """Fill a table with synthetic videos, search it, and compare `check` lists with float64 of every pair."""
    torch.manual_seed(0)
    interaction = GapAware(GapAwareConfig(pooling="text_conditioned"), case.dim).eval().to(device)
    for parameter in interaction.parameters():
        parameter.mul_(case.scale)
    videos = SyntheticVideos(case, device)
    table = ResidentTable(interaction, [device], wide_keys=case.wide_keys)
    place = {"pin_memory": True} if case.host_frames else {"device": device}
    frames_VFD = torch.empty(case.num_items, case.frames, case.dim, dtype=torch.float16, **place)
    started = time.perf_counter()
    for number, rows in enumerate(block_slices(case.num_items, _MADE_AT_ONCE)):
        part_VFD = videos.block(number, rows.stop - rows.start)
        frames_VFD[rows] = part_VFD
        table.add(_features(part_VFD), more=case.num_items - rows.stop)
        if rows.stop % (16 * _MADE_AT_ONCE) == 0:
            say(f"  {rows.stop:,} cards")
    wait_for(device)
    build_s = time.perf_counter() - started

    def fetch(rows: Tensor) -> VideoFeatures:
        if not case.host_frames:
            return _features(frames_VFD[rows])
        from gare.interaction.bounds_cuda import gather_rows

        return _features(gather_rows(frames_VFD.flatten(1), rows).unflatten(1, frames_VFD.shape[1:]))

    text = videos.texts()
    found = table.find(text, case.top, fetch)  # and kernels are compiled
    search_ms = median_ms(lambda: table.find(text, case.top, fetch), device)
    bounds_ms = median_ms(lambda: table.bounds(text), device)
    held_bytes = table.num_bytes * case.num_items // table.num_rows
    num_equal, broken = _compare(
        interaction, table, text[:check], frames_VFD, [one.rows for one in found], case.top
    )
    return ResidentBenchmark(
        case=case,
        device=describe_device(device),
        torch=torch.__version__,
        build_s=build_s,
        table_gb=held_bytes / 1e9,
        search_ms=search_ms,
        bounds_ms=bounds_ms,
        read_ms=_read_ms(held_bytes, device),
        scored=sum(one.num_scored for one in found) / len(found),
        num_checked=min(check, case.num_texts),
        num_equal=num_equal,
        bounds_broken=broken,
    )


def _features(frames_VFD: Tensor) -> VideoFeatures:
    return VideoFeatures(
        frames_VFD, torch.ones(frames_VFD.shape[:2], dtype=torch.bool, device=frames_VFD.device)
    )


def _compare(
    interaction: GapAware,
    table: ResidentTable,
    text: TextFeatures,
    frames_VFD: Tensor,
    found: list[list[int]],
    top: int,
) -> tuple[int, int]:
    """How many lists are those of all scores in float64, and how many scores lie outside their bounds."""
    import copy

    if not len(text):
        return 0, 0
    double = copy.deepcopy(interaction).double().for_search()
    device = text.text_TD.device
    parts = [
        double.score(text.to(torch.float64), _features(frames_VFD[rows].to(device).double()))
        for rows in block_slices(len(frames_VFD), _MADE_AT_ONCE)
    ]
    scores_TV = torch.cat(parts, dim=1)
    lower_TV, upper_TV = table.bounds(text)
    broken = int(((scores_TV > upper_TV) | (scores_TV < lower_TV)).sum())
    best_TK = scores_TV.sort(dim=1, descending=True, stable=True).indices[:, :top]
    return sum(rows == expected for rows, expected in zip(best_TK.tolist(), found, strict=False)), broken


def _read_ms(num_bytes: int, device: torch.device) -> float:
    """As many bytes read once, and next to nothing done with them."""
    size = min(num_bytes, 2**31)
    numbers = torch.ones(size // 8, dtype=torch.int64, device=device)
    return median_ms(numbers.amax, device) * num_bytes / size

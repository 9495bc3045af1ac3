"""A million videos in the memory of a GPU: how long a proven top k takes, and what the memory's speed allows.

It is the table that exact searches of a library on a GPU begin from. Without a GPU it runs in Triton's
interpreter, to be tried.

Shapes: T texts, V videos, F frames, D embedding.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.bench.bench_timing import describe_device, median_ms, wait_for
from gare.interaction import GapAware, GapAwareConfig
from gare.interaction.proven_pairs import ProvenList
from gare.interaction.resident_table import ResidentTable
from gare.types import TextFeatures, VideoFeatures, block_slices

_CLUSTERS = 400
_MADE_AT_ONCE = 8192
_MULTIPLIED_AT_ONCE = 2**18
LEAST_FOR_PLANS = 1_000_000


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
    pooling: str = "text_conditioned"
    corrected_side: str = "text"
    wide_keys: bool = True
    host_frames: bool = False
    """Frames in pinned main memory, from where the GPU reads those of what is scored."""


@dataclass(frozen=True)
class ResidentTimes:
    """Milliseconds are for all texts together."""

    search_ms: float
    """Texts to proven lists."""
    first_ms: float
    """The part of `search_ms` that bounds all cards by the first rung."""
    bounds_ms: float
    """Not part of a search: the second rung of all cards."""
    read_ms: float
    """The bytes of the cards read once: the floor of the second rung."""
    first_read_ms: float
    """The bytes that the first rung needs, read once: its floor."""
    scored: float
    """Items scored in float64 for a list, on average."""
    scored_share: float
    """The same as a share of all items."""


@dataclass(frozen=True)
class ResidentCheck:
    """Lists compared with all items scored in float64."""

    num_checked: int
    num_equal: int
    bounds_broken: int
    """Scores outside their bounds, of these lists."""


@dataclass(frozen=True)
class ResidentBenchmark:
    """What `gare bench exact` says of a GPU."""

    case: ResidentCase
    device: str
    torch: str
    fill_s: float
    """The making of all videos and their cards."""
    cards_gb: float
    times: ResidentTimes
    product_ms: float
    """The bare product of the texts with F + 2 vectors of every video, in bfloat16."""
    check: ResidentCheck

    @property
    def constants(self) -> dict[str, float]:
        """What `gare plan` uses of it; nothing of a small table, where launches take most of the time."""
        if self.case.num_items < LEAST_FOR_PLANS:
            return {}
        texts, times = self.case.num_texts, self.times
        return {
            "gpu_exact_ns": 1e6 * times.first_ms / texts / self.case.num_items,
            "gpu_exact_fixed_ms": (times.search_ms - times.first_ms) / texts,
        }


def benchmark_resident(
    case: ResidentCase, *, check: int, device: torch.device, say: Callable[[str], object]
) -> ResidentBenchmark:
    """Fill a table, time its searches, and compare the lists of so many texts with float64."""
    run = ResidentRun(case, device)
    say(f"making {case.num_items:,} items and their cards on {describe_device(device)}")

    def say_some(done: int) -> None:
        if done == case.num_items or done % (16 * _MADE_AT_ONCE) == 0:
            say(f"  {done:,}")

    seconds = run.fill(say_some)
    say(f"searches for {case.num_texts} texts")
    times, product_ms = run.time(), run.product_ms()
    if check:
        say(f"scoring all items for {min(check, case.num_texts)} of them in float64")
    return ResidentBenchmark(
        case=case,
        device=describe_device(device),
        torch=torch.__version__,
        fill_s=seconds,
        cards_gb=run.table_bytes / 1e9,
        times=times,
        product_ms=product_ms,
        check=run.check(check) if check else ResidentCheck(0, 0, 0),
    )


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


class ResidentRun:
    """A table of synthetic videos, filled, timed and checked one after the other: each gives its result."""

    def __init__(self, case: ResidentCase, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        config = GapAwareConfig.load({"pooling": case.pooling, "corrected_side": case.corrected_side})
        self._interaction = GapAware(config, case.dim).eval().to(device)
        with torch.no_grad():
            for parameter in self._interaction.parameters():
                parameter.mul_(case.scale)
        self._videos = SyntheticVideos(case, device)
        self._table = ResidentTable(self._interaction, [device], wide_keys=case.wide_keys)
        place = {"pin_memory": True} if case.host_frames else {"device": device}
        self._frames_VFD = torch.empty(
            case.num_items,
            case.frames,
            case.dim,
            dtype=torch.float16,
            **place,
        )
        self.text = self._videos.texts()

    @property
    def table_bytes(self) -> int:
        """Memory of the cards of all videos."""
        return self._table.num_bytes * self.case.num_items // self._table.num_rows

    def fill(self, on_block: Callable[[int], object] = lambda done: None) -> float:
        """Make all cards, and say how many videos have theirs; seconds."""
        started = time.perf_counter()
        for number, rows in enumerate(block_slices(self.case.num_items, _MADE_AT_ONCE)):
            part_VFD = self._videos.block(number, rows.stop - rows.start)
            self._frames_VFD[rows] = part_VFD
            self._table.add(_features(part_VFD), more=self.case.num_items - rows.stop)
            on_block(rows.stop)
        wait_for(self.device)
        return time.perf_counter() - started

    def search(self) -> list[ProvenList]:
        """The proven lists of all texts."""
        return self._table.find(self.text, self.case.top, self._fetch)

    def time(self) -> ResidentTimes:
        """How long a search takes, beside the bare reading of the cards."""
        found = self.search()  # and kernels are compiled
        scored = sum(one.num_scored for one in found) / len(found)
        return ResidentTimes(
            search_ms=median_ms(self.search, self.device),
            first_ms=median_ms(lambda: self._table.first_rung(self.text, self.case.top), self.device),
            bounds_ms=median_ms(lambda: self._table.bounds(self.text), self.device),
            read_ms=_read_ms(self.table_bytes, self.device),
            first_read_ms=_read_ms(self.case.num_items * 4 * self.case.dim, self.device),
            scored=scored,
            scored_share=scored / self.case.num_items,
        )

    @torch.no_grad()
    def product_ms(self) -> float:
        """The other floor: the bare product of the texts with F + 2 vectors of every video, in bfloat16."""
        num_rows = min(self.case.num_items, _MULTIPLIED_AT_ONCE) * (self.case.frames + 2)
        rows_ND = torch.ones(num_rows, self.case.dim, dtype=torch.bfloat16, device=self.device)
        text_DT = self.text.text_TD.bfloat16().mT
        share = self.case.num_items * (self.case.frames + 2) / num_rows
        return median_ms(lambda: rows_ND @ text_DT, self.device) * share

    @torch.no_grad()
    def check(self, count: int) -> ResidentCheck:
        """Compare the lists of so many texts with float64 of every pair."""
        text = self.text[:count]
        double = copy.deepcopy(self._interaction).double().for_search()
        parts = [
            double.score(text.to(torch.float64), _features(self._frames_VFD[rows].to(self.device).double()))
            for rows in block_slices(len(self._frames_VFD), _MADE_AT_ONCE)
        ]
        scores_TV = torch.cat(parts, dim=1)
        lower_TV, upper_TV = (bound[:, : self.case.num_items] for bound in self._table.bounds(text))
        broken = int(((scores_TV > upper_TV) | (scores_TV < lower_TV)).sum())
        best_TK = scores_TV.sort(dim=1, descending=True, stable=True).indices[:, : self.case.top]
        found = [one.rows for one in self.search()[:count]]
        num_equal = sum(rows == expected for rows, expected in zip(found, best_TK.tolist(), strict=True))
        return ResidentCheck(len(text), num_equal, broken)

    def _fetch(self, rows: Tensor) -> VideoFeatures:
        if not self.case.host_frames:
            return _features(self._frames_VFD[rows])
        from gare.interaction.pair_scores_cuda import gather_rows

        shape = self._frames_VFD.shape[1:]
        return _features(gather_rows(self._frames_VFD.flatten(1), rows).unflatten(1, shape))


def _features(frames_VFD: Tensor) -> VideoFeatures:
    return VideoFeatures(
        frames_VFD, torch.ones(frames_VFD.shape[:2], dtype=torch.bool, device=frames_VFD.device)
    )


def _read_ms(num_bytes: int, device: torch.device) -> float:
    """As many bytes read once, and next to nothing done with them."""
    size = min(num_bytes, 2**31)
    numbers = torch.ones(size // 8, dtype=torch.int64, device=device)
    return median_ms(numbers.amax, device) * num_bytes / size

"""Exact search with a proof, rung by rung, beside the bare reading of the same bytes and the bare product.

Features, cards and bounds are in memory, so that a GPU without a store can run it. `compare_library` asks a
real library instead, with `exact` and with `exhaustive`, in turns.

Shapes: T texts, V videos, F frames, D embedding, K the size of a list.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gare.bench.bench_timing import describe_device, median_ms, wait_for
from gare.bench.synthetic_vectors import clustered_frames, clustered_vectors, synthetic_model
from gare.interaction import Interaction
from gare.interaction.increment_keys import KeyCards
from gare.interaction.score_bounds import BoundCards
from gare.interaction.score_cards import cat_cards, flat_tensors, num_bytes
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures, block_slices

Say = Callable[[str], None]
_VIDEOS_AT_ONCE = 256  # while cards are made, in float64
_VIDEOS_A_BLOCK = 4096
_FIRST = 32
_ROUNDING = 1e-12


@dataclass(frozen=True)
class ExactCase:
    """What is searched, and by which model."""

    num_items: int
    dim: int
    frames: int
    top: int
    scale: float
    """How many times larger than they start all weights of the interaction are."""
    pooling: str
    corrected_side: str

    def model(self) -> GARE:
        """The same weights every time."""
        settings = {"pooling": self.pooling, "corrected_side": self.corrected_side}
        return synthetic_model(self.dim, self.frames, scale=self.scale, **settings)

    def text_vectors(self, count: int) -> np.ndarray:
        """Texts near the videos' clusters, as those of a trained model are."""
        return clustered_vectors(np.random.default_rng(1), count, self.dim)


@dataclass(frozen=True)
class LibraryComparison:
    """`--exact` and `--exhaustive` on the same library, in turns. Milliseconds are medians."""

    num_queries: int
    num_same: int
    """Queries for which both gave the same list."""
    exact_ms: float
    exhaustive_ms: float
    ratio: float
    first_exact_s: float
    """The first exact search, which makes all bounds."""
    scored: float
    """Items scored for a list, on average."""
    refined: float
    """Items whose keys were read."""


@dataclass(frozen=True)
class ExactBenchmark:
    """Milliseconds are for one batch of texts and all items."""

    case: ExactCase
    device: str
    torch: str
    num_queries: int
    batch: int
    prepare_s: float
    bytes_an_item: float
    """The first rung and the second."""
    first_pass_ms: float
    """Two products a pair, and their bounds."""
    keys_ms: float
    """Products with all keys, and the bounds of both rungs together."""
    rescoring_ms: float
    """Exact scores in float64 of what the bounds leave."""
    certificate_ms: float
    """Choosing what to score, and checking that no other item can be in the list."""
    read_ms: float
    """The floor: every byte of the cards read once."""
    product_ms: float
    """The other floor: the bare matrix product of the texts with F + 2 vectors an item."""
    left_by_ball: float
    """Items that the first rung leaves for a list, on average."""
    scored: float
    """Items that were scored for a list, on average."""
    scored_most: int
    num_compared: int
    """Lists that were compared with all items scored in float64."""
    num_equal: int
    """Those that were the same, in the same order."""
    bounds_broken: int
    """Pairs whose score lies outside its bounds, among all pairs of these."""
    library: LibraryComparison | None = None

    @property
    def constants(self) -> dict[str, float]:
        """What `gare plan` uses of it: the time of one core. On a GPU, searches go another way."""
        if not self.device.startswith("CPU"):
            return {}
        passes_ms = (self.first_pass_ms + self.keys_ms) / self.batch
        return {
            "exact_ns": 1e6 * passes_ms * torch.get_num_threads() / self.case.num_items,
            "exact_fixed_ms": (self.rescoring_ms + self.certificate_ms) / self.batch,
            "card_bytes": self.bytes_an_item,
        }


@dataclass(frozen=True)
class CardedVideos:
    """Videos in memory with both rungs, in blocks."""

    stored: VideoFeatures
    """As a library keeps them, in half precision."""
    blocks: list[tuple[BoundCards, KeyCards]]

    @classmethod
    def make(cls, interaction: Interaction, stored: VideoFeatures, key_dtype: torch.dtype) -> CardedVideos:
        """The cards of these videos."""
        blocks = []
        for some in stored.blocks(_VIDEOS_A_BLOCK):
            cards = [
                _both_rungs(interaction, few.to(torch.float32), key_dtype)
                for few in some.blocks(_VIDEOS_AT_ONCE)
            ]
            blocks.append((cat_cards([one for one, _ in cards]), cat_cards([other for _, other in cards])))
        return cls(stored, blocks)

    def video(self, rows: Tensor | slice) -> VideoFeatures:
        """Some of them, as they are scored."""
        return self.stored[rows].to(torch.float64)


@dataclass
class Stages:
    """Seconds by stage."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add what is done inside to a stage."""
        wait_for(self.device)
        started = time.perf_counter()
        yield
        wait_for(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True)
class ProvenLists:
    """The places of the best videos of each text, and what their proof took."""

    rows: list[list[int]]
    scored: list[int]
    left_by_ball: list[int]


@torch.no_grad()
def benchmark_exact(
    case: ExactCase,
    *,
    queries: int,
    batch: int,
    check: int,
    key_dtype: torch.dtype,
    device: torch.device,
    say: Say,
) -> ExactBenchmark:
    """Find the best items of synthetic texts, and compare `check` of the lists with float64 of every pair."""
    interaction = case.model().interaction.to(device)
    text = TextFeatures.from_vectors(torch.from_numpy(case.text_vectors(queries)).to(device))
    say(f"making {case.num_items:,} items and their bounds")
    started = time.perf_counter()
    items = _make_items(interaction, case, key_dtype, device, say)
    wait_for(device)
    prepare_s = time.perf_counter() - started
    say(f"{queries:,} searches")
    stages, found, double = Stages(device), ProvenLists([], [], []), in_double(interaction)
    for texts in text.blocks(batch):
        answers = proven_lists(interaction, double, texts, items, case.top, stages)
        found.rows.extend(answers.rows)
        found.scored.extend(answers.scored)
        found.left_by_ball.extend(answers.left_by_ball)
        if len(found.rows) % (10 * batch) == 0:
            say(f"  {len(found.rows):,}")
    num_equal = broken = 0
    compared = text[: min(check, queries)]
    if len(compared):
        say(f"scoring all items for {len(compared):,} of them in float64")
        num_equal, broken = compare_lists(interaction, double, compared, items, case.top, found.rows, say)
    num_batches = -(-queries // batch)
    spent = {name: 1000 * seconds / num_batches for name, seconds in stages.seconds.items()}
    return ExactBenchmark(
        case=case,
        device=describe_device(device),
        torch=torch.__version__,
        num_queries=queries,
        batch=batch,
        prepare_s=prepare_s,
        bytes_an_item=sum(num_bytes(part) for cards in items.blocks for part in cards) / case.num_items,
        first_pass_ms=spent["first_pass"],
        keys_ms=spent["keys"],
        rescoring_ms=spent["rescoring"],
        certificate_ms=spent["certificate"],
        read_ms=median_ms(lambda: _read(items), device),
        product_ms=_product_ms(text[: min(batch, queries)], case, device),
        left_by_ball=statistics.mean(found.left_by_ball),
        scored=statistics.mean(found.scored),
        scored_most=max(found.scored),
        num_compared=len(compared),
        num_equal=num_equal,
        bounds_broken=broken,
    )


def _make_items(
    interaction: Interaction, case: ExactCase, key_dtype: torch.dtype, device: torch.device, say: Say
) -> CardedVideos:
    generator, parts = np.random.default_rng(2), list[CardedVideos]()
    for rows in block_slices(case.num_items, _VIDEOS_A_BLOCK):
        count = rows.stop - rows.start
        frames = torch.from_numpy(clustered_frames(generator, count, case.frames, case.dim)).to(device)
        video = VideoFeatures(frames, torch.ones(frames.shape[:2], dtype=torch.bool, device=device))
        parts.append(CardedVideos.make(interaction, video, key_dtype))
        say(f"  {rows.stop:,}")
    frames_VFD = torch.cat([part.stored.frames_VFD for part in parts])
    mask_VF = torch.cat([part.stored.mask_VF for part in parts])
    return CardedVideos(
        VideoFeatures(frames_VFD, mask_VF), [block for part in parts for block in part.blocks]
    )


def _both_rungs(
    interaction: Interaction, video: VideoFeatures, key_dtype: torch.dtype
) -> tuple[BoundCards, KeyCards]:
    balls = interaction.bound_cards(video, torch.float16)
    assert balls is not None
    keys = interaction.key_cards(video, balls, key_dtype)
    assert keys is not None
    return balls, keys


def in_double(interaction: Interaction) -> Interaction:
    """A copy that scores in float64."""
    return copy.deepcopy(interaction).double().for_search()


def proven_lists(
    interaction: Interaction,
    double: Interaction,
    text: TextFeatures,
    items: CardedVideos,
    top: int,
    stages: Stages,
    exact_TV: Tensor | None = None,
) -> ProvenLists:
    """The best items of each text, proven.

    Args:
        exact_TV: float64 scores of all pairs, where whoever compares has them: they are not computed again.
    """
    with stages.time("first_pass"):
        ball_TV = torch.cat([interaction.bounds(text, balls).upper_TV for balls, _ in items.blocks], dim=1)
    with stages.time("keys"):
        key_TV = torch.cat([interaction.key_bounds(text, *cards).upper_TV for cards in items.blocks], dim=1)
        upper_TV = torch.minimum(ball_TV, key_TV)
    rows, scored, left = [], [], []
    for number in range(len(text)):
        with stages.time("certificate"):
            upper_V, order_V = upper_TV[number].sort(descending=True, stable=True)
        best, done, size = _nothing(text), 0, max(_FIRST, 2 * top)
        while True:
            with stages.time("certificate"):
                last = best[0][top - 1] if len(best[0]) >= top else -torch.inf
                num_left = int((upper_V >= last - _ROUNDING).sum())
            if done >= num_left:
                break
            chosen = order_V[done : min(done + size, num_left)]
            with stages.time("rescoring"):
                if exact_TV is not None:
                    score_V = exact_TV[number, chosen]
                else:
                    one = text[number : number + 1].to(torch.float64)
                    score_V = double.score(one, items.video(chosen))[0]
            with stages.time("certificate"):
                best = _merge(best, (score_V, chosen), top)
            done, size = done + len(chosen), 2 * size
        rows.append(best[1].tolist())
        scored.append(done)
        left.append(int((ball_TV[number] >= best[0][-1]).sum()))
    return ProvenLists(rows, scored, left)


def _nothing(text: TextFeatures) -> tuple[Tensor, Tensor]:
    device = text.text_TD.device
    return torch.zeros(0, dtype=torch.float64, device=device), torch.zeros(0, dtype=torch.long, device=device)


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], top: int) -> tuple[Tensor, Tensor]:
    """The best of both; equal scores by place."""
    scores, rows = torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])
    rows, order = rows.sort(stable=True)
    scores, by_score = scores[order].sort(descending=True, stable=True)
    return scores[:top], rows[by_score][:top]


def compare_lists(
    interaction: Interaction,
    double: Interaction,
    text: TextFeatures,
    items: CardedVideos,
    top: int,
    found: list[list[int]],
    say: Say,
) -> tuple[int, int]:
    """How many lists are those of all scores in float64, and how many scores lie outside their bounds."""
    best, broken = [_nothing(text)] * len(text), 0
    start = 0
    for balls, keys in items.blocks:
        rows = torch.arange(start, start + len(balls), device=text.text_TD.device)
        scores_TV = double.score(text.to(torch.float64), items.video(rows))
        for bounds in (interaction.bounds(text, balls), interaction.key_bounds(text, balls, keys)):
            outside_TV = (scores_TV > bounds.upper_TV) | (scores_TV < bounds.lower_TV)
            broken += int(outside_TV.sum())
        best = [_merge(one, (scores_V, rows), top) for one, scores_V in zip(best, scores_TV, strict=True)]
        start += len(balls)
        say(f"  {start:,}")
    equal = [rows.tolist() == expected for (_, rows), expected in zip(best, found, strict=False)]
    return sum(equal), broken


def _read(items: CardedVideos) -> None:
    """Read every byte of the cards, and do next to nothing with it."""
    for cards in items.blocks:
        for part in cards:
            for tensor in flat_tensors(part).values():
                flat = tensor.contiguous().flatten().view(torch.uint8)
                flat[: len(flat) // 8 * 8].view(torch.int64).amax()


def _product_ms(text: TextFeatures, case: ExactCase, device: torch.device) -> float:
    """float32 on a CPU, bfloat16 on a GPU, a block at a time: whatever the values, they take as long."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    text_TD, block = text.text_TD.to(dtype), min(case.num_items, _VIDEOS_A_BLOCK)
    rows_ND = torch.ones(block * (case.frames + 2), case.dim, dtype=dtype, device=device)
    return median_ms(lambda: rows_ND @ text_TD.mT, device) * case.num_items / block


@torch.no_grad()
def compare_library(
    case: ExactCase, *, queries: int, folder: Path | None, say: Say, device: torch.device | str = "cpu"
) -> LibraryComparison:
    """Search a real library with `exact` and with `exhaustive`, in turns."""
    from gare.bench.search_bench import encoded_vector
    from gare.bench.synthetic_library import make_library
    from gare.library.library import Library
    from gare.library.search.search_request import SearchRequest

    model = case.model()
    times: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "library"
        make_library(place, model, case.num_items, say)
        library = stack.enter_context(Library.open(place, model=model, device=device))
        searcher, texts = library.searcher, case.text_vectors(queries + 1)
        searcher.proven.on_progress = lambda done, total: say(f"  bounds of {done:,} of {total:,} items")

        def ask(number: int, exact: bool) -> tuple[list[str], float, tuple[int, int]]:
            request = SearchRequest(words="a vector", top=case.top, exact=exact, exhaustive=not exact)
            started = time.perf_counter()
            ranking = searcher.find(request, query=encoded_vector(texts[number]).to(device))
            seconds = time.perf_counter() - started
            proof = ranking.certificate
            return ranking.ids, seconds, (0, 0) if proof is None else (proof.num_scored, proof.num_refined)

        say("the first exact search makes all bounds")
        _, first_s, _ = ask(queries, True)
        ask(queries, False)
        counts, same = [], 0
        for number in range(queries):
            exact, exhaustive = ask(number, True), ask(number, False)
            times[True].append(exact[1])
            times[False].append(exhaustive[1])
            counts.append(exact[2])
            same += exact[0] == exhaustive[0]
            say(f"  {number + 1}: {1000 * exact[1]:.0f} ms, {1000 * exhaustive[1]:.0f} ms")
    exact_ms, exhaustive_ms = (1000 * statistics.median(times[exact]) for exact in (True, False))
    return LibraryComparison(
        num_queries=queries,
        num_same=same,
        exact_ms=exact_ms,
        exhaustive_ms=exhaustive_ms,
        ratio=exhaustive_ms / exact_ms,
        first_exact_s=first_s,
        scored=statistics.mean(scored for scored, _ in counts),
        refined=statistics.mean(refined for _, refined in counts),
    )

"""How much a model computes, by module, and how long it takes beside its baseline.

Operations are closed forms for the paper's ViT-B/32 and counted for any other model. One multiply-accumulate
(MAC) is two operations (FLOP). The paper's table mixes them: see `paper_table`.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gare.analysis.numbers import Numbers
from gare.analysis.presentation import (
    BLUE,
    COLUMN,
    ORANGE,
    SKY,
    Picture,
    Table,
    legend_above,
    number,
    percent,
)
from gare.analysis.probe import Claim, Probe
from gare.analysis.study import Study, Subject
from gare.interaction.increment_net import multiply_adds
from gare.model import GARE

BATCH, FRAMES, WORDS = 128, 12, 32
TIMED_PAIRS = 64
PAPER_GFLOP = {"visual": 11_673.60, "temporal": 38.81, "psi": 36.35, "text": 156.29}
"""The paper's breakdown at batch 128 × 12 frames."""
MODULES = {
    "visual": "image tower",
    "text": "text tower",
    "temporal": "temporal",
    "psi": "increment net, dense, all pairs",
    "pooling": "pooling",
}


class EfficiencyProbe(Probe):
    """Parameters, operations, time and memory by module."""

    title = "Efficiency"
    intro = (
        "Parameters and operations by module, and time and memory beside the baseline, measured in turns on "
        "the same machine."
    )

    def depends_on(self, study: Study) -> Sequence[object]:
        return (study.device,)

    def measure(self, study: Study) -> Numbers:
        """Parameters, operations, time and memory by module, beside the paper's and the baseline's."""
        subjects = {} if study.baseline is None else {"baseline": study.baseline}
        subjects["model"] = study.subject
        # Counted before timing, which moves the models to the study's device.
        parameters = {role: count_parameters(subject.model) for role, subject in subjects.items()}
        flops = {role: count_flops(subject.model) for role, subject in subjects.items()}
        calls = {
            f"{role}/{name}": call
            for role, subject in subjects.items()
            for name, call in _calls(subject, study).items()
        }
        values = {
            "paper": paper_table(),
            "batch": BATCH,
            "frames": FRAMES,
            "device": _describe(study.device),
            "parameters": parameters,
            "flops": flops,
            "costs": measure_costs(calls, study.device),
            "timed_pairs": TIMED_PAIRS,
            "pairs_scored": [len(study.subject.text), len(study.subject.video)],
        }
        return Numbers.of(values)

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        parts = "; ".join(
            f"{row['module']} {number(row['gmac'], 2)} GMAC = {number(row['gflop'], 2)} GFLOP, paper "
            f"{number(row['paper'], 2)}"
            for row in numbers.values["paper"]
        )
        caption = (
            "Operations of the paper's model (CLIP ViT-B/32) for a batch of 128 texts and 128 videos of 12 "
            f"frames: {parts}. The paper's temporal and increment-net (psi) numbers are FLOPs, its text "
            "number is MACs, and its visual number is neither: it is 7.60 for each of the 1,536 frames."
        )
        return (Picture("efficiency-flops", caption, partial(_flops, values=numbers.values), (COLUMN, 2.3)),)

    def tables(self, numbers: Numbers) -> Sequence[Table]:
        values, roles = numbers.values, list(numbers.values["flops"])
        return (
            _paper(values),
            _flops_table(values, roles),
            _parameters(values["parameters"], roles),
            _costs(values, roles),
        )

    def claims(self) -> Sequence[Claim]:
        rule, needs = "below 5 % of the FLOPs of a batch", "needs a model with increments"
        return (Claim("The increment net costs little", rule, _net_is_small, needs),)


# Numbers: operations and parameters


@dataclass(frozen=True)
class Transformer:
    """The cost of a stack of standard layers: an MLP four times as wide, four D×D projections."""

    width: int
    layers: int

    def macs(self, tokens: int) -> int:
        """MACs of one sequence: 12 D² a token and layer, and two products of tokens with tokens.

        >>> Transformer(width=2, layers=1).macs(tokens=3)
        180
        """
        return self.layers * (12 * self.width**2 * tokens + 2 * tokens**2 * self.width)


@dataclass(frozen=True)
class PaperRow:
    """One line of the comparison with the paper, in units of 10⁹."""

    module: str
    gmac: float
    gflop: float
    paper: float
    nearest: str
    """Which of the two counts the paper's number is."""
    note: str


def clip_macs(*, batch: int = BATCH, frames: int = FRAMES, words: int = WORDS) -> dict[str, int]:
    """MACs of the paper's model (CLIP ViT-B/32, D = 512) by module, for every pair of a batch."""
    vision, text, temporal, dim = Transformer(768, 12), Transformer(512, 12), Transformer(512, 4), 512
    patches = (224 // 32) ** 2
    image = patches * 3 * 32**2 * vision.width + vision.macs(patches + 1) + vision.width * dim
    return {
        "visual": batch * frames * image,
        "temporal": batch * temporal.macs(frames),
        "psi": multiply_adds(dim, pairs=batch**2, owners=batch, tokens=frames),
        "text": batch * (text.macs(words) + text.width * dim),
    }


def paper_table() -> list[PaperRow]:
    """The paper's FLOPs by module beside ours, and which of MAC and FLOP each of them counts."""
    notes = {
        "visual": "neither: exactly 7.60 a frame, so perhaps a rounded number from elsewhere; ViT-B/32 at "
        "224 pixels has 4.41 MAC or 8.82 FLOP",
        "temporal": "FLOPs: four layers of width 512 on 12 frames",
        "psi": "FLOPs: the dense form on all 128 × 128 pairs, keys and values once a frame; ours is 0.05 % "
        "more",
        "text": "MACs: 12 layers of width 512 on 32 tokens; its FLOPs are twice that",
    }
    rows = []
    for module, macs in clip_macs().items():
        gmac, paper = macs / 1e9, PAPER_GFLOP[module]
        differences = {"MAC": abs(gmac / paper - 1), "FLOP": abs(2 * gmac / paper - 1)}
        nearest = min(differences, key=differences.__getitem__)
        if differences[nearest] > 0.01:
            nearest = "neither"
        rows.append(PaperRow(module, gmac, 2 * gmac, paper, nearest, notes[module]))
    return rows


@torch.no_grad()
def count_flops(model: GARE, *, batch: int = BATCH, frames: int = FRAMES) -> dict[str, float]:
    """FLOPs of this model by module, counted by torch on one item and multiplied up to a batch of pairs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    towers, interaction, words = model.encoder.flops(), model.interaction, model.encoder.max_words
    flops = {"visual": batch * frames * towers["image"], "text": batch * towers["text"]}
    if model.temporal is not None:
        frames_VFD = torch.zeros(1, frames, model.dim, device=model.device)
        mask_VF = torch.ones(1, frames, dtype=torch.bool, device=model.device)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model.temporal(frames_VFD, mask_VF)
        flops["temporal"] = batch * float(counter.get_total_flops())
    if any(True for _ in interaction.parameters()):
        name = "psi" if interaction.has_increments else "pooling"
        flops[name] = interaction.flops(texts=batch, videos=batch, frames=frames, words=words)
    return flops


def count_parameters(model: GARE) -> dict[str, int]:
    """Parameters by module; the towers by their first level."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        module = f"{parts[0]}.{parts[1]}" if parts[0] == "encoder" else parts[0]
        counts[module] = counts.get(module, 0) + parameter.numel()
    return counts


# Numbers: time and memory


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of a call, and the most memory its tensors held at a time, inputs not counted."""

    milliseconds: float
    peak_mb: float


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors made inside, alive at the same time; works on every device.

    >>> with PeakMemory() as memory:
    ...     for _ in range(3):
    ...         x = torch.zeros(1000, dtype=torch.float64)
    ...         del x
    >>> memory.peak
    8000
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in before | self._known:
                self._add(tensor.untyped_storage())
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._known.clear()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _add(self, storage: torch.UntypedStorage) -> None:
        size, address = storage.nbytes(), storage.data_ptr()
        if not size:
            return
        self._known.add(address)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self._known.discard(address)
        self._live -= size


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def measure_costs(
    functions: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int = 5
) -> dict[str, Cost]:
    """Each call once a round, in turn: what slows the machine down slows all of them."""
    peaks: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad():
        for name, function in functions.items():
            with PeakMemory() as memory:  # warms up as well
                function()
            peaks[name] = memory.peak / 1e6
        for _ in range(rounds):
            for name, function in functions.items():
                _wait(device)
                start = time.perf_counter()
                function()
                _wait(device)
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: Cost(statistics.median(times[name]), peaks[name]) for name in functions}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _calls(subject: Subject, study: Study) -> dict[str, Any]:
    """What is timed, on the study's device; the model goes there and stays."""
    device = study.device
    model = subject.model.to(device)
    few = slice(0, TIMED_PAIRS)
    text, video = subject.text.to(device), subject.video.to(device)
    size = model.encoder.image_format.size
    frames = subject.video.frames_VFD.shape[1]
    frames_VFCHW = torch.zeros(2, frames, 3, size, size, dtype=torch.uint8, device=device)
    mask_VF = torch.ones(2, frames, dtype=torch.bool, device=device)
    captions = study.gallery.captions[:16]
    calls = {
        "encode 16 texts": lambda: model.encode_text(captions),
        "encode 2 videos": lambda: model.encode_frames(frames_VFCHW, mask_VF),
        "score, factored": lambda: model.score(text, video, method="factored"),
        "score, dense": lambda: model.score(text[few], video[few], method="dense"),
    }
    return calls


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


# Figures


def _flops(figure: Any, values: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = values["paper"]
    for shift, name, label, colour in (
        (-0.27, "gmac", "MACs", SKY),
        (0.0, "gflop", "FLOPs", BLUE),
        (0.27, "paper", "the paper's number", ORANGE),
    ):
        places = [place + shift for place in range(len(rows))]
        axes.barh(places, [row[name] for row in rows], 0.25, color=colour, label=label)
    axes.set_yticks(range(len(rows)), [row["module"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"10⁹ operations, batch {values['batch']} × {values['frames']}")
    legend_above(axes, columns=3)
    axes.grid(axis="y", visible=False)


# Tables


def _paper(values: dict[str, Any]) -> Table:
    return Table(
        f"CLIP ViT-B/32, batch {values['batch']} × {values['frames']} frames, 10⁹ operations",
        ["module", "the paper's number counts", "MAC", "FLOP", "paper"],
        [
            [row["module"], row["note"], *(f"{row[key]:,.2f}" for key in ("gmac", "gflop", "paper"))]
            for row in values["paper"]
        ],
        text_columns=2,
    )


def _flops_table(values: dict[str, Any], roles: Sequence[str]) -> Table:
    flops = values["flops"]
    modules = [name for name in MODULES if any(name in flops[role] for role in roles)]
    return Table(
        f"The models of this report, batch {values['batch']} × {values['frames']} frames, GFLOP",
        ["module", *roles],
        [[MODULES[name], *(_maybe(flops[role].get(name), 1e-9) for role in roles)] for name in modules],
    )


def _parameters(counts: dict[str, Any], roles: Sequence[str]) -> Table:
    names = sorted({name for role in roles for name in counts[role]})
    rows = [[name, *(_count(counts[role].get(name)) for role in roles)] for name in names]
    rows.append(["all", *(_count(sum(counts[role].values())) for role in roles)])
    return Table("Parameters", ["module", *roles], rows)


def _costs(values: dict[str, Any], roles: Sequence[str]) -> Table:
    calls = list(dict.fromkeys(name.split("/", 1)[1] for name in values["costs"]))
    texts, videos = values["pairs_scored"]
    pairs = min(values["timed_pairs"], texts)
    sizes = {"score, factored": f", {texts} × {videos} pairs", "score, dense": f", {pairs} × {pairs} pairs"}
    rows = []
    for call in calls:
        cells = [call + sizes.get(call, "")]
        for role in roles:
            cost = values["costs"][f"{role}/{call}"]
            cells += [number(cost["milliseconds"], 1), number(cost["peak_mb"], 1)]
        rows.append(cells)
    header = ["", *(f"{role}, {unit}" for role in roles for unit in ("ms", "MB"))]
    return Table(f"Time (median) and peak memory of tensors, {values['device']}", header, rows)


def _maybe(value: float | None, scale: float) -> str:
    return "–" if value is None else number(value * scale, 2)


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


# Claims


def _net_is_small(values: dict[str, Any]) -> tuple[bool, str] | None:
    flops = values["flops"]["model"]
    if "psi" not in flops:
        return None
    share, size = flops["psi"] / sum(flops.values()), values["parameters"]["model"]["interaction"]
    rows = {row["module"]: row["gflop"] for row in values["paper"]}
    return share < 0.05, (
        f"{percent(share, 2)} of this model's FLOPs and {size:,} parameters; of ViT-B/32 "
        f"{percent(rows['psi'] / sum(rows.values()), 2)}"
    )

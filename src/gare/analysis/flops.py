"""How much a model computes, by module: closed forms for the paper's ViT-B/32, counted for any other model.

One multiply-accumulate (MAC) is two operations (FLOP). The paper's table mixes them: see `paper_table`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures

BATCH, FRAMES, WORDS = 128, 12, 32
PAPER_GFLOP = {"visual": 11_673.60, "temporal": 38.81, "psi": 36.35, "text": 156.29}
"""The paper's breakdown at batch 128 × 12 frames."""


@dataclass(frozen=True)
class Transformer:
    """The cost of a stack of standard layers: an MLP four times as wide, four D×D projections."""

    width: int
    layers: int

    def macs(self, tokens: int) -> int:
        """Of one sequence: 12 D² a token and layer, and two products of tokens with tokens.

        >>> Transformer(width=2, layers=1).macs(tokens=3)
        180
        """
        return self.layers * (12 * self.width**2 * tokens + 2 * tokens**2 * self.width)


@dataclass(frozen=True)
class Row:
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
        "psi": psi_macs(dim, texts=batch, videos=batch, frames=frames),
        "text": batch * (text.macs(words) + text.width * dim),
    }


def psi_macs(dim: int, *, texts: int, videos: int, frames: int) -> int:
    """Dense psi: query, output, residual and last map for each pair; keys and values for each frame."""
    pairs = texts * videos
    return pairs * (4 * dim**2 + 2 * frames * dim) + videos * frames * 2 * dim**2


def paper_table() -> list[Row]:
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
        rows.append(Row(module, gmac, 2 * gmac, paper, nearest, notes[module]))
    return rows


@torch.no_grad()
def count_flops(model: GARE, *, batch: int = BATCH, frames: int = FRAMES) -> dict[str, float]:
    """FLOPs of this model by module, counted by torch on one item and multiplied up to a batch of pairs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    def count(function, *inputs) -> int:  # type: ignore[no-untyped-def]
        # Fused attention on a CPU is not counted; as separate products it is.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            function(*inputs)
        return int(counter.get_total_flops())

    size, device = model.backbone.image_format.size, model.device
    token_ids_TW, _ = model.backbone.tokenize(["a man is cooking"])
    width = model.backbone.config.max_words
    token_ids_TW = _widen(token_ids_TW, width).to(device)
    mask_TW = torch.ones(1, width, dtype=torch.bool, device=device)
    pixels_NCHW = torch.zeros(1, 3, size, size, device=device)
    mask_VF = torch.ones(1, frames, dtype=torch.bool, device=device)
    frames_VFD = torch.zeros(1, frames, model.dim, device=device)
    flops = {
        "visual": batch * frames * count(model.backbone.encode_images, pixels_NCHW),
        "text": batch * count(model.backbone.encode_text, token_ids_TW, mask_TW),
    }
    if model.temporal is not None:
        flops["temporal"] = batch * count(model.temporal, frames_VFD, mask_VF)
    if model.increment_net is not None:
        over_words = model.config.interaction.context == "words"
        context = width if over_words else frames
        flops["psi"] = 2 * psi_macs(model.dim, texts=batch, videos=batch, frames=context)
    if model.pooling_net is not None:
        text = TextFeatures.from_vectors(torch.zeros(2, model.dim, device=device))
        videos = VideoFeatures(frames_VFD.expand(2, -1, -1).clone(), mask_VF.expand(2, -1).clone())
        flops["pooling"] = batch**2 // 4 * count(model.score_pairs, text, videos)
    return {name: float(value) for name, value in flops.items()}


def count_parameters(model: GARE) -> dict[str, int]:
    """Parameters by module; the towers by their first level."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        module = f"{parts[0]}.{parts[1]}" if parts[0] == "backbone" else parts[0]
        counts[module] = counts.get(module, 0) + parameter.numel()
    return counts


def _widen(token_ids_TW: torch.Tensor, width: int) -> torch.Tensor:
    """Padding costs as much as words do; the last token of a text stays its last (CLIP looks for it)."""
    repeats = width - token_ids_TW.shape[1]
    if repeats <= 0:
        return token_ids_TW[:, :width]
    middle = token_ids_TW[:, 1:2].expand(-1, repeats)
    return torch.cat([token_ids_TW[:, :-1], middle, token_ids_TW[:, -1:]], dim=1)

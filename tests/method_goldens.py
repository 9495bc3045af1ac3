"""Goldens of published methods: `golden(name)` reads what the method's own code computed.

They lie beside the repository (`../shared/golden/methods`), which another checkout may not have: then the
tests that need them are skipped and say so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gare import Interaction, TextFeatures, VideoFeatures
from gare.interaction import INTERACTIONS, build_interaction
from gare.interaction.peers import load_original

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "golden" / "methods"
DIM = 16


@dataclass(frozen=True)
class Golden:
    """Tensors by name, without the prefix of their kind."""

    settings: dict[str, Any]
    inputs: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def text(self, number: int | None = None) -> TextFeatures:
        """The first texts; a golden without words gets its sentence vectors as words, and the reverse."""
        text_TD, words_TWD = self.inputs.get("text_TD"), self.inputs.get("words_TWD")
        if words_TWD is None:
            return TextFeatures.from_vectors(text_TD[:number])
        text_TD = words_TWD[:, 0] if text_TD is None else text_TD
        mask_TW = self.inputs.get("mask_TW", torch.ones(words_TWD.shape[:2])).bool()
        return TextFeatures(text_TD[:number], words_TWD[:number], mask_TW[:number])

    def video(self, number: int | None = None) -> VideoFeatures:
        frames_VFD = self.inputs["frames_VFD"]
        mask_VF = self.inputs.get("mask_VF", torch.ones(frames_VFD.shape[:2])).bool()
        return VideoFeatures(frames_VFD, mask_VF, self.inputs.get("patches_VFPD"))[:number]

    def build(
        self, name: str, *, dim: int = DIM, without: tuple[str, ...] = (), **settings: Any
    ) -> Interaction:
        """The method with the original weights, in evaluation mode."""
        interaction = build_interaction(INTERACTIONS[name].Config(**settings), dim)
        load_original(interaction, self.weights, without=without)
        return interaction.eval()

    def grad_inputs(self, *names: str) -> list[Tensor]:
        """Inputs that collect gradients, for comparing them with the golden's."""
        return [self.inputs[name].requires_grad_() for name in names]


def golden(name: str) -> Golden:
    if not FOLDER.is_dir():
        pytest.skip(f"the goldens of published methods are not at {FOLDER}")
    tensors = load_file(FOLDER / f"{name}.safetensors")
    kinds: dict[str, dict[str, Tensor]] = {"input": {}, "weight": {}, "output": {}, "grad": {}}
    for key, tensor in tensors.items():
        kind, _, rest = key.partition(".")
        kinds[kind][rest] = tensor
    settings = json.loads((FOLDER / f"{name}.json").read_text())["settings"]
    return Golden(settings, kinds["input"], kinds["weight"], kinds["output"], kinds["grad"])


def agrees(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest entry."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = (actual.detach() - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    assert difference <= tolerance, f"differs by {difference:.2e} of the largest entry"

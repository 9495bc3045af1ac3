"""Random features and interactions for tests of scoring."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from typing import Any, Literal

import torch
from torch import nn

from gare import INTERACTIONS, Interaction, TextFeatures, VideoFeatures
from gare.interaction import GapAwareConfig, InteractionConfig, build_interaction

HEADS = (1, 4)
_OF_TRAINING = ("name", "init", "dropout")  # they change no score of given weights
_NEEDS_PATCHES = ("select_patches",)  # random features have none


def variants(config_class: type[InteractionConfig], **fixed: Any) -> list[InteractionConfig]:
    """Every combination of the choices that a settings class offers, read off its annotations."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    axes: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(config_class):
        if field.name in (*config_class.TRAPS, *_NEEDS_PATCHES) and field.name not in fixed:
            continue  # a trap breaks a law: tests/unit/test_method_traps.py shows what each does
        if field.name in fixed:
            axes[field.name] = (fixed[field.name],)
        elif field.name in ("num_heads", "num_concepts"):
            axes[field.name] = HEADS
        elif typing.get_origin(hints[field.name]) is Literal and field.name not in _OF_TRAINING:
            axes[field.name] = typing.get_args(hints[field.name])
        elif hints[field.name] is bool:
            axes[field.name] = (True, False)
    return [
        config_class(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())
    ]


def every_interaction() -> list[InteractionConfig]:
    """Every combination of the choices of every interaction there is."""
    return [config for name in INTERACTIONS for config in variants(INTERACTIONS[name].Config)]


def every_gap_aware(**fixed: Any) -> list[GapAwareConfig]:
    """Every combination of GARE's ablation axes, with one head unless told."""
    return variants(GapAwareConfig, **{"num_heads": 1, **fixed})  # type: ignore[return-value]


def every_factored(**fixed: Any) -> list[GapAwareConfig]:
    """Those of `every_gap_aware` that are scored without forming increments."""
    return [config for config in every_gap_aware(**fixed) if config.query != "paper_text"]


def short(value: Any) -> str:
    """A test id: what differs from the default."""
    if not isinstance(value, InteractionConfig):
        return str(value)
    changed = value.changed_values()
    return "-".join([value.name, *(f"{key}={changed[key]}" for key in sorted(changed.keys() - {"name"}))])


def random_text(
    generator: torch.Generator, num_texts: int, num_words: int, dim: int, dtype: torch.dtype = torch.float64
) -> TextFeatures:
    mask = _random_mask(generator, num_texts, num_words)
    text = torch.randn(num_texts, dim, generator=generator, dtype=dtype)
    return TextFeatures(text, torch.randn(num_texts, num_words, dim, generator=generator, dtype=dtype), mask)


def random_video(
    generator: torch.Generator, num_videos: int, num_frames: int, dim: int, dtype: torch.dtype = torch.float64
) -> VideoFeatures:
    frames = torch.randn(num_videos, num_frames, dim, generator=generator, dtype=dtype)
    return VideoFeatures(frames, _random_mask(generator, num_videos, num_frames))


def random_interaction(
    generator: torch.Generator, config: InteractionConfig, dim: int, dtype: torch.dtype = torch.float64
) -> Interaction:
    """An interaction in evaluation mode whose every weight matters."""
    interaction = build_interaction(config, dim).to(dtype).eval()
    randomise(interaction, generator)
    return interaction


@torch.no_grad()
def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that each of them matters; LayerNorm scales around one."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)
            if isinstance(part, nn.LayerNorm) and name == "weight":
                parameter.add_(1)


def _random_mask(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """At least one real token a row, at a random place."""
    mask = torch.rand(rows, columns, generator=generator) < 0.7
    mask[torch.arange(rows), torch.randint(columns, (rows,), generator=generator)] = True
    return mask

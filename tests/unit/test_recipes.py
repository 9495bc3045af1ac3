"""Every recipe and every row of every table describes a run that could start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gare.train import RunConfig
from gare.train.ablation import Ablation

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_are_valid(path):
    config = RunConfig.load(path)
    assert RunConfig.load(config.to_values()) == config


@pytest.mark.parametrize("path", sorted((RECIPES / "ablations").glob("*.toml")), ids=lambda path: path.stem)
def test_ablations_are_valid_and_rows_differ(path):
    ablation = Ablation.load(path)
    configs = [RunConfig.load(RECIPES / "msrvtt_frames_mini.toml", row.set) for row in ablation.rows]
    assert len({config.fingerprint for config in configs}) == len(configs)

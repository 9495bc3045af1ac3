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


@pytest.mark.parametrize(
    ("table", "setting"),
    [
        ("variants", "objective.terms.direction.variant=paper_orthogonal"),
        ("variants", "objective.terms.radius.variant=paper_lse"),
        ("interaction", "model.interaction.query=paper_text"),
        ("claim", "model.interaction.query=paper_text"),
    ],
)
def test_tables_of_the_paper_have_its_own_formulas(table, setting):
    """Our forms of them stand beside, with names that say so."""
    rows = {row.name: list(row.set) for row in Ablation.load(RECIPES / "ablations" / f"{table}.toml").rows}
    assert [name for name, values in rows.items() if values == [setting]] == [
        name for name in rows if "as the paper displays" in name and setting in rows[name]
    ]
    assert [setting] in rows.values()


def test_each_dataset_has_the_context_and_side_of_the_papers_main_row():
    """ActivityNet's 42.6 has words as context, on the video side; with frames the paper has 40.2."""
    found = {}
    for name in ("activitynet", "didemo", "msrvtt9k", "msvd"):
        interaction = RunConfig.load(RECIPES / f"{name}_paper.toml").model.interaction
        found[name] = (interaction.context, interaction.corrected_side)
    frames = ("frames", "text")
    assert found == {
        "activitynet": ("words", "video"), "didemo": frames, "msrvtt9k": frames, "msvd": frames
    }  # fmt: skip


@pytest.mark.parametrize(("size", "source"), [("b16", "base-patch16"), ("l14", "large-patch14")])
def test_the_larger_towers_differ_from_the_main_recipe_in_the_tower_alone(size, source):
    main = RunConfig.load(RECIPES / "msrvtt9k_paper.toml").to_values()
    larger = RunConfig.load(RECIPES / f"msrvtt9k_paper_vit_{size}.toml").to_values()
    assert larger["model"]["encoder"].pop("source") == f"openai/clip-vit-{source}"
    del main["model"]["encoder"]["source"]
    assert larger == main

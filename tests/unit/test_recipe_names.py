"""Recipes and tables by name."""

from __future__ import annotations

import pytest

import gare
from gare.cli.recipes import RECIPES, TABLES, find_recipe, recipe_names, recipes_folder
from gare.errors import ConfigError


def test_names_lead_to_the_files_that_come_with_the_package():
    assert {"losses", "context", "baselines", "core"} <= set(recipe_names(TABLES))
    assert {"own_csv", "msrvtt_frames_mini"} <= set(recipe_names(RECIPES))
    assert find_recipe("losses", TABLES) == recipes_folder() / "ablations" / "losses.toml"
    assert find_recipe("own_csv", RECIPES) == recipes_folder() / "own_csv.toml"


def test_a_file_of_ones_own_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses").write_text("")
    assert str(find_recipe("losses", TABLES)) == "losses"
    assert find_recipe(str(tmp_path / "losses"), TABLES) == tmp_path / "losses"


@pytest.mark.parametrize("name", ["loses", "no/losses", "losses.toml", "../ablations/losses"])
def test_an_unknown_name_lists_the_known_ones(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=f"{name} does not exist; .*one of alpha, anchor, baselines, captions, claim"
    ):
        find_recipe(name, TABLES)


def test_an_installed_package_brings_its_own(tmp_path, monkeypatch):
    (tmp_path / "gare" / "recipes" / "ablations").mkdir(parents=True)
    (tmp_path / "gare" / "recipes" / "ablations" / "mine.toml").write_text("")
    monkeypatch.setattr(gare, "__file__", str(tmp_path / "gare" / "__init__.py"))
    assert recipe_names(TABLES) == ["mine"]

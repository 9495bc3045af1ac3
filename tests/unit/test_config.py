"""Settings: strict, preset-aware, and the same after a round trip through TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from gare import GareConfig, ObjectiveConfig
from gare.errors import ConfigError
from gare.interaction import GapAwareConfig, MeanPoolingConfig, TextConditionedConfig
from gare.settings import Settings


def test_presets_differ_where_fidelity_says():
    paper, released = GareConfig(), GareConfig.load({"preset": "released"})
    assert paper.interaction == GapAwareConfig(pooling="mean", mask_frames=True)
    assert released.interaction == GapAwareConfig(
        pooling="text_conditioned", pooling_temperature=3.0, mask_frames=False
    )
    assert (paper.temperature.learnable, released.temperature.learnable) == (False, True)
    paper_loss, released_loss = ObjectiveConfig(), ObjectiveConfig.load({"preset": "released"})
    paper_kl, released_kl = paper_loss.terms["kl"], released_loss.terms["kl"]
    assert (paper_kl.weight, paper_kl.reduction) == (0.07, "per_dimension")
    assert (released_kl.weight, released_kl.reduction) == (1e-4, "event")
    same_video = [loss.terms["contrastive"].same_video for loss in (paper_loss, released_loss)]
    assert same_video == ["exclude", "released"]


def test_a_value_of_ones_own_wins_over_the_preset():
    config = GareConfig.load({"preset": "released", "interaction": {"pooling_temperature": 5.0}})
    assert config.interaction.pooling_temperature == 5.0
    assert config.interaction.mask_frames is False


@pytest.mark.parametrize("preset", ["paper", "released"])
@pytest.mark.parametrize("cls", [GareConfig, ObjectiveConfig])
def test_toml_round_trip(cls, preset, tmp_path):
    config = cls.load({"preset": preset})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert cls.load(tmp_path / "config.toml") == config
    assert cls.load(tmp_path / "config.toml").fingerprint == config.fingerprint


def test_overrides_reach_nested_values():
    config = GareConfig.load(
        {}, ["interaction.dropout=0", "interaction.pooling=text_conditioned", "num_frames=4"]
    )
    assert config.interaction.dropout == 0
    assert config.interaction.pooling == "text_conditioned"
    assert config.num_frames == 4
    assert config.fingerprint != GareConfig().fingerprint


def test_an_override_of_the_name_leaves_behind_what_only_the_other_class_has():
    recipe = {"interaction": {"init": "zero_output", "pooling": "mean", "mask_frames": False}}
    assert GareConfig.load(recipe, ["interaction.name=mean"]).interaction == MeanPoolingConfig(
        mask_frames=False
    )
    config = GareConfig.load(
        recipe, ["interaction.pooling_temperature=5", "interaction.name=text_conditioned"]
    )
    assert config.interaction == TextConditionedConfig(mask_frames=False, pooling_temperature=5)
    again = GareConfig.load(config.to_values(), ["interaction.name=gare", "interaction.dropout=0"])
    assert again.interaction == GapAwareConfig(mask_frames=False, pooling_temperature=5, dropout=0)
    assert GareConfig.load({}, ["encoder.name=tiny", "encoder.dim=8"]).encoder.dim == 8
    with pytest.raises(ConfigError, match=r"unknown key 'interaction\.pooing'"):  # a mistake stays one
        GareConfig.load({"interaction": {"pooing": "mean"}}, ["interaction.name=mean"])
    with pytest.raises(ConfigError, match=r"must be 'gare' or .*, not 'men'"):
        GareConfig.load(recipe, ["interaction.name=men"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"interactn": {}}, "unknown key 'interactn'; known here: encoder, interaction, num_frames"),
        (
            {"interaction": {"contxt": "words"}},
            "unknown key 'interaction.contxt'; known here: context, corrected_side",
        ),
        ({"increment": {"haeds": 2}}, "unknown key 'interaction.haeds'; known here: context"),
        (
            {"interaction": {"context": "audio"}},
            "interaction.context: must be 'frames' or 'words', not 'audio'",
        ),
        ({"interaction": {"num_heads": 0}}, "interaction.num_heads: must be at least 1, not 0"),
        ({"encoder": {"name": "tiny", "dim": 10**9}}, "encoder.dim: must be at most 8192, not 1000000000"),
        ({"encoder": {"name": "mini", "dim": 10**30}}, "encoder.dim: must be at most 8192"),
        (
            {"encoder": {"name": "resnet"}},
            "encoder.name: must be 'clip' or 'mini' or 'tiny' or 'transformers' or 'own', not 'resnet'",
        ),
        (
            {"encoder": {}},
            "encoder.name: must be 'clip' or 'mini' or 'tiny' or 'transformers' or 'own', not None",
        ),
        (
            {"backbone": {"family": "resnet"}},
            "encoder.name: must be 'clip' or 'mini' or 'tiny' or 'transformers' or 'own', not 'resnet'",
        ),
        ({"interaction": {"mask_frames": 1}}, "interaction.mask_frames: must be true or false, not 1"),
        ({"interaction": {"dropout": "much"}}, "interaction.dropout: must be a number, not 'much'"),
        ({"num_frames": 2.5}, "num_frames: must be a whole number, not 2.5"),
        ({"interaction": 3}, "interaction: must be a table of settings, not 3"),
        ({"preset": ["paper"]}, "preset: must be 'paper' or 'released'"),
        ({"temperature": {"value": float("inf")}}, "temperature.value: must be finite"),
        ({"preset": "mine"}, "preset: must be 'paper' or 'released', not 'mine'"),
    ],
)
def test_mistakes_are_named_with_what_would_be_right(values, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        GareConfig.load(values)


def test_files_that_are_not_toml(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        GareConfig.load(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        GareConfig.load(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match="is not an override"):
        GareConfig.load({}, ["dropout"])
    with pytest.raises(ConfigError, match="num_frames is a value, not a section"):
        GareConfig.load({"num_frames": 3}, ["num_frames.x=1"])


def test_to_toml_is_plain_toml():
    assert tomllib.loads(GareConfig().to_toml())["temporal"]["num_layers"] == 4


def test_changed_values_are_those_that_are_not_the_default():
    config = GareConfig.load({"encoder": {"name": "mini", "dim": 64, "image_size": 192}, "num_frames": 8})
    assert config.changed_values() == {
        "encoder": {"is": "MiniEncoderConfig", "dim": 64},
        "temporal": {"is": "TemporalConfig"},
        "interaction": {"is": "GapAwareConfig"},
        "temperature": {"is": "TemperatureConfig"},
        "num_frames": 8,
    }
    explicit = GareConfig.load(config.to_values())
    assert explicit.changed_values() == config.changed_values()
    tiny = GareConfig.load({"encoder": {"name": "tiny"}})
    assert tiny.changed_values() != GareConfig().changed_values()


@dataclass(frozen=True)
class Lamp(Settings):
    colour: str = "white"

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}, "warm": {"colour": "amber"}}

    @classmethod
    def upgraded(cls, values: dict[str, Any]) -> dict[str, Any]:
        if (old := values.pop("color", None)) == "":
            raise ConfigError("color must not be empty")
        return values if old is None else {**values, "colour": old}


@dataclass(frozen=True)
class Room(Settings):
    lamp: Lamp = Lamp()


def test_a_class_translates_its_old_keys_wherever_it_stands():
    assert Lamp.load({"color": "red"}) == Lamp("red")
    old = {"lamp": {"preset": "warm"}}
    assert Room.load(old, ["lamp.color=red"]) == Room(Lamp("red"))  # before the preset fills in the rest
    assert Room.load(old) == Room(Lamp("amber"))
    assert old == {"lamp": {"preset": "warm"}}
    with pytest.raises(ConfigError, match=r"^lamp: color must not be empty$"):
        Room.load({"lamp": {"color": ""}})


def test_the_last_override_wins_whether_it_uses_an_old_key_or_a_new_one():
    assert Lamp.load({"colour": "blue"}, ["color=red"]) == Lamp("red")
    assert Lamp.load({"color": "blue"}, ["colour=red"]) == Lamp("red")
    assert Room.load({"lamp": {"color": "blue"}}, ["lamp.colour=red", "lamp.color=green"]) == Room(
        Lamp("green")
    )
    assert Room.load({}, ["lamp.color=green", "lamp.colour=red"]) == Room(Lamp("red"))

"""Settings: strict, preset-aware, and the same after a round trip through TOML."""

from __future__ import annotations

import tomllib

import pytest

from gare import GareConfig, Interaction, ObjectiveConfig
from gare.errors import ConfigError


def test_presets_differ_where_fidelity_says():
    paper, released = GareConfig(), GareConfig.load({"preset": "released"})
    assert paper.interaction == Interaction(pooling="mean", mask_frames=True)
    assert released.interaction == Interaction(
        pooling="text_conditioned", pooling_temperature=3.0, mask_frames=False
    )
    assert (paper.temperature.learnable, released.temperature.learnable) == (False, True)
    paper_loss, released_loss = ObjectiveConfig(), ObjectiveConfig.load({"preset": "released"})
    assert (paper_loss.kl_weight, paper_loss.kl_reduction) == (0.07, "per_dimension")
    assert (released_loss.kl_weight, released_loss.kl_reduction) == (1e-4, "event")
    assert (paper_loss.same_video, released_loss.same_video) == ("exclude", "released")


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
        {}, ["increment.dropout=0", "interaction.pooling=text_conditioned", "num_frames=4"]
    )
    assert config.increment.dropout == 0
    assert config.interaction.pooling == "text_conditioned"
    assert config.num_frames == 4
    assert config.fingerprint != GareConfig().fingerprint


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"incremnt": {}}, "unknown key 'incremnt'; known here: backbone, increment, interaction"),
        (
            {"increment": {"haeds": 2}},
            "unknown key 'increment.haeds'; known here: dropout, enabled, init, num_heads",
        ),
        (
            {"interaction": {"contxt": "words"}},
            "unknown key 'interaction.contxt'; known here: context, corrected_side",
        ),
        (
            {"interaction": {"context": "audio"}},
            "interaction.context: must be 'frames' or 'words', not 'audio'",
        ),
        ({"increment": {"num_heads": 0}}, "increment.num_heads: must be at least 1, not 0"),
        (
            {"backbone": {"family": "resnet"}},
            "backbone.family: must be 'clip' or 'mini' or 'tiny', not 'resnet'",
        ),
        ({"backbone": {}}, "backbone.family: must be 'clip' or 'mini' or 'tiny', not None"),
        ({"increment": {"enabled": 1}}, "increment.enabled: must be true or false, not 1"),
        ({"increment": {"dropout": "much"}}, "increment.dropout: must be a number, not 'much'"),
        ({"num_frames": 2.5}, "num_frames: must be a whole number, not 2.5"),
        ({"increment": 3}, "increment: must be a table of settings, not 3"),
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
    config = GareConfig.load({"backbone": {"family": "mini", "dim": 64, "image_size": 192}, "num_frames": 8})
    assert config.changed_values() == {
        "backbone": {"is": "MiniBackboneConfig", "dim": 64},
        "temporal": {"is": "TemporalConfig"},
        "increment": {"is": "IncrementConfig"},
        "interaction": {"is": "Interaction"},
        "temperature": {"is": "TemperatureConfig"},
        "num_frames": 8,
    }
    explicit = GareConfig.load(config.to_values())
    assert explicit.changed_values() == config.changed_values()
    tiny = GareConfig.load({"backbone": {"family": "tiny"}})
    assert tiny.changed_values() != GareConfig().changed_values()

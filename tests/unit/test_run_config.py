"""Recipes, and the settings that runs of version 0.1 saved: they are read as what they meant."""

from __future__ import annotations

import pytest

from gare.train import RunConfig
from gare.train.run_config import CachedConfig, DataConfig, PreloadConfig, StreamConfig

SAVED = """
selection_split = "val"
teachers = []
seed = 0
epochs = 6
batch_size = 2
numerics = "clean"
precision = "float32"
compile = false
gradient_checkpointing = false
ema_decay = 0.0
evaluate_every = 1
checkpoint_every = 1
log_every = 1

[data]
manifest = "data/colours"
also_train = []
num_frames = 3
sampling = "grid"
draw_frames = false
augmentation = "strong"
caption_choice = "one_per_video"
num_workers = 0
allow_missing = false
preload = false
cache_features = true
views = 3
mixed_share = 0.0

[model]
num_frames = 12

[model.backbone]
family = "tiny"
dim = 16
image_size = 32
vocabulary = 512
max_words = 16
freeze_image = true

[model.temporal]
num_layers = 1
max_frames = 77
init = "text_tower"

[model.increment]
enabled = true
num_heads = 1
dropout = 0.3
init = "normal"

[model.interaction]
corrected_side = "text"
context = "frames"
query = "gap"
gap_direction = "video_minus_text"
normalise = false
pooling = "mean"
pooling_temperature = 3.0
mask_frames = true

[model.temperature]
value = 0.05
learnable = true

[objective]
kl_weight = 0.07
kl_reduction = "per_dimension"
kl_anchor = "video"
kl_prior_std = 1.0
kl_normalise = false
radius_weight = 0.01
radius_variant = "variance"
radius_variance_cap = 0.5
diversity_weight = 0.01
diversity_variant = "log_mean_exp"
diversity_sharpness = 2.0
teacher_weight = 1.0
same_video = "exclude"

[optimizer]
kind = "adamw"
learning_rate = 0.003
image_learning_rate = 0.003
text_learning_rate = 0.003
weight_decay = 0.2
beta1 = 0.9
beta2 = 0.98
eps = 1e-06
warmup = 0.1
clip_norm = 1.0
"""
"""A config.toml as `gare train` wrote it before frames were one choice and loss terms had tables."""


def test_a_saved_run_of_old_is_read_and_written_in_the_new_form(tmp_path):
    (tmp_path / "config.toml").write_text(SAVED)
    config = RunConfig.load(tmp_path / "config.toml")
    assert config.data == DataConfig(
        manifest="data/colours",
        num_frames=3,
        frames=CachedConfig(augmentation="strong", views=3),
        caption_choice="one_per_video",
    )
    assert config.objective == RunConfig(data=config.data, selection_split="val").objective
    assert config.optimizer.learning_rate == 0.003
    (tmp_path / "new.toml").write_text(config.to_toml())
    assert "cache_features" not in config.to_toml()
    assert RunConfig.load(tmp_path / "new.toml") == config


@pytest.mark.parametrize(
    ("old", "frames"),
    [
        ({}, StreamConfig()),
        ({"augmentation": "randaugment"}, StreamConfig(augmentation="randaugment")),
        ({"draw_frames": True, "preload": False}, StreamConfig(draw_frames=True)),
        (
            {"preload": True, "mixed_share": 0.25, "draw_frames": True, "views": 1},
            PreloadConfig(mixed_share=0.25, draw_frames=True),
        ),
        ({"preload": True, "augmentation": "strong"}, PreloadConfig(augmentation="strong")),
        ({"cache_features": True, "mixed_share": 0.0, "draw_frames": False}, CachedConfig()),
    ],
)
def test_old_flags_choose_how_frames_arrive(old, frames):
    values = {"manifest": "data", "sampling": "uniform"}
    assert DataConfig.load({**values, **old}).frames == frames
    assert (
        DataConfig.load(values, [f"{key}={str(value).lower()}" for key, value in old.items()]).frames
        == frames
    )


@pytest.mark.parametrize(
    ("start", "overrides", "frames"),
    [
        ({}, ["frames=preload", "frames.augmentation=light"], PreloadConfig(augmentation="light")),
        ({}, ["frames.augmentation=light"], StreamConfig(augmentation="light")),
        ({"frames": "cached"}, ["cache_features=false"], StreamConfig()),
        ({"frames": "cached"}, ["cache_features=false", "preload=true"], PreloadConfig()),
        ({"frames": "cached"}, ["preload=true", "cache_features=false"], PreloadConfig()),
        ({"cache_features": True}, ["frames=preload"], PreloadConfig()),
        (
            {"frames": {"name": "cached", "views": 3, "augmentation": "light"}},
            ["frames=stream"],
            StreamConfig(),
        ),
        (
            {"frames": {"name": "cached", "views": 3, "augmentation": "light"}},
            ["views=1", "augmentation=off"],
            CachedConfig(),
        ),
        (
            {"frames": {"name": "cached", "views": 3, "augmentation": "light"}},
            ["views=2", "frames.views=4"],
            CachedConfig(views=4, augmentation="light"),
        ),
    ],
)
def test_overrides_by_old_keys_and_new_ones_do_not_collide(start, overrides, frames):
    assert DataConfig.load({"manifest": "data", **start}, overrides).frames == frames

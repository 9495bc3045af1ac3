"""The videos of a recipe: of one dataset, or of several to train on and one to choose by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gare.data.loader import FrameSource
from gare.data.manifest import join
from gare.train.config import RunConfig


def open_source(config: RunConfig) -> FrameSource:
    """What `data.manifest` and `data.also_train` name."""
    data = config.data
    first, *others = (
        FrameSource.open(Path(place), data.num_frames, data.sampling, allow_missing=data.allow_missing)
        for place in (data.manifest, *data.also_train)
    )
    return add_training_data(first, others)


def add_training_data(source: FrameSource, others: Sequence[FrameSource]) -> FrameSource:
    """The source with the training splits of others; its name, val and test stay as they are."""
    if not others:
        return source
    manifests = [source.manifest, *(other.manifest.select("train") for other in others)]
    return replace(
        source,
        manifest=join(source.manifest.header.name, manifests),
        caches=[cache for each in (source, *others) for cache in each.caches],
        missing=tuple(video for each in (source, *others) for video in each.missing),
    )

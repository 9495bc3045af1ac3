"""A model, and the name under which it is found again: what a library notes of the model that made it."""

from __future__ import annotations

import os
from typing import Any

from gare.encoders import MODELS, EncoderProtocol
from gare.model.gare import GARE

ModelLike = GARE | EncoderProtocol | str | os.PathLike[str]
"""What names a model: a loaded one, an encoder of one's own, or what `GARE.from_pretrained` takes by name."""

UNNAMED = "(a model made in Python)"


def load_named(model: ModelLike) -> tuple[str, GARE]:
    """The name of a model and the model itself, for inference.

    A folder is named by its full path, so that it is found from everywhere. An encoder of one's own is named
    by its `name`: it is found again where it is handed over, or offered by an installed package.
    """
    if isinstance(model, GARE):
        return UNNAMED, model.eval()
    if not isinstance(model, str | os.PathLike):
        loaded = GARE.from_pretrained(model)
        encoder: Any = loaded.config.encoder
        return encoder.model, loaded
    name, folder = str(model), os.path.expanduser(model)
    if os.path.isdir(folder) and name not in MODELS:
        name = os.path.realpath(folder)
    return name, GARE.from_pretrained(name)

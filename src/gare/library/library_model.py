"""The model of a library: its stamp, loading it again by that stamp, and the device it is on."""

from __future__ import annotations

import os
import shlex
import warnings

import torch

from gare.errors import CheckpointError, LibraryError
from gare.library.check.repair_run import LoadModel
from gare.library.store import ModelStamp
from gare.model import GARE
from gare.model.named_models import ModelLike, load_named
from gare.model.shipped import REPLACED


def model_stamp(model: GARE, name: str) -> ModelStamp:
    """The stamp of a loaded model; `name` is what loads it again. Hashes about 1 GB of weights a second."""
    return ModelStamp(
        name=name,
        fingerprint=model.fingerprint(),
        dim=model.dim,
        stage1_dim=model.dim + 1,
        num_frames=model.config.num_frames,
    )


def load_model(model: ModelLike, device: torch.device | str) -> tuple[str, GARE]:
    """A model as a library uses it, padding masked, and the name that loads it again."""
    name, loaded = load_named(model)
    return name, loaded.masking_padding().to(device)


def load_model_of(library: str, stamp: ModelStamp, device: torch.device | str) -> GARE:
    """The model that a stamp names. If it is gone or has other weights, the error says how to go on."""
    try:
        named = load_named(stamp.name)[1]
        model = named.masking_padding().to(device)
    except CheckpointError as error:
        raise LibraryError(
            f"{library} was made by {stamp.name}, which cannot be loaded: {error} If it is "
            "elsewhere now, open the library with model=… (--model)"
        ) from None
    if not model.is_known_as(stamp.fingerprint):
        if named.is_known_as(stamp.fingerprint):
            raise LibraryError(
                f"{library} was made by {stamp.name} with an earlier gare, which let padding count: its "
                f"vectors depend on what was indexed together. Encode it again: gare index --model "
                f"{stamp.name}"
            )
        if stamp.fingerprint in REPLACED.get(stamp.name, ()):
            raise LibraryError(
                f"{library} was made by the {stamp.name} of an earlier gare, which a better one has "
                f"replaced. Encode it again: gare index --library {shlex.quote(library)} --model {stamp.name}"
            )
        raise LibraryError(
            f"{library} was made by {stamp.name}, but its weights have changed since; open it with the "
            f"old weights (model=…), or encode it again: gare index --model {stamp.name}"
        )
    return model


def model_loader(
    library: str, model: str | os.PathLike[str] | None = None, device: torch.device | str = "cpu"
) -> LoadModel:
    """What loads the model of a library that is being repaired, when and if it is needed.

    Args:
        library: its address, for messages.
        model: where the model is now, if it moved; or which it was, for a library that does not know.
    """

    def load(stamp: ModelStamp | None) -> tuple[GARE, ModelStamp]:
        if stamp is not None and model is None:
            return load_model_of(library, stamp, device), stamp
        if model is None:
            raise LibraryError(f"{library} has lost the name of its model; name it with --model")
        name, loaded = load_model(model, device)
        if stamp is not None and not loaded.is_known_as(stamp.fingerprint):
            return load_model_of(library, stamp, device), stamp  # the vectors of another model
        return loaded, stamp or model_stamp(loaded, name)

    return load


def usable_device(device: torch.device | str) -> torch.device:
    """The same device, or the CPU with a warning where it is a GPU that is not here."""
    wanted = torch.device(device)
    if wanted.type == "cuda" and not torch.cuda.is_available():
        warnings.warn("no GPU is here; the CPU is used", RuntimeWarning, stacklevel=3)
        return torch.device("cpu")
    return wanted

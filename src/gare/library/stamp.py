"""Which model made a library's vectors."""

from __future__ import annotations

import hashlib
import json

import torch

from gare.library.schema import ModelStamp
from gare.model import GARE


def model_stamp(model: GARE, name: str) -> ModelStamp:
    """The stamp of a loaded model; `name` is what loads it again. Hashes about 1 GB of weights a second."""
    settings = model.config.changed_values()  # a setting that a later version adds must not refuse a library
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(f"{key}{tensor.dtype}{list(tensor.shape)}".encode())
        plain = tensor.detach().cpu().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return ModelStamp(
        name=name,
        fingerprint=digest.hexdigest(),
        dim=model.dim,
        stage1_dim=model.dim + 1,
        num_frames=model.config.num_frames,
    )

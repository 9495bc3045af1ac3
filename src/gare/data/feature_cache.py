"""Features of a frozen encoder, computed once: safetensors shards under the fingerprint of the model."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gare.atomic import replacing
from gare.errors import DataError


class FeatureCache:
    """Tensors by id, for one model. Every `put` is a file of its own, whole or absent even after a kill.

    Args:
        folder: where caches live; each model has a subfolder.
        fingerprint: of the encoder, its weights and the frames it saw; other features are never returned.

    Examples:
        >>> import tempfile, torch
        >>> cache = FeatureCache(Path(tempfile.mkdtemp()), "3f2a")
        >>> cache.put({"video7": torch.zeros(12, 512)})
        >>> cache.missing(["video7", "video8"]), cache.get(["video7"])[0].shape
        (['video8'], torch.Size([12, 512]))
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        if not fingerprint or os.sep in fingerprint:
            raise ValueError(f"'{fingerprint}' is not a fingerprint; use hex digits")
        self._folder = Path(folder) / fingerprint
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open_files: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            self._shard_of.update(dict.fromkeys(self._file(path.name).keys(), path.name))

    def missing(self, ids: Iterable[str]) -> list[str]:
        """The ids that are not in the cache."""
        return [id_ for id_ in ids if id_ not in self._shard_of]

    def put(self, features: Mapping[str, Tensor]) -> None:
        """Add tensors by id, as one file."""
        path = self._folder / f"features-{uuid.uuid4().hex}.safetensors"  # several processes may write
        with replacing(path) as part:
            save_file({id_: tensor.detach().cpu().contiguous() for id_, tensor in features.items()}, part)
        self._shard_of.update(dict.fromkeys(features, path.name))

    def get(self, ids: Iterable[str]) -> list[Tensor]:
        """The tensors of these ids, in their order."""
        ids = list(ids)
        if absent := self.missing(ids):
            raise DataError(
                f"{len(absent)} features are not in {self._folder}, such as {absent[0]}; compute them"
            )
        return [self._file(self._shard_of[id_]).get_tensor(id_) for id_ in ids]

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            try:
                self._open_files[name] = safe_open(self._folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DataError(f"{self._folder / name} is damaged ({error}); delete it") from None
        return self._open_files[name]

"""Models that sentence-transformers or open_clip run, as encoders of one's own.

Their libraries are extras, imported when such a model is loaded. A sentence-transformers folder that holds a
plain dual encoder of transformers needs neither: `dual_encoder_in` finds it.

open_clip needs torchvision. Neither was installed where this was written: that part was not run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gare.encoders.processor_settings import Processor, read_pictures
from gare.errors import CheckpointError
from gare.extras import require
from gare.types import digest_tensors

OPEN_CLIP = "open_clip:"
_MODULES, _OPEN_CLIP_CONFIG = "modules.json", "open_clip_config.json"
_UNKNOWN_SIZE = 448  # of the pictures that a processor nobody could read gets


def is_sentence_transformers(folder: Path) -> bool:
    """Whether a folder was written by sentence-transformers."""
    return (folder / _MODULES).is_file()


def is_gare_module(folder: Path) -> bool:
    """Whether a folder of sentence-transformers holds a model of ours, saved as one of its modules."""
    return _read_modules(folder)[0]["type"].startswith("gare.")


def is_open_clip(name: str) -> bool:
    """Whether a name is that of an open_clip model: open_clip:ARCHITECTURE/WEIGHTS, or a folder of one."""
    folder = Path(name)
    return name.startswith(OPEN_CLIP) or (
        (folder / _OPEN_CLIP_CONFIG).is_file() and not (folder / "config.json").is_file()
    )


def dual_encoder_in(folder: Path) -> Path | None:
    """The folder of the transformers model that a sentence-transformers model consists of; None where other
    modules change its vectors. Bringing them to length one does not change a cosine."""
    modules = _read_modules(folder)
    if any(not module["type"].endswith(".Normalize") for module in modules[1:]):
        return None
    inside = folder / modules[0]["path"]
    inside = inside if (inside / "config.json").is_file() else folder
    try:
        kind = json.loads((inside / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    has_both_towers = "text_config" in kind and "vision_config" in kind
    is_clip = modules[0]["type"].endswith((".CLIPModel", ".Transformer"))
    return inside if has_both_towers and is_clip else None


def _read_modules(folder: Path) -> list[dict[str, str]]:
    try:
        modules: list[dict[str, str]] = json.loads((folder / _MODULES).read_text(encoding="utf-8"))
        if not modules or not all({"type", "path"} <= module.keys() for module in modules):
            raise ValueError("it names no modules")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / _MODULES} is damaged: {error}; download the model again") from None
    return modules


class SentenceTransformersModel:
    """A model of sentence-transformers that reads pictures; an `EncoderProtocol`."""

    image_fit = "squash"

    def __init__(self, folder: Path) -> None:
        require("sentence-transformers", f"the model {folder}")
        _refuse_pickles_below(folder)
        from sentence_transformers import SentenceTransformer

        try:
            self._model: Any = SentenceTransformer(
                str(folder),
                device="cpu",
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )
        except Exception as error:  # whatever its modules do
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"sentence-transformers cannot load {folder}: {reason}") from None
        if "image" not in getattr(self._model, "modalities", ["text"]):
            raise CheckpointError(
                f"{folder} is a sentence-transformers model for texts alone; gare needs one that reads "
                "pictures too, such as sentence-transformers/clip-ViT-B-32"
            )
        self.name, self.fingerprint = str(folder), _digest_of_files(folder)
        self.image_size = self._picture_size(folder)

    def _picture_size(self, folder: Path) -> int:
        try:
            images = self._model[0].processor.image_processor
            return read_pictures(Processor(images, None), folder).size
        except (AttributeError, CheckpointError):
            return _UNKNOWN_SIZE

    def encode_texts(self, texts: list[str]) -> Any:
        """Vectors of texts."""
        return self._model.encode(texts, convert_to_numpy=True, show_progress_bar=False)

    def encode_images(self, images: list[np.ndarray]) -> Any:
        """Vectors of pictures."""
        from PIL import Image

        pictures = [Image.fromarray(image) for image in images]
        return self._model.encode(pictures, convert_to_numpy=True, show_progress_bar=False)


class OpenClipModel:
    """A model of open_clip; an `EncoderProtocol`.

    Args:
        name: `open_clip:ViT-B-32/laion2b_s34b_b79k`, architecture and weights as open_clip lists them, or a
            folder with open_clip_config.json.
    """

    def __init__(self, name: str) -> None:
        require("open-clip", f"the model {name}")
        import open_clip

        architecture, _, pretrained = name.removeprefix(OPEN_CLIP).rpartition("/")
        if not name.startswith(OPEN_CLIP):
            architecture, pretrained = f"local-dir:{name}", ""
        elif not architecture:
            raise CheckpointError(
                f"'{name}' names no weights; write {OPEN_CLIP}ARCHITECTURE/WEIGHTS, such as "
                f"{OPEN_CLIP}ViT-B-32/laion2b_s34b_b79k (open_clip.list_pretrained() has them all)"
            )
        try:
            model = open_clip.create_model(architecture, pretrained=pretrained or None)
            self._tokenizer: Any = open_clip.get_tokenizer(architecture)
        except Exception as error:  # unknown names, no network, damaged files
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"open_clip cannot load {name}: {reason}") from None
        self._model: Any = model.eval()
        wanted = model.visual.preprocess_cfg
        size = wanted["size"]
        self.name = name
        self.fingerprint = digest_tensors({key: x.float() for key, x in model.state_dict().items()})
        self.image_size = int(size if isinstance(size, int) else size[0])
        self.image_fit = "squash" if wanted.get("resize_mode") == "squash" else "crop"
        self._mean, self._std = (torch.tensor(wanted[key]).view(3, 1, 1) for key in ("mean", "std"))

    @torch.no_grad()
    def encode_texts(self, texts: list[str]) -> Tensor:
        """Vectors of texts."""
        vectors_TD: Tensor = self._model.encode_text(self._tokenizer(texts))
        return vectors_TD

    @torch.no_grad()
    def encode_images(self, images: list[np.ndarray]) -> Tensor:
        """Vectors of pictures."""
        pixels_NCHW = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
        vectors_ND: Tensor = self._model.encode_image((pixels_NCHW - self._mean) / self._std)
        return vectors_ND


def _refuse_pickles_below(folder: Path) -> None:
    for pickle in sorted(folder.rglob("*.bin")):
        if not any(pickle.parent.glob("*.safetensors")):
            raise CheckpointError(
                f"{pickle} is a pickle, and reading one can run code of whoever wrote it; gare reads "
                "safetensors alone. If you trust its source, load the model with sentence-transformers and "
                "save it again (save_pretrained)"
            )


def _digest_of_files(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".safetensors", ".json", ".txt", ".model") and path.is_file():
            digest.update(str(path.relative_to(folder)).encode())
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
    return digest.hexdigest()

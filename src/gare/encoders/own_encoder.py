"""An encoder of one's own, without torch or a base class: two methods, a name and a fingerprint.

`Library.open(place, model=Mine())` takes such an object, `--model NAME` one that a package offers by an entry
point (`MODELS`). docs/how-to/use-your-own-encoder.md shows one from start to end.

The object is called in the process that indexes or searches. Others decode, and know nothing of it.

Shapes: T texts, W words, N images, D embedding.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gare.encoders.encoder import Encoder, EncoderConfig, ImageFormat
from gare.encoders.other_libraries import (
    OpenClipModel,
    SentenceTransformersModel,
    is_open_clip,
    is_sentence_transformers,
)
from gare.errors import CheckpointError, ConfigError, EncoderError, GareError
from gare.image_fit import ImageFit
from gare.registry import Registry
from gare.settings import PositiveInt

_BYTES = 8  # of a text in one token
_MAX_WORDS = 512


@runtime_checkable
class EncoderProtocol(Protocol):
    """What an encoder of one's own has. Vectors are numpy arrays or tensors, one row each, of any length.

    Two attributes may be added: `image_size`, the side of the square pictures it takes (224), and
    `image_fit`, how a picture becomes square: "squash" (the default, all of it) or "crop" (its middle).
    """

    name: str
    """What a library is told to have been made by; with an entry point, what `--model` takes."""
    fingerprint: str
    """Changes whenever its vectors would: a library refuses vectors of another one."""

    def encode_texts(self, texts: list[str]) -> Any:
        """One vector a text, [texts, D]."""
        ...

    def encode_images(self, images: list[np.ndarray]) -> Any:
        """One vector a picture, [pictures, D]; each picture is uint8, height × width × 3, RGB."""
        ...


MODELS: Registry[Callable[[], Any]] = Registry("model", {})
"""Encoders of one's own by name: what gives the object when it is called, its class for example."""

_GIVEN: dict[str, EncoderProtocol] = {}
"""Objects that were handed over in this process, by what identifies them."""


def looks_like_encoder(thing: object) -> bool:
    """Whether a thing has the two methods; what else it lacks is said by `describe`."""
    return callable(getattr(thing, "encode_texts", None)) and callable(getattr(thing, "encode_images", None))


@dataclass(frozen=True)
class OwnEncoderConfig(EncoderConfig):
    """An encoder of one's own, by its name."""

    name: Literal["own"] = "own"
    model: str = ""
    """The name of the object, as in the entry points `gare.models`."""
    identity: str = ""
    """Its fingerprint; none takes whichever it has."""
    dim: PositiveInt | None = None
    """Dimensions of its vectors; none asks it."""
    image_size: PositiveInt = 224
    image_fit: Literal["crop", "squash"] = "squash"


def describe(encoder: Any) -> OwnEncoderConfig:
    """The settings of an object; the object is remembered, so that an encoder can be built from them.

    Raises:
        ConfigError: it lacks something; the message says what.
    """
    if isinstance(encoder, type):
        raise ConfigError(f"{encoder.__name__} is a class; hand over an object of it: {encoder.__name__}()")
    kind = type(encoder).__name__
    values = {}
    for attribute in ("name", "fingerprint"):
        value = getattr(encoder, attribute, None)
        value = value() if callable(value) else value
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{kind}.{attribute} must be a string that is not empty, not {value!r}")
        values[attribute] = value
    if not looks_like_encoder(encoder):
        raise ConfigError(f"{kind} needs the methods encode_texts(texts) and encode_images(images)")
    size, fit = getattr(encoder, "image_size", 224), getattr(encoder, "image_fit", "squash")
    config = OwnEncoderConfig.load(
        {"model": values["name"], "identity": values["fingerprint"], "image_size": size, "image_fit": fit}
    )
    _GIVEN[_key(config)] = encoder
    return config


class OwnEncoder(Encoder):
    """An object of one's own as an encoder. It has no weights that gare knows of, so none are trained.

    A text travels as its bytes, eight to a token.
    """

    Config = OwnEncoderConfig
    config: OwnEncoderConfig

    def __init__(
        self, config: OwnEncoderConfig, *, weights: bool = True, tokenizer_folder: Path | None = None
    ) -> None:
        super().__init__(config)
        self._own = (_find(config),)
        found = describe(self._own[0])
        if config.identity and found.identity != config.identity:
            raise CheckpointError(
                f"the encoder '{config.model}' has changed: its fingerprint is {found.identity}, and it was "
                f"{config.identity}; use the old one, or train and index anew"
            )
        self.register_buffer("_place", torch.zeros(()), persistent=False)
        fit = ImageFit(found.image_fit, as_processor=True)
        self.image_format = ImageFormat(found.image_size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), fit)
        self.max_words = _MAX_WORDS
        self.dim = self._find_dim()
        self.config = OwnEncoderConfig.load({**found.to_values(), "dim": self.dim})

    def _find_dim(self) -> int:
        kind, size = type(self._own[0]).__name__, self.image_format.size
        text_TD = self._ask("encode_texts", ["a dog"])
        grey = np.full((size, size, 3), 128, dtype=np.uint8)
        image_ND = self._ask("encode_images", [grey])
        if text_TD.shape != image_ND.shape:
            raise ConfigError(
                f"{kind}: texts have {text_TD.shape[1]} dimensions and pictures {image_ND.shape[1]}; they "
                "must be in one space"
            )
        return text_TD.shape[1]

    def _ask(self, method: str, inputs: list[Any], dim: int | None = None) -> Tensor:
        """What a method of the object gives, as floats on the device of the model.

        Args:
            dim: how many dimensions it gave before.
        """
        who, number = f"{type(self._own[0]).__name__}.{method}", len(inputs)
        with _explained(f"{who} failed"):
            given = getattr(self._own[0], method)(inputs)
        try:
            vectors_ND = _to_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{who} must give {number} vectors, as an array, a tensor or a list, and gave a "
                f"{type(given).__name__} that cannot be read as numbers: {str(error).splitlines()[0]}"
            ) from None
        wanted = f"{number} vectors" + (f" of {dim} dimensions" if dim else "")
        if (
            vectors_ND.ndim != 2
            or len(vectors_ND) != number
            or vectors_ND.shape[1] != (dim or vectors_ND.shape[1])
        ):
            raise ConfigError(f"{who} must give {wanted}, and gave the shape {list(vectors_ND.shape)}")
        place: Any = self._place
        vectors_ND = vectors_ND.to(place.device, torch.float32)
        if not torch.isfinite(vectors_ND).all():
            raise ConfigError(f"{who} gave NaN, infinity, or numbers beyond those of float32")
        return vectors_ND

    # --- features -------------------------------------------------------------------------------------------

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = [text.encode("utf-8", "replace")[: _BYTES * _MAX_WORDS] or b" " for text in texts]
        lengths_T = torch.tensor([-(-len(row) // _BYTES) for row in rows])
        width = int(lengths_T.max())
        joined = b"".join(row.ljust(_BYTES * width, b"\0") for row in rows)
        token_ids_TW = torch.from_numpy(np.frombuffer(joined, dtype="<i8").astype(np.int64))
        return token_ids_TW.view(len(rows), width), torch.arange(width) < lengths_T[:, None]

    def encode_text(self, token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
        rows = token_ids_TW.masked_fill(~mask_TW, 0).cpu().numpy().astype("<i8")
        texts = [row.tobytes().rstrip(b"\0").decode("utf-8", "ignore") for row in rows]
        text_TD = self._ask("encode_texts", texts, self.dim)
        return text_TD, text_TD[:, None].expand(-1, token_ids_TW.shape[1], -1)

    def encode_frames(self, bytes_NCHW: Tensor) -> Tensor:
        images = [np.ascontiguousarray(each) for each in bytes_NCHW.permute(0, 2, 3, 1).cpu().numpy()]
        return self._ask("encode_images", images, self.dim)

    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        return self.encode_frames((pixels_NCHW.float() * 255).round().clamp(0, 255).to(torch.uint8))

    def project_images(self, features_NE: Tensor) -> Tensor:
        return features_NE

    # --- what is known of it --------------------------------------------------------------------------------

    def identity(self, values: dict[str, Any]) -> dict[str, Any]:
        """Without its name: the fingerprint is what counts."""
        return {key: value for key, value in values.items() if key != "model"}

    def image_tower_digest(self) -> str:
        return hashlib.blake2b(self.config.identity.encode(), digest_size=8).hexdigest()

    def compile_towers(self) -> None:
        """It is not torch's to compile."""

    def flops(self) -> dict[Literal["image", "text"], float]:
        """Nothing that could be counted."""
        return {"image": 0.0, "text": 0.0}


def _to_tensor(given: Any) -> Tensor:
    """An array, a tensor, or a list of numbers, arrays or tensors as one tensor."""
    if isinstance(given, list | tuple) and given and isinstance(given[0], Tensor):
        given = torch.stack(list(given))
    if isinstance(given, Tensor):
        return given.detach()
    array = np.asarray(given)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"its elements are {array.dtype}")
    return torch.from_numpy(array.astype(np.float64, order="C"))


def _find(config: OwnEncoderConfig) -> Any:
    """The object of these settings: handed over in this process, or offered by an installed package."""
    key, is_any = _key(config), not config.identity
    given = [own for known, own in _GIVEN.items() if known == key or (is_any and known.startswith(key))]
    if given:
        return given[-1]
    if config.model not in MODELS and not is_open_clip(config.model) and not _is_folder(config.model):
        raise CheckpointError(
            f"'{config.model}' is an encoder of someone's own, which this process does not have. From "
            "Python, hand the object over (model=…); for the command line, offer it by an entry point "
            f"'{config.model}' of the group {MODELS.group}"
        )
    return load_own(config.model)


def load_own(name: str) -> Any:
    """What a package offers under this name, or a model of another library that has it."""
    if name not in MODELS and is_open_clip(name):
        return OpenClipModel(name)
    if name not in MODELS and _is_folder(name):
        return SentenceTransformersModel(Path(name))
    offered = MODELS[name]
    is_ready = looks_like_encoder(offered) and not isinstance(offered, type)
    if is_ready:
        return offered
    with _explained(f"the model '{name}' cannot be made"):
        return offered()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Say which code of someone's own has failed, and where; the error itself stays the cause."""
    try:
        yield
    except GareError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error).strip() or "no message").splitlines()[0]
        raise EncoderError(
            f"{what}: {type(error).__name__}: {said} ({place.filename}, line {place.lineno})"
        ) from error


def _is_folder(name: str) -> bool:
    return is_sentence_transformers(Path(name))


def _key(config: OwnEncoderConfig) -> str:
    return f"{config.model}\n{config.identity}"

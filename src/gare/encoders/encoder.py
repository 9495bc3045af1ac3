"""Encoders: an image tower and a text tower that end in one space, with the facts that only they know.

Those are: which parameters belong to which tower, how to freeze them, what picture they take, what they cost.

A new encoder subclasses `Encoder`, brings its settings as `Config`, and is registered in `ENCODERS`.
`docs/how-to/add-an-encoder.md` shows one from start to end.

Shapes: T texts, W words, V videos, F frames, N images, E image features, D embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gare.encoders.bfloat16_layers import bfloat16_products, is_wanted, prepare
from gare.image_fit import CROP, ImageFit
from gare.settings import Settings
from gare.types import digest_tensors

Part = Literal["image", "text", "projection"]
"""Where a parameter belongs: the image tower, the text tower, or the maps into the shared space."""


@dataclass(frozen=True)
class EncoderConfig(Settings):
    """The settings of an encoder; `name` says which one. Each class gives its own name as the default."""

    name: str


@dataclass(frozen=True)
class ImageFormat:
    """How pixels must look: a square of `size`, by default a centre crop; normalised by channel."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    fit: ImageFit = CROP

    def __repr__(self) -> str:
        """Without a fit that is the default: features of frames were kept under this before there was one."""
        fit = "" if self.fit == CROP else f", fit={self.fit}"
        return f"ImageFormat(size={self.size}, mean={self.mean}, std={self.std}{fit})"

    def normalise(self, bytes_NCHW: Tensor) -> Tensor:
        """(x / 255 − mean) / std per channel, on the device of the input; any leading dimensions.

        >>> ImageFormat(1, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).normalise(torch.full((3, 1, 1), 255)).flatten()
        tensor([1., 1., 1.])
        """
        mean_C11 = torch.tensor(self.mean, device=bytes_NCHW.device).view(-1, 1, 1)
        std_C11 = torch.tensor(self.std, device=bytes_NCHW.device).view(-1, 1, 1)
        if bytes_NCHW.is_cuda:  # in one pass; the last digit may differ
            return torch.addcmul(-mean_C11 / std_C11, bytes_NCHW, 1 / (255 * std_C11))
        return bytes_NCHW.float().div_(255).sub_(mean_C11).div_(std_C11)


class Encoder(nn.Module, ABC):
    """Two towers that end in one space of `dim` dimensions.

    Args:
        config: the settings; an instance of `Config`.
        weights: False builds the architecture alone, for weights that are loaded afterwards.
        tokenizer_folder: where a saved model keeps a tokeniser of its own.
    """

    Config: ClassVar[type[EncoderConfig]]
    IMAGE_TOWER: ClassVar[tuple[str, ...]] = ()
    """Names of the submodules (or buffers) that are the image tower: what is frozen and cached, without its
    projection."""
    TEXT_TOWER: ClassVar[tuple[str, ...]] = ()
    """Names of the submodules that are the text tower."""

    dim: int
    image_format: ImageFormat
    max_words: int
    """The most tokens a text may have."""
    _is_fast: bool | None = None
    config: Any
    """Complete: the same towers, weights aside, can be built from it alone."""

    # --- what a new encoder writes --------------------------------------------------------------------------

    @abstractmethod
    def __init__(self, config: Any, *, weights: bool = True, tokenizer_folder: Path | None = None) -> None:
        super().__init__()

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids [T, W] and their mask, true where a token is real."""

    @abstractmethod
    def encode_text(self, token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
        """The sentence vector [T, D] and the vector of every token [T, W, D], not normalised."""

    @abstractmethod
    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        """Features of the image tower [N, E], before its projection: what a cache keeps of a frozen tower."""

    @abstractmethod
    def project_images(self, features_NE: Tensor) -> Tensor:
        """Features of the image tower in the shared space [N, D]; any leading dimensions."""

    # --- what it may do better ------------------------------------------------------------------------------

    def start_temporal(self, temporal: nn.Module) -> bool:
        """Start the temporal transformer from weights of the towers; False where none fit."""
        return False

    def identity(self, values: dict[str, Any]) -> dict[str, Any]:
        """Those of its settings that a model's fingerprint has in it; the weights are in it anyway."""
        return values

    def save_tokenizer(self, folder: Path) -> None:
        """Put beside the weights what `tokenize` needs and the package does not ship."""

    def freeze_first_layer(self) -> None:
        """Freeze what the released code never trains: the patch embedding of a ViT."""

    def enable_gradient_checkpointing(self) -> None:
        """Compute activations of the towers again in backward instead of keeping them, where they can."""
        for tower in self.children():
            enable: Any = getattr(tower, "gradient_checkpointing_enable", None)
            if enable is not None:
                enable({"use_reentrant": False})

    def random_tokens(self, num_texts: int) -> tuple[Tensor, Tensor]:
        """Token ids of full length that the text tower accepts, for benchmarks, with their mask."""
        return self.tokenize(["a dog runs on the beach " * self.max_words] * num_texts)

    # --- shared ---------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the towers."""
        return next(self.parameters(), torch.zeros(())).dtype

    def encode_frames(self, bytes_NCHW: Tensor) -> Tensor:
        """Features [N, E] of frames as they come from a decoder: bytes, cropped to `image_format.size`.

        The one place where bytes are normalised and shown to the image tower. A large one multiplies in
        bfloat16 where the processor gains by it (`bfloat16_layers`).
        """
        pixels_NCHW = self.image_format.normalise(bytes_NCHW).to(self.dtype)
        is_fast = not torch.is_grad_enabled() and self._has_fast_tower(pixels_NCHW.device)
        with bfloat16_products(on=is_fast):
            return self.image_features(pixels_NCHW)

    def _has_fast_tower(self, device: torch.device) -> bool:
        """Whether the image tower is large and ready for products in bfloat16, wanted on this device."""
        if not is_wanted(device):
            return False
        if self._is_fast is None:
            towers = [part for name, part in self.named_children() if name in self.IMAGE_TOWER]
            self._is_fast = any([prepare(tower) for tower in towers])
        return self._is_fast

    def encode_images(self, pixels_NCHW: Tensor) -> Tensor:
        """One vector per image [N, D], not normalised."""
        return self.project_images(self.image_features(pixels_NCHW))

    def part_of(self, parameter: str) -> Part:
        """Which part a parameter of this encoder belongs to, by its name."""
        module = parameter.split(".")[0]
        if module in self.IMAGE_TOWER:
            return "image"
        return "text" if module in self.TEXT_TOWER else "projection"

    def tower_parameters(self, part: Part) -> dict[str, nn.Parameter]:
        """The parameters of one part, by name."""
        return {name: p for name, p in self.named_parameters() if self.part_of(name) == part}

    def freeze(self, part: Part) -> None:
        """Keep the weights of one part as they are."""
        for parameter in self.tower_parameters(part).values():
            parameter.requires_grad_(False)

    @property
    def is_image_tower_frozen(self) -> bool:
        """Whether no weight of the image tower is trained, so that its features can be cached."""
        return not any(parameter.requires_grad for parameter in self.tower_parameters("image").values())

    def image_tower_digest(self) -> str:
        """Sixteen hex digits that change when the features of a frame would."""
        tower = {n: x.float() for n, x in self.state_dict().items() if self.part_of(n) == "image"}
        return digest_tensors(tower)

    def compile_towers(self) -> None:
        """Run both towers through torch.compile; the rest of a model is a few large matrix products."""
        self._is_fast = False  # torch.compile does as well, and does not see into these layers
        towers: Any = self
        towers.image_features = torch.compile(self.image_features)
        towers.encode_text = torch.compile(self.encode_text)

    @torch.no_grad()
    def flops(self) -> dict[Literal["image", "text"], float]:
        """Operations for one image and for one text of full length, one multiply-add counted as two."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        device, size = next(self.parameters(), torch.zeros(())).device, self.image_format.size
        plain = type(self)  # not what torch.compile has put in its place: that is not counted
        token_ids_TW, mask_TW = self.random_tokens(1)
        counts: dict[Literal["image", "text"], float] = {}
        # Fused attention on a CPU is not counted; as separate products it is.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            pixels_NCHW = torch.zeros(1, 3, size, size, device=device, dtype=self.dtype)
            features_NE = plain.image_features(self, pixels_NCHW)
            self.project_images(features_NE)
        counts["image"] = float(counter.get_total_flops())
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            plain.encode_text(self, token_ids_TW.to(device), mask_TW.to(device))
        counts["text"] = float(counter.get_total_flops())
        return counts

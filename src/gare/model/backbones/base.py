"""What GARE asks of a pair of towers. Shapes: T texts, W words, N images, D embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from gare.config import BackboneConfig
from gare.model.temporal import TemporalTransformer


@dataclass(frozen=True)
class ImageFormat:
    """How pixels must look: a centre crop of `size`, normalised by channel."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Backbone(nn.Module, ABC):
    """Two towers that end in one space of `dim` dimensions."""

    dim: int
    image_format: ImageFormat
    config: BackboneConfig
    """Complete: the same towers, weights aside, can be built from it alone."""

    @abstractmethod
    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids [T, W] and their mask, true where a token is real."""

    @abstractmethod
    def encode_text(self, token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
        """The sentence vector [T, D] and the vector of every token [T, W, D], not normalised."""

    @abstractmethod
    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        """What the image tower sees [N, E], before its projection: what a cache keeps of a frozen tower."""

    @abstractmethod
    def project_images(self, features_NE: Tensor) -> Tensor:
        """Features of the image tower in the shared space [N, D]."""

    def encode_images(self, pixels_NCHW: Tensor) -> Tensor:
        """One vector per image [N, D], not normalised."""
        return self.project_images(self.image_features(pixels_NCHW))

    def start_temporal(self, temporal: TemporalTransformer) -> bool:
        """Start the temporal transformer from weights of the towers; False where none fit."""
        return False

    def save_tokenizer(self, folder: Path) -> None:
        """Put beside the weights what `tokenize` needs and the package does not ship."""

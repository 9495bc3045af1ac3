"""Random towers for tests: everything a real pair has, small enough to run in a millisecond.

Shapes: T texts, W words, N images, D embedding.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from gare.encoders.encoder import Encoder, EncoderConfig, ImageFormat
from gare.settings import PositiveInt, Width

PATCH = 8


@dataclass(frozen=True)
class TinyEncoderConfig(EncoderConfig):
    """Random towers small enough for tests: a patch embedding and a bag of words with positions."""

    name: Literal["tiny"] = "tiny"
    dim: Width = 16
    image_size: PositiveInt = 32
    vocabulary: PositiveInt = 512
    max_words: PositiveInt = 16
    freeze_image: bool = False


class TinyEncoder(Encoder):
    """Words are hashed into a small vocabulary; an image is the mean of its patch vectors."""

    Config = TinyEncoderConfig
    IMAGE_TOWER, TEXT_TOWER = ("patches",), ("words", "text")
    config: TinyEncoderConfig

    def __init__(
        self, config: TinyEncoderConfig, *, weights: bool = True, tokenizer_folder: Path | None = None
    ) -> None:
        super().__init__(config)
        self.config = config
        self.dim, self.max_words = config.dim, config.max_words
        self.image_format = ImageFormat(config.image_size, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        self.words = nn.Embedding(config.vocabulary, config.dim)
        self.positions = nn.Parameter(torch.empty(config.max_words, config.dim).normal_(std=0.1))
        self.text = nn.Linear(config.dim, config.dim)
        self.patches = nn.Conv2d(3, config.dim, kernel_size=PATCH, stride=PATCH)
        self.image = nn.Linear(config.dim, config.dim)
        self.patches.requires_grad_(not config.freeze_image)

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        rows = [text.lower().split()[: self.config.max_words] or [""] for text in texts]
        width = max(map(len, rows))
        token_ids_TW = torch.zeros(len(rows), width, dtype=torch.long)
        mask_TW = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, words in enumerate(rows):
            ids = [zlib.crc32(word.encode()) % self.config.vocabulary for word in words]
            token_ids_TW[i, : len(ids)] = torch.tensor(ids)
            mask_TW[i, : len(ids)] = True
        return token_ids_TW, mask_TW

    def encode_text(self, token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
        words_TWD = self.text((self.words(token_ids_TW) + self.positions[: token_ids_TW.shape[1]]).tanh())
        kept_TW1 = mask_TW[..., None].to(words_TWD.dtype)
        return (words_TWD * kept_TW1).sum(dim=1) / kept_TW1.sum(dim=1), words_TWD

    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        features_NE: Tensor = self.patches(pixels_NCHW).tanh().mean(dim=(2, 3))
        return features_NE

    def project_images(self, features_NE: Tensor) -> Tensor:
        vectors_ND: Tensor = self.image(features_NE)
        return vectors_ND

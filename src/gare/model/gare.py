"""The model: an encoder, a temporal transformer over frames, and the interaction that scores each pair.

Long, because a user looks for every method of a model in one place; what they do is mostly elsewhere.

Shapes: T texts, W words, V videos, F frames, D embedding.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard, ModelHubMixin
from PIL.Image import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from gare.encoders import MODELS, EncoderProtocol, build_encoder
from gare.encoders.hub_folder import find_folder
from gare.encoders.other_libraries import OPEN_CLIP
from gare.encoders.own_encoder import describe, load_own
from gare.errors import CheckpointError
from gare.interaction import Interaction, ScoreCards, build_interaction
from gare.interaction.interaction import check_shapes, check_text, check_video, score_in_blocks
from gare.interaction.temporal import TemporalTransformer, default_heads
from gare.model import plain_encoding
from gare.model.model_card import CardResult, current_results, make_card, merge_results, read_results
from gare.model.model_config import GareConfig
from gare.model.model_files import CONFIG_FILE, TOKENIZER_FOLDER, WEIGHTS_FILE, load_state, read_folder
from gare.model.plain_encoders import encoder_of_folder, plain_config
from gare.model.plain_encoding import PlainVectors
from gare.model.shipped import FORMER_FINGERPRINTS, SHIPPED, read_shipped
from gare.model.version_0_1 import old_fingerprint
from gare.types import FrameWeights, PairScores, TextFeatures, VideoFeatures, update_digest

_TOO_LARGE = ("can't allocate memory", "calculation overflowed", "Overflow when unpacking", "out of memory")

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

    Examples:
        >>> config = GareConfig.load({"encoder": {"name": "tiny"}})
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
        self.encoder = build_encoder(
            config.encoder, weights=pretrained_towers, tokenizer_folder=tokenizer_folder
        )
        self.config = replace(config, encoder=self.encoder.config)
        self.dim = self.encoder.dim
        self.temporal: TemporalTransformer | None = None
        if config.temporal.num_layers:
            self.temporal = TemporalTransformer(
                self.dim,
                num_layers=config.temporal.num_layers,
                num_heads=config.temporal.num_heads or default_heads(self.dim),
                max_frames=config.temporal.max_frames,
            )
            if config.temporal.init == "text_tower":
                self.encoder.start_temporal(self.temporal)
        self.interaction: Interaction = build_interaction(config.interaction, self.dim)
        self.written_by_0_1: dict[str, Any] | None = None
        """The settings as version 0.1 saved them, if it did: libraries of that version are known by them."""
        self.card_results: tuple[CardResult, ...] = ()
        """What its card says it scored; `save_pretrained` and `push_to_hub` write it while it is true."""
        log_logit_scale = torch.tensor(-math.log(config.temperature.value))
        if config.temperature.learnable:
            self.log_logit_scale = nn.Parameter(log_logit_scale)
        else:
            self.register_buffer("log_logit_scale", log_logit_scale)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
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
            token_ids_TW, mask_TW = self.encoder.tokenize(texts[start : start + batch_size])
            batches.append(self.text_features(token_ids_TW.to(self.device), mask_TW.to(self.device)))
        return TextFeatures.cat(batches)

    @torch.no_grad()
    def encode_video(
        self, videos: Sequence[VideoInput], *, num_frames: int | None = None, batch_size: int = 8
    ) -> VideoFeatures:
        """Encode video files (`num_frames` frames each) or lists of PIL images, mixed as you like.

        A model whose padding takes part (`mask_frames = false`, as the released code) pads to `num_frames`.
        """
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
        return VideoFeatures.cat(
            [
                self.frame_features(videos[start : start + batch_size], num_frames)
                for start in range(0, len(videos), batch_size)
            ]
        )

    def encode(
        self,
        inputs: Any,
        *,
        kind: Literal["text", "video"] | None = None,
        batch_size: int | None = None,
        num_frames: int | None = None,
        normalize_embeddings: bool = True,
        convert_to_tensor: bool = False,
        show_progress_bar: bool = False,
        gradients: bool = False,
    ) -> PlainVectors | Tensor:
        """One vector for each text or video, [N, D]; [D] for a single one.

        A plain vector is the text vector, or the mean of a video's frames. The product of two is the cosine
        without increments: what a vector index needs. What is returned remembers every frame, and
        `similarity` gives the model's own scores. Without gradients and dropout, in evaluation mode.

        Args:
            inputs: one or many. A string is a text, unless it ends like the name of a video or a picture. A
                video is a path, a picture (PIL), a list of pictures, or an array of bytes [F, H, W, 3]. A
                list of pictures is many videos of one frame; a list of lists, many videos.
            kind: what all inputs are, where a string could be taken for the other.
            batch_size: texts or videos at a time; default 256 or 8.
            num_frames: frames that are read of a file; default: as many as the model was trained with.
            normalize_embeddings: vectors of length one.
            convert_to_tensor: a tensor on the model's device instead of a NumPy array.
            gradients: keep what backward needs, and the model in its mode; with `convert_to_tensor` only.

        Examples:
            >>> model = GARE(GareConfig.load({"encoder": {"name": "tiny"}}))
            >>> model.encode("a dog").shape, model.encode(["a dog", "rain"]).shape
            ((16,), (2, 16))
        """
        return plain_encoding.encode(
            self,
            inputs,
            kind=kind,
            batch_size=batch_size,
            num_frames=num_frames,
            normalize=normalize_embeddings,
            as_tensor=convert_to_tensor,
            show_progress=show_progress_bar,
            gradients=gradients,
        )

    def similarity(self, first: Any, second: Any) -> Tensor:
        """The score of each of the first with each of the second, [N, M].

        Texts with videos have the model's scores, increments included, as `score` gives them. Texts with
        texts, and videos with videos, have the cosine of their plain vectors.

        Args:
            first: what `encode` returned or rows of it, features, or what `encode` takes.
            second: likewise.

        Raises:
            ValueError: plain vectors without their features, for a model whose score is not their product.

        Examples:
            >>> model = GARE(GareConfig.load({"encoder": {"name": "tiny"}}))
            >>> frames = torch.zeros(4, 32, 32, 3, dtype=torch.uint8)
            >>> model.similarity(["a dog", "rain"], model.encode(frames)).shape
            torch.Size([2, 1])
        """
        return plain_encoding.similarity(self, first, second)

    def frame_features(
        self, videos: Sequence[str | os.PathLike[str] | Sequence[Image]], num_frames: int | None = None
    ) -> VideoFeatures:
        """Features of one batch of videos: paths, or frames as pictures. With gradients where they are on."""
        return self.encode_frames(*self.load_frames(videos, num_frames))

    def load_frames(
        self, videos: Sequence[str | os.PathLike[str] | Sequence[Image]], num_frames: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Frames of one batch of videos as `encode_frames` takes them, and their mask; nothing is encoded."""
        from gare.data.transforms import to_bytes
        from gare.data.video import SHORT_SIDE, read_frames

        num_frames = self.config.num_frames if num_frames is None else num_frames
        size, fit = self.encoder.image_format.size, self.encoder.image_format.fit
        # Where padding takes part, its amount must not depend on what else is encoded.
        least = 1 if self.interaction.masks_padding else num_frames
        clips = [
            read_frames(video, num_frames, short_side=fit.decoded_side(size, SHORT_SIDE))
            if isinstance(video, str | os.PathLike)
            else list(video)
            for video in videos
        ]
        frames = [to_bytes(clip, size, fit) for clip in clips]
        return stack_clips(frames, least=least)

    def encode_frames(
        self, frames_VFCHW: Tensor, mask_VF: Tensor, *, num_real: int | None = None
    ) -> VideoFeatures:
        """Features of frames as a decoder gives them: bytes [V, F, 3, size, size] on any device.

        Normalising, the image tower and what follows happen here for every caller: training, evaluation,
        indexing, uploads. Padded frames are not shown to the tower, unless the interaction uses them: then
        they are zero after normalising, as in the released code, whatever bytes they have.

        Args:
            num_real: how many frames are real, or some more, where that is known: counting those of a mask on
                a GPU waits for it.
        """
        self._check_frames(frames_VFCHW, mask_VF)
        if frames_VFCHW.dtype != torch.uint8:
            raise ValueError(f"frames must be bytes, got {frames_VFCHW.dtype}; video_features takes floats")
        if self.interaction.masks_padding:
            frames_VFCHW = frames_VFCHW.to(self.device)
            return self._features_of_shown(self.encoder.encode_frames, frames_VFCHW, mask_VF, num_real)
        frames_VFCHW, mask_VF = frames_VFCHW.to(self.device), mask_VF.to(self.device)
        pixels_VFCHW = self.encoder.image_format.normalise(frames_VFCHW)
        pixels_VFCHW.masked_fill_(~mask_VF.bool()[:, :, None, None, None], 0)
        return self.video_features(pixels_VFCHW, mask_VF)

    def text_features(self, token_ids_TW: Tensor, mask_TW: Tensor) -> TextFeatures:
        """Features of token ids; `mask_TW` is true (or 1) where a token is real."""
        if token_ids_TW.ndim != 2 or token_ids_TW.shape != mask_TW.shape or not token_ids_TW.numel():
            raise ValueError(
                "token ids and mask must both be [texts, words] and not empty, got "
                f"{list(token_ids_TW.shape)} and {list(mask_TW.shape)}"
            )
        if token_ids_TW.is_floating_point():
            raise ValueError(f"token ids must be whole numbers, got {token_ids_TW.dtype}")
        text_TD, words_TWD = self.encoder.encode_text(token_ids_TW, mask_TW.bool())
        return TextFeatures(text_TD, words_TWD, mask_TW.bool())

    def video_features(self, pixels_VFCHW: Tensor, mask_VF: Tensor) -> VideoFeatures:
        """Features of frames [V, F, 3, size, size]; `mask_VF` is true (or 1) where a frame is real."""
        self._check_frames(pixels_VFCHW, mask_VF)
        if not pixels_VFCHW.is_floating_point():
            raise ValueError("pixels must be normalised floats, not bytes: encode_frames takes bytes")
        pixels_VFCHW = pixels_VFCHW.to(self.encoder.dtype)
        return self._features_of_shown(self.encoder.image_features, pixels_VFCHW, mask_VF)

    def _check_frames(self, frames_VFCHW: Tensor, mask_VF: Tensor) -> None:
        size = self.encoder.image_format.size
        if frames_VFCHW.ndim != 5 or frames_VFCHW.shape[2:] != (3, size, size) or not frames_VFCHW.numel():
            raise ValueError(
                f"pixels must be [videos, frames, 3, {size}, {size}] and not empty, "
                f"got {list(frames_VFCHW.shape)}"
            )
        if mask_VF.shape != frames_VFCHW.shape[:2]:
            raise ValueError(f"mask must be {list(frames_VFCHW.shape[:2])}, got {list(mask_VF.shape)}")

    def _features_of_shown(
        self,
        tower: Callable[[Tensor], Tensor],
        frames_VFCHW: Tensor,
        mask_VF: Tensor,
        num_real: int | None = None,
    ) -> VideoFeatures:
        """Features of the frames that the tower must see; zeros for the others."""
        frames_NCHW = frames_VFCHW.flatten(0, 1)
        # Counted where the mask is: asking a GPU would wait for it.
        shown_K, mask_VF = self._frames_to_encode(mask_VF, num_real), mask_VF.to(self.device)
        if shown_K is None:
            features_NE = tower(frames_NCHW)
        else:
            shown_K = shown_K.to(self.device)
            features_KE = tower(frames_NCHW[shown_K])
            empty_NE = features_KE.new_zeros(len(frames_NCHW), features_KE.shape[1])
            features_NE = empty_NE.index_copy(0, shown_K, features_KE)
        return self._image_to_video_features(features_NE.unflatten(0, mask_VF.shape), mask_VF)

    @property
    def has_independent_frames(self) -> bool:
        """Whether a frame's vector is its own, whatever frames are beside it."""
        return self.temporal is None and self.interaction.masks_padding

    def num_frames_shown(self, num_real: int, total: int) -> int:
        """How many of all frames the image tower is shown, if so many are real."""
        if not self.interaction.masks_padding:  # as the released code: padding takes part
            return total
        # A compiled tower is compiled for every number of frames: on a GPU, few different ones.
        together = 512 if self.device.type == "cuda" else 1
        return min(total, -(-max(num_real, 1) // together) * together)

    def _frames_to_encode(self, mask_VF: Tensor, num_real: int | None = None) -> Tensor | None:
        """Which frames the image tower must see, real ones first; None for all of them."""
        total = mask_VF.numel()
        if num_real is None and self.interaction.masks_padding:
            num_real = int(mask_VF.bool().sum())
        num_shown = self.num_frames_shown(total if num_real is None else num_real, total)
        if num_shown == total:
            return None
        return (~mask_VF.bool()).flatten().int().argsort(stable=True)[:num_shown]

    def video_features_from_cache(self, features_VFE: Tensor, mask_VF: Tensor) -> VideoFeatures:
        """Features of frames from the cached output of a frozen image tower (`encoder.encode_frames`)."""
        return self._image_to_video_features(features_VFE, mask_VF)

    def _image_to_video_features(self, features_VFE: Tensor, mask_VF: Tensor) -> VideoFeatures:
        """Image features into the shared space, then through the temporal transformer."""
        mask_VF = mask_VF.bool()
        frames_VFD = self.encoder.project_images(features_VFE)
        if self.interaction.masks_padding:
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
        has_dropout = self.interaction.has_active_dropout
        if method == "auto":
            method = "dense" if has_dropout and isinstance(video, VideoFeatures) else "factored"
        if method == "dense" and isinstance(video, ScoreCards):
            raise ValueError("score cards are for method 'factored'; pass video features to 'dense'")
        if method == "factored" and has_dropout:
            raise ValueError(
                "factored scoring has no dropout: call model.eval() first, or use method 'dense'"
            )
        self._check(text, video)
        blocks: Any = {"text_block": text_block, "video_block": video_block}
        if isinstance(video, VideoFeatures) and method == "dense":
            return score_in_blocks(self.interaction.score_pairs, text, video, **blocks)
        return self.interaction.score(text, video, **blocks)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        """Scores with the increment of every pair, T × V × D numbers: for training and small inputs."""
        check_shapes(text, video)
        if not self.training:
            self._check(text, video)
        return self.interaction.score_pairs(text, video)

    @torch.no_grad()
    def score_cards(self, video: VideoFeatures) -> ScoreCards:
        """What `score` computes from the videos alone, to be kept while weights and videos stay the same.

        Without gradients; `model.interaction.cards` has them.
        """
        if video.dim != self.dim or not len(video):
            raise ValueError(
                f"{len(video)} videos of {video.dim} dimensions; this model needs some of {self.dim}"
            )
        check_video(video, self.interaction)
        return self.interaction.cards(video)

    @torch.no_grad()
    def radii(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> Tensor:
        """The length of every increment [T, V], without forming it."""
        self._check(text, video)
        return self.interaction.radii(text, video)

    @torch.no_grad()
    def frame_weights(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> FrameWeights:
        """How much each frame counts in each score."""
        self._check(text, video)
        return self.interaction.frame_weights(text, video)

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
        check_text(text, self.interaction)
        if isinstance(video, VideoFeatures):
            check_video(video, self.interaction)

    def masking_padding(self) -> GARE:
        """This model with padded frames left out: itself, unless its settings let them take part.

        The other one shares the weights. A library searches with it: it keeps the real frames of an item
        alone, and a score that counted padding would depend on which items are scored together.
        """
        if self.interaction.masks_padding:
            return self
        config = replace(self.config, interaction=self.interaction.config.masking_padding())
        masked = copy.copy(self)
        masked._modules = dict(self._modules)
        masked.config, masked.written_by_0_1, masked.card_results = config, None, ()
        masked.interaction = build_interaction(config.interaction, self.dim)
        masked.interaction.load_state_dict(self.interaction.state_dict(), assign=True)
        return masked.eval()

    # --- identity -------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Thirty-two hex digits of the settings and every weight; hashes about 1 GB of weights a second.

        Settings count only where they differ from their defaults, so that one which a later version adds
        changes nothing.
        """
        settings = self.config.changed_values()
        if "encoder" in settings:
            settings["encoder"] = self.encoder.identity(settings["encoder"])
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
        for name, tensor in sorted(self.state_dict().items()):
            update_digest(digest, name, tensor)
        return digest.hexdigest()

    def is_known_as(self, fingerprint: str) -> bool:
        """Whether a library with this fingerprint holds this model's vectors.

        It may be the fingerprint of this version, of 0.1, or of an earlier file of a shipped model that gives
        every video the same vectors.
        """
        own = self.fingerprint()
        if fingerprint == own or fingerprint in FORMER_FINGERPRINTS.get(own, ()):
            return True
        return old_fingerprint(self, self.config, self.written_by_0_1) == fingerprint

    # --- files ----------------------------------------------------------------------------------------------

    def _save_pretrained(self, save_directory: Path) -> None:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, save_directory / WEIGHTS_FILE, metadata={"format": "pt"})
        self.encoder.save_tokenizer(save_directory / TOKENIZER_FOLDER)
        (save_directory / CONFIG_FILE).write_text(
            json.dumps(self.config.to_values(), indent=2) + "\n", encoding="utf-8"
        )

    def generate_model_card(self, *_: Any, results: Sequence[CardResult] = (), **__: Any) -> ModelCard:
        """The card that `save_pretrained` and `push_to_hub` write beside the weights.

        Args:
            results: what the model scored (`model_card_kwargs={"results": …}`), besides `card_results`.
        """
        known = merge_results(current_results(self, self.card_results), results)
        return make_card(self, known)

    @classmethod
    def from_pretrained(  # type: ignore[override]  # hub options pass through untouched
        cls, name_or_path: str | os.PathLike[str] | EncoderProtocol, **hub_options: Any
    ) -> GARE:
        """Load a model for inference.

        Args:
            name_or_path: gare-mini; a folder or, while online, a hub id of a model saved by gare or of a dual
                encoder of transformers (CLIP, SigLIP, …); an encoder of your own (`EncoderProtocol`), or the
                name under which a package offers it. What is no GARE model ranks by the plain cosine.
            hub_options: `revision=`, `token=` and others of `huggingface_hub.snapshot_download`.
        """
        if not isinstance(name_or_path, str | os.PathLike):
            return cls(plain_config(describe(name_or_path))).eval()
        if str(name_or_path) in SHIPPED:
            return cls._load_shipped(str(name_or_path))
        if str(name_or_path) in MODELS or str(name_or_path).startswith(OPEN_CLIP):
            offered = load_own(str(name_or_path))
            return offered.eval() if isinstance(offered, GARE) else cls.from_pretrained(offered)
        if os.path.isfile(name_or_path):
            raise CheckpointError(
                f"{name_or_path} is a file; give the folder written by save_pretrained, or read a checkpoint "
                "of the authors' code with gare.load_released"
            )
        folder = find_folder(name_or_path, **hub_options)
        encoder = encoder_of_folder(folder)
        return cls._load_folder(folder) if encoder is None else cls(plain_config(encoder)).eval()

    @classmethod
    def _load_folder(cls, folder: Path) -> GARE:
        saved = read_folder(folder)
        try:
            model = cls(saved.config, pretrained_towers=False, tokenizer_folder=saved.tokenizer_folder)
        except (RuntimeError, TypeError, MemoryError, OverflowError) as error:
            is_of_memory = isinstance(error, MemoryError | OverflowError)
            if not is_of_memory and not any(words in str(error) for words in _TOO_LARGE):
                raise
            raise CheckpointError(
                f"the settings in {folder / CONFIG_FILE} describe a model that does not fit into memory; "
                "they are damaged, or of a machine with more of it"
            ) from None
        load_state(model, saved.state, source=str(folder))
        model.written_by_0_1 = saved.written_by_0_1
        model.card_results = read_results(folder)
        return model.eval()

    @classmethod
    def _load_shipped(cls, name: str) -> GARE:
        config, state = read_shipped(name)
        model = cls(config, pretrained_towers=False)
        load_state(model, state, source=name)
        return model.eval()


def stack_clips(clips: Sequence[Tensor], *, least: int = 1) -> tuple[Tensor, Tensor]:
    """Clips of frames [F, 3, H, W] as one batch [V, F, 3, H, W], padded to the longest, with its mask.

    `least` is a number of frames that the batch has in any case.
    """
    lengths_V = torch.tensor([len(clip) for clip in clips])
    width, (channels, height, columns) = max(least, int(lengths_V.max())), clips[0].shape[1:]
    # Channels last in memory, as decoded pictures have them: no copy, and convolutions like it.
    frames_VFHWC = clips[0].new_zeros(len(clips), width, height, columns, channels)
    frames_VFCHW = frames_VFHWC.permute(0, 1, 4, 2, 3)
    for row, clip in enumerate(clips):
        frames_VFCHW[row, : len(clip)] = clip
    return frames_VFCHW, torch.arange(width) < lengths_V[:, None]

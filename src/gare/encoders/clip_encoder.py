"""CLIP and SigLIP towers, run by transformers. Shapes: T texts, W words, N images, D embedding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from gare.encoders import clip_tokenizer
from gare.encoders.bfloat16_layers import has_kernel, run_layers
from gare.encoders.clip_layers import FirstPlaceLayer, PatchEmbedding
from gare.encoders.encoder import Encoder, EncoderConfig, ImageFormat
from gare.encoders.short_attention import use_short_attention
from gare.encoders.training_layers import (
    LayerParts,
    is_bfloat16_step,
    run_training_layers,
    run_up_to_norm,
    trainable_parts,
)
from gare.errors import CheckpointError, ConfigError
from gare.settings import Range

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

LARGEST_STATES = 64
"""Layers add about one to states, rounded to bfloat16. Float16 rounds eight times finer, but all of the sum,
and each time that it is stored: where states begin larger than this, most of the error would be float16's."""


@dataclass(frozen=True)
class ClipEncoderConfig(EncoderConfig):
    """CLIP or SigLIP towers, run by transformers."""

    name: Literal["clip"] = "clip"
    source: str | None = None
    """Hub id or folder of pretrained towers (openai/clip-vit-base-patch32); none means random weights."""
    architecture: dict[str, Any] = field(default_factory=lambda: {"model_type": "clip"})
    """The transformers config (default: ViT-B/32); read off `source`, so a saved model needs no hub."""
    max_words: Annotated[int, Range(least=3)] = 32
    """Tokens a text, its start and end included."""


class ClipEncoder(Encoder):
    """The towers of a `CLIPModel` or `SiglipModel`, without its temperature: GARE has its own.

    Their modules are imported when one is built: transformers takes a second.
    """

    Config = ClipEncoderConfig
    IMAGE_TOWER, TEXT_TOWER = ("vision",), ("text",)
    config: ClipEncoderConfig
    trains_by_kernels = True
    """Whether a training step in bfloat16 on a GPU has its towers by `training_layers`, where it can."""
    STATES_DTYPE = torch.float16
    """In which the states of the image tower are kept between kernels, in encoding on a GPU; in float32 where
    they begin larger than `LARGEST_STATES`."""

    def __init__(
        self, config: ClipEncoderConfig, *, weights: bool = True, tokenizer_folder: Path | None = None
    ) -> None:
        super().__init__(config)
        towers = _load_towers(config) if weights and config.source else _build_towers(config)
        self.kind: str = towers.config.model_type
        if self.kind not in ("clip", "siglip"):
            raise ConfigError(f"'{self.kind}' towers are not supported; use a CLIP or SigLIP model")
        architecture = _without_version(towers.config.to_diff_dict())
        self.config = replace(config, architecture=architecture)
        self.vision: Any = towers.vision_model
        embeddings = self.vision.embeddings
        embeddings.patch_embedding = PatchEmbedding.of(embeddings.patch_embedding)
        use_short_attention(self.vision)
        self.text: Any = towers.text_model
        if self.kind == "clip":
            self.image_projection: nn.Module = towers.visual_projection
            self.text_projection: nn.Module = towers.text_projection
            self.dim = towers.config.projection_dim
            FirstPlaceLayer.make(self.vision.encoder.layers[-1])
        else:  # SigLIP projects inside its towers
            self.image_projection = self.text_projection = nn.Identity()
            self.dim = towers.config.vision_config.hidden_size
        mean, std = (CLIP_MEAN, CLIP_STD) if self.kind == "clip" else ((0.5,) * 3, (0.5,) * 3)
        self.image_format = ImageFormat(towers.config.vision_config.image_size, mean, std)
        self._max_positions: int = towers.config.text_config.max_position_embeddings
        self._vocabulary: int = towers.config.text_config.vocab_size
        self.max_words = min(config.max_words, self._max_positions)
        self._tokenizer_source = str(tokenizer_folder) if tokenizer_folder else config.source
        self._tokenizer: Any = None

    @property
    def uses_shipped_tokenizer(self) -> bool:
        """Whether the vocabulary is CLIP's, whose tokeniser comes with the package."""
        return self.kind == "clip" and self._vocabulary == clip_tokenizer.VOCABULARY_SIZE

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        if self.uses_shipped_tokenizer:
            return clip_tokenizer.tokenize(texts, self.max_words)
        # SigLIP was trained on texts padded to its full length.
        padding = (
            {"padding": "max_length", "max_length": self._max_positions} if self.kind == "siglip" else {}
        )
        encoded = self._load_tokenizer()(
            list(texts),
            return_tensors="pt",
            truncation=True,
            **{"padding": True, "max_length": self.max_words, **padding},
        )
        token_ids_TW: Tensor = encoded["input_ids"]
        if "attention_mask" in encoded:
            return token_ids_TW, encoded["attention_mask"].bool()
        mask_TW = token_ids_TW != self._load_tokenizer().pad_token_id
        mask_TW[:, 0] = True
        return token_ids_TW, mask_TW

    def encode_text(self, token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
        if (parts := self._text_parts(token_ids_TW)) is not None:
            return self._train_on_tokens(token_ids_TW, mask_TW, parts)
        # SigLIP was trained to see its padding.
        output = self.text(
            input_ids=token_ids_TW, attention_mask=mask_TW.long() if self.kind == "clip" else None
        )
        project_words = self.text_projection if self.kind == "clip" else self.text.head
        return self.text_projection(output.pooler_output), project_words(output.last_hidden_state)

    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        features_NE: Tensor = self.vision(pixel_values=pixels_NCHW).pooler_output
        return features_NE

    def encode_frames(self, bytes_NCHW: Tensor) -> Tensor:
        if bytes_NCHW.is_cuda and bytes_NCHW.dtype == torch.uint8 and self.kind == "clip":
            if not torch.is_grad_enabled():
                if self._has_fast_tower(bytes_NCHW.device):
                    return self._encode_bytes(bytes_NCHW)
            elif self._trains_by_kernels() and (parts := self._vision_parts()) is not None:
                return self._train_on_bytes(bytes_NCHW, parts)
        return super().encode_frames(bytes_NCHW)

    def _encode_bytes(self, bytes_NCHW: Tensor) -> Tensor:
        """The tower in bfloat16, from bytes to features: what is between its layers is read once."""
        tower = self.vision
        patches_NPX = tower.embeddings.patch_embedding.patches_of(bytes_NCHW)
        states_NPE, normed_NPE = self._embed_and_norm(patches_NPX)
        states_NPE = run_layers(tower.encoder.layers, states_NPE, normed_NPE)
        features_NE: Tensor = tower.post_layernorm(states_NPE[:, 0])
        return features_NE

    def _trains_by_kernels(self) -> bool:
        """Whether gradients come from `training_layers`: it is wanted, and this is its kind of step."""
        return self.trains_by_kernels and is_bfloat16_step()

    def _vision_parts(self) -> list[LayerParts] | None:
        """All layers but the last, if they can be trained by kernels."""
        places: int = self.vision.embeddings.position_embedding.num_embeddings
        return trainable_parts(list(self.vision.encoder.layers)[:-1], places)

    def _text_parts(self, token_ids_TW: Tensor) -> list[LayerParts] | None:
        """The layers of the text tower, if kernels are to train them."""
        is_wanted = token_ids_TW.is_cuda and self.kind == "clip"
        if not (is_wanted and self._trains_by_kernels()):
            return None
        return trainable_parts(list(self.text.encoder.layers), token_ids_TW.shape[1])

    def _train_on_bytes(
        self, bytes_NCHW: Tensor, parts: Sequence[LayerParts], *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """The tower with gradients, from bytes to features: all layers but the last by `training_layers`."""
        tower = self.vision
        patches_NPX = tower.embeddings.patch_embedding.patches_of(bytes_NCHW)
        states_NPE = self._embed(patches_NPX.to(dtype))
        norm = tower.encoder.layers[-1].layer_norm1
        return self._finish(*run_up_to_norm(parts, states_NPE, norm, dtype=dtype))

    def _train_on_tokens(
        self,
        token_ids_TW: Tensor,
        mask_TW: Tensor,
        parts: Sequence[LayerParts],
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Tensor, Tensor]:
        """The text tower with gradients: all its layers by `training_layers`."""
        states_TWE = self._embed_tokens(token_ids_TW)
        states_TWE = run_training_layers(parts, states_TWE, dtype=dtype, mask_NP=mask_TW, is_causal=True)
        return self._finish_text(states_TWE, token_ids_TW)

    def _embed_tokens(self, token_ids_TW: Tensor) -> Tensor:
        states_TWE: Tensor = self.text.embeddings(input_ids=token_ids_TW)
        return states_TWE

    def _finish_text(self, states_TWE: Tensor, token_ids_TW: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors of sentences, which are at the end of each, and of words."""
        normed_TWE = self.text.final_layer_norm(states_TWE)
        end = self.text.config.eos_token_id
        is_end_TW = token_ids_TW if end == 2 else token_ids_TW == end  # 2 stands for the largest number
        rows_T = torch.arange(len(token_ids_TW), device=token_ids_TW.device)
        last_TE = normed_TWE[rows_T, is_end_TW.int().argmax(dim=-1)]
        return self.text_projection(last_TE), self.text_projection(normed_TWE)

    def _embed_and_norm(self, patches_NPX: Tensor) -> tuple[Tensor, Tensor | None]:
        """The states before the first layer; and their norm, where one kernel gives both."""
        if not has_kernel(patches_NPX):
            return self._embed(patches_NPX), None
        from gare.encoders.add_norm_cuda import embed_norm

        weight_EX, moved_PE, largest = self._kept_embedding(patches_NPX.dtype)
        states_dtype = self.STATES_DTYPE if largest <= LARGEST_STATES else torch.float32
        norms = (self.vision.pre_layrnorm, self.vision.encoder.layers[0].layer_norm1)
        first, second = ((norm.weight, norm.bias, norm.eps) for norm in norms)
        embedded_NSE = nn.functional.linear(patches_NPX, weight_EX)
        return embed_norm(embedded_NSE, moved_PE, first, second, states_dtype=states_dtype)

    def _kept_embedding(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        """`_embedding` without gradients, and how large states are after it, four standard deviations away.

        Made when it is first needed, and again when it has changed.
        """
        embeddings, norm = self.vision.embeddings, self.vision.pre_layrnorm
        patch = embeddings.patch_embedding
        parts = [patch.weight, embeddings.class_embedding, embeddings.position_embedding.weight]
        parts += [norm.weight, norm.bias]
        parts += [] if patch.bias is None else [patch.bias]
        version = [dtype, *((part.data_ptr(), part._version) for part in parts)]
        kept = self.__dict__.get("_embedding_of_bytes")
        if kept is None or kept[0] != version:
            weight_EX, moved_PE = (each.detach() for each in self._embedding(dtype))
            kept = (version, (weight_EX, moved_PE, float((4 * norm.weight.abs() + norm.bias.abs()).max())))
            self.__dict__["_embedding_of_bytes"] = kept
        found: tuple[Tensor, Tensor, float] = kept[1]
        return found

    def _embedding(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What patches of bytes are multiplied by [E, X], in `dtype`; what each place [P, E] is moved by."""
        embeddings = self.vision.embeddings
        weight_EX, shift_E = embeddings.patch_embedding.for_bytes(self.image_format)
        first_E, position_PE = embeddings.class_embedding, embeddings.position_embedding.weight
        moved_PE = torch.cat([first_E[None], shift_E.expand(len(position_PE) - 1, -1)])
        return weight_EX.to(dtype), position_PE + moved_PE

    def _embed(self, patches_NPX: Tensor) -> Tensor:
        """The states [N, P, E] before the first layer, in float32; the product is in that of the patches."""
        weight_EX, moved_PE = self._embedding(patches_NPX.dtype)
        embedded_NPE = nn.functional.linear(patches_NPX, weight_EX)
        states_NPE: Tensor = self.vision.pre_layrnorm(
            nn.functional.pad(embedded_NPE, (0, 0, 1, 0)) + moved_PE
        )
        return states_NPE

    def _finish(self, first_N1E: Tensor, normed_NPE: Tensor) -> Tensor:
        """Features, from what the last layer has after its first norm."""
        states_N1E = self.vision.encoder.layers[-1].finish(first_N1E, normed_NPE)
        features_NE: Tensor = self.vision.post_layernorm(states_N1E[:, 0])
        return features_NE

    def project_images(self, features_NE: Tensor) -> Tensor:
        vectors_ND: Tensor = self.image_projection(features_NE)
        return vectors_ND

    def save_tokenizer(self, folder: Path) -> None:
        if not self.uses_shipped_tokenizer and self._tokenizer_source is not None:
            self._load_tokenizer().save_pretrained(folder)

    @torch.no_grad()
    def start_temporal(self, temporal: Any) -> bool:
        """Copy the first text layers and positions into `temporal`; False where the shapes differ."""
        positions, layers = self.text.embeddings.position_embedding.weight, self.text.encoder.layers
        same_shape = layers[0].mlp.fc1.weight.shape == (4 * self.dim, self.dim)
        if self.kind != "clip" or not same_shape or len(layers) < len(temporal.layers):
            return False
        shared = min(len(positions), len(temporal.position))
        temporal.position[:shared] = positions[:shared]
        for ours, theirs in zip(temporal.layers, layers, strict=False):
            ours.load_state_dict(temporal_layer_from_clip(theirs.state_dict()))
        return True

    def compile_towers(self) -> None:
        """Also keep less for backward: of a layer of the image tower, its input and its matrix products."""
        ours: Any = self
        for name in ("_embed", "_finish", "_embed_tokens", "_finish_text"):
            setattr(self, name, torch.compile(getattr(self, name)))
        if not self.vision.is_gradient_checkpointing:  # that keeps less still
            # It warns of operators that work in place; these layers have none.
            logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
            keep_products = partial(create_selective_checkpoint_contexts, _policy)
            self.vision.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_products})
        super().compile_towers()
        compiled = self.encode_text

        # Asked outside of what is compiled, for kernels are not used within.
        def encode_text(token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
            if (parts := self._text_parts(token_ids_TW)) is not None:
                return self._train_on_tokens(token_ids_TW, mask_TW, parts)
            return compiled(token_ids_TW, mask_TW)

        ours.encode_text = encode_text

    def enable_gradient_checkpointing(self) -> None:
        super().enable_gradient_checkpointing()
        self.trains_by_kernels = False  # which keeps more

    def freeze_first_layer(self) -> None:
        """The released code does not train the first layer of a ViT (`clip.visual.conv1`)."""
        self.vision.embeddings.patch_embedding.requires_grad_(False)

    def random_tokens(self, num_texts: int) -> tuple[Tensor, Tensor]:
        token_ids_TW = torch.randint(1, min(400, self._vocabulary), (num_texts, self.max_words))
        token_ids_TW[:, -1] = self._vocabulary - 1  # CLIP looks for its last token
        return token_ids_TW, torch.ones_like(token_ids_TW, dtype=torch.bool)

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            if self._tokenizer_source is None:
                raise ConfigError(
                    "these towers have random weights and a vocabulary of their own, so no tokeniser fits; "
                    "pass token ids to text_features, or set encoder.source"
                )
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_source)
            except (OSError, ValueError, ImportError) as error:
                raise CheckpointError(f"no tokeniser in {self._tokenizer_source}: {error}") from None
        return self._tokenizer


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def _policy(context: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    """What backward keeps of a layer. All else is computed again: norms, activations, sums, short attention.

    That takes as long as reading and writing it. 14.5 GB are kept instead of 25.5 for 1,536 pictures.
    """
    is_product = operator in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def temporal_layer_from_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a transformers CLIP layer under the names of `TemporalLayer`."""
    renamed = {"layer_norm1": "norm1", "layer_norm2": "norm2", "mlp.fc1": "expand", "mlp.fc2": "contract"}
    ours = {}
    for part in ("weight", "bias"):
        parts = [state[f"self_attn.{name}_proj.{part}"] for name in ("q", "k", "v")]
        ours[f"attention_in.{part}"] = torch.cat(parts)
        ours[f"attention_out.{part}"] = state[f"self_attn.out_proj.{part}"]
        ours |= {f"{new}.{part}": state[f"{old}.{part}"] for old, new in renamed.items()}
    return ours


def _without_version(config: dict[str, Any]) -> dict[str, Any]:
    """The same model must have the same fingerprint whichever transformers wrote it down."""
    return {
        key: _without_version(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "transformers_version"
    }


def _load_towers(config: ClipEncoderConfig) -> Any:
    from transformers import AutoModel

    try:
        return AutoModel.from_pretrained(config.source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot load CLIP towers from '{config.source}': {str(error).splitlines()[0]} "
            "Give a folder saved by transformers, or a hub id while online."
        ) from None


def _build_towers(config: ClipEncoderConfig) -> Any:
    from transformers import AutoConfig, AutoModel

    architecture = dict(config.architecture)
    model_type = architecture.pop("model_type", "clip")
    try:
        return AutoModel.from_config(AutoConfig.for_model(model_type, **architecture), dtype=torch.float32)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"encoder.architecture does not describe CLIP or SigLIP towers: {error}") from None

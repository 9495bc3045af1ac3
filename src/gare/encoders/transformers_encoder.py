"""Any dual encoder of transformers: CLIP, SigLIP, SigLIP 2, MetaCLIP 2, ALIGN, AltCLIP, Chinese-CLIP, others.

A model of transformers is one if its class has `get_text_features` and `get_image_features`, and each gives
one vector. Both are called as they are, so features are those of transformers. How pictures and texts are
prepared is read off the model's own processor (`processor_settings`).

Shapes: T texts, W words, N images, E image features, D embedding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from gare.encoders.encoder import Encoder, EncoderConfig
from gare.encoders.hub_folder import find_folder, refuse_weights
from gare.encoders.processor_settings import (
    PictureSettings,
    Processor,
    TextSettings,
    first_line,
    load_processor,
    load_tokenizer,
    read_pictures,
    read_texts,
    split_patches,
)
from gare.errors import CheckpointError, ConfigError

_VISION, _TEXT = ("vision_model", "image_model"), ("text_model",)
_IMAGE_PROJECTIONS = ("visual_projection", "vision_projection", "image_projection")
_TEXT_PROJECTIONS = ("text_projection",)
_NOT_USED = ("logit_scale", "logit_bias", "temperature")  # GARE has its own
_PICTURES, _TEXTS = PictureSettings(), TextSettings()


@dataclass(frozen=True)
class TransformersEncoderConfig(EncoderConfig):
    """A dual encoder of transformers."""

    name: Literal["transformers"] = "transformers"
    source: str | None = None
    """Folder or hub id of a model (google/siglip2-base-patch16-224); none means random weights. What it
    says is kept in the settings below: a saved model does not need it."""
    architecture: dict[str, Any] = field(default_factory=lambda: {"model_type": "clip"})
    """The transformers config, read off `source`."""
    pictures: PictureSettings = _PICTURES
    """What its image processor does, read off `source`."""
    texts: TextSettings = _TEXTS
    """What its tokeniser does, read off `source`."""
    freeze_image: bool = False
    """Do not train the image tower; its projection is trained."""
    freeze_text: bool = False
    """Do not train the text tower; its projection is trained."""


class TransformersEncoder(Encoder):
    """The towers of a transformers model, run by that model's own methods."""

    Config = TransformersEncoderConfig
    IMAGE_TOWER, TEXT_TOWER = ("vision",), ("text",)
    config: TransformersEncoderConfig

    def __init__(
        self,
        config: TransformersEncoderConfig,
        *,
        weights: bool = True,
        tokenizer_folder: Path | None = None,
    ) -> None:
        super().__init__(config)
        self._tokenizer_folder = tokenizer_folder
        self._processor: Processor | None = None
        folder = find_folder(config.source) if weights and config.source else None
        with _quiet():
            if folder is not None:
                model = _load_model(folder)
                self._processor = load_processor(folder)
                config = replace(
                    config,
                    source=None,
                    architecture=_without_version(model.config.to_diff_dict()),
                    pictures=read_pictures(self._processor, folder),
                    texts=read_texts(self._processor, model.config),
                )
            else:
                model = _build_model(config)
        self.config = config
        self.image_format = config.pictures.image_format()
        self.max_words = config.texts.max_length
        self._take_apart(model)
        self.dim = self._find_dim()
        if config.texts.plain_attention:
            model.set_attn_implementation({"text_config": "eager"})
        elif self._processor is not None and self._depends_on_padding():
            # The text tower of AIMv2 (transformers 5.22) looks ahead in a batch without padding: the causal
            # mask is left to a fast attention that is not told of it.
            model.set_attn_implementation({"text_config": "eager"})
            padding = "max_length" if self._depends_on_padding() else config.texts.padding
            texts = replace(config.texts, plain_attention=True, padding=padding)
            self.config = replace(config, texts=texts)
        if config.freeze_image:
            self.freeze("image")
        if config.freeze_text:
            self.freeze("text")

    def _take_apart(self, model: Any) -> None:
        """Towers and projections as parts of this module; the model keeps them, and runs them."""
        self.vision: nn.Module = _part(model, _VISION)
        self.text: nn.Module = _part(model, _TEXT)
        self.image_projection = _take_out(model, _IMAGE_PROJECTIONS)
        self.text_projection = _take_out(model, _TEXT_PROJECTIONS)
        known = {id(parameter) for parameter in self.parameters()}
        unknown = [
            name for name, p in model.named_parameters() if id(p) not in known and name not in _NOT_USED
        ]
        if unknown:
            raise CheckpointError(
                f"{type(model).__name__} has weights outside its towers and projections ({unknown[0]}), so "
                "gare cannot save it"
            )
        # In a tuple: what runs the towers is not a module of its own, whose weights would be counted twice.
        self._runner = (model,)

    @torch.no_grad()
    def _find_dim(self) -> int:
        """The width of the space, from one picture and one text."""
        model, was_training = self._runner[0], self.training
        self.eval()
        try:
            features_NE = self.image_features(torch.zeros(1, 3, *(2 * [self.image_format.size])))
            image_ND = self.project_images(features_NE)
            text_TD, _ = self.encode_text(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4).bool())
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{type(model).__name__} cannot be run as a dual encoder: {str(error).splitlines()[0]}"
            ) from None
        self.train(was_training)
        if image_ND.ndim != 2 or image_ND.shape != text_TD.shape:
            raise CheckpointError(
                f"{type(model).__name__} does not give one vector for a picture and one for a text in the "
                f"same space: their shapes are {list(image_ND.shape)} and {list(text_TD.shape)}"
            )
        if not (image_ND.isfinite().all() and text_TD.isfinite().all()):
            raise CheckpointError(
                f"{type(model).__name__} gives NaN or infinity; its weights are damaged, or they diverged in "
                "training: download or save it again"
            )
        return image_ND.shape[1]

    @torch.no_grad()
    def _depends_on_padding(self) -> bool:
        """Whether a text comes out differently beside a longer one."""
        was_training = self.training
        self.eval()
        try:
            short_TD, _ = self.encode_text(*self.tokenize(["a dog"]))
            both_TD, _ = self.encode_text(*self.tokenize(["a dog", "a dog and a cat on a chair"]))
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the tokeniser does not fit the text tower of this {type(self._runner[0]).__name__}: "
                f"{first_line(error)}"
            ) from None
        self.train(was_training)
        return not torch.allclose(short_TD[0], both_TD[0], atol=1e-4 * float(short_TD.abs().max()))

    # --- features -------------------------------------------------------------------------------------------

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        wanted, tokenizer = self.config.texts, self._tokenizer()
        encoded = tokenizer(
            list(texts),
            padding=wanted.padding,
            truncation=True,
            max_length=wanted.max_length,
            return_tensors="pt",
        )
        token_ids_TW: Tensor = encoded["input_ids"]
        if "attention_mask" in encoded:
            return token_ids_TW, encoded["attention_mask"].bool()
        mask_TW = token_ids_TW != tokenizer.pad_token_id
        mask_TW[:, 0] = True
        return token_ids_TW, mask_TW

    def encode_text(self, token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
        mask = {"attention_mask": mask_TW.long()} if self.config.texts.shows_mask else {}
        output = self._runner[0].get_text_features(input_ids=token_ids_TW, **mask)
        text_TD: Tensor = self.text_projection(_pooled(output))
        return text_TD, self._words(output, text_TD, token_ids_TW.shape[1])

    def _words(self, output: Any, text_TD: Tensor, num_words: int) -> Tensor:
        """The vector of every token; that of the text where tokens have none in the shared space."""
        states_TWE = getattr(output, "last_hidden_state", None)
        if states_TWE is not None and states_TWE.shape[1] == num_words:
            for project in (self.text_projection, getattr(self.text, "head", None)):
                wanted = (states_TWE.shape[-1], text_TD.shape[-1])
                if isinstance(project, nn.Linear) and (project.in_features, project.out_features) == wanted:
                    words_TWD: Tensor = project(states_TWE)
                    return words_TWD
        return text_TD[:, None].expand(-1, num_words, -1)

    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        features_NE: Tensor = _pooled(self._runner[0].get_image_features(**self.tower_inputs(pixels_NCHW)))
        return features_NE

    def tower_inputs(self, pixels_NCHW: Tensor) -> dict[str, Tensor]:
        """What `get_image_features` of the model takes."""
        if self.image_format.fit.mode == "patches":
            return split_patches(pixels_NCHW, self.image_format)
        return {"pixel_values": pixels_NCHW}

    def project_images(self, features_NE: Tensor) -> Tensor:
        # Two dimensions: GroupViT has a batch norm in its projection.
        vectors_ND: Tensor = self.image_projection(features_NE.flatten(0, -2))
        unflattened: Tensor = vectors_ND.unflatten(0, features_NE.shape[:-1])
        return unflattened

    # --- files ----------------------------------------------------------------------------------------------

    def identity(self, values: dict[str, Any]) -> dict[str, Any]:
        """Without the architecture: the weights tell it, and another transformers may write it otherwise."""
        return {key: value for key, value in values.items() if key not in ("architecture", "source")}

    def save_tokenizer(self, folder: Path) -> None:
        if self._processor is not None or self._tokenizer_folder is not None:
            self._tokenizer().save_pretrained(folder)

    def random_tokens(self, num_texts: int) -> tuple[Tensor, Tensor]:
        text_tower: Any = self.text
        vocabulary = text_tower.get_input_embeddings().num_embeddings
        token_ids_TW = torch.randint(
            min(5, vocabulary - 1), min(400, vocabulary), (num_texts, self.max_words)
        )
        token_ids_TW[:, -1] = vocabulary - 1  # CLIP looks for its last token
        return token_ids_TW, torch.ones_like(token_ids_TW, dtype=torch.bool)

    def _tokenizer(self) -> Any:
        if self._processor is None:
            if self._tokenizer_folder is None:
                raise ConfigError(
                    "these towers have random weights, so no tokeniser fits; pass token ids to "
                    "text_features, or set encoder.source"
                )
            self._processor = Processor(None, load_tokenizer(self._tokenizer_folder))
        return self._processor.tokenizer


# --- the model of transformers ------------------------------------------------------------------------------


def _load_model(folder: Path) -> Any:
    """The model in a folder, whole: weights that are missing would be random."""
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config may be broken in any way
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind in CONFIG_MAPPING:
            raise CheckpointError(
                f"{folder / 'config.json'} has settings that a {kind} of transformers cannot have: "
                f"{first_line(error)}; download or save it again"
            ) from None
        raise CheckpointError(
            f"{folder} is a model of the kind '{kind}', which this version of transformers does not know: "
            f"{first_line(error)}. Models that bring code of their own (trust_remote_code) are not run: it "
            "would be code of strangers"
        ) from None
    model_class = _model_class(config, folder)
    refuse_weights(folder)
    try:
        model, loaded = model_class.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, in one line
        )
    except Exception as error:  # truncated, damaged, of other shapes: each fails in its own way
        raise CheckpointError(
            f"the weights in {folder} cannot be loaded: {first_line(error)}; download or save them again"
        ) from None
    # A key of another shape comes with both shapes.
    other_shapes = [each if isinstance(each, str) else each[0] for each in loaded["mismatched_keys"]]
    lacking = sorted(name for name in {*loaded["missing_keys"], *other_shapes} if name not in _NOT_USED)
    if lacking:
        raise CheckpointError(
            f"the weights in {folder} are not those of a whole {model_class.__name__}: "
            f"{len(lacking)} are missing or of another shape (first: {lacking[0]}). Its config.json or its "
            "weights are of another model, or not complete; download or save it again"
        )
    if unused := _layers_not_in(model, loaded["unexpected_keys"]):
        raise CheckpointError(
            f"{folder / 'config.json'} has fewer layers than the weights beside it (first: {unused[0]}): "
            "they are of two models; download or save it again"
        )
    return model.eval()


def _layers_not_in(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the weights that are of further layers of a tower. Others, such as heads, are not needed."""
    parts = dict(model.named_modules())
    return sorted(name for name in names if re.split(r"\.layers?\.", name)[0] in parts and ".layer" in name)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar, since loading takes a second, no report of many lines, since an error says it in one,
    and no warnings of token ids in transformers' own defaults, which SigLIP's config gives rise to."""
    from transformers.utils import logging

    was_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_shown:
            logging.enable_progress_bar()


def _model_class(config: Any, folder: Path) -> Any:
    from transformers import MODEL_MAPPING

    try:
        model_class = MODEL_MAPPING[type(config)]
    except KeyError:
        raise CheckpointError(f"{folder}: transformers has no model for '{config.model_type}'") from None
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    lacking = [
        what
        for what, method in (("texts", "get_text_features"), ("pictures", "get_image_features"))
        if not hasattr(model_class, method)
    ]
    if lacking:
        alone = {"input_ids": "texts", "pixel_values": "pictures"}.get(model_class.main_input_name)
        is_alone = len(lacking) == 2 and alone is not None and not hasattr(config, "vision_config")
        what = f"a model for {alone} alone" if is_alone else f"without vectors for {' and '.join(lacking)}"
        raise CheckpointError(
            f"{folder} is a {model_class.__name__}, {what}. gare needs a dual encoder: a tower for texts and "
            "one for pictures, such as CLIP or SigLIP"
        )
    return model_class


def _build_model(config: TransformersEncoderConfig) -> Any:
    from transformers import AutoConfig, AutoModel

    architecture = dict(config.architecture)
    model_type = architecture.pop("model_type", "clip")
    try:
        built = AutoConfig.for_model(model_type, **architecture)
        _model_class(built, Path(model_type))
        return AutoModel.from_config(built, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"encoder.architecture does not describe a dual encoder: {error}") from None


def _part(model: Any, names: Sequence[str]) -> nn.Module:
    for name in names:
        if isinstance(getattr(model, name, None), nn.Module):
            part: nn.Module = getattr(model, name)
            return part
    raise CheckpointError(f"{type(model).__name__} has no {' or '.join(names)}; gare cannot find its towers")


def _take_out(model: Any, names: Sequence[str]) -> nn.Module:
    """The projection of a model, which is left with none: it is applied here, so that it can be trained alone
    on features that were kept."""
    for name in names:
        if isinstance(getattr(model, name, None), nn.Module):
            projection: nn.Module = getattr(model, name)
            setattr(model, name, nn.Identity())
            return projection
    return nn.Identity()


def _pooled(output: Any) -> Tensor:
    """The vector of each text or picture: transformers gives it in an object, or did so directly."""
    pooled: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return pooled


def _without_version(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_version(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in ("transformers_version", "_name_or_path", "architectures", "dtype")
    }

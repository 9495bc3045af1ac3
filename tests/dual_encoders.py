"""Random dual encoders of every family of transformers, small, saved into a folder as on the hub: config,
processor, tokeniser, safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

TEXTS = [
    "a dog catches a ball",
    "A Red Car",
    "two people cook in a kitchen",
    "rain",
    "the sea at night, and a boat",
    "a cat sleeps on a chair",
    "children play football",
    "snow on a mountain",
    "someone writes on a board with a very long pen while others watch from the back of the room",
    "a green field",
]
_WORDS = sorted({word for text in TEXTS for word in text.lower().replace(",", "").split()})
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def pictures(number: int = 10) -> list[Image.Image]:
    """Smooth pictures of many shapes."""
    random = np.random.default_rng(3)
    sizes = [
        (64, 48),
        (320, 180),
        (90, 200),
        (128, 128),
        (500, 333),
        (41, 67),
        (640, 360),
        (33, 32),
        (300, 90),
    ]
    made = []
    for place in range(number):
        width, height = sizes[place % len(sizes)]
        small = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        made.append(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    return made


def word_tokenizer(folder: Path, *, lower: bool = True, **options: Any) -> Any:
    """A tokeniser with one token a word, as the fast tokenisers of every family are."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *_WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**special, **options})


def _clip(folder: Path, name: str = "CLIP", **text: Any) -> Any:
    import transformers as t

    text_config = {**SMALL, "vocab_size": 99, "max_position_embeddings": 20, **text}
    text_config |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    config = getattr(t, f"{name}Config")(text_config=text_config, vision_config=vision, projection_dim=24)
    images = t.CLIPImageProcessorPil(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32})
    tokenizer = word_tokenizer(folder, model_max_length=20)
    return getattr(t, f"{name}Model")(config), t.CLIPProcessor(images, tokenizer)


def _metaclip_2(folder: Path) -> Any:
    return _clip(folder, "MetaClip2")


def _siglip(folder: Path) -> Any:
    import transformers as t

    config = t.SiglipConfig(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 16, "projection_size": 32},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
    )
    images = t.SiglipImageProcessorPil(size={"height": 32, "width": 32}, resample=2)
    tokenizer = word_tokenizer(folder, model_max_length=16, model_input_names=["input_ids"])
    return t.SiglipModel(config), t.SiglipProcessor(images, tokenizer)


def _siglip2(folder: Path) -> Any:
    """Fixed resolution: SigLIP's classes with a tokeniser that gives a mask and pads on the left."""
    import transformers as t

    model, processor = _siglip(folder)
    processor.tokenizer = word_tokenizer(folder, model_max_length=16, padding_side="right")
    return model, t.SiglipProcessor(processor.image_processor, processor.tokenizer)


def _siglip2_naflex(folder: Path) -> Any:
    import transformers as t

    config = t.Siglip2Config(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 64, "projection_size": 32},
        vision_config={**SMALL, "num_patches": 16, "patch_size": 16},
    )
    images = t.Siglip2ImageProcessorPil(patch_size=16, max_num_patches=256)
    return t.Siglip2Model(config), t.Siglip2Processor(images, word_tokenizer(folder, model_max_length=64))


def _align(folder: Path) -> Any:
    import transformers as t

    config = t.AlignConfig(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 70},
        vision_config={
            "image_size": 33,
            "kernel_sizes": [3, 3],
            "in_channels": [32, 8],
            "out_channels": [8, 16],
            "strides": [1, 2],
            "num_block_repeats": [1, 1],
            "expand_ratios": [1, 2],
            "depthwise_padding": [],
            "hidden_dim": 24,
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
        },
        projection_dim=16,
    )
    images = t.EfficientNetImageProcessorPil(
        size={"height": 40, "width": 40}, crop_size={"height": 33, "width": 33}, do_center_crop=True
    )
    return t.AlignModel(config), t.AlignProcessor(images, word_tokenizer(folder, model_max_length=70))


def _altclip(folder: Path) -> Any:
    import transformers as t

    config = t.AltCLIPConfig(
        text_config={
            **SMALL,
            "vocab_size": 99,
            "max_position_embeddings": 30,
            "project_dim": 24,
            "pad_token_id": 0,
        },
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    images = t.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return t.AltCLIPModel(config), t.AltCLIPProcessor(images, word_tokenizer(folder, model_max_length=26))


def _chinese_clip(folder: Path) -> Any:
    import transformers as t

    config = t.ChineseCLIPConfig(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 40},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    images = t.ChineseCLIPImageProcessorPil(
        size={"height": 32, "width": 32}, do_center_crop=False, crop_size={"height": 32, "width": 32}
    )
    tokenizer = word_tokenizer(
        folder, model_max_length=40, model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    )
    return t.ChineseCLIPModel(config), t.ChineseCLIPProcessor(images, tokenizer)


def _clipseg(folder: Path) -> Any:
    import transformers as t

    model, _ = _clip(folder, "CLIPSeg")
    images = t.ViTImageProcessorPil(size={"height": 32, "width": 32})
    return model, t.CLIPSegProcessor(images, word_tokenizer(folder, model_max_length=20))


def _groupvit(folder: Path) -> Any:
    import transformers as t

    config = t.GroupViTConfig(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 20, "eos_token_id": 2},
        vision_config={
            **SMALL,
            "depths": [1, 1],
            "num_group_tokens": [4, 0],
            "num_output_groups": [4, 2],
            "image_size": 32,
            "patch_size": 8,
        },
        projection_dim=24,
        projection_intermediate_dim=30,
    )
    images = t.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return t.GroupViTModel(config), t.CLIPProcessor(images, word_tokenizer(folder, model_max_length=20))


def _aimv2(folder: Path) -> Any:
    import transformers as t

    config = t.Aimv2Config(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 20, "eos_token_id": 2},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    images = t.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return t.Aimv2Model(config), t.CLIPProcessor(images, word_tokenizer(folder, model_max_length=20))


def _vision_text_dual_encoder(folder: Path) -> Any:
    import transformers as t

    config = t.VisionTextDualEncoderConfig.from_vision_text_configs(
        t.ViTConfig(**SMALL, image_size=32, patch_size=8),
        t.BertConfig(**SMALL, vocab_size=99, max_position_embeddings=40),
        projection_dim=24,
    )
    images = t.ViTImageProcessorPil(size={"height": 32, "width": 32})
    processor = t.VisionTextDualEncoderProcessor(images, word_tokenizer(folder, model_max_length=40))
    return t.VisionTextDualEncoderModel(config), processor


def _blip(folder: Path) -> Any:
    import transformers as t

    config = t.BlipConfig(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 40, "encoder_hidden_size": 32},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    images = t.BlipImageProcessorPil(size={"height": 32, "width": 32})
    return t.BlipModel(config), t.BlipProcessor(images, word_tokenizer(folder, model_max_length=40))


def _owlvit(folder: Path) -> Any:
    import transformers as t

    config = t.OwlViTConfig(
        text_config={**SMALL, "vocab_size": 99, "max_position_embeddings": 20, "eos_token_id": 2},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=24,
    )
    images = t.OwlViTImageProcessorPil(size={"height": 32, "width": 32})
    return t.OwlViTModel(config), t.OwlViTProcessor(images, word_tokenizer(folder, model_max_length=20))


FAMILIES: dict[str, Callable[[Path], Any]] = {
    "clip": _clip,
    "siglip": _siglip,
    "siglip2": _siglip2,
    "siglip2_naflex": _siglip2_naflex,
    "metaclip_2": _metaclip_2,
    "align": _align,
    "altclip": _altclip,
    "chinese_clip": _chinese_clip,
    "clipseg": _clipseg,
    "groupvit": _groupvit,
    "aimv2": _aimv2,
    "vision_text_dual_encoder": _vision_text_dual_encoder,
    "blip": _blip,
    "owlvit": _owlvit,
}


def save_family(name: str, folder: Path) -> Path:
    """A random model of a family with its processor, in a folder."""
    torch.manual_seed(0)
    model, processor = FAMILIES[name](folder)
    for parameter in model.parameters():  # else features of all pictures are alike: weights start near zero
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@torch.no_grad()
def own_cosine(folder: Path, images: list[Image.Image], texts: list[str]) -> torch.Tensor:
    """Scores [T, V] as one who uses transformers alone computes them."""
    from transformers import AutoModel, AutoProcessor

    model, processor = AutoModel.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    padding = "max_length" if model.config.model_type in ("siglip", "siglip2", "align") else True
    tokens = processor(text=texts, padding=padding, truncation=True, return_tensors="pt")
    pixels = processor(images=images, return_tensors="pt")
    text, image = (
        torch.nn.functional.normalize(getattr(found, "pooler_output", found), dim=-1)
        for found in (model.get_text_features(**tokens), model.get_image_features(**pixels))
    )
    return text @ image.T

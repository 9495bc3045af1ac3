"""What the processor of a transformers model does to pictures and texts, read off the processor itself.

The processor is asked, not guessed at: flat pictures show how it scales colours, a short text shows how it
pads. What is read is then compared with the processor on noise of several shapes. A processor that does
something else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gare.encoders.encoder import ImageFormat
from gare.encoders.hub_folder import require_tokenizer
from gare.errors import CheckpointError
from gare.image_fit import FitMode, ImageFit, Resample, fit_image, patches_size
from gare.settings import PositiveInt, Settings

_RESAMPLES: dict[int, Resample] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
_SHAPES = ((61, 43), (37, 80), (97, 97), (640, 360))
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.spm", "merges.txt", "*.tiktoken")
_LARGEST = 4096  # pixels of a side; the largest towers of transformers see 1,536
_LONGEST_LINE = 300
_UNLIMITED = 100_000  # a tokeniser that knows no limit names a number of thirty digits
_READ_IN_FULL_LENGTH = ("siglip", "siglip2")
"""Trained on texts padded to the full length; the documentation of transformers says so, no file does."""


@dataclass(frozen=True)
class PictureSettings(Settings):
    """The picture an image tower takes."""

    size: PositiveInt = 224
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    fit: FitMode = "crop"
    edge: PositiveInt | None = None
    """The side it is resized to before its middle is cut out; none is `size`."""
    resample: Resample = "bicubic"
    patch: PositiveInt = 16
    max_patches: PositiveInt = 256

    def image_format(self) -> ImageFormat:
        """The same as the rest of the package takes it."""
        fit = ImageFit(self.fit, self.edge, self.resample, self.patch, self.max_patches, as_processor=True)
        return ImageFormat(self.size, self.mean, self.std, fit)


@dataclass(frozen=True)
class TextSettings(Settings):
    """How texts become tokens."""

    padding: Literal["longest", "max_length"] = "longest"
    max_length: PositiveInt = 77
    shows_mask: bool = True
    """Whether the tower is told which tokens are padding."""
    plain_attention: bool = False
    """Whether attention is computed step by step; else by whatever is fastest."""


@dataclass(frozen=True)
class Processor:
    """The two halves of a processor; `whole` is what joins them, where the model has that."""

    images: Any
    tokenizer: Any
    whole: Any = None

    def pixels(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """What the image tower is given for these pictures."""
        process = self.images if self.whole is None else self.whole
        return dict(process(images=list(pictures), return_tensors="pt"))

    def save(self, folder: Path) -> None:
        """Write what `load_tokenizer` reads."""
        self.tokenizer.save_pretrained(folder)


def load_processor(folder: Path) -> Processor:
    """The processor of a model in a folder, with pictures handled by Pillow: by torchvision they differ."""
    from transformers import AutoImageProcessor, AutoProcessor

    try:
        if not any((folder / name).is_file() for name in _PROCESSOR_FILES):
            raise ValueError("there is neither file")  # transformers would speak of its web site
        images = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # settings may be broken in any way
        raise CheckpointError(
            f"{folder} has no image processor that can be used ({first_line(error)}). It says how pictures "
            "are resized and normalised: the folder needs preprocessor_config.json or processor_config.json"
        ) from None
    tokenizer = load_tokenizer(folder)
    try:
        whole = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        whole.image_processor, whole.tokenizer = images, tokenizer
    except Exception:  # many models have none: then the two halves are all there is
        whole = None
    return Processor(images, tokenizer, whole if hasattr(whole, "valid_processor_kwargs") else None)


def load_tokenizer(folder: Path) -> Any:
    """The tokeniser in a folder."""
    from transformers import AutoTokenizer

    require_tokenizer(folder, str(folder))
    try:
        if not any(path for pattern in _VOCABULARIES for path in Path(folder).glob(pattern)):
            raise ValueError("no file with a vocabulary")  # transformers would make an empty one
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer(["a dog"])
    except Exception as error:  # every tokeniser fails in its own way
        raise CheckpointError(
            f"{folder} has no tokeniser that can be used ({first_line(error)}). The folder needs the files "
            "of its tokeniser, such as tokenizer.json"
        ) from None
    return tokenizer


# --- pictures -----------------------------------------------------------------------------------------------


def read_pictures(processor: Processor, folder: Path) -> PictureSettings:
    """How the processor makes pixels of a picture.

    Raises:
        CheckpointError: it does something that `ImageFit` has no words for.
    """
    kind = type(processor.images).__name__.removesuffix("Pil")
    flat = [Image.new("RGB", (48, 48), (level,) * 3) for level in (0, 255)]
    try:
        _refuse_huge(processor.images)
        given = processor.pixels(flat)
        settings = _settings(processor.images, given)
        _compare(processor, settings)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"the image processor of {folder} ({kind}) makes pixels in a way that gare cannot follow: "
            f"{first_line(error)}. gare knows: resize and crop, resize to a square, patches of SigLIP 2"
        ) from None
    return settings


def _refuse_huge(images: Any) -> None:
    """Refuse a size that no tower has, before a picture of that size fills the memory."""
    sizes = [*_numbers(getattr(images, "size", None)), *_numbers(getattr(images, "crop_size", None))]
    if most := getattr(images, "max_num_patches", None):
        sizes.append(patches_size(ImageFit("patches", patch=int(images.patch_size), max_patches=int(most))))
    if sizes and max(sizes) > _LARGEST:
        raise ValueError(f"its pictures have a side of {max(sizes):,} pixels, and {_LARGEST:,} are the most")


def _numbers(size: Any) -> list[int]:
    """What a size of a processor says of sides, in pixels."""
    return [int(side) for side in dict(size).values() if side] if size else []


def _settings(images: Any, given: dict[str, Tensor]) -> PictureSettings:
    pixels = given["pixel_values"].double()
    is_patches = "spatial_shapes" in given
    black_C, white_C = (_levels(each, is_patches=is_patches) for each in pixels)
    # Black is −mean / std, white (1 − mean) / std.
    std_C = 1 / (white_C - black_C)
    mean_C = -black_C * std_C
    mean, std = (
        (_rounded(c[0].item()), _rounded(c[1].item()), _rounded(c[2].item())) for c in (mean_C, std_C)
    )
    resample = _RESAMPLES[int(images.resample)]
    if is_patches:
        patch = int(images.patch_size)
        fit = ImageFit("patches", patch=patch, max_patches=pixels.shape[1])
        return PictureSettings(
            patches_size(fit), mean, std, "patches", None, resample, patch, fit.max_patches
        )
    height, width = pixels.shape[-2:]
    if height != width:
        raise ValueError(f"it makes pictures of {width} × {height} pixels, which are not square")
    size = images.size
    if not images.do_resize:
        raise ValueError("it does not resize")
    if size.get("height") and size.get("width"):
        if size["height"] != size["width"]:
            raise ValueError(f"it resizes to {size['width']} × {size['height']} pixels, not a square")
        mode: FitMode = "squash"
        edge = int(size["height"])
    else:
        mode, edge = "crop", int(size["shortest_edge"])
    return PictureSettings(width, mean, std, mode, None if edge == width else edge, resample)


def _rounded(value: float) -> float:
    """Seven digits: a last bit must not make another model.

    >>> _rounded(0.48145466), _rounded(0.00392156862745)  # of a processor that leaves bytes as they are
    (0.4814547, 0.003921569)
    """
    places = 7 if abs(value) >= 0.1 else 9
    return round(value, places)


def _levels(pixels: Tensor, *, is_patches: bool) -> Tensor:
    """The value of each channel of a flat picture, [3]."""
    return pixels[0, :3] if is_patches else pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2]


def _compare(processor: Processor, settings: PictureSettings) -> None:
    """Refuse settings that do not give what the processor gives, for pictures of several shapes."""
    wanted, random = settings.image_format(), np.random.default_rng(0)
    for width, height in _SHAPES:
        picture = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        expected = processor.pixels([picture])
        bytes_HWC = torch.from_numpy(np.array(fit_image(picture, wanted.size, wanted.fit)))
        ours_CHW = wanted.normalise(bytes_HWC.permute(2, 0, 1))
        if settings.fit == "patches":
            ours = split_patches(ours_CHW[None], wanted)
            same = torch.equal(ours["spatial_shapes"], expected["spatial_shapes"].long())
            same &= torch.equal(ours["pixel_attention_mask"], expected["pixel_attention_mask"].long())
            ours_CHW = ours["pixel_values"][0]
        else:
            same = True
        theirs = expected["pixel_values"][0].float()
        if not same or ours_CHW.shape != theirs.shape or not torch.allclose(ours_CHW, theirs, atol=1e-4):
            raise ValueError(f"a picture of {width} × {height} pixels comes out differently")


def split_patches(pixels_NCHW: Tensor, wanted: ImageFormat) -> dict[str, Tensor]:
    """What `image_fit.lay_out_patches` laid out, as SigLIP 2 takes it: patches, mask, rows and columns."""
    patch, most = wanted.fit.patch, wanted.fit.max_patches
    cells = wanted.size // patch
    patches = pixels_NCHW.unflatten(3, (cells, patch)).unflatten(2, (cells, patch))
    patches_NPhwC = patches.permute(0, 2, 4, 3, 5, 1).flatten(1, 2)
    bits_NB2 = _bits(patches_NPhwC[:, -1], wanted)
    shape_N2 = (bits_NB2 << torch.arange(bits_NB2.shape[1], device=bits_NB2.device)[:, None]).sum(dim=1)
    # Padded frames are empty squares, and colours that were changed in training may have changed the numbers.
    rows_N = shape_N2[:, 0].clamp(1, most)
    shape_N2 = torch.stack([rows_N, torch.minimum(shape_N2[:, 1].clamp_min(1), most // rows_N)], dim=1)
    mask_NP = torch.arange(most, device=shape_N2.device) < shape_N2.prod(dim=1, keepdim=True)
    values_NPE = patches_NPhwC[:, :most].flatten(2).masked_fill(~mask_NP[..., None], 0)
    return {"pixel_values": values_NPE, "pixel_attention_mask": mask_NP.long(), "spatial_shapes": shape_N2}


def _bits(cell_NhwC: Tensor, wanted: ImageFormat) -> Tensor:
    """The numbers in black and white in the last cell: bits [N, 16, 2], the lowest first."""
    first_NBC = cell_NhwC.flatten(1, 2)[:, :16, :2]
    mean_C, std_C = first_NBC.new_tensor(wanted.mean[:2]), first_NBC.new_tensor(wanted.std[:2])
    return (first_NBC * std_C + mean_C > 0.5).long()


# --- texts --------------------------------------------------------------------------------------------------


def read_texts(processor: Processor, config: Any) -> TextSettings:
    """How the processor pads and cuts texts; `config` is that of the model."""
    tokenizer = processor.tokenizer
    shows_mask = "attention_mask" in tokenizer(["a dog"])
    bare = len(tokenizer(["a dog"])["input_ids"][0])
    padded = bare
    if processor.whole is not None:
        padded = len(processor.whole(text=["a dog"])["input_ids"][0])
    positions = _positions(config)
    limits = [limit for limit in (tokenizer.model_max_length, positions) if limit and limit < _UNLIMITED]
    if padded > bare:  # it pads to a length of its own
        return TextSettings("max_length", min(padded, positions or padded), shows_mask)
    if limits and min(limits) <= len(tokenizer([""])["input_ids"][0]):
        raise CheckpointError(
            f"texts of {min(limits)} tokens have no room for a word; mend model_max_length in "
            "tokenizer_config.json"
        )
    if not limits:
        raise CheckpointError(
            "neither the tokeniser nor the config says how long a text may be; set model_max_length in "
            "tokenizer_config.json"
        )
    # A tower that is not told what is padding reads it: then every text needs the same length.
    is_full = config.model_type in _READ_IN_FULL_LENGTH or not shows_mask
    return TextSettings("max_length" if is_full else "longest", int(min(limits)), shows_mask)


def _positions(config: Any) -> int | None:
    """How many tokens the text tower has positions for."""
    text = getattr(config, "text_config", config)
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None:
        return None
    # Towers of RoBERTa's kind count positions from behind the padding token.
    is_roberta = "roberta" in getattr(text, "model_type", "") or config.model_type == "altclip"
    return int(positions) - (int(text.pad_token_id) + 1 if is_roberta and text.pad_token_id else 0)


def first_line(error: BaseException) -> str:
    """What an error says in its first line, and in the next one where the first only announces it.

    >>> first_line(ValueError("Not valid:\\n    4 heads for a width of 30.\\n    More"))
    'Not valid: 4 heads for a width of 30'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    is_announced = lines[0].endswith(":") and len(lines) > 1
    line = (f"{lines[0]} {lines[1]}" if is_announced else lines[0]).rstrip(". ")
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE].rstrip()} …"

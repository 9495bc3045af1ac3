"""How a picture becomes a square: to the byte what the image processors of transformers make of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gare.data.transforms import to_bytes
from gare.encoders import ImageFormat
from gare.encoders.mini_encoder import tiles_of
from gare.image_fit import CROP, ImageFit, fit_image, patches_size

SIDES = st.integers(1, 240)


def noise(width: int, height: int) -> Image.Image:
    bytes_HWC = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3))
    return Image.fromarray(bytes_HWC.astype(np.uint8))


@pytest.mark.parametrize(
    ("name", "options", "size", "fit"),
    [
        ("CLIPImageProcessorPil", {}, 224, ImageFit(as_processor=True)),
        (
            "CLIPImageProcessorPil",
            {"size": {"shortest_edge": 40}, "crop_size": {"height": 33, "width": 33}},
            33,
            ImageFit(edge=40, as_processor=True),
        ),
        (
            "CLIPImageProcessorPil",
            {"size": {"shortest_edge": 27}, "crop_size": {"height": 32, "width": 32}},
            32,
            ImageFit(edge=27, as_processor=True),
        ),
        (
            "SiglipImageProcessorPil",
            {"size": {"height": 48, "width": 48}, "resample": 2},
            48,
            ImageFit("squash", resample="bilinear", as_processor=True),
        ),
        (
            "EfficientNetImageProcessorPil",
            {
                "size": {"height": 40, "width": 40},
                "crop_size": {"height": 33, "width": 33},
                "do_center_crop": True,
                "include_top": False,
            },
            33,
            ImageFit("squash", edge=40, as_processor=True),
        ),
    ],
)
@settings(max_examples=25, deadline=None)
@given(width=SIDES, height=SIDES)
def test_the_bytes_are_those_of_the_processor(name, options, size, fit, width, height):
    import transformers

    processor = getattr(transformers, name)(**options, do_rescale=False, do_normalize=False)
    if max(width, height) > 150 * min(width, height):
        return
    picture = noise(width, height)
    expected_CHW = processor(picture, return_tensors="np", input_data_format=None)["pixel_values"][0]
    np.testing.assert_array_equal(to_bytes([picture], size, fit)[0].numpy(), expected_CHW)


@settings(max_examples=40, deadline=None)
@given(width=SIDES, height=SIDES, patch=st.sampled_from([4, 7, 16]), most=st.integers(1, 60))
def test_patches_are_those_of_the_processor(width, height, patch, most):
    from transformers import Siglip2ImageProcessorPil

    fit = ImageFit("patches", resample="bilinear", patch=patch, max_patches=most, as_processor=True)
    processor = Siglip2ImageProcessorPil(patch_size=patch, max_num_patches=most)
    if max(width, height) > most * min(width, height):
        return  # the processor gives more patches than it says, and fails
    picture = noise(width, height)
    expected = processor(picture, do_rescale=False, do_normalize=False, return_tensors="np")
    size = patches_size(fit)
    square_HWC = np.asarray(fit_image(picture, size, fit))
    cells = size // patch
    patches = square_HWC.reshape(cells, patch, cells, patch, 3).swapaxes(1, 2).reshape(cells * cells, -1)
    np.testing.assert_array_equal(patches[:most], expected["pixel_values"][0])


def test_a_line_of_pixels_does_not_fill_the_memory():
    line = Image.new("RGB", (200_000, 1), "white")
    assert fit_image(line, 32, ImageFit(as_processor=True)).size == (32, 32)
    black_around = np.asarray(fit_image(line, 32, ImageFit(edge=28, as_processor=True)))
    assert (black_around[2:30] == 255).all()
    assert black_around.shape == (32, 32, 3)
    assert black_around.sum() == 255 * 28 * 32 * 3


def test_what_is_the_default_is_not_written():
    """The name of kept features has the format in it: a new field must not make them be computed again."""
    assert (
        str(ImageFormat(8, (0.5,) * 3, (0.5,) * 3)).replace(" ", "")
        == "ImageFormat(size=8,mean=(0.5,0.5,0.5),std=(0.5,0.5,0.5))"
    )
    assert repr(CROP) == "ImageFit()"
    assert repr(ImageFit("squash", edge=9)) == "ImageFit(mode='squash', edge=9)"


def test_squash_shows_the_whole_picture():
    picture = Image.new("RGB", (90, 30), "red")
    picture.paste(Image.new("RGB", (30, 30), "blue"), (60, 0))
    squashed, cropped = (to_bytes([picture], 30, fit)[0] for fit in (ImageFit("squash"), CROP))
    assert squashed[2, :, 20:].float().mean() > 200  # the blue third
    assert cropped[2].max() == 0


@pytest.mark.parametrize(("width", "height"), [(160, 90), (90, 160), (50, 50), (3, 400), (1, 1)])
def test_letterbox_shows_the_whole_picture_undistorted(width, height):
    square = to_bytes([Image.new("RGB", (width, height), "white")], 64, ImageFit("letterbox"))[0]
    is_picture = (square > 250).all(dim=0)
    scale = 64 / max(width, height)
    assert is_picture.any(dim=0).sum() == max(1, round(width * scale))
    assert is_picture.any(dim=1).sum() == max(1, round(height * scale))
    assert (square[:, ~is_picture] == 127).all()


@pytest.mark.parametrize(
    ("width", "height", "number"), [(160, 90, 2), (90, 160, 2), (60, 60, 1), (320, 90, 4), (3, 900, 4)]
)
def test_tiles_cover_the_picture_from_end_to_end(width, height, number):
    picture = noise(width, height)
    squares = to_bytes([picture], 64, ImageFit("tiles"))
    tiles, found = tiles_of(squares)
    assert (found, tiles.shape) == (number, (number, 3, 32, 32))
    scale = 32 / min(width, height)
    size = tuple(max(32, min(round(side * scale), 200 * 32)) for side in (width, height))
    whole = np.asarray(picture.resize(size, Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    np.testing.assert_array_equal(tiles[0].numpy(), whole[:, :32, :32])
    np.testing.assert_array_equal(tiles[-1].numpy(), whole[:, -32:, -32:])


def test_pictures_of_other_shapes_keep_their_own_tiles():
    pictures = [noise(160, 90), noise(60, 60), noise(400, 90)]
    together, number = tiles_of(to_bytes(pictures, 64, ImageFit("tiles")))
    assert number == 4
    for picture, four in zip(pictures, together.float().unflatten(0, (3, 4)), strict=True):
        alone, _ = tiles_of(to_bytes([picture], 64, ImageFit("tiles")))
        np.testing.assert_allclose(four.mean(dim=0), alone.float().mean(dim=0), atol=1e-3)

"""Images into tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from gare.data.colour_jitter import ColourJitter, draw_colour_jitter, jitter_colours
from gare.data.randaugment import _OPERATIONS, rand_augment
from gare.data.transforms import Augmentation, augment, to_bytes
from gare.encoders.encoder import ImageFormat

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def to_pixels(images: list[Image.Image], size: int) -> torch.Tensor:
    return ImageFormat(size, MEAN, STD).normalise(to_bytes(images, size))


def gradient(width: int, height: int) -> Image.Image:
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(np.stack([x, y, (x + y) / 2], axis=-1).astype(np.uint8))


@pytest.mark.parametrize("size", [(320, 240), (240, 320), (64, 64), (50, 400), (225, 224)])
def test_short_side_and_centre_crop(size: tuple[int, int]) -> None:
    pixels_FCHW = to_pixels([gradient(*size), gradient(*size)], 224)
    assert pixels_FCHW.shape == (2, 3, 224, 224)
    assert pixels_FCHW.dtype == torch.float32
    centre = to_bytes([gradient(*size)], 224)[0, :2, 111:113, 111:113].float().mean()
    assert centre == pytest.approx(127, abs=3)


@pytest.mark.parametrize("size", [(320, 240), (240, 321), (455, 256), (192, 333), (100, 150), (224, 300)])
def test_one_step_equals_resize_then_crop(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(40, 215, (12, 12, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    short = min(size)
    width, height = (224 if side == short else int(side * 224 / short) for side in size)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(int)
    actual = to_bytes([image], 224)[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(actual - expected).max() <= 2  # Pillow rounds between the two directions, in either order
    assert np.abs(actual - expected).mean() < 0.1


def test_numbers_are_those_of_the_definition() -> None:
    image = gradient(64, 64)
    expected = (np.asarray(image) / 255 - np.array(MEAN)) / np.array(STD)
    actual = to_pixels([image], 64)[0].permute(1, 2, 0)
    torch.testing.assert_close(actual, torch.from_numpy(expected).float(), atol=1e-5, rtol=1e-5)


def test_large_images_are_antialiased() -> None:
    stripes = Image.fromarray(np.tile(np.array([0, 255], dtype=np.uint8), (448, 224)))
    values = to_bytes([stripes], 64).float()
    assert values.std() < 2


def test_normalise_leaves_its_input_alone() -> None:
    batch_VFCHW = torch.full((2, 3, 3, 4, 4), 255, dtype=torch.uint8)
    assert ImageFormat(4, (0.5,) * 3, (0.5,) * 3).normalise(batch_VFCHW).unique().tolist() == [1.0]
    assert batch_VFCHW.unique().tolist() == [255]


def test_grey_and_transparent_images_become_rgb() -> None:
    assert to_bytes([Image.new("L", (40, 40)), Image.new("RGBA", (40, 40))], 32).shape == (2, 3, 32, 32)
    with pytest.raises(ValueError, match="at least one image"):
        to_bytes([], 32)


@pytest.mark.parametrize("augmentation", ["off", "light", "strong", "randaugment"])
def test_augmentation_is_one_draw_per_clip(augmentation: Augmentation) -> None:
    clip = [gradient(64, 48)] * 3
    changed = 0
    for seed in range(12):
        first, *others = augment(clip, augmentation, generator=torch.Generator().manual_seed(seed))
        again = augment(clip, augmentation, generator=torch.Generator().manual_seed(seed))
        assert all(np.array_equal(first, other) for other in (*others, *again))
        assert first.mode == "RGB"
        changed += first.size != clip[0].size or not np.array_equal(first, clip[0])
    assert changed == 0 if augmentation == "off" else changed >= 10


def test_every_randaugment_operation_keeps_size_and_mode() -> None:
    image = gradient(64, 48)
    for make in _OPERATIONS:
        for strength in (0.0, 0.7, 1.0):
            result = make(strength, -1.0)(image)
            assert (result.size, result.mode) == (image.size, "RGB")
    assert len(_OPERATIONS) == 15
    strong = rand_augment([image], generator=torch.Generator().manual_seed(1), num_operations=40)
    assert not np.array_equal(strong[0], image)


def test_colour_jitter_does_what_it_says() -> None:
    clips = torch.randint(0, 256, (3, 2, 3, 20, 40), dtype=torch.uint8)
    same = ColourJitter(1, 1, 1, 0, 0, 0, 0)
    assert torch.equal(jitter_colours(clips, torch.tensor([same] * 3)), clips)
    grey, dark, hidden = jitter_colours(
        clips,
        torch.tensor(
            [
                same._replace(saturation=0),
                same._replace(brightness=0.5),
                ColourJitter(1, 1, 1, 0.25, 0.5, 0.5, 1),
            ]
        ),
    )
    assert torch.equal(grey[:, 0], grey[:, 1])
    assert (dark.float() - 0.5 * clips[1].float()).abs().max() <= 1
    assert (hidden[:, :, 10:, 10:20] == 127).all()
    is_kept = torch.ones(20, 40, dtype=torch.bool)
    is_kept[10:, 10:20] = False
    assert torch.equal(hidden[:, :, is_kept], clips[2][:, :, is_kept])


def test_jitters_vary_and_now_and_then_hide_a_patch() -> None:
    draws = [draw_colour_jitter(torch.Generator().manual_seed(seed)) for seed in range(400)]
    assert all(0.6 <= draw.brightness <= 1.4 and 0 <= draw.left <= draw.right <= 1 for draw in draws)
    assert 0.05 < sum(draw.saturation == 0 for draw in draws) / 400 < 0.15
    assert 0.2 < sum(draw.right > draw.left for draw in draws) / 400 < 0.3


def test_unknown_augmentation_lists_the_known() -> None:
    with pytest.raises(ValueError, match="off, light, strong, randaugment"):
        augment([gradient(8, 8)], "heavy", generator=torch.Generator())  # type: ignore[arg-type]

"""The laws that every encoder keeps, whoever wrote it: each a function of an encoder with random weights.

`tests/unit/test_encoders.py` holds every entry of ENCODERS to them; the test of an encoder of one's own may
do the same: `for law in LAWS: law(build_encoder(config, weights=False))`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gare.encoders import Encoder, build_encoder


def random_frames(encoder: Encoder, number: int = 3) -> Tensor:
    size, generator = encoder.image_format.size, torch.Generator().manual_seed(0)
    return torch.randint(256, (number, 3, size, size), generator=generator, dtype=torch.uint8)


@torch.no_grad()
def shapes_are_what_it_says(encoder: Encoder) -> None:
    token_ids_TW, mask_TW = encoder.random_tokens(2)
    assert token_ids_TW.shape == mask_TW.shape == (2, encoder.max_words)
    assert mask_TW.dtype == torch.bool
    text_TD, words_TWD = encoder.encode_text(token_ids_TW, mask_TW)
    assert text_TD.shape == (2, encoder.dim)
    assert words_TWD.shape == (2, encoder.max_words, encoder.dim)
    features_NE = encoder.encode_frames(random_frames(encoder))
    assert features_NE.ndim == 2
    assert encoder.project_images(features_NE).shape == (3, encoder.dim)
    assert encoder.project_images(features_NE[None]).shape == (
        1,
        3,
        encoder.dim,
    )  # a cache has videos × frames


@torch.no_grad()
def bytes_are_normalised_once(encoder: Encoder) -> None:
    bytes_NCHW = random_frames(encoder)
    pixels_NCHW = encoder.image_format.normalise(bytes_NCHW)
    torch.testing.assert_close(encoder.encode_frames(bytes_NCHW), encoder.image_features(pixels_NCHW))
    expected_ND = encoder.project_images(encoder.image_features(pixels_NCHW))
    torch.testing.assert_close(encoder.encode_images(pixels_NCHW), expected_ND)


@torch.no_grad()
def an_image_does_not_depend_on_its_batch_mates(encoder: Encoder) -> None:
    bytes_NCHW = random_frames(encoder)
    together_NE = encoder.encode_frames(bytes_NCHW)
    torch.testing.assert_close(encoder.encode_frames(bytes_NCHW[1:2]), together_NE[1:2], atol=1e-5, rtol=1e-4)


def every_parameter_has_its_part(encoder: Encoder) -> None:
    """The towers are those submodules that the class names; what the image tower says comes from it alone."""
    modules = {name.split(".")[0] for name in encoder.state_dict()}
    assert {*encoder.IMAGE_TOWER, *encoder.TEXT_TOWER} <= modules
    parts = {part: encoder.tower_parameters(part) for part in ("image", "text", "projection")}
    assert sum(map(len, parts.values())) == len(dict(encoder.named_parameters()))
    features_NE = encoder.encode_frames(random_frames(encoder))
    if not features_NE.requires_grad:
        assert not parts["image"] or encoder.is_image_tower_frozen
        return
    names, parameters = zip(*encoder.named_parameters(), strict=True)
    gradients = torch.autograd.grad(features_NE.sum(), parameters, allow_unused=True)
    reached = {name for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    assert {encoder.part_of(name) for name in reached} == {"image"}


def freezing_freezes_one_part(encoder: Encoder) -> None:
    for part in ("image", "text", "projection"):
        encoder.requires_grad_(True)
        encoder.freeze(part)
        still = {encoder.part_of(name) for name, p in encoder.named_parameters() if not p.requires_grad}
        assert still <= {part}
        assert not any(p.requires_grad for p in encoder.tower_parameters(part).values())
        assert encoder.is_image_tower_frozen == (part == "image" or not encoder.tower_parameters("image"))
    encoder.requires_grad_(True)


@torch.no_grad()
def the_digest_is_that_of_the_image_tower(encoder: Encoder) -> None:
    before = encoder.image_tower_digest()
    assert len(before) == 16
    for name, parameter in encoder.named_parameters():
        old = parameter.clone()
        parameter.add_(1)
        assert (encoder.image_tower_digest() != before) == (encoder.part_of(name) == "image"), name
        parameter.copy_(old)
        if name.count(".") > 4:  # one of a deep tower is enough
            break
    assert encoder.image_tower_digest() == before


def its_settings_are_complete(encoder: Encoder) -> None:
    """Built again from its settings alone, it has the same weights to load."""
    config = type(encoder.config).load(encoder.config.to_values())
    assert config == encoder.config
    again = build_encoder(config, weights=False)
    again.load_state_dict(encoder.state_dict())
    assert (again.dim, again.image_format, again.max_words) == (
        encoder.dim,
        encoder.image_format,
        encoder.max_words,
    )


def it_costs_something(encoder: Encoder) -> None:
    cost = encoder.flops()
    assert cost["image"] > 0
    assert cost["text"] >= 0


LAWS: list[Callable[[Encoder], None]] = [
    shapes_are_what_it_says,
    bytes_are_normalised_once,
    an_image_does_not_depend_on_its_batch_mates,
    every_parameter_has_its_part,
    freezing_freezes_one_part,
    the_digest_is_that_of_the_image_tower,
    its_settings_are_complete,
    it_costs_something,
]

"""Layers written out for training, in Triton's interpreter: values and gradients are those of the layers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from gare.encoders.clip_encoder import ClipEncoder, ClipEncoderConfig
from gare.encoders.clip_layers import PatchEmbedding, attend_by_sums
from gare.encoders.encoder import ImageFormat
from gare.encoders.training_layers import parts_of, run_training_layers, run_up_to_norm
from gare.interaction.temporal import TemporalTransformer
from gare.train.gradient_step import _tf32

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this machine")
from gare.encoders import add_norm_cuda, quick_gelu_cuda
from gare.encoders.patches_cuda import patches_of_bytes


def _layers(*, width: int = 48, heads: int = 3, hidden: int = 80, number: int = 2) -> torch.nn.ModuleList:
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    torch.manual_seed(0)
    config = CLIPVisionConfig(hidden_size=width, intermediate_size=hidden, num_attention_heads=heads)
    config._attn_implementation = "sdpa"
    layers = torch.nn.ModuleList(CLIPEncoderLayer(config) for _ in range(number))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layers


def _values_and_gradients(layers: torch.nn.ModuleList, states: Tensor, output: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(output, [states, *layers.parameters()], torch.ones_like(output).cumsum(1))
    return [output.detach(), *found]


@pytest.mark.parametrize(("number", "programs", "rows"), [(1, 1000, 1), (3, 2, 1), (1, 2, 4)])
def test_values_and_gradients_are_those_of_the_layers(
    number: int, programs: int, rows: int, monkeypatch: pytest.MonkeyPatch
):
    """With as many programs as there are rows, with two that share them, and with several rows at once."""
    for kernels in (add_norm_cuda, quick_gelu_cuda):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(add_norm_cuda, "ROWS", rows)
    layers = _layers(number=number)
    states = (2 * torch.randn(2, 5, 48)).requires_grad_()
    expected = states
    for layer in layers:
        expected = layer(expected, None)
    ours = run_training_layers([parts_of(layer) for layer in layers], states, dtype=torch.float32)
    names = ["output", "states", *dict(layers.named_parameters())]
    pairs = zip(
        _values_and_gradients(layers, states, ours),
        _values_and_gradients(layers, states, expected),
        strict=True,
    )
    for name, (actual, wanted) in zip(names, pairs, strict=True):
        assert actual.dtype == torch.float32, name
        torch.testing.assert_close(
            actual, wanted, atol=2e-4, rtol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_norm_after_the_layers_gives_what_a_last_layer_needs():
    layers, norm = _layers(), torch.nn.LayerNorm(48)
    with torch.no_grad():
        norm.weight += 0.3 * torch.randn(48)
    states = (2 * torch.randn(2, 5, 48)).requires_grad_()
    inputs = [states, *layers.parameters(), norm.weight, norm.bias]
    found = [run_up_to_norm([parts_of(layer) for layer in layers], states, norm, dtype=torch.float32)]
    expected = states
    for layer in layers:
        expected = layer(expected, None)
    found.append((expected[:, :1], norm(expected)))
    ours, theirs = [
        [*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(x).cumsum(1) for x in outputs])]
        for outputs in found
    ]
    for actual, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, wanted, atol=5e-4, rtol=5e-4)


def test_texts_have_the_vectors_and_gradients_they_had():
    encoder = _tower()
    token_ids = torch.randint(1, 90, (3, 7))
    token_ids[:, -1] = 99
    token_ids[1, 4] = 99
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 5:] = False
    parameters = list(encoder.text.parameters())

    def gradients(vectors: tuple[Tensor, Tensor]) -> list[Tensor]:
        text, words = vectors[0], vectors[1][mask]
        total = (text * torch.linspace(-1, 1, text.shape[1])).sum() + words.square().sum()
        return [text.detach(), words.detach(), *torch.autograd.grad(total, parameters)]

    parts = [parts_of(layer) for layer in encoder.text.encoder.layers]
    wanted = gradients(encoder.encode_text(token_ids, mask))
    actual = gradients(encoder._train_on_tokens(token_ids, mask, parts, dtype=torch.float32))
    names = ["text", "words", *(name for name, _ in encoder.text.named_parameters())]
    for name, one, other in zip(names, actual, wanted, strict=True):
        torch.testing.assert_close(
            one, other, atol=1e-3, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_frames_among_each_other_have_the_values_and_gradients_they_had():
    torch.manual_seed(0)
    temporal = TemporalTransformer(32, num_layers=2, num_heads=2, max_frames=6)
    frames, mask = torch.randn(3, 5, 32, requires_grad=True), torch.ones(3, 5, dtype=torch.bool)
    mask[1, 2:] = False
    hidden = frames + temporal.position[:5]
    wanted = temporal(frames, mask)[mask]
    actual = (frames + temporal.train_by_kernels(hidden, mask, dtype=torch.float32))[mask]
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)
    inputs = [frames, *temporal.parameters()]
    pairs = [torch.autograd.grad(x.square().sum(), inputs, allow_unused=True) for x in (actual, wanted)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def _tower(**more: object) -> ClipEncoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    architecture = {
        "model_type": "clip",
        "projection_dim": 16,
        "vision_config": {**sizes, "image_size": 16, "patch_size": 8, **more},
        "text_config": {**sizes, "num_hidden_layers": 1, "vocab_size": 100},
    }
    encoder = ClipEncoder(ClipEncoderConfig(architecture=architecture)).train()
    with torch.no_grad():
        for parameter in encoder.vision.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return encoder


def test_a_tower_gives_what_it_gave_and_every_parameter_its_gradient():
    encoder = _tower()
    bytes_NCHW = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    names = [name for name, _ in encoder.vision.named_parameters()]

    def gradients(features: Tensor) -> list[Tensor]:
        weights = torch.linspace(-1, 1, features.numel()).view_as(features)
        return [features.detach(), *torch.autograd.grad(features, list(encoder.vision.parameters()), weights)]

    wanted = gradients(encoder.image_features(encoder.image_format.normalise(bytes_NCHW)))
    actual = gradients(encoder._train_on_bytes(bytes_NCHW, encoder._vision_parts(), dtype=torch.float32))
    for name, one, other in zip(["features", *names], actual, wanted, strict=True):
        torch.testing.assert_close(
            one, other, atol=1e-3, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_it_is_for_clip_with_nothing_frozen_or_dropped():
    assert _tower()._vision_parts() is not None
    assert _tower(hidden_act="gelu")._vision_parts() is None
    assert _tower(attention_dropout=0.1)._vision_parts() is None
    assert _tower(image_size=96)._vision_parts() is None  # 145 places
    frozen = _tower()
    frozen.freeze("image")
    assert frozen._vision_parts() is None


@pytest.mark.parametrize(("size", "patch"), [((32, 32), 8), ((30, 28), 14), ((17, 35), 16)])
def test_patches_of_bytes_are_those_of_the_convolution(size: tuple[int, int], patch: int):
    bytes_NCHW = torch.randint(256, (2, 3, *size), dtype=torch.uint8)
    convolution = PatchEmbedding.of(torch.nn.Conv2d(3, 5, patch, stride=patch))
    patches = patches_of_bytes(bytes_NCHW, patch)
    assert torch.equal(patches, convolution.patches_of(bytes_NCHW))
    weight_EX, shift_E = convolution.for_bytes(ImageFormat(patch, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
    pixels = ImageFormat(patch, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)).normalise(bytes_NCHW)
    expected = convolution(pixels).flatten(2).mT
    torch.testing.assert_close(patches.float() @ weight_EX.mT + shift_E, expected, atol=1e-4, rtol=1e-4)


def test_attention_of_one_query_by_sums_is_that_of_torch():
    query, key, value = (torch.randn(2, 3, places, 8, requires_grad=True) for places in (1, 5, 5))
    pair = (
        attend_by_sums(query, key, value),
        torch.nn.functional.scaled_dot_product_attention(query, key, value),
    )
    torch.testing.assert_close(*pair)
    gradients = [torch.autograd.grad(x.square().sum(), (query, key, value)) for x in pair]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_products_are_rounded_within_a_step_alone():
    before = torch.get_float32_matmul_precision()
    with _tf32(on=True):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with _tf32(on=False):
        assert torch.get_float32_matmul_precision() == before


@torch.no_grad()
def test_what_is_before_the_first_product_of_a_tower_is_one_kernel(monkeypatch: pytest.MonkeyPatch):
    encoder = _tower()
    patches = encoder.vision.embeddings.patch_embedding.patches_of(
        torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    ).float()
    expected = encoder._embed(patches)
    assert encoder._embed_and_norm(patches)[1] is None  # not on a GPU
    monkeypatch.setattr("gare.encoders.clip_encoder.has_kernel", lambda _: True)
    for _ in range(2):
        states, normed = encoder._embed_and_norm(patches)
        assert normed is not None
        assert states.dtype == torch.float16
        torch.testing.assert_close(states.float(), expected, atol=1e-5, rtol=2**-10)
        wanted = encoder.vision.encoder.layers[0].layer_norm1(expected)
        torch.testing.assert_close(normed.float(), wanted, atol=2e-2, rtol=1e-2)
        encoder.vision.embeddings.position_embedding.weight += 0.5  # is seen
        expected = encoder._embed(patches)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile looks at it
def test_compiled_ends_of_a_tower_change_nothing(monkeypatch: pytest.MonkeyPatch):
    encoder = _tower()
    bytes_NCHW = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    parameters = list(encoder.vision.parameters())

    def gradients() -> list[Tensor]:
        features = encoder._train_on_bytes(bytes_NCHW, encoder._vision_parts(), dtype=torch.float32)
        return [features.detach(), *torch.autograd.grad(features.square().sum(), parameters)]

    wanted = gradients()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    encoder.compile_towers()
    for one, other in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)

"""Image towers whose products are in bfloat16: the same vectors to 1e-4 in cosine, and only where wanted."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from gare.bench.encode_bench import transformers_features
from gare.encoders import bfloat16_layers, clip_encoder
from gare.encoders.short_attention import short_attention
from gare.model import GARE, GareConfig

VISION = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION |= {"image_size": 64, "patch_size": 16}
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_model(kind: str) -> GARE:
    torch.manual_seed(0)
    architecture = {"model_type": kind, "vision_config": VISION, "text_config": TEXT}
    if kind == "clip":
        architecture["projection_dim"] = 32
    else:
        architecture["text_config"] = {**TEXT, "hidden_size": 64, "projection_size": 64}
    values = {
        "encoder": {"name": "clip", "architecture": architecture},
        "temporal": {"num_layers": 0},
        "interaction": {"name": "mean"},
    }
    model = GARE(GareConfig.load(values)).eval()
    with torch.no_grad():
        for parameter in model.encoder.vision.parameters():  # as far from zero as trained ones are
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that gains by it; others compute the same, slowly."""
    monkeypatch.delenv(bfloat16_layers.VARIABLES["cpu"], raising=False)
    monkeypatch.setattr(bfloat16_layers, "has_fast_bfloat16", lambda _: True)
    monkeypatch.setattr(bfloat16_layers, "LEAST_PARAMETERS", 1)


def frames(number: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (number, 3, 64, 64), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.no_grad()
def test_vectors_are_those_of_transformers(kind, wanted):
    model = make_model(kind)
    encoder = model.encoder
    reference = transformers_features(model)
    assert reference is not None
    expected = reference(encoder.image_format.normalise(frames()))
    actual = encoder.project_images(encoder.encode_frames(frames()))
    assert actual.dtype == torch.float32
    assert not torch.equal(actual, expected)  # it was done
    assert F.cosine_similarity(actual, expected).min() > 1 - 1e-4
    exact = encoder.encode_images(encoder.image_format.normalise(frames()))  # floats: in float32 as ever
    torch.testing.assert_close(exact, expected, atol=1e-5, rtol=1e-4)


def in_interpreter(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    """The product with its activation, in small tiles, and in float32: the interpreter has no bfloat16."""
    from gare.encoders import active_product_cuda

    product = active_product_cuda.active_product

    def active_product(x, weight, bias):
        shape = active_product_cuda.Shape(64, 128, 32, 1, 4, 3, False)
        return product(x.float(), weight.float(), bias.float(), shape=shape).bfloat16()

    monkeypatch.setattr(active_product_cuda, "active_product", active_product)
    monkeypatch.setattr(bfloat16_layers, "has_active_product", lambda *_: not seen.append("product"))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@torch.no_grad()
def test_kernels_of_a_gpu_give_these_vectors(kind, wanted, monkeypatch):
    """In Triton's interpreter: sums with norms, attention, and the activation in its product."""
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this machine")
    model = make_model(kind)
    plain = model.encoder.encode_frames(frames())
    seen = []

    def attend(query, key, value, scale):  # the interpreter has no products in bfloat16
        return short_attention(query.float(), key.float(), value.float(), scale).bfloat16()

    monkeypatch.setattr(bfloat16_layers, "short_attention", attend)
    monkeypatch.setattr(bfloat16_layers, "has_kernel", lambda states: not seen.append("norm"))

    def is_short(query, key):
        return query.shape == key.shape and not seen.append("attention")

    monkeypatch.setattr(bfloat16_layers, "is_short", is_short)
    in_interpreter(monkeypatch, seen)
    by_kernels = model.encoder.encode_frames(frames())
    # The last layer of CLIP has one query.
    product = ["product"] if kind == "clip" else []  # SigLIP has another activation
    last = ["norm", "norm", *product] if kind == "clip" else ["norm", "attention", "norm"]
    assert seen == 2 * ["norm", "attention", "norm", *product] + last
    assert F.cosine_similarity(by_kernels, plain).min() > 1 - 1e-4
    exact = model.encoder.image_features(model.encoder.image_format.normalise(frames()))
    assert F.cosine_similarity(by_kernels, exact).min() > 1 - 1e-4


@pytest.mark.parametrize("by_kernels", [False, True])
@torch.no_grad()
def test_from_bytes_to_features_as_on_a_gpu(by_kernels, wanted, monkeypatch):
    model = make_model("clip")
    encoder = model.encoder
    exact = encoder.image_features(encoder.image_format.normalise(frames()))
    assert bfloat16_layers.prepare(encoder.vision)
    if by_kernels:
        pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this machine")
        seen: list[str] = []
        in_interpreter(monkeypatch, seen)
        for module in (bfloat16_layers, clip_encoder):
            monkeypatch.setattr(module, "has_kernel", lambda _: True)
        monkeypatch.setattr(bfloat16_layers, "is_one_query", lambda query, _: query.shape[2] == 1)
        states, _ = encoder._embed_and_norm(encoder.vision.embeddings.patch_embedding.patches_of(frames()))
        assert states.dtype == torch.float16
        assert F.cosine_similarity(encoder._encode_bytes(frames()), exact).min() > 1 - 1e-4
        encoder.vision.pre_layrnorm.bias[3] = 300.0  # so large that float16 would round most
        states, _ = encoder._embed_and_norm(encoder.vision.embeddings.patch_embedding.patches_of(frames()))
        assert states.dtype == torch.float32
        exact = encoder.image_features(encoder.image_format.normalise(frames()))
    assert F.cosine_similarity(encoder._encode_bytes(frames()), exact).min() > 1 - 1e-4


@pytest.mark.parametrize("width", [64, 100])
def test_a_sum_and_its_norm_in_one_kernel(width):
    pytest.importorskip("triton", reason="the kernel needs Triton, which has no wheel for this machine")
    from gare.encoders.add_norm_cuda import add_norm

    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(width)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    states = 3 + torch.randn(2, 5, width)
    one, other = (torch.randn(2, 5, width).bfloat16() for _ in range(2))
    with torch.no_grad():
        for branches, expected in (
            ((), states),
            ((one,), states + one),
            ((one, other), states + one + other),
        ):
            for keeps_sum in (True, False):
                sums, normed = add_norm(
                    states, branches, norm.weight, norm.bias, norm.eps, keeps_sum=keeps_sum
                )
                assert torch.equal(sums, expected if keeps_sum else states)
                assert normed.dtype == torch.bfloat16
                torch.testing.assert_close(normed.float(), norm(expected), atol=1e-2, rtol=1e-2)


@torch.no_grad()
def test_states_in_float16_have_the_norm_of_the_sum_in_float32():
    pytest.importorskip("triton", reason="the kernel needs Triton, which has no wheel for this machine")
    from gare.encoders.add_norm_cuda import add_norm, embed_norm

    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(100)
    states = (300 * torch.randn(2, 5, 100)).half()
    branch = torch.randn(2, 5, 100).bfloat16()
    branch[0, 0, :3] = torch.tensor([3e5, -3e5, float("nan")])
    exact = states.float() + branch.float()
    kept, normed = add_norm(states, (branch,), norm.weight, norm.bias, norm.eps)
    assert torch.equal(kept[0, 0, :2], torch.tensor([65504.0, -65504.0]).half())  # nothing is infinite
    assert kept[0, 0, 2].isnan()  # and nothing wrong is hidden
    assert torch.equal(kept[:, 1:], exact.half()[:, 1:])
    torch.testing.assert_close(normed[:, 1:].float(), norm(exact)[:, 1:], atol=1e-2, rtol=1e-2)
    same, _ = add_norm(states, (branch,), norm.weight, norm.bias, norm.eps, keeps_sum=False)
    assert torch.equal(same, states)

    embedded, moved = torch.randn(2, 4, 100).bfloat16(), torch.randn(5, 100)
    both = [(each.weight, each.bias, each.eps) for each in (norm, torch.nn.LayerNorm(100))]
    exact, normed = embed_norm(embedded, moved, *both)
    kept, normed_again = embed_norm(embedded, moved, *both, states_dtype=torch.float16)
    assert torch.equal(kept, exact.half())
    assert torch.equal(normed, normed_again)


@pytest.mark.parametrize("together", [0, 1])
@pytest.mark.parametrize("is_flat", [False, True])
@torch.no_grad()
def test_a_product_and_its_activation_in_one_kernel(together, is_flat):
    """In float32, whose products the interpreter has; rows that are no whole tile."""
    pytest.importorskip("triton", reason="the kernel needs Triton, which has no wheel for this machine")
    from gare.encoders.active_product_cuda import Shape, active_product

    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 31, 32), torch.randn(64, 32), torch.randn(64)
    shape = Shape(16, 32, 16, together, 4, 3, is_flat)
    found = active_product(x, weight, bias, shape=shape)
    torch.testing.assert_close(found, F.silu(F.linear(x, weight, bias)), atol=1e-4, rtol=1e-4)


def test_a_tanh_exact_to_eleven_bits_is_below_the_rounding_of_bfloat16():
    x = torch.linspace(-30, 30, 100_001, dtype=torch.float64)
    half = x / 2
    exact = F.silu(x)
    for sign in (-1, 1):
        found = half + half * torch.tanh(half) * (1 + sign * 2**-11)
        assert ((found - exact).abs() <= 2**-9 * x.abs().clamp(min=1)).all()


@torch.no_grad()
def test_attention_of_one_query_in_one_kernel():
    pytest.importorskip("triton", reason="the kernel needs Triton, which has no wheel for this machine")
    from gare.encoders.short_attention import attend_once

    torch.manual_seed(0)
    query = 5 * torch.randn(2, 1, 3, 20).transpose(1, 2)
    key, value = torch.randn(2, 17, 2, 3, 20).permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    torch.testing.assert_close(attend_once(query, key, value, 20**-0.5), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_small_towers_other_processors_and_a_refusal_stay_in_float32(wanted, monkeypatch):
    model = make_model("clip")
    exact = model.encoder.image_features(model.encoder.image_format.normalise(frames()))
    with monkeypatch.context() as patched:
        patched.setenv(bfloat16_layers.VARIABLES["cpu"], "float32")
        assert torch.equal(model.encoder.encode_frames(frames()), exact)
    with monkeypatch.context() as patched:
        patched.setattr(bfloat16_layers, "has_fast_bfloat16", lambda _: False)
        assert torch.equal(model.encoder.encode_frames(frames()), exact)
    with monkeypatch.context() as patched:
        patched.setattr(bfloat16_layers, "LEAST_PARAMETERS", 10_000_000)
        assert torch.equal(make_model("clip").encoder.encode_frames(frames()), exact)
    assert not torch.equal(model.encoder.encode_frames(frames()), exact)


def test_gradients_are_exact(wanted):
    model = make_model("clip")
    with torch.no_grad():
        model.encoder.encode_frames(frames())  # prepared
    exact = model.encoder.image_features(model.encoder.image_format.normalise(frames()))
    features = model.encoder.encode_frames(frames())
    torch.testing.assert_close(features, exact)
    features.sum().backward()
    assert model.encoder.vision.encoder.layers[0].mlp.fc1.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_weights_that_change_are_used(wanted):
    model = make_model("clip")
    names = list(model.state_dict())
    before = model.encoder.encode_frames(frames())
    assert list(model.state_dict()) == names
    other = copy.deepcopy(model)
    for layer in other.encoder.vision.encoder.layers:
        layer.mlp.fc1.weight.mul_(2.0)
    after = other.encoder.encode_frames(frames())
    exact = other.encoder.image_features(other.encoder.image_format.normalise(frames()))
    assert F.cosine_similarity(after, exact).min() > 1 - 1e-4
    assert F.cosine_similarity(after, before).min() < 1 - 1e-3
    assert torch.equal(model.encoder.encode_frames(frames()), before)

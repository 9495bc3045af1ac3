"""Attention of short sequences, in Triton's interpreter, against torch's own."""

from __future__ import annotations

from functools import partial
from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gare.encoders import short_attention as module
from gare.encoders.short_attention import attend, is_short, short_attention
from gare.model import GARE, GareConfig

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel for this machine")

from gare.encoders import short_attention_cuda

SHAPES = [(2, 3, 50, 64), (1, 2, 16, 32), (2, 1, 7, 20), (1, 1, 1, 16), (1, 2, 100, 64)]


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value as a tower makes them, and a gradient: [N, H, P, E] views of [N, P, H, E]."""
    pictures, heads, places, width = shape
    torch.manual_seed(0)
    tensors = [torch.randn(pictures, places, heads, width).to(dtype) for _ in range(4)]
    return [tensor.transpose(1, 2) for tensor in tensors]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_values_and_gradients_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
):
    query, key, value, gradient = _random(shape, dtype)
    scale = 0.7 * shape[-1] ** -0.5
    ours = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    attended = short_attention(*ours, scale).transpose(1, 2)
    attended.backward(gradient)
    theirs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(*theirs, scale=scale)
    expected.backward(gradient.double())
    assert torch.allclose(attended.double(), expected, atol=tolerance)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad.double(), other.grad, atol=4 * tolerance)


@pytest.mark.parametrize(("is_masked", "is_causal"), [(True, False), (False, True), (True, True)])
def test_places_that_are_not_seen_count_for_nothing(is_masked: bool, is_causal: bool):
    pictures, places, heads, width = 3, 7, 2, 16
    packed, gradient = (
        torch.randn(pictures, places, 3, heads, width),
        torch.randn(pictures, places, heads, width),
    )
    mask = torch.rand(pictures, places) < 0.6
    mask[:, 0] = True
    options = {"mask_NP": mask if is_masked else None, "is_causal": is_causal}
    attended = short_attention_cuda.forward(*packed.permute(2, 0, 3, 1, 4), 0.25, **options)
    found, sums, again = short_attention_cuda.packed_backward(gradient, packed, 0.25, **options)
    leaf = packed.clone().requires_grad_()
    seen = mask[:, None, None] if is_masked else torch.ones(places, places, dtype=torch.bool)
    seen = seen & torch.ones(places, places, dtype=torch.bool).tril() if is_causal else seen
    expected = F.scaled_dot_product_attention(*leaf.permute(2, 0, 3, 1, 4), attn_mask=seen, scale=0.25)
    expected = expected.transpose(1, 2)
    expected.backward(gradient)
    assert leaf.grad is not None
    for one, other in ((attended, expected), (again, expected), (found, leaf.grad)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums, leaf.grad.sum(dim=(0, 1)), atol=1e-4, rtol=1e-4)
    if is_masked:  # ones and zeros of another type
        options["mask_NP"] = mask.long()
        same = short_attention_cuda.forward(*packed.permute(2, 0, 3, 1, 4), 0.25, **options)
        assert torch.equal(same, attended)


def test_torch_accepts_both_operators():
    query, key, value, _ = _random((1, 2, 5, 16), torch.float32)
    inputs = tuple(x.detach().clone().requires_grad_() for x in (query, key, value))
    torch.library.opcheck(short_attention, (*inputs, 0.25))


@torch.no_grad()
def test_it_is_for_half_precision_on_a_gpu_and_few_places():
    def tensor(places: int, dtype: torch.dtype, *, is_cuda: bool = True, width: int = 64) -> SimpleNamespace:
        return SimpleNamespace(shape=(1, 1, places, width), dtype=dtype, is_cuda=is_cuda)

    def fits(one: SimpleNamespace) -> bool:
        return is_short(one, one)  # type: ignore[arg-type]

    assert fits(tensor(50, torch.bfloat16))
    assert not fits(tensor(197, torch.bfloat16))  # ViT-B/16
    assert not fits(tensor(50, torch.float32))
    assert not fits(tensor(50, torch.bfloat16, is_cuda=False))
    assert not fits(tensor(50, torch.bfloat16, width=256))
    assert not is_short(tensor(50, torch.bfloat16), tensor(49, torch.bfloat16))  # type: ignore[arg-type]
    with torch.enable_grad():
        assert not is_short(tensor(50, torch.bfloat16), tensor(50, torch.bfloat16))  # type: ignore[arg-type]


def test_a_tower_that_uses_it_sees_what_it_saw(monkeypatch: pytest.MonkeyPatch):
    """The image tower calls it, with the layout it really has; texts, which are masked, do not."""
    model = _small_clip()
    pixels = torch.randn(2, 3, 32, 32)
    tokens, mask = model.encoder.random_tokens(2)
    plain = model.encoder.encode_images(pixels), model.encoder.encode_text(tokens, mask)[0]
    calls = []

    def says_yes(query: torch.Tensor, key: torch.Tensor) -> bool:
        calls.append(query.shape)
        return True

    monkeypatch.setattr(module, "is_short", says_yes)
    short = model.encoder.encode_images(pixels), model.encoder.encode_text(tokens, mask)[0]
    assert calls == [(2, 2, 17, 16)]  # of two layers the last has one query
    for one, other in zip(short, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
        assert not one.isnan().any()


def _small_clip() -> GARE:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    architecture = {
        "model_type": "clip",
        "projection_dim": 16,
        "vision_config": {**sizes, "image_size": 32, "patch_size": 8},
        "text_config": {**sizes, "vocab_size": 100, "eos_token_id": 99},
    }
    return GARE(GareConfig.load({"encoder": {"name": "clip", "architecture": architecture}})).eval()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch uses what it deprecates
def test_compiled_it_keeps_products_alone_and_has_the_same_gradients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "is_short", lambda *_: True)
    model = _small_clip().train()
    pixels = torch.randn(2, 3, 32, 32)
    model.encoder.image_features(pixels).square().sum().backward()
    plain = _take_gradients(model)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    model.encoder.compile_towers()
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, ...]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = model.encoder.image_features(pixels)
    features.square().sum().backward()
    compiled = _take_gradients(model)
    assert plain.keys() == compiled.keys()
    for name, gradient in plain.items():
        assert torch.allclose(gradient, compiled[name], atol=1e-4), name
    widths = sorted(prod(shape) // 34 for shape in kept.values() if prod(shape) % 34 == 0)
    # The first of two layers: its input, query, key, value, attention's product, the first of the MLP.
    # The last, which has one query: its input, keys and values.
    assert [width for width in widths if width >= 32] == (5 + 3) * [32] + [64]


def _take_gradients(model: GARE) -> dict[str, torch.Tensor]:
    taken = {name: p.grad for name, p in model.encoder.vision.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def test_masks_and_causes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "is_short", lambda *_: True)
    query, key, value, _ = _random((1, 2, 5, 16), torch.float32)
    for is_causal, mask in ((True, None), (False, torch.tensor([[[[True, False, True, True, True]]]]))):
        attended, _ = attend(SimpleNamespace(is_causal=is_causal), query, key, value, mask, scaling=0.25)
        expected = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=0.25
        )
        assert torch.allclose(attended.transpose(1, 2), expected, atol=1e-6)

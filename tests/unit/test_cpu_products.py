"""Products by oneDNN are those of torch, on every processor that has it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gare import cpu_products
from gare.cpu_products import PackedMap, multiply

LARGE = 1 << 18


@pytest.fixture(params=[False, True], ids=["by torch", "by oneDNN"])
def by_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways, whatever processor this is."""
    monkeypatch.setattr(cpu_products, "mkl_is_slow", lambda: request.param)
    return bool(request.param)


def check_like_float64(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    with torch.no_grad():
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        actual = multiply(x, weight, bias)
    assert actual.dtype == x.dtype
    assert actual.shape == expected.shape
    rounding = 4 * torch.finfo(x.dtype).eps * x.shape[-1] ** 0.5
    scale = x.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1).max() + 1
    assert ((actual.double() - expected).abs() <= rounding * scale).all()


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("shape", [(700, 64), (1, 700, 64), (7, 100, 64), (2, 5, 70, 64), (1, 64), (0, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_float64(shape: tuple[int, ...], has_bias: bool) -> None:
    weight = torch.randn(300, 64)
    check_like_float64(torch.randn(shape), weight, torch.randn(300) if has_bias else None)


@pytest.mark.usefixtures("by_onednn")
def test_views_are_multiplied_as_they_lie() -> None:
    rows = torch.randn(300, 2, 128)
    check_like_float64(rows[:, 1, ::2], torch.randn(64, 500).mT)
    check_like_float64(rows[::3, 0, 64:], torch.randn(1, 64).expand(400, 64))
    check_like_float64(rows.transpose(0, 1)[..., :64], torch.randn(500, 128)[:, 64:])


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_multiplied_by_torch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(700, 64).to(dtype), torch.randn(300, 64).to(dtype)
    assert torch.equal(multiply(x, weight), F.linear(x, weight))


@pytest.mark.usefixtures("by_onednn")
def test_a_product_with_a_gradient_has_one() -> None:
    x, weight = torch.randn(700, 64), torch.randn(300, 64, requires_grad=True)
    multiply(x, weight).sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, x.sum(0).expand(300, 64), atol=1e-3)


def test_only_large_products_on_a_slow_processor_go_to_onednn(
    by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        calls.append(x.numel() * len(weight))
        return F.linear(x, weight)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    with torch.no_grad():
        multiply(torch.randn(4, 64), torch.randn(8, 64))
        multiply(torch.randn(LARGE // 64, 64), torch.randn(8, 64))
    assert calls == ([8 * LARGE] if by_onednn else [])


def test_a_packed_map_is_the_same_map() -> None:
    weight, bias, x = torch.randn(300, 64), torch.randn(300), torch.randn(9, 64)
    expected = F.linear(x, weight, bias)
    assert torch.allclose(PackedMap(weight, bias, typical_rows=32)(x), expected, atol=1e-5)

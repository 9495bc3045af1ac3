"""Products on a CPU by oneDNN, in float32 and to the same accuracy as torch's own; without a gradient.

torch multiplies float32 matrices by MKL, which takes more than twice as long on AMD's processors; on Intel's
it depends on the sizes (docs/benchmarks.md).
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_FEWEST_PRODUCTS = 1 << 18  # for fewer, the call takes longer than the product


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: each vector of `x` with each row of `weight`, and `bias` added.

    >>> multiply(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    tensor([[11., 17.]])
    """
    operands = (x, weight) if bias is None else (x, weight, bias)
    is_large = x.numel() * len(weight) >= _FEWEST_PRODUCTS
    if not is_large or not mkl_is_slow() or not all(map(can_use_onednn, operands)):
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@cache
def mkl_is_slow() -> bool:
    """Whether this is a processor of AMD's."""
    try:
        processor = Path("/proc/cpuinfo").read_text()
    except OSError:
        processor = platform.processor()
    return "AuthenticAMD" in processor


class PackedMap:
    """A linear map whose weights lie in the order in which oneDNN multiplies them.

    With few rows a product reads far more weights than it computes, and otherwise rearranges them every time.

    Args:
        typical_rows: what the weights are laid out for; any other number works as well.
    """

    def __init__(self, weight: Tensor, bias: Tensor, *, typical_rows: int) -> None:
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, typical_rows)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def can_use_onednn(operand: Tensor) -> bool:
    """Whether a product with this tensor may be taken here: on a CPU, in float32, without a gradient."""
    return (
        operand.device.type == "cpu"
        and operand.dtype == torch.float32
        and not (torch.is_grad_enabled() and operand.requires_grad)
        and not operand.is_inference()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )

"""The increment net."""

from __future__ import annotations

import pytest
import torch

from gare.interaction.increment_net import IncrementNet


@pytest.mark.parametrize("dim", [512, 768])
def test_parameter_count_follows_the_width(dim):
    """Six D×D maps with bias and three LayerNorms; 1,579,008 at D = 512 (the paper's 1.58 M)."""
    count = sum(p.numel() for p in IncrementNet(dim).parameters())
    assert count == 6 * (dim * dim + dim) + 3 * 2 * dim
    assert dim != 512 or count == 1_579_008


def test_increments_at_the_start_are_as_long_as_in_the_released_code():
    """FIDELITY 6: |Delta| ≈ 10.3 at step 0 at D = 512."""
    torch.manual_seed(0)
    net = IncrementNet(512).eval()
    lengths = net(torch.randn(4, 8, 512), torch.randn(4, 12, 512), torch.ones(4, 12, dtype=torch.bool)).norm(
        dim=-1
    )
    assert 9.5 < lengths.mean() < 11


def test_zero_output_starts_from_the_baseline():
    net = IncrementNet(16, init="zero_output").eval()
    assert (
        net(torch.randn(2, 3, 16), torch.randn(2, 4, 16), torch.ones(2, 4, dtype=torch.bool)).abs().max() == 0
    )


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="16 dimensions, which 3 heads do not divide"):
        IncrementNet(16, num_heads=3)

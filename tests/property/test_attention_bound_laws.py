"""How far attention can move when its logits are known up to an error: no drawn error moves it farther."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gare.interaction.increment_keys import StoredKeys, attention_moved
from gare.interaction.score_bounds import product_dtype


@given(
    seed=st.integers(0, 2**31 - 1),
    error=st.sampled_from([0.0, 1e-6, 0.01, 1.0, 5.0, 40.0]),
    spread=st.sampled_from([0.1, 3.0, 100.0, 1e4]),
    tokens=st.integers(1, 7),
)
def test_no_error_moves_attention_farther(seed, error, spread, tokens):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(1, 1, tokens, 50, generator=generator, dtype=torch.float64)
    moved = attention_moved(logits.softmax(dim=2), torch.full((1, 1, 50), error, dtype=torch.float64))
    for sign in (torch.rand(logits.shape, generator=generator, dtype=torch.float64) * 2 - 1).sign(), None:
        drawn = torch.rand(logits.shape, generator=generator, dtype=torch.float64) * 2 - 1
        off = error * (drawn if sign is None else sign)
        apart = ((logits + off).softmax(dim=2) - logits.softmax(dim=2)).abs().sum(dim=2) / 2
        assert (apart <= moved + 1e-12).all()


@given(seed=st.integers(0, 2**31 - 1), dtype=st.sampled_from([torch.int8, torch.int16, torch.bfloat16]))
def test_products_with_stored_keys_are_within_their_error(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-8, 9, (1,), generator=generator).item()
    keys = size * torch.randn(3, 4, 20, generator=generator, dtype=torch.float64)
    keys[0, 0] = 0
    text = torch.randn(5, 20, generator=generator, dtype=torch.float64)
    found, error = StoredKeys.round(keys, dtype).products(text)
    assert ((found - keys @ text.mT).abs() <= error).all()


def test_float32_that_torch_may_shorten_is_not_trusted():
    assert product_dtype() == torch.float32
    torch.set_float32_matmul_precision("high")
    try:
        assert product_dtype() == torch.float64
    finally:
        torch.set_float32_matmul_precision("highest")
    assert product_dtype() == torch.float32

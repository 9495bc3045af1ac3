"""What attention can do to an increment, and an error to attention: nothing that is drawn goes farther."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from features import every_gap_aware
from gare.interaction.increment_ball import increment_range
from gare.interaction.increment_keys import StoredKeys, attention_moved
from gare.interaction.score_bounds import product_dtype
from interaction_laws import random_scene


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


@given(
    seed=st.integers(0, 2**31 - 1),
    config=st.sampled_from(every_gap_aware(context="frames", query="gap", normalise=False)),
    num_heads=st.sampled_from([1, 2]),
    size=st.sampled_from([0.1, 1, 10]),
    nearness=st.sampled_from([0.03, 1]),
)
@torch.no_grad()
def test_no_text_leads_an_increment_out_of_its_range(seed, config, num_heads, size, nearness):
    scene = random_scene(seed, replace(config, num_heads=num_heads), sizes=(40, 2, 4, 5))
    for parameter in scene.interaction.parameters():
        parameter *= size
    mean_V1D = scene.video.mean()[:, None]
    video = replace(scene.video, frames_VFD=mean_V1D + nearness * (scene.video.frames_VFD - mean_V1D))
    increment_TVD = scene.interaction.increments(scene.text, video)
    rules = scene.interaction.bound_rules
    found = increment_range(*rules.context(video), rules.net)
    assert ((increment_TVD - found.centre_OD).norm(dim=-1) <= found.radius_O).all()
    square, squares_TV = found.square(), increment_TVD.square().sum(dim=-1)
    assert ((square.low <= squares_TV) & (squares_TV <= square.high)).all()
    generator = torch.Generator().manual_seed(seed)
    for vector_VD in (
        video.mean(),
        torch.randn(video.mean().shape, generator=generator, dtype=torch.float64),
    ):
        along, products_TV = found.along(vector_VD), (increment_TVD * vector_VD).sum(dim=-1)
        assert ((along.low <= products_TV) & (products_TV <= along.high)).all()


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

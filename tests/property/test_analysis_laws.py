"""Laws of the probes: closed forms against autograd and finite differences, factored against dense."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from features import random_text, random_video, randomise
from gare import GARE, GareConfig
from gare.analysis.pair_gradients import cancellation, increment_gradients, infonce, text_pulls
from gare.analysis.pairs import PairVectors, pair_geometry, products_of, split_products
from gare.analysis.probes.coverage_probe import coverage_curve, depths_of_top
from gare.analysis.probes.tension_probe import autograd_difference
from gare.analysis.probes.trust_region_probe import compare_direction

SIDES = st.sampled_from(["text", "video"])
SEEDS = st.integers(0, 2**31 - 1)


def random_vectors(seed: int, size: int, dim: int, side: str) -> PairVectors:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(size, 1, dim, generator=generator, dtype=torch.float64).expand(-1, size, -1)
    video, increment = torch.randn(2, size, size, dim, generator=generator, dtype=torch.float64)
    own, other = (text, video) if side == "text" else (video, text)
    return PairVectors(own, other, 0.5 * increment, side)


@given(seed=SEEDS, size=st.integers(2, 6), dim=st.integers(2, 8), side=SIDES)
def test_pulls_on_texts_equal_autograd(seed, size, dim, side):
    vectors = random_vectors(seed, size, dim, side)
    text = (vectors.own_TVD if side == "text" else vectors.other_TVD)[:, 0].clone().requires_grad_()
    text_TVD = text[:, None].expand(-1, size, -1)
    shifted = (text_TVD if side == "text" else vectors.own_TVD) + vectors.increment_TVD
    other = vectors.other_TVD if side == "text" else text_TVD
    logits = F.cosine_similarity(shifted, other, dim=-1) / 0.2
    target = torch.arange(size)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.mT, target)) / 2
    (expected,) = torch.autograd.grad(loss, text)
    pulls = text_pulls(vectors, temperature=0.2)
    torch.testing.assert_close(pulls.total_TD, expected, atol=1e-12, rtol=1e-9)
    ratio = cancellation(pulls)
    assert (ratio >= 0).all()
    assert (ratio <= 1 + 1e-12).all()


@given(seed=SEEDS, side=SIDES)
def test_gradients_on_increments_equal_autograd_and_finite_differences(seed, side):
    vectors = random_vectors(seed, 4, 5, side)
    assert autograd_difference(vectors, temperature=0.3) < 1e-9
    gradient = increment_gradients(vectors, temperature=0.3)
    generator = torch.Generator().manual_seed(seed)
    i, j, d = (int(torch.randint(n, (1,), generator=generator)) for n in (4, 4, 5))
    nudge = torch.zeros_like(vectors.increment_TVD)
    nudge[i, j, d] = 1e-5
    up = infonce(vectors, vectors.increment_TVD + nudge, 0.3)
    down = infonce(vectors, vectors.increment_TVD - nudge, 0.3)
    assert float(gradient[i, j, d]) == pytest.approx((up - down) / 2e-5, rel=1e-6, abs=1e-8)


@given(seed=SEEDS, side=SIDES)
def test_the_coupled_step_promises_descent_and_its_beginning_descends(seed, side):
    vectors = random_vectors(seed, 4, 6, side)
    assert compare_direction(vectors, temperature=0.5).first_order <= 1e-12
    gradient = increment_gradients(vectors, temperature=0.5)
    nudged = vectors.increment_TVD - 1e-4 * F.normalize(gradient, dim=-1)
    assert infonce(vectors, nudged, 0.5) < infonce(vectors, vectors.increment_TVD, 0.5)


def small_model(**interaction: str) -> GARE:
    torch.manual_seed(0)
    values = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 0}, "interaction": interaction}
    model = GARE(GareConfig.load(values)).eval()
    randomise(model.interaction, torch.Generator().manual_seed(3))
    return model


@pytest.mark.parametrize("side", ["text", "video"])
@pytest.mark.parametrize("context", ["frames", "words"])
@pytest.mark.parametrize("pooling", ["mean", "text_conditioned"])
def test_split_geometry_equals_that_of_the_vectors(side, context, pooling):
    model = small_model(corrected_side=side, context=context, pooling=pooling)
    generator = torch.Generator().manual_seed(4)
    text, video = random_text(generator, 5, 4, 16), random_video(generator, 5, 3, 16)
    dense = pair_geometry(products_of(model.interaction.pair_vectors(text, video)))
    factored = pair_geometry(split_products(model, text, video))
    for field in fields(dense):
        torch.testing.assert_close(
            getattr(factored, field.name), getattr(dense, field.name), atol=1e-6, rtol=1e-8, msg=field.name
        )
    torch.testing.assert_close(factored.cosine, model.score(text, video).double(), atol=1e-9, rtol=1e-9)


def test_split_geometry_of_cross_attention_pooling():
    values = {
        "encoder": {"name": "tiny"},
        "temporal": {"num_layers": 0},
        "increment": {"enabled": False},
        "interaction": {"name": "xpool"},
    }
    torch.manual_seed(0)
    model = GARE(GareConfig.load(values)).eval()
    generator = torch.Generator().manual_seed(4)
    text, video = random_text(generator, 4, 4, 16), random_video(generator, 4, 3, 16)
    vectors = model.interaction.pair_vectors(text, video)
    scores = model.double().score(text, video)
    torch.testing.assert_close(pair_geometry(products_of(vectors)).cosine, scores, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(pair_geometry(split_products(model, text, video)).cosine, scores)


@given(seed=SEEDS, size=st.integers(2, 30))
@hypothesis_settings(max_examples=30)
def test_coverage_rises_to_one_and_is_perfect_for_the_same_ranking(seed, size):
    plain, full = torch.randn(2, 5, size, generator=torch.Generator().manual_seed(seed))
    curve = coverage_curve(depths_of_top(plain, full), size)
    assert curve.coverage == sorted(curve.coverage)
    assert curve.coverage[-1] == pytest.approx(1)
    top = min(10, size)
    same = coverage_curve(depths_of_top(plain, plain), size)
    assert same.coverage[top - 1] == pytest.approx(1)

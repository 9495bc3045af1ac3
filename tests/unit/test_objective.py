"""Every term against numbers worked out by hand or by another library."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from gare import ObjectiveConfig, PairScores
from gare.errors import ConfigError
from gare.objective import (
    direction_diversity,
    distillation,
    kl_bottleneck,
    radius_spread,
    symmetric_infonce,
    term_weights,
    training_loss,
)


def test_infonce_by_hand():
    scores = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    rows = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(-0.5))]
    columns = [math.log(1 + math.exp(-0.5)), math.log(1 + math.exp(-1))]
    assert symmetric_infonce(scores, 1.0).item() == pytest.approx((sum(rows) + sum(columns)) / 4)


def test_infonce_of_more_videos_than_texts_uses_the_first_as_pairs():
    scores = torch.randn(2, 3, dtype=torch.float64)
    rows = -scores.log_softmax(dim=1).diagonal().mean()
    columns = -scores.log_softmax(dim=0).diagonal().mean()
    torch.testing.assert_close(symmetric_infonce(scores, 1.0), (rows + columns) / 2)


def test_captions_of_one_video_are_not_negatives():
    scores = torch.randn(3, 3, dtype=torch.float64)
    twice = torch.tensor([4, 9, 4])
    loss = symmetric_infonce(scores, 2.0, video_index=twice)
    changed = scores.clone()
    changed[0, 2] = changed[2, 0] = 100.0  # the two captions of video 4, crosswise
    torch.testing.assert_close(symmetric_infonce(changed, 2.0, video_index=twice), loss)
    assert symmetric_infonce(changed, 2.0) > loss + 10
    different = torch.tensor([4, 9, 5])
    torch.testing.assert_close(
        symmetric_infonce(scores, 2.0, video_index=different), symmetric_infonce(scores, 2.0)
    )


@pytest.mark.parametrize("anchor", ["video", "text"])
@pytest.mark.parametrize("prior_std", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("normalise", [False, True])
def test_kl_equals_torch_distributions(anchor, prior_std, normalise):
    increment = torch.randn(4, 5, 6, dtype=torch.float64)
    used = torch.nn.functional.normalize(increment, dim=-1) if normalise else increment
    over = 0 if anchor == "video" else 1
    mean, std = used.mean(dim=over), used.std(dim=over) + 1e-6
    posterior = Independent(Normal(mean, std), 1)
    prior = Independent(Normal(torch.zeros_like(mean), prior_std * torch.ones_like(std)), 1)
    expected = kl_divergence(posterior, prior).mean()
    options = {"anchor": anchor, "prior_std": prior_std, "normalise": normalise}
    torch.testing.assert_close(kl_bottleneck(increment, reduction="event", **options), expected)
    torch.testing.assert_close(kl_bottleneck(increment, reduction="per_dimension", **options), expected / 6)


def test_kl_keeps_its_digits_where_increments_hardly_differ():
    torch.manual_seed(0)
    exact = 5 + 1e-3 * torch.randn(8, 4, 16, dtype=torch.float64)
    exact = exact.float().double().requires_grad_()
    single = exact.detach().float().requires_grad_()
    kl_bottleneck(exact).backward()
    kl_bottleneck(single).backward()
    error = (single.grad - exact.grad).norm() / exact.grad.norm()
    assert error < 1e-5


def test_radius_variance_stops_at_its_cap():
    radius = torch.tensor([[1.0, 2.0], [1.0, 1.0]], requires_grad=True)
    assert radius_spread(radius, cap=0.5).item() == pytest.approx(-0.25)
    wide = torch.tensor([[0.0, 10.0]], requires_grad=True)
    loss = radius_spread(wide, cap=0.5)
    assert loss.item() == -0.5
    assert torch.autograd.grad(loss, wide)[0].abs().max() == 0
    released = radius_spread(wide, cap=0.5, above_cap="zero")
    assert released.item() == 0
    assert torch.autograd.grad(released, wide)[0].abs().max() == 0
    assert radius_spread(radius, cap=0.5, above_cap="zero").item() == pytest.approx(-0.25)
    assert ObjectiveConfig.load({"preset": "released"}).terms["radius"].above_cap == "zero"


def test_radius_lse_by_hand():
    radius = torch.tensor([[1.0, 3.0]])
    expected = math.log((2 + 2 * math.exp(-4)) / 4)
    assert radius_spread(radius, variant="lse").item() == pytest.approx(expected)
    assert radius_spread(torch.ones(2, 3), variant="lse").item() == pytest.approx(0)


def test_direction_by_hand():
    increment = torch.tensor([[[2.0, 0.0], [0.0, 3.0]]])  # orthogonal: distances 0, 1, 1, 0
    expected = math.log((2 + 2 * math.exp(-2)) / 4)
    assert direction_diversity(increment, sharpness=2.0).item() == pytest.approx(expected)
    assert direction_diversity(increment, variant="orthogonal").item() == 0
    same = torch.tensor([[[2.0, 0.0], [5.0, 0.0]]])
    assert direction_diversity(same).item() == pytest.approx(0, abs=1e-6)
    assert direction_diversity(same, variant="orthogonal").item() == pytest.approx(1)


def test_distillation_against_torch_distributions():
    scores, teacher = torch.randn(2, 5, 5, dtype=torch.float64)
    expected = sum(
        kl_divergence(Categorical(logits=b), Categorical(logits=a)).mean()
        for a, b in ((4 * scores, teacher), (4 * scores.T, teacher.T))
    )
    torch.testing.assert_close(distillation(scores, 4.0, teacher), expected / 2)
    with pytest.raises(ValueError, match=r"\[5, 5\] and teachers \[5, 4\] differ"):
        distillation(scores, 4.0, teacher[:, :4])


def test_the_total_is_the_weighted_sum_of_the_raw_terms():
    config = ObjectiveConfig.load(
        {
            "terms": {
                "kl": {"weight": 0.3},
                "radius": {"weight": 0.2},
                "direction": {"weight": 0.1},
                "teacher": {"weight": 0.4},
            }
        }
    )
    increment = torch.randn(4, 4, 8)
    pairs = PairScores(torch.randn(4, 4), increment)
    teacher = torch.randn(4, 4)
    loss = training_loss(pairs, 10.0, config, teacher_logits_TV=teacher)
    names = ["contrastive", "kl", "radius", "direction", "teacher"]
    assert list(loss.terms) == names == list(term_weights(config))
    by_hand = (
        symmetric_infonce(pairs.scores_TV, 10.0)
        + 0.3 * kl_bottleneck(increment)
        + 0.2 * radius_spread(increment.norm(dim=-1))
        + 0.1 * direction_diversity(increment)
        + 0.4 * distillation(pairs.scores_TV, 10.0, teacher)
    )
    torch.testing.assert_close(loss.total, by_hand)


def test_variants_and_same_video_reach_the_terms():
    pairs = PairScores(torch.randn(4, 4), torch.randn(4, 4, 8))
    twins = torch.tensor([0, 1, 0, 2])
    changes = {"radius": {"variant": "lse"}, "direction": {"variant": "orthogonal"}}
    config = ObjectiveConfig.load({"terms": {**changes, "kl": {"anchor": "text", "prior_std": 3}}})
    terms = training_loss(pairs, 5.0, config, video_index=twins).terms
    radius = pairs.increment_TVD.norm(dim=-1)
    torch.testing.assert_close(
        terms["contrastive"], symmetric_infonce(pairs.scores_TV, 5.0, video_index=twins)
    )
    torch.testing.assert_close(terms["kl"], kl_bottleneck(pairs.increment_TVD, anchor="text", prior_std=3))
    torch.testing.assert_close(terms["radius"], radius_spread(radius, variant="lse"))
    torch.testing.assert_close(
        terms["direction"], direction_diversity(pairs.increment_TVD, variant="orthogonal")
    )
    released = training_loss(pairs, 5.0, ObjectiveConfig.load({"preset": "released"}), video_index=twins)
    torch.testing.assert_close(released.terms["contrastive"], symmetric_infonce(pairs.scores_TV, 5.0))


def test_the_baseline_has_the_contrastive_term_alone():
    loss = training_loss(PairScores(torch.randn(3, 3), None), 100.0, ObjectiveConfig())
    assert list(loss.terms) == ["contrastive"]
    assert loss.total == loss.terms["contrastive"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kl_bottleneck(torch.zeros(2, 2, 2), anchor="videos"),
            "anchor 'videos' is not one of video, text",
        ),
        (lambda: kl_bottleneck(torch.zeros(2, 2, 2), reduction="sum"), "is not one of event, per_dimension"),
        (lambda: radius_spread(torch.zeros(2, 2), variant="var"), "is not one of variance, lse"),
        (
            lambda: direction_diversity(torch.zeros(2, 2, 2), variant="x"),
            "is not one of log_mean_exp, orthogonal, paper_orthogonal",
        ),
        (lambda: symmetric_infonce(torch.zeros(2, 2), 1.0, video_index=[0, 1]), "must be a tensor"),
        (lambda: symmetric_infonce(torch.zeros(0, 0), 1.0), "not empty"),
        (lambda: kl_bottleneck(torch.zeros(1, 3, 4)), "at least two texts"),
        (lambda: kl_bottleneck(torch.zeros(3, 1, 4), anchor="text"), "at least two videos"),
        (lambda: radius_spread(torch.zeros(3, 1)), "at least two videos"),
        (lambda: direction_diversity(torch.zeros(3, 1, 2), variant="orthogonal"), "at least two videos"),
    ],
)
def test_batches_too_small_for_a_term_say_so(call, message):
    with pytest.raises(ValueError, match=message):
        call()


OLD_VALUES = {
    "kl_weight": 0.5,
    "kl_reduction": "event",
    "kl_anchor": "text",
    "kl_prior_std": 2.0,
    "kl_normalise": True,
    "radius_weight": 0.25,
    "radius_variant": "lse",
    "radius_variance_cap": 0.75,
    "diversity_weight": 0.125,
    "diversity_variant": "orthogonal",
    "diversity_sharpness": 3.0,
    "teacher_weight": 8.0,
    "same_video": "released",
}
"""Every key of the one flat table there was; each differs from its default."""


def test_every_key_of_the_old_flat_table_still_says_what_it_said():
    assert ObjectiveConfig.load(OLD_VALUES).to_values() == {
        "terms": {
            "contrastive": {"weight": 1.0, "same_video": "released"},
            "kl": {
                "weight": 0.5,
                "reduction": "event",
                "anchor": "text",
                "prior_std": 2.0,
                "normalise": True,
            },
            "radius": {"weight": 0.25, "variant": "lse", "variance_cap": 0.75, "above_cap": "cap"},
            "direction": {"weight": 0.125, "variant": "orthogonal", "sharpness": 3.0, "log_floor": 0.0},
            "teacher": {"weight": 8.0},
        }
    }
    released = ObjectiveConfig.load({"preset": "released", "kl_weight": 0.5})
    assert released.terms["kl"].reduction == "event"  # the preset fills in what an old key leaves out
    assert released.terms["kl"].weight == 0.5
    assert ObjectiveConfig.load({"kl_weight": 0.5}, ["terms.kl.weight=1"]).terms["kl"].weight == 1
    assert ObjectiveConfig.load({"terms": {"kl": {"weight": 1}}}, ["kl_weight=0"]).terms["kl"].weight == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kl_wieght": 1}, "unknown key 'kl_wieght'; known here: terms"),
        ({"terms": {"lk": {}}}, "there is no loss term 'lk'; there are: contrastive, kl, radius"),
        ({"terms": {"kl": {"wieght": 1}}}, "terms.kl: unknown key 'wieght'; known here: anchor, normalise"),
        ({"terms": {"kl": {"weight": -1}}}, "terms.kl: weight: must be at least 0"),
        ({"terms": {"kl": 0.5}}, "terms.kl: must be a table of settings, not 0.5"),
        ({"kl_weight": "much"}, "terms.kl: weight: must be a number"),
        ({"kl_weight": 1, "terms": {"kl": 0.5}}, "terms.kl: must be a table of settings, not 0.5"),
        ({"kl_weight": 1, "terms": 0.5}, "terms: must be a table, not 0.5"),
    ],
)
def test_mistakes_in_terms_are_named_with_what_would_be_right(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        ObjectiveConfig.load(values)


def test_the_radius_term_as_the_appendix_displays_it():
    """log[1 + 1/B Σ_j exp(−(ε_ij − ε̄_i)²)], the mean over texts."""
    radius = torch.tensor([[1.0, 2.0, 4.5], [0.5, 0.5, 0.5]], dtype=torch.float64)
    rows = []
    for row in radius.tolist():
        mean = sum(row) / 3
        rows.append(math.log(1 + sum(math.exp(-((x - mean) ** 2)) for x in row) / 3))
    assert radius_spread(radius, variant="paper_lse").item() == pytest.approx(sum(rows) / 2, rel=1e-12)
    assert rows[1] == pytest.approx(math.log(2))


def test_the_orthogonal_term_as_the_appendix_displays_it():
    """1/B² Σ_j Σ_{k≠j} ⟨z_ij, z_ik⟩²: the divisor is B², not B(B−1)."""
    increment = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = increment / increment.norm(dim=-1, keepdim=True)
    total = sum(
        float(unit[i, j] @ unit[i, k]) ** 2 for i in range(2) for j in range(3) for k in range(3) if k != j
    )
    found = direction_diversity(increment, variant="paper_orthogonal").item()
    assert found == pytest.approx(total / 9 / 2, rel=1e-12)
    assert found == pytest.approx(direction_diversity(increment, variant="orthogonal").item() * 2 / 3)


def test_the_forms_of_the_appendix_can_be_asked_for_in_a_recipe():
    terms = {"radius": {"variant": "paper_lse"}, "direction": {"variant": "paper_orthogonal"}}
    config = ObjectiveConfig.load({"terms": terms})
    assert ObjectiveConfig.load(config.to_values()) == config

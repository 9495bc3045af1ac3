"""Probes on cases small enough to be worked out by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from features import random_text, random_video, randomise
from gare import GARE, GareConfig
from gare.analysis.distributions import PairSpread, Spread, histograms
from gare.analysis.pair_gradients import cancellation, compare_step, increment_gradients, text_pulls
from gare.analysis.pairs import PairVectors, pair_geometry, products_of
from gare.analysis.probes.bottleneck_probe import (
    effective_dimension,
    gather_moments,
    kl_per_video,
    logistic_regression,
    match_information,
)
from gare.analysis.probes.coverage_probe import coverage_curve, depths_of_top, gallery_coverage
from gare.analysis.probes.dynamics_probe import curve_summary
from gare.analysis.probes.efficiency_probe import (
    PAPER_GFLOP,
    PeakMemory,
    Transformer,
    clip_macs,
    count_flops,
    measure_costs,
    paper_table,
)
from gare.analysis.probes.geometry_probe import separability, shared_space
from gare.analysis.probes.hard_negatives_probe import (
    examples,
    false_negatives,
    forgiven_recall,
    hard_negatives,
)
from gare.analysis.probes.tension_probe import DimensionStatistics, tension_of
from gare.analysis.probes.trust_region_probe import compare_direction, step_summary
from gare.analysis.study import Subject, View
from gare.analysis.training_probe import by_kind, describe_step, read_records
from gare.errors import EvaluationError
from gare.interaction.increment_net import IncrementNet, multiply_adds
from gare.objective import kl_bottleneck, symmetric_infonce
from gare.theory.trust_region import uncoupled_step


def vectors(own, other, increment=None, side="text"):
    own, other = torch.tensor(own, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    increment = torch.zeros_like(own) if increment is None else torch.tensor(increment, dtype=torch.float64)
    return PairVectors(own, other, increment, side)


def test_pulls_cancel_when_both_videos_lie_in_one_direction():
    """Two texts along x, both videos along y: every softmax is (½, ½), the pulls equal and opposite."""
    pair = vectors([[[1, 0]] * 2] * 2, [[[0, 1]] * 2] * 2)
    pulls = text_pulls(pair, temperature=1.0, direction="text_to_video")
    # residual −½ towards y for the own video, +½ for the other; over N = 2 texts
    torch.testing.assert_close(pulls.positive_TD, torch.tensor([[0, -0.25]] * 2, dtype=torch.float64))
    torch.testing.assert_close(pulls.negative_TD, -pulls.positive_TD)
    assert cancellation(pulls).tolist() == [0.0, 0.0]


def test_pulls_agree_when_the_videos_are_opposite():
    pair = vectors([[[1, 0]] * 2] * 2, [[[0, 1], [0, -1]]] * 2)
    pulls = text_pulls(pair, temperature=1.0, direction="text_to_video")
    torch.testing.assert_close(pulls.negative_TD, pulls.positive_TD)
    assert cancellation(pulls).tolist() == pytest.approx([1.0, 1.0])


def test_statistics_of_dimensions():
    found = DimensionStatistics.of(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    assert found.mean_D.tolist() == [2.0, 0.0]
    assert found.variance_D.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("side", ["text", "video"])
def test_tension_of_a_model_is_what_autograd_gives(side):
    """Mean and variance of every dimension: pulls on texts, and on increments of both kinds of pairs."""
    model = small_gare(side)
    generator = torch.Generator().manual_seed(1)
    text, video = random_text(generator, 6, 4, 16), random_video(generator, 6, 3, 16)
    view = View("GARE", Subject("model", model, text, video, "mark"), with_increments=True)
    values, table = tension_of(view)
    assert values["autograd_difference"] < 1e-9

    pairs = next(view.batches())
    is_text = side == "text"
    leaf_TVD = (
        (pairs.own_TVD if is_text else pairs.other_TVD).clone().requires_grad_()
    )  # a text for each pair
    delta = pairs.increment_TVD.clone().requires_grad_()
    own, other = (leaf_TVD, pairs.other_TVD) if is_text else (pairs.own_TVD, leaf_TVD)
    logits = torch.nn.functional.cosine_similarity(own + delta, other, dim=-1) / view.subject.temperature
    on_text, on_delta = torch.autograd.grad(symmetric_infonce(logits, 1.0), (leaf_TVD, delta))
    diagonal = torch.eye(6, dtype=torch.bool)
    pulls = {"positive": on_text[diagonal], "negative": on_text.sum(dim=1) - on_text[diagonal]}
    pulls |= {"sum": on_text.sum(dim=1)}
    pulls |= {"delta_positive": on_delta[diagonal], "delta_negative": on_delta[~diagonal]}
    for name, rows in pulls.items():
        for column, expected in (("mean", rows.mean(dim=0)), ("variance", rows.var(dim=0, correction=0))):
            torch.testing.assert_close(table[f"{name}_{column}"], expected, atol=1e-12, rtol=1e-6)


def small_gare(side):
    torch.manual_seed(0)
    values = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 0}}
    model = GARE(GareConfig.load(values | {"interaction": {"corrected_side": side}})).eval()
    randomise(model.interaction, torch.Generator().manual_seed(3))
    return model


def test_geometry_of_one_pair():
    """t = (3, 0), v = (0, 4), Delta = (0, −3): away from the video, at a right angle to t."""
    found = pair_geometry(products_of(vectors([[[3, 0]]], [[[0, 4]]], [[[0, -3]]])))
    assert found.plain_cosine.item() == 0
    assert found.cosine.item() == pytest.approx(-math.sqrt(0.5))
    assert (found.own_norm.item(), found.radius.item()) == (3, 3)
    assert found.shifted_norm.item() == pytest.approx(math.sqrt(18))
    assert found.distance.item() == pytest.approx(5)
    assert found.shifted_distance.item() == pytest.approx(math.sqrt(9 + 49))
    assert found.angle_to_own.item() == pytest.approx(90)
    assert found.angle_to_gap.item() == pytest.approx(math.degrees(math.acos(-4 / 5)))


def test_angles_without_an_increment_are_no_numbers():
    found = pair_geometry(products_of(vectors([[[3, 0]]], [[[0, 4]]])))
    assert math.isnan(found.angle_to_gap.item())
    assert math.isnan(Spread.of(found.angle_to_gap).mean)


def test_pair_spread_takes_the_diagonal_apart():
    found = PairSpread.of(torch.tensor([[1.0, 10.0], [20.0, 3.0]]))
    assert (found.positive.mean, found.negative.mean) == (2.0, 15.0)


def test_histograms_share_bins_and_have_area_one():
    table = histograms({"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.25, float("nan")])}, bins=4)
    assert table["edge"].tolist() == [0, 0.25, 0.5, 0.75]
    assert table["a"].tolist() == [2, 0, 0, 2]
    assert table["b"].tolist() == [0, 4, 0, 0]


def test_shared_space_of_two_opposite_groups():
    """Texts at east, videos at west: distance 2, told apart perfectly, all of one kind in one place."""
    left, right = torch.tensor([[1.0, 0.0]] * 10), torch.tensor([[-1.0, 0.0]] * 10)
    found = shared_space(left, right)
    assert found.alignment == 4
    assert found.centroid_distance == 2
    assert found.separability == 1
    assert found.left_uniformity == pytest.approx(0)


def test_vectors_of_one_cloud_are_not_told_apart():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 400, 4, generator=generator, dtype=torch.float64)
    assert 0.4 < separability(left, right) < 0.6


def test_coupled_step_of_an_update_along_the_gradient_has_no_error():
    """One pair moves exactly against its gradient: the closed form must find that very step."""
    generator = torch.Generator().manual_seed(1)
    own, other, increment = torch.randn(3, 4, 4, 6, generator=generator, dtype=torch.float64)
    before = PairVectors(own, other, 0.1 * increment)
    gradient = increment_gradients(before, temperature=0.5)
    unit = gradient / gradient.norm(dim=-1, keepdim=True)
    found = compare_step(before, before.increment_TVD - 2.0 * unit, temperature=0.5)
    assert found.feasible_TV.all()
    torch.testing.assert_close(found.learned_TV, torch.full((4, 4), 2.0, dtype=torch.float64))
    torch.testing.assert_close(found.analytic_TV, found.learned_TV)
    assert found.error_TV.max() < 1e-9


def test_uncoupled_steps_lower_the_loss_and_agree_with_themselves():
    generator = torch.Generator().manual_seed(2)
    own, other = torch.randn(2, 5, 5, 6, generator=generator, dtype=torch.float64)
    plain = PairVectors(own, other, torch.zeros_like(own))
    step = uncoupled_step(
        increment_gradients(plain, temperature=0.5), torch.full((5, 5), 0.1, dtype=torch.float64)
    )
    found = compare_direction(PairVectors(own, other, step), temperature=0.5)
    assert found.agreement_TV.min() > 1 - 1e-9
    assert found.loss_learned == pytest.approx(found.loss_uncoupled)
    assert found.loss_uncoupled < found.loss_plain
    assert found.first_order <= 0


def test_record_of_a_step():
    before = vectors([[[1, 0]] * 2] * 2, [[[0, 1], [0, -1]]] * 2, [[[0, 1], [0, 2]], [[0, 2], [0, 1]]])
    record = describe_step(before, before, temperature=1.0)
    assert record["radius/positive"] == 1
    assert record["radius/negative"] == 2
    assert record["angle_to_own/positive"] == pytest.approx(90)
    assert record["step_learned/positive"] == pytest.approx(0)
    assert by_kind("x", torch.tensor([[1.0, float("nan")], [5.0, 3.0]])) == {
        "x/positive": 2.0,
        "x/negative": 5.0,
    }


def test_records_become_columns(tmp_path):
    (tmp_path / "probe.jsonl").write_text('{"step": 0, "a": 1}\n{"step": 3}\n')
    found = read_records(tmp_path)
    assert found["step"] == [0, 3]
    assert found["a"][0] == 1
    assert math.isnan(found["a"][1])


def test_a_record_cut_off_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "probe.jsonl").write_text('{"step": 0, "a": 1}\n{"step": 3, "a"')
    assert read_records(tmp_path) == {"a": [1], "step": [0]}


@pytest.mark.parametrize(("content", "message"), [(None, "--probe"), ("", "empty"), ("[]\n", "line 1")])
def test_records_that_are_not_there(tmp_path, content, message):
    if content is not None:
        (tmp_path / "probe.jsonl").write_text(content)
    with pytest.raises(EvaluationError, match=message):
        read_records(tmp_path)


def test_curve_that_falls_and_rises():
    found = curve_summary(torch.tensor([90.0, 60.0, 80.0]))
    assert found == {"start": 90, "end": 80, "lowest": 60, "lowest_at": 0.5, "highest": 90}


def test_hard_negatives_follow_the_captions():
    text = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    before = torch.tensor([[0.5, 0.6, 0.0], [0.4, 0.7, 0.0], [0.1, 0.2, 0.9]])
    after = torch.tensor([[0.8, 0.6, 0.0], [0.4, 0.7, 0.0], [0.1, 0.2, 0.3]])
    found = hard_negatives(before, after, text, num_neighbours=1)
    assert found.neighbour_TK.flatten().tolist() == [1, 0, 1]
    torch.testing.assert_close(found.margin_before_T, torch.tensor([-0.1, 0.3, 0.7]))
    torch.testing.assert_close(found.margin_after_T, torch.tensor([0.2, 0.3, 0.1]))
    assert examples(found)["most hurt"] == 2


def test_a_twin_is_the_most_likely_false_negative():
    generator = torch.Generator().manual_seed(0)
    text, video = torch.randn(2, 6, 8, generator=generator)
    text[4], video[4] = text[1] + 0.01, video[1] + 0.01
    scores = torch.eye(6) + 0.01 * torch.randn(6, 6, generator=generator)
    scores[1, 4], scores[4, 1] = 1.2, 0.9
    found = false_negatives(scores, text, video)
    assert (found.first[0], found.second[0], found.confused[0]) == (1, 4, True)
    recall, forgiven = forgiven_recall(scores, found)
    assert recall == pytest.approx(5 / 6)
    assert forgiven == 1


def test_coverage_of_galleries_of_several_sizes():
    """The same ranking twice: of the top 10 exactly k are among the first k, in a gallery of any size."""
    scores = torch.rand(4, 30, generator=torch.Generator().manual_seed(0))
    for curve in gallery_coverage(scores, scores, [20, 30], draws=3, generator=torch.Generator()):
        assert curve.coverage == pytest.approx([min(k, 10) / 10 for k in range(1, curve.gallery + 1)])
        assert curve.needed_for_99 == 10


def test_coverage_by_hand():
    plain = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    full = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    assert depths_of_top(plain, full, top=2).tolist() == [[2, 4]]
    curve = coverage_curve(torch.tensor([[2, 4]]), 4)
    assert curve.coverage == [0, 0.5, 0.5, 1]
    assert curve.needed_for_99 == 4


def test_counted_operations_are_the_closed_forms(tiny_model):
    """An image is 16 patches of 3·8·8 pixels to 16 numbers, then one 16×16 map."""
    flops = count_flops(tiny_model, batch=4, frames=3)
    assert flops["visual"] == 4 * 3 * 2 * (16 * 3 * 64 * 16 + 16 * 16)
    assert flops["text"] == 4 * 2 * 16 * 16 * 16
    assert flops["temporal"] == 4 * 2 * Transformer(width=16, layers=2).macs(tokens=3)


def test_operations_are_counted_wherever_the_model_is(tiny_model):
    """As on a graphics card: inputs must go where the weights are."""
    here = count_flops(tiny_model, batch=4, frames=3)
    assert count_flops(copy.deepcopy(tiny_model).to("meta"), batch=4, frames=3) == here


def test_counted_operations_of_psi_are_the_closed_form():
    from torch.utils.flop_counter import FlopCounterMode

    psi, mask = IncrementNet(16).eval(), torch.ones(5, 3, dtype=torch.bool)
    with FlopCounterMode(display=False) as counter:
        psi(torch.zeros(5, 4, 16), torch.zeros(5, 3, 16), mask)
    assert counter.get_total_flops() == 2 * multiply_adds(16, pairs=20, owners=5, tokens=3)


def test_psi_by_hand():
    """One text, one video, two frames, D = 3: four maps for the pair, two for each frame, two products."""
    assert multiply_adds(3, pairs=1, owners=1, tokens=2) == 4 * 9 + 2 * 2 * 9 + 2 * 2 * 3


def test_where_the_paper_counts_what():
    found = {row.module: row for row in paper_table()}
    assert {name: row.nearest for name, row in found.items()} == {
        "visual": "neither",
        "temporal": "FLOP",
        "psi": "FLOP",
        "text": "MAC",
    }
    assert found["temporal"].gflop == pytest.approx(PAPER_GFLOP["temporal"], rel=1e-3)
    assert found["psi"].gflop == pytest.approx(PAPER_GFLOP["psi"], rel=1e-3)
    assert found["text"].gmac == pytest.approx(PAPER_GFLOP["text"], rel=1e-3)
    assert clip_macs(batch=1, frames=1)["visual"] / 1e9 == pytest.approx(4.41, abs=0.005)


def test_peak_memory_counts_what_lives_together():
    with PeakMemory() as memory:
        first = torch.zeros(1000, dtype=torch.float64)
        second = first + 1
        del first
        third = second.view(10, 100)
        del second
        third + 1
    assert memory.peak == 16_000


def test_costs_have_a_time_and_a_peak():
    costs = measure_costs({"a": lambda: torch.zeros(1000)}, torch.device("cpu"), rounds=2)
    assert costs["a"].milliseconds > 0
    assert costs["a"].peak_mb == pytest.approx(0.004)


def test_kl_per_video_is_the_term_of_the_objective():
    increment = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = gather_moments(lambda rows: increment[:4, rows], 4, torch.tensor([1, 2, 3, 0]), block=3)
    expected = kl_bottleneck(increment[:4])
    assert kl_per_video(moments.mean_VD, moments.std_VD).mean() == pytest.approx(float(expected))


def test_moments_by_blocks_are_those_of_all_increments():
    increment = torch.randn(5, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = gather_moments(lambda rows: increment[:, rows], 5, torch.tensor([1, 2, 3, 4, 0]), block=2)
    flat = increment.flatten(0, 1)
    torch.testing.assert_close(moments.covariance_DD, flat.T.cov(correction=0))
    torch.testing.assert_close(moments.positive_TD, increment[range(5), range(5)])
    torch.testing.assert_close(moments.negative_TD, increment[range(5), [1, 2, 3, 4, 0]])


def test_effective_dimension_of_a_ball():
    assert effective_dimension(torch.eye(7)) == pytest.approx(7)


def test_match_information_of_a_label_and_of_noise():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 200, 3, generator=generator)
    assert match_information(noise[0], noise[1]) < 0.02
    assert match_information(noise[0] + 20, noise[1] - 20) > 0.8


def test_logistic_regression_finds_the_minimum():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator, dtype=torch.float64)
    label = (x[:, 0] > 0).double()
    weight = logistic_regression(x, label).requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ weight, label, reduction="sum")
    (slope,) = torch.autograd.grad(loss + 0.5 * 0.01 * 50 * weight @ weight, weight)
    assert slope.abs().max() < 1e-8


def test_histograms_of_nothing_are_empty():
    table = histograms({"a": torch.full((3,), float("nan"))}, bins=2)
    assert table["edge"].tolist() == [0, 0.5]
    assert table["a"].tolist() == [0, 0]


def steps(**changes):
    column = {"step_error": 0.1, "step_feasible": 1.0, "step_descends": 1.0}
    column |= {"step_learned": 0.1, "step_analytic": 0.2}
    found = {f"{name}/{kind}": [x] * 4 for name, x in column.items() for kind in ("positive", "negative")}
    found |= {"step": [0, 1, 2, 3], "loss_before": [1.0] * 4, "loss_analytic": [0.5, 0.5, 2.0, 1.0]}
    return {name: torch.tensor(column, dtype=torch.float64) for name, column in (found | changes).items()}


def test_a_loss_that_stays_has_not_descended():
    """Lower twice, higher once, the same once; where no pair has a step, there is nothing to judge."""
    assert step_summary(steps())["loss_descended"] == 0.5
    feasible = {f"step_feasible/{kind}": [1.0, 1.0, 1.0, 0.0] for kind in ("positive", "negative")}
    found = step_summary(steps(**feasible))
    assert found["num_stepped"] == 3
    assert found["loss_descended"] == pytest.approx(2 / 3)

"""What becomes of the numbers of probes: files, pictures, claims."""

from __future__ import annotations

import json

import pytest
import torch

from gare import ObjectiveConfig
from gare.analysis import analysis_run
from gare.analysis.numbers import Numbers, NumberStore
from gare.analysis.presentation import save_picture
from gare.analysis.probes import PROBES
from gare.analysis.probes.ablations_probe import ablation_picture, read_ablation
from gare.analysis.probes.dynamics_probe import TERMS
from gare.analysis.probes.hard_negatives_probe import example_picture, thumbnail_name
from gare.errors import ConfigError, EvaluationError
from gare.objective import term_weights


def judge_claims(numbers, reasons=None):
    return analysis_run.judge_claims({name: PROBES[name]() for name in PROBES}, numbers, reasons)


def ablation_table(names):
    cell = {"mean": 0.5, "sd": 0.01, "low": 0.4, "high": 0.6, "p_value": None}
    rows = [{"name": name, "seeds": [0], "text_to_video": {"recall_at_1": cell}} for name in names]
    return {"title": "Sharpness", "provenance": "toy.", "rows": rows}


def test_every_term_of_the_loss_has_its_colour():
    assert list(TERMS) == list(term_weights(ObjectiveConfig()))


def test_ablation_rows_with_numbers_are_put_in_order(tmp_path):
    names = ["sigma 2", "unit, sigma 1", "sigma 10", "sigma 0.5"]
    (tmp_path / "table.json").write_text(json.dumps(ablation_table(names)))
    found = read_ablation(tmp_path)
    assert [point.value for point in found.points] == [0.5, 2, 10, None]
    assert found.reference == "sigma 2"


def test_the_caption_of_an_ablation_has_its_numbers(tmp_path):
    (tmp_path / "table.json").write_text(json.dumps(ablation_table(["alpha 2", "alpha 1"])))
    (table,) = Numbers.of({"figures": [read_ablation(tmp_path)]}).values["figures"]
    picture = ablation_picture(table)
    assert "alpha 1 50.0; alpha 2 50.0" in picture.caption


@pytest.mark.parametrize(("content", "message"), [(None, "gare ablate"), ("{}", "not a table")])
def test_ablation_that_is_not_there(tmp_path, content, message):
    if content is not None:
        (tmp_path / "table.json").write_text(content)
    with pytest.raises(EvaluationError, match=message):
        read_ablation(tmp_path)


def test_numbers_come_back_and_only_for_their_fingerprint(tmp_path):
    store = NumberStore(tmp_path)
    numbers = Numbers.of({"x": torch.tensor(1.5), "y": float("nan")}, {"t": {"a": [1, 2], "b": ["p", "q"]}})
    store.save("tension", "f1", numbers, 0.1)
    assert store.load("tension", "f1") == Numbers(
        {"x": 1.5, "y": None}, {"t": {"a": [1, 2], "b": ["p", "q"]}}
    )
    assert store.load("tension", "f2") is None
    assert store.load("geometry", "f1") is None
    (tmp_path / "tension.t.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(EvaluationError, match="--force"):
        store.load("tension", "f1")


def test_a_probe_that_was_stopped_halfway_is_measured_again(tmp_path):
    """Old values must not be read with new tables."""
    store = NumberStore(tmp_path)
    store.save("tension", "f1", Numbers({"x": 1}, {"t": {"a": [1]}}), 0.1)
    with pytest.raises(TypeError):
        store.save("tension", "f2", Numbers({"x": object()}, {"t": {"a": [2]}}), 0.1)
    assert store.load("tension", "f1") is None
    assert store.load("tension", "f2") is None


def test_thumbnails_of_any_id_have_a_name_that_files_may_have():
    long, other = "猫/" * 100 + "a", "猫/" * 100 + "b"
    assert len(thumbnail_name(long).encode()) < 200
    assert thumbnail_name(long) != thumbnail_name(other)


def test_captions_are_drawn_as_they_are(tmp_path):
    """Dollar signs are not formulas, and a script that the font lacks is no warning."""
    captions = ["costs $5, not $\\frac{$", "two\nlines\tand a tab", "猫 🐶"]
    example = {"caption": captions[0], "videos": ["a", "$b$", "c"], "captions": captions}
    picture = example_picture({"first": {**example, "before": [0.1] * 3, "after": [0.2] * 3}}, tmp_path)
    assert save_picture(picture, tmp_path)["pdf"].read_bytes().startswith(b"%PDF")


def test_claims_say_what_is_missing():
    claims = judge_claims({})
    assert all(claim.holds is None and claim.measured.startswith("needs") for claim in claims)
    claims = judge_claims({}, {"tension": "one video"})
    assert {claim.measured for claim in claims if claim.section == "tension"} == {"one video"}


def tension(label, *, increments, ratio):
    spread = {"median": ratio}
    found = {"cancellation": spread, "cancellation_one_way": spread, "opposition": spread}
    return {"label": label, "with_increments": increments, "common_cancellation": ratio, **found}


def test_what_is_said_of_models_without_increments_is_judged_on_one():
    def judge(**views):
        return {claim.says: claim for claim in judge_claims({"tension": Numbers(views)})}

    says = "Without increments, the two pulls on a single text nearly cancel"
    gare, plain = tension("GARE", increments=True, ratio=0.5), tension("plain", increments=False, ratio=0.05)
    assert judge(baseline=plain, model=gare)[says].holds
    assert judge(model=plain)[says].holds
    assert judge(baseline=gare, model=plain)[says].holds
    assert judge(baseline=gare, model=gare)[says].holds is None


def test_the_coupled_step_is_judged_on_the_split_and_in_training():
    def judge(coupled, run=None):
        values = {"losses": {"loss_learned": 2.0, "loss_coupled": coupled}}
        values |= {"run": run} if run else {}
        claims = judge_claims({"trust_region": Numbers(values)})
        return next(claim.holds for claim in claims if claim.says == "The coupled step descends")

    assert judge(1.5)
    assert judge(2.0) is False
    run = {"num_stepped": 9, "descends/positive": 1.0, "descends/negative": 1.0, "error_largest": 1.0}
    run |= {f"error_{quarter}_quarter": 1.0 for quarter in ("first", "third", "last")} | {"error/negative": 1}
    assert judge(1.5, run | {"loss_descended": 0.9})
    assert judge(1.5, run | {"loss_descended": 0.5}) is False


def test_claims_are_judged_by_their_numbers():
    curve = {"start": 80.0, "end": 100.0, "lowest": 70.0, "lowest_at": 0.4, "highest": 100.0}
    names = ("angle_to_gap/positive", "angle_to_gap/negative", "angle_to_own/positive")
    values = {name: curve for name in names}
    found = {claim.says: claim for claim in judge_claims({"dynamics": Numbers(values)})}
    assert found["The angle between Δ and the gap becomes obtuse"].holds
    assert found["The angle between Δ and t falls, then rises"].holds
    obtuse = {name: {**curve, "start": 95.0} for name in names}
    (claim,) = [c for c in judge_claims({"dynamics": Numbers(obtuse)}) if "obtuse" in c.says]
    assert "95.0° → 100.0° (obtuse from the first records on)" in claim.measured
    rising = {name: {**curve, "lowest": 80.0, "end": 85.0} for name in names}
    found = {claim.says: claim for claim in judge_claims({"dynamics": Numbers(rising)})}
    assert found["The angle between Δ and the gap becomes obtuse"].verdict == "does not hold here"
    assert found["The angle between Δ and t falls, then rises"].holds is False


def test_probes_are_chosen_by_name():
    assert analysis_run.chosen(PROBES, []) == list(PROBES)
    assert analysis_run.chosen(PROBES, ["coverage", "tension"]) == ["tension", "coverage"]
    with pytest.raises(ConfigError, match="no probe 'tensions'; there are: tension, geometry"):
        analysis_run.chosen(PROBES, ["tensions"])

"""experiments/decisive.py: stacked training is gare's training, the control is zero, the chain runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from gare import GARE, GareConfig
from gare.data.manifest import Header, Manifest, Row
from gare.objective import ObjectiveConfig, training_loss
from gare.train.optimizers import build_optimizer
from gare.types import TextFeatures, VideoFeatures
from warm import run_python

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import decisive  # noqa: E402
import decisive_data  # noqa: E402
import decisive_stack  # noqa: E402
import decisive_table  # noqa: E402

DIM = 16
SCALE = decisive.Scale(seeds=(0, 1), milestones=(4, 8), batch_sizes=(8,))


@pytest.fixture(scope="module")
def tasks() -> dict[str, decisive_data.Task]:
    return decisive_data.make_tasks(decisive_data.random_vectors(dim=DIM, pictures=96, videos=48))


def make_stack(task, row, *, trains_projections=False, seeds=(3, 4), milestones=(5,)):
    models = [decisive_stack.Model(task, row, 0.05, seed, trains_projections) for seed in seeds]
    programs = decisive_stack.Programs(DIM, compiled=False)
    return decisive_stack.Stack(models, batch_size=8, milestones=milestones, programs=programs)


def without_dropout(name):
    row = decisive_stack.ROWS[name]
    return row if not row.is_trained else replace(row, interaction=replace(row.interaction, dropout=0.0))


# --- stacked training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", decisive_stack.ROWS)
def test_losses_and_gradients_of_a_stack_are_those_of_each_model_alone(tasks, name):
    task, row = tasks["A2"], without_dropout(name)
    stack = make_stack(task, row, trains_projections=True)
    batch = stack.batch(0)
    program = decisive_stack.make_program(row, DIM)
    gradients, losses = program(stack.weights, *batch, stack._scale_M, stack._moves_M)
    for number, head in enumerate(decisive_stack.new_heads(row, DIM, (3, 4))):
        loss = head(*(part[number] for part in batch), stack._scale_M[number])
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), decisive_stack.OPTIMIZER.clip_norm)
        torch.testing.assert_close(losses[number], loss.detach(), rtol=1e-5, atol=1e-5)
        for key, weight in head.named_parameters():
            torch.testing.assert_close(gradients[key][number], weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "has_terms"), [("psi + losses", True), ("text-conditioned + psi", False)])
def test_steps_of_a_stack_are_those_of_gares_own_model_and_optimizer(tasks, name, has_terms):
    task, row = tasks["B"], without_dropout(name)
    stack = make_stack(task, row)
    head = decisive_stack.new_heads(row, DIM, (4,))[0]
    settings = {"name": "gare", "dropout": 0.0, "pooling": row.interaction.pooling}
    model = GARE(
        GareConfig.load({"encoder": {"name": "tiny"}, "temporal": {"num_layers": 0}, "interaction": settings})
    )
    model.interaction.load_state_dict(head.interaction.state_dict())
    model.encoder.requires_grad_(False)
    optimizer = build_optimizer(model, decisive_stack.OPTIMIZER)
    terms = {} if has_terms else {"terms": {key: {"weight": 0.0} for key in ("kl", "radius", "direction")}}
    for step in range(3):
        texts, frames, mask, items = (part[1] for part in stack.batch(step))
        pairs = model.score_pairs(TextFeatures.from_vectors(texts), VideoFeatures(frames, mask))
        loss = training_loss(pairs, 20.0, ObjectiveConfig.load(terms), video_index=items)
        optimizer.zero_grad()
        loss.total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), decisive_stack.OPTIMIZER.clip_norm)
        optimizer.step()
        losses = stack.step(step, 1.0)
        torch.testing.assert_close(losses[1], loss.total.detach(), rtol=1e-4, atol=1e-5)
    for key, weight in model.interaction.named_parameters():
        torch.testing.assert_close(
            stack.weights[f"interaction.{key}"][1], weight.detach(), rtol=1e-3, atol=2e-5
        )


def test_frozen_projections_stay_and_trained_ones_move(tasks):
    row = decisive_stack.ROWS["psi zero"]
    for is_trained in (False, True):
        stack = make_stack(tasks["A1"], row, trains_projections=is_trained)
        assert list(stack.train()) == [5]
        assert bool(stack.weights["text_projection.weight"].any()) == is_trained
        assert stack.weights["interaction.increment_net.output.weight"].any()


def test_a_branch_to_a_milestone_leaves_the_trunk_as_it_was(tasks):
    def at_end(milestones):
        stack = make_stack(tasks["A2"], without_dropout("psi zero"), milestones=milestones)
        list(stack.train())
        return stack.weights["interaction.increment_net.output.weight"]

    torch.testing.assert_close(at_end((5, 20)), at_end((20,)), rtol=0, atol=0)


def test_a_stack_of_tasks_and_rows_trains_each_as_it_would_be_trained_alone(tasks):
    offset, psi = without_dropout("offset"), without_dropout("psi zero")
    mixed = [
        decisive_stack.Model(tasks["A4"], offset, 0.05, 3, trains_projections=True),
        decisive_stack.Model(tasks["A4"], psi, 0.01, 3),
        decisive_stack.Model(tasks["B"], psi, 0.05, 4, trains_projections=True),
        decisive_stack.Model(tasks["A1"], offset, 0.05, 4),
    ]
    programs = decisive_stack.Programs(DIM, compiled=False)

    def trained(models):
        stack = decisive_stack.Stack(models, batch_size=8, milestones=(3,), programs=programs)
        list(stack.train())
        return stack.weights

    together = trained(mixed)
    for number, model in enumerate(mixed):
        alone = trained([model])
        for name, weight in alone.items():
            torch.testing.assert_close(together[name][number], weight[0], rtol=1e-3, atol=2e-5)
        assert bool(together["text_projection.bias"][number].any()) == model.trains_projections
    with pytest.raises(ValueError, match="share a program"):
        trained([mixed[0], replace(mixed[1], row=decisive_stack.ROWS["psi + losses"])])


def test_dropout_differs_between_the_models_of_a_stack(tasks):
    losses = make_stack(tasks["A2"], decisive_stack.ROWS["psi normal"], seeds=(7, 7)).step(0, 1.0)
    assert losses[0] != losses[1]


# --- data and table ----------------------------------------------------------------------------------------


def test_a_batch_has_no_item_twice_and_texts_describe_their_first_item(tasks):
    for task in tasks.values():
        items, texts = task.batches(0, steps=9, batch_size=8)
        assert items.shape == (9, 8, task.shots)
        assert all(len(set(step.flatten().tolist())) == step.numel() for step in items)
        assert torch.equal(task.train.item_of_text[texts], items[..., 0])
        assert torch.equal(items, task.batches(0, steps=9, batch_size=8)[0])


def test_pseudo_videos_have_the_texts_of_all_their_pictures(tasks):
    one, four = tasks["A1"].test, tasks["A4"].test
    assert len(four) == len(one) // 4
    assert torch.equal(four.video.frames_VFD[2, :4], one.video.frames_VFD[8:12, 0])
    assert torch.equal(four.text_TD[four.item_of_text == 2], one.text_TD[(one.item_of_text // 4) == 2])


def test_intervals_see_a_difference_and_none(tmp_path):
    rng = np.random.default_rng(0)
    ranks = rng.integers(1, 5, size=(2, 400)).astype(np.uint16)
    cells = [decisive_table.Cell("A2", row, 0.05, "frozen", 8) for row in ("psi zero", "offset")]
    arrays = {"A2/video_of_text": np.repeat(np.arange(100), 4).astype(np.uint16)}
    for cell, better in zip(cells, (1, 0), strict=True):
        changed = ranks.copy()
        changed[:, ::5] = 1 if better else 3
        arrays[f"{cell.key}/text_to_video"] = changed
    np.savez(tmp_path / "ranks.npz", **arrays)
    results = decisive_table.Results(tmp_path / "ranks.npz")
    metric, change, near, far, seeds, queries = decisive_table.compare(
        results, *cells, "text_to_video", "text_to_video"
    )[0]
    assert (metric, seeds, queries) == ("R@1", 2, 400)
    assert change == pytest.approx(20.0)
    assert far[0] < near[0] < change < near[1] < far[1]
    assert far[0] > 10
    found = decisive_table.all_comparisons(results, (4, 8))
    assert {(one.question, one.steps) for one in found} == {("primary", 8)}
    assert {one.question for one in decisive_table.all_comparisons(results, (8, 16))} == {"shorter runs"}
    assert "psi beats the offset" in decisive_table.verdict(found, 8)[0]
    assert decisive_table.verdict(found, 8)[-1] == "- 5 of 6 primary comparisons were not run"


@pytest.mark.parametrize("run", ["decisive", "decisive-2"])
def test_the_tables_in_the_repository_are_made_from_the_ranks_beside_them(run, tmp_path):
    folder = EXPERIMENTS / "results" / run
    for name in ("ranks.npz", "shares.json"):
        (tmp_path / name).symlink_to(folder / name)
    assert decisive_table.write_table(tmp_path) == (folder / "table.md").read_text(encoding="utf-8")
    made, kept = (json.loads((each / "table.json").read_text()) for each in (tmp_path, folder))
    assert made == kept


def test_the_plan_has_every_row_task_and_temperature():
    plan = decisive.make_plan(7_000)
    cells = [cell for group in plan for cell in group]
    assert len(cells) == len(set(cells)) == 6 * 2 * 4 + 4 * 4
    assert {cell.row for cell in cells[:16]} == {"offset", "psi zero"}  # the primary comparisons come first
    assert {cell.projections for cell in cells[-16:]} == {"trained"}
    other = [cell for group in decisive.make_plan(7_000, "trained") for cell in group]
    assert set(other) == set(cells)
    assert {cell.projections for cell in other[:16]} == {"trained"}
    assert {cell.temperature for cell in other[16:40]} == {0.05}


# --- the chain ---------------------------------------------------------------------------------------------


def write_set(folder: Path, name: str, frames: list[int], captions: int) -> None:
    rows = []
    for number, count in enumerate(frames):
        colour = tuple(np.random.default_rng(len(name) * 1_000 + number).integers(0, 255, 3).tolist())
        place = folder / name / f"{name}{number}"
        place.mkdir(parents=True)
        for frame in range(count):
            Image.new("RGB", (40, 36), tuple(max(0, part - 9 * frame) for part in colour)).save(
                place / f"{frame}.png"
            )
        split = "val" if name == "msrvtt_frames" and number < 4 else "train"
        texts = [f"{name} colour {colour[0]} and {colour[1]} number {n}" for n in range(captions)]
        rows += [Row(f"{name}{number}", f"{name}{number}", text, split) for text in texts]
    Manifest(Header(name), tuple(rows)).save(folder / name / "manifest.csv")


RECIPE = """
selection_split = "val"
epochs = 1
batch_size = 8
[data]
manifest = "set by decisive.py"
num_frames = 1
[model.encoder]
name = "tiny"
[model.temporal]
num_layers = 0
[model.interaction]
name = "mean"
"""


def test_the_whole_chain_on_few_pictures(tmp_path):
    data = tmp_path / "data"
    write_set(data, "flickr8k", [1] * 48, 2)
    write_set(data, "coco", [1] * 48, 2)
    write_set(data, "msrvtt_frames", [2] * 8 + [4, 6] * 9, 2)
    (tmp_path / "towers.toml").write_text(RECIPE)
    command = [
        str(EXPERIMENTS / "decisive.py"),
        "all",
        "--data",
        "data",
        "--out",
        "run",
        "--recipe",
        "towers.toml",
    ]
    small = [
        "--minutes",
        "1e6",
        "--seeds",
        "1",
        "--milestones",
        "2",
        "--batch",
        "8",
        "--workers",
        "0",
        "--device",
        "cpu",
    ]
    done = run_python([*command, *small], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    halves = [Manifest.load(data / "coco" / f"{half}.csv") for half in ("towers", "psi")]
    ids = [{row.video_id for row in half.rows} for half in halves]
    assert not ids[0] & ids[1]
    assert len(ids[0] | ids[1]) == 48
    videos = Manifest.load(data / "msrvtt_frames" / "psi.csv")
    assert len(videos.all_videos()) == 18  # those of at least four frames
    assert videos.splits == ["train", "test"]

    results = decisive_table.Results(tmp_path / "run" / "ranks.npz")
    cells = [
        decisive_table.Cell(**cell)
        for cell in json.loads((tmp_path / "run/shares.json").read_text())["run"]["cells"]
    ]
    assert all(results.ranks(cell, "text_to_video") is not None for cell in cells)
    control = [replace(cell, row="offset") for cell in cells if (cell.task, cell.row) == ("A1", "psi zero")]
    for cell in control:  # with one frame psi is an offset: the same run
        for direction in ("text_to_video", "video_to_text", "qb_norm"):
            psi = results.ranks(replace(cell, row="psi zero"), direction)
            assert np.array_equal(results.ranks(cell, direction), psi)
    table = json.loads((tmp_path / "run" / "table.json").read_text())
    assert len({(one["task"], one["temperature"]) for one in table if one["question"] == "primary"}) == 6
    assert "not run" not in (tmp_path / "run" / "table.md").read_text()


def test_what_is_there_is_not_run_again_and_time_that_is_over_is_told(tasks, tmp_path, capsys):
    rows = ("offset", "psi zero")
    plan = [(decisive_table.Cell("B", row, 0.05, "frozen", 8),) for row in rows]

    def lines(cells, minutes):
        decisive.run_psi(tmp_path, tasks, SCALE, minutes=minutes, compiled=False, plan=cells)
        return capsys.readouterr().out.splitlines()

    assert [line.split(":")[0] for line in lines(plan[:1], 1e6)] == ["[1/1] B/offset/0.05/frozen/8"]
    before = (tmp_path / "cells" / "B_offset_0.05_frozen_8.npz").read_bytes()
    assert lines(plan, 0) == ["not run: B/psi zero/0.05/frozen/8 (the 0 minutes are over)"]
    assert [line.split(":")[0] for line in lines(plan, 1e6)] == ["[1/1] B/psi zero/0.05/frozen/8"]
    assert (tmp_path / "cells" / "B_offset_0.05_frozen_8.npz").read_bytes() == before
    assert json.loads((tmp_path / "batch.json").read_text())["batch_size"] == 8  # one size: no trial

    def collected():
        decisive.collect(tmp_path, SCALE)
        return set(decisive_table.Results(tmp_path / "ranks.npz").arrays)

    assert "B/psi zero/0.05/frozen/4/text_to_video" in collected()
    (tmp_path / "cells" / "B_psi-zero_0.05_frozen_8.npz").unlink()  # cut off before its end
    assert "B/psi zero/0.05/frozen/4/text_to_video" in collected()
    assert lines(plan, 1e6)[-1].startswith("[1/1] B/psi zero/0.05/frozen/8")


def test_a_mistake_is_told_without_a_traceback(tmp_path):
    for step, word in (
        ("table", "run 'decisive.py psi' first"),
        ("psi", "make them with"),
        ("halves", "manifest"),
    ):
        done = run_python(
            [str(EXPERIMENTS / "decisive.py"), step, "--out", "none", "--data", "none"], cwd=tmp_path
        )
        assert done.returncode == 1
        assert word in done.stderr
        assert "Traceback" not in done.stderr

"""experiments/mini_shots.py: the chain at tiny size, the gradient, what goes on where it was cut off."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gare import GARE, GareConfig
from gare.data.manifest import Header, Manifest, Row
from gare.types import VideoFeatures

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import mini_shots
import mini_shots_data

TINY = {
    "encoder": {"name": "tiny"},
    "temporal": {"num_layers": 0},
    "interaction": {"name": "gare", "init": "normal", "pooling": "mean"},
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(mini_shots_data, "PIECE_ITEMS", {"flickr8k": 6, "coco": 6, "msrvtt_frames": 4})
    monkeypatch.setattr(mini_shots, "BATCH_SIZE", 4)
    monkeypatch.setattr(mini_shots, "STEPS", (5, 10))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three sets of flat pictures, and a model with increments."""
    folder = tmp_path_factory.mktemp("shots")
    torch.manual_seed(0)
    GARE(GareConfig.load(TINY)).save_pretrained(folder / "model")
    for name, frames, splits in (
        ("flickr8k", 1, {"train": 14, "val": 8}),
        ("coco", 1, {"train": 14}),
        ("msrvtt_frames", 3, {"train": 9, "val": 5}),
    ):
        rows = []
        for split, number in splits.items():
            for item in range(number):
                video_id = f"{name}{split}{item}"
                place = folder / "data" / name / video_id
                place.mkdir(parents=True)
                for frame in range(frames):
                    colour = tuple(np.random.default_rng(len(rows) + frame).integers(0, 255, 3).tolist())
                    Image.new("RGB", (36, 40), colour).save(place / f"{frame}.png")
                rows += [Row(video_id, video_id, f"{name} {item} word {n}", split) for n in range(3)]
        Manifest(Header(name), tuple(rows)).save(folder / "data" / name / "manifest.csv")
    return folder


def run(folder, monkeypatch, *words):
    out = ["--out", str(folder / "run"), "--data", str(folder / "data"), "--model", str(folder / "model")]
    monkeypatch.setattr(sys, "argv", ["mini_shots.py", *words, *out])
    mini_shots.main()


def test_the_chain_from_pictures_to_the_table(made, monkeypatch, capsys):
    for what in ("frames", "texts"):
        run(made, monkeypatch, what, "val", "train-0", "train-1")
    pieces = [Manifest.load(made / f"run/pieces/flickr8k/train-{n}.csv") for n in (0, 1)]
    ids = [{row.video_id for row in piece.rows} for piece in pieces]
    assert not ids[0] & ids[1]
    assert [len(piece.rows) for piece in pieces] == [12, 12]  # two captions of each picture
    run(made, monkeypatch, "train", "0", "1", "--pieces", "train-0", "train-1")
    run(made, monkeypatch, "judge", "val")
    run(made, monkeypatch, "table", "val")
    rows = {(row["row"], row["steps"]): row for row in json.loads((made / "run/table-val.json").read_text())}
    assert rows["psi", 10]["seeds"] == 2
    assert set(rows["shipped", 0]["measures"]) == set(mini_shots.MEASURES)
    assert rows["offset", 10]["shares"]["B"] < 1e-6 < rows["shipped", 0]["shares"]["B"]
    assert ("psi + losses", 10) not in rows
    for measure in rows["shipped", 0]["measures"].values():
        assert (measure["difference"], measure["low"], measure["high"]) == (0, 0, 0)
    with np.load(made / "run/ranks-val.npz") as ranks:
        assert ranks["psi/10/A2/text_to_video"].shape == (2, 24)
        assert ranks["shipped/0/all/text_to_video"].shape == (1, 39)
    assert "| psi from shipped | 10 | 2 |" in capsys.readouterr().out


def test_shipped_row_scores_as_the_model_does(made, monkeypatch):
    for what in ("frames", "texts"):
        run(made, monkeypatch, what, "val")
    tasks = mini_shots_data.load_tasks(made / "run", "val", [])
    head = mini_shots.new_head(mini_shots.FREE["shipped"], 0, tasks, str(made / "model")).eval()
    model = GARE.from_pretrained(made / "model")
    data = mini_shots_data.open_piece(made / "data", made / "run", "msrvtt_frames", "val")
    (first,) = [row for row in data.manifest.rows if row.video_id.endswith("val3")][:1]
    test = tasks["B"].test
    (caption,) = (
        (test.text_TD - model.encode_text([first.caption]).text_TD).abs().sum(dim=1).topk(1, largest=False)[1]
    )
    item = int(test.item_of_text[caption])
    pictures = [Image.open(made / "data/msrvtt_frames" / first.video_id / f"{n}.png") for n in range(3)]
    wanted = model.score(model.encode_text([first.caption]), model.encode_video([pictures]))
    found = head.interaction.score(*head.features(test.text_TD, test.video))[caption, item]
    torch.testing.assert_close(found, wanted[0, 0], rtol=1e-4, atol=1e-5)


def random_tasks(dim=16):
    from decisive_data import make_tasks, random_vectors

    tasks = make_tasks(random_vectors(dim=dim, pictures=60, videos=24))
    return {**tasks, "all": tasks["B"]}


def new_run(name, tasks):
    row = replace(mini_shots.TRAINED[name], name=name if name != "psi from shipped" else "psi")
    return mini_shots.Run(row, 0, tasks, mini_shots.new_head(row, 0, tasks, "none"))


@pytest.mark.parametrize("name", ["psi", "text-conditioned + psi", "offset"])
def test_the_gradient_is_that_of_formed_increments(name):
    tasks = random_tasks()
    run = new_run(name, tasks)
    torch.nn.init.normal_(run.head.interaction.increment_net.output.weight, std=0.02)
    formed = new_run(name, tasks)
    formed.head.load_state_dict(run.head.state_dict())
    score_pairs = formed.head.interaction.score_pairs
    formed.head.interaction.score = lambda text, video: score_pairs(text, video).scores_TV
    for step in range(4):  # each kind of batch
        for each in (run, formed):
            each.step = step
            each.optimizer.zero_grad()
            each.loss().backward()
        pairs = zip(run.head.interaction.parameters(), formed.head.interaction.parameters(), strict=True)
        for one, other in pairs:
            found = torch.zeros_like(one) if one.grad is None else one.grad  # the bias of keys has none
            torch.testing.assert_close(found, other.grad, rtol=1e-3, atol=1e-5)


def test_an_offset_sees_the_mean_frame_alone():
    tasks = random_tasks()
    run = new_run("offset", tasks)
    seen = []
    score = run.head.interaction.score
    run.head.interaction.score = lambda text, video: seen.append(video) or score(text, video)
    run.step = 2  # four pictures
    run.loss()
    task, items, _ = run.batches["A4"]
    wanted = VideoFeatures.mean(
        VideoFeatures(*(x[items[0]].flatten(1, 2) for x in vars_of(task.train.video)))
    )
    assert seen[0].frames_VFD.shape[1] == 1
    torch.testing.assert_close(seen[0].frames_VFD[:, 0], wanted)


def vars_of(video):
    return video.frames_VFD, video.mask_VF


def test_a_run_that_is_cut_off_ends_as_one_that_was_not(tmp_path):
    tasks = random_tasks()
    straight = mini_shots.train_to(new_run("psi", tasks), 10, tmp_path / "straight.pt", "straight")
    trunk = tmp_path / "cut.pt"
    mini_shots.train_to(new_run("psi", tasks), 5, trunk, "shorter")
    resumed = mini_shots.train_to(new_run("psi", tasks), 10, trunk, "longer")
    for key, weight in straight.items():
        torch.testing.assert_close(resumed[key], weight, rtol=0, atol=0)
    assert straight["increment_net.output.weight"].any()

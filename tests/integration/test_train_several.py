"""Training on several datasets: their training splits together, one of them to choose by."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from PIL import Image

from gare import GARE
from gare.data.loader import FrameSource
from gare.data.manifest import Header, Manifest, Row
from gare.errors import DataError
from gare.evaluate.model_evaluation import evaluate_model
from gare.train import RunConfig, train
from gare.train.training_frames import open_source
from toy_data import recipe, write_dataset

CPU = torch.device("cpu")


def write_images(folder, *, prefix="image", splits=("train", "val")):
    """Captioned images, each a video of one frame."""
    rows = []
    for split in splits:
        for number in range(4):
            name = f"{prefix}-{split}-{number}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (40, 40), 60 * number).save(folder / f"{name}.png")
            rows.append(Row(name, f"{name}.png", f"grey {number} of {split}", split))
    Manifest(Header("greys"), tuple(rows)).save(folder / "manifest.csv")
    return folder / "manifest.csv"


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    return write_dataset(folder / "colours"), write_images(folder / "greys")


def config(manifests, **changes):
    settings = recipe(manifests[0], **changes)
    settings["data"] = {**settings["data"], "also_train": [str(manifests[1].parent)]}
    return RunConfig.load(settings)


def test_only_training_splits_are_added(manifests):
    source = open_source(config(manifests).data)
    assert source.manifest.header.name == "colours"
    assert {split: counts.videos for split, counts in source.manifest.counts.items()} == {
        "train": 12, "val": 8, "test": 8,
    }  # fmt: skip
    alone = FrameSource.open(manifests[0], 3)
    for split in ("val", "test"):
        assert source.manifest.captions(split) == alone.manifest.captions(split)
    sizes = {video.video_id: len(source.read(video)) for video in source.manifest.videos("train")}
    assert sizes["video0-train"] == 3
    assert sizes["image-train-3"] == 1


def test_a_set_named_twice_is_shown_twice_as_often(manifests):
    settings = config(manifests).to_values()
    once = open_source(RunConfig.load(settings).data).manifest
    settings["data"]["also_train"] *= 2
    twice = open_source(RunConfig.load(settings).data).manifest
    assert twice.videos("train") == once.videos("train")
    shown = Counter(twice.video_index("train"))
    for video, times in Counter(once.video_index("train")).items():
        is_image = twice.videos("train")[video].video_id.startswith("image")
        assert shown[video] == times * (2 if is_image else 1)


@pytest.mark.parametrize("frames", ["stream", "cached"])
def test_a_run_sees_all_and_is_chosen_by_the_first(manifests, tmp_path, frames):
    settings = config(manifests, epochs=2, batch_size=6).to_values()
    settings["data"]["frames"] = frames
    settings["model"]["encoder"]["freeze_image"] = frames == "cached"
    both = RunConfig.load(settings)
    assert RunConfig.load(both.to_values()) == both
    best = train(both, tmp_path / "run", device=CPU)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 4  # two epochs of (8 + 4) // 6 batches
    result, _ = evaluate_model(GARE.from_pretrained(best), open_source(both.data), "test", selected_on="val")
    assert (result.dataset, result.num_videos) == ("colours", 8)


def test_what_cannot_be_joined_is_refused(manifests, tmp_path):
    write_images(tmp_path / "no-train", prefix="other", splits=("val",))
    with pytest.raises(DataError, match="has no split 'train'"):
        open_source(config((manifests[0], tmp_path / "no-train" / "manifest.csv")).data)
    rows = [Row("video0-test", "video0", "red again", "train")]
    (tmp_path / "leak" / "video0").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "leak" / "video0" / "0.png")
    Manifest(Header("leak"), tuple(rows)).save(tmp_path / "leak" / "manifest.csv")
    with pytest.raises(DataError, match="video0-test is in colours and in leak"):
        open_source(config((manifests[0], tmp_path / "leak" / "manifest.csv")).data)
    with pytest.raises(DataError, match=r"nowhere.*does not exist"):
        open_source(config((manifests[0], tmp_path / "nowhere" / "manifest.csv")).data)

"""A dataset from outside the package, written here alone and in docs/how-to/add-a-dataset.md.

A function and a line; then prepare, train and evaluate as ever.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from clips import steady, write_video
from gare import GARE
from gare.cli.data_command import prepare
from gare.cli.main import app
from gare.data.datasets import DATASETS, read_dataset
from gare.data.loader import FrameSource
from gare.data.manifest import Header, Manifest, Row
from gare.errors import ConfigError, DataError
from gare.evaluate.model_evaluation import evaluate_model
from gare.train import RunConfig, train
from strangers import as_it_was, blocks, installed, points
from toy_data import recipe

PAGE = "add-a-dataset.md"
CPU = torch.device("cpu")


def read_diary(annotations: Path, *, videos: Path | None = None) -> Manifest:
    """The clips of `diary.json`. The same ones are for training and for testing, to keep this short."""
    try:
        diary = json.loads((annotations / "diary.json").read_text())
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} does not exist; give the folder of the diary") from None
    rows = [
        Row(f"{clip}-{split}", f"{clip}.mp4", text, split)
        for split in ("train", "test")
        for clip, text in diary.items()
    ]
    return Manifest(Header("diary", "my own days", root=str((videos or annotations).resolve())), tuple(rows))


@pytest.fixture(autouse=True)
def diary():
    with as_it_was(DATASETS):
        DATASETS.register("diary", read_diary)
        yield


def write_days(folder: Path, *clips: str) -> Path:
    folder.mkdir()
    (folder / "diary.json").write_text(json.dumps({clip: f"it was {clip}" for clip in clips}))
    for number, clip in enumerate(clips):
        write_video(folder / f"{clip}.mp4", steady(2 + number))
    return folder


def test_the_page_shows_this_code_and_its_lines_run(tmp_path, monkeypatch, capsys):
    own, use = blocks(PAGE, "python")
    assert inspect.getsource(read_diary) in own
    write_days(tmp_path / "days", "monday")
    monkeypatch.chdir(tmp_path)
    exec(compile(use, PAGE, "exec"), dict(globals()))
    assert "Counts(videos=1, captions=1)" in capsys.readouterr().out


def test_an_installed_dataset_is_prepared_on_the_command_line(tmp_path):
    days, out = write_days(tmp_path / "days", "monday", "tuesday"), tmp_path / "prepared"
    DATASETS._entries.pop("diary")
    with installed(tmp_path, "my_diary", blocks(PAGE, "python")[0], points(PAGE)):
        words = ["data", "prepare", "diary", "--annotations", days, "--out", out, "--frames", 3]
        done = CliRunner().invoke(app, [*map(str, words), "--workers", "1"])
        assert done.exit_code == 0, done.output
        assert DATASETS["diary"].__module__ == "my_diary"
    assert len(Manifest.load(out / "manifest.csv").videos("test")) == 2


def test_from_its_own_files_to_a_result(tmp_path, capsys):
    out = tmp_path / "prepared"
    folder = write_days(tmp_path / "days", "monday", "tuesday", "wednesday", "thursday")

    prepare("diary", annotations=folder, out=out, frames=3, workers=1)
    assert "diary: my own days" in capsys.readouterr().out
    best = train(RunConfig.load(recipe(out, epochs=2, selection_split="train")), tmp_path / "run", device=CPU)
    result, _ = evaluate_model(
        GARE.from_pretrained(best), FrameSource.open(out, 3), "test", selected_on="train"
    )
    assert (result.dataset, result.num_videos, result.num_texts) == ("diary", 4, 4)


def test_its_mistakes_and_a_wrong_name_are_named(tmp_path):
    with pytest.raises(DataError, match="give the folder of the diary"):
        read_dataset("diary", tmp_path)
    with pytest.raises(ConfigError, match=r"there is no dataset 'dairy'; there are: msrvtt, .*, diary"):
        read_dataset("dairy", tmp_path)

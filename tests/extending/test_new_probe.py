"""A probe from outside, defined here alone and in docs/how-to/add-a-probe.md.

`gare analyze` shows it with its figure, table and claim.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gare import GARE, GareConfig
from gare.analysis.analysis_run import analyse
from gare.analysis.html_report import write_report
from gare.analysis.numbers import Numbers
from gare.analysis.presentation import Picture, Table, number
from gare.analysis.probe import Claim, Probe, videos
from gare.analysis.probes import PROBES
from gare.analysis.study import Gallery, Study, open_study
from gare.cli.main import app
from gare.data.loader import FrameSource
from strangers import as_it_was, blocks, installed, points
from toy_data import write_dataset

PAGE = "add-a-probe.md"


class CaptionLengthProbe(Probe):
    """Do longer captions lie closer to their videos?"""

    title = "Length of captions"
    intro = "Score of each caption with its own video, by number of words."
    needs = (videos(2),)

    def measure(self, study: Study) -> Numbers:
        words = [len(caption.split()) for caption in study.gallery.captions]
        score = study.subject.geometry.cosine.diagonal()
        table = {"words": words, "score": score}
        return Numbers.of(
            {"mean_words": sum(words) / len(words), "mean_score": score.mean()}, {"captions": table}
        )

    def figures(self, numbers: Numbers, study: Study) -> Sequence[Picture]:
        def draw(figure) -> None:
            figure.subplots().scatter(*numbers.tables["captions"].values())

        return [Picture("caption-length", f"Mean score {number(numbers.values['mean_score'])}.", draw)]

    def tables(self, numbers: Numbers) -> Sequence[Table]:
        return [Table("Captions & words", ["", "words"], [["mean", number(numbers.values["mean_words"], 1)]])]

    def claims(self) -> Sequence[Claim]:
        def judge(values):
            return values["mean_words"] < 5, f"{values['mean_words']:.1f} words"

        return [Claim("Captions are short", "fewer than 5 words on average", judge, "needs captions")]


@pytest.fixture(autouse=True)
def _probes_as_they_were():
    with as_it_was(PROBES):
        yield


@pytest.fixture
def model(tmp_path) -> Path:
    torch.manual_seed(0)
    GARE(GareConfig.load({"encoder": {"name": "tiny"}})).save_pretrained(tmp_path / "model")
    write_dataset(tmp_path / "data")
    return tmp_path / "model"


def check_report(out: Path) -> None:
    page = (out / "report.html").read_text(encoding="utf-8")
    assert '<h2 id="caption_length">Length of captions</h2>' in page
    assert re.search(r'<figure id="caption-length"><img src="data:image/svg', page)
    assert (out / "figures" / "caption-length.pdf").is_file()
    assert "<h3>Captions &amp; words</h3>" in page
    assert '<a href="#caption_length">Captions are short</a>' in page
    assert "2.0 words" in page
    claims = {claim["claim"]: claim for claim in json.loads((out / "claims.json").read_text())}
    assert claims["Captions are short"]["verdict"] == "holds"
    assert claims["The increment net costs little"]["measured"] == "left out by --only"


def test_a_registered_probe_is_in_the_report(model, tmp_path):
    PROBES.register("caption_length", CaptionLengthProbe)
    gallery = Gallery.open(FrameSource.open(tmp_path / "data", 3), "test")
    said: list[str] = []
    for _ in range(2):
        study = open_study(GARE.from_pretrained(model), gallery, tmp_path / "out")
        analysis = analyse(study, PROBES, tmp_path / "out", only=["caption_length"], say=said.append)
    write_report(analysis, title="Mine")
    assert analysis.numbers["caption_length"].values["mean_words"] == 2
    assert said[1] == "caption_length: kept from before"
    check_report(tmp_path / "out")


def test_what_it_needs_is_said_in_its_place(model, tmp_path):
    PROBES.register("caption_length", CaptionLengthProbe)
    write_dataset(tmp_path / "one", videos=1)
    gallery = Gallery.open(FrameSource.open(tmp_path / "one", 3), "test")
    study = open_study(GARE.from_pretrained(model), gallery, tmp_path / "out")
    analysis = analyse(study, PROBES, tmp_path / "out", only=["caption_length"], say=lambda _: None)
    (claim,) = [claim for claim in analysis.claims if claim.section == "caption_length"]
    assert claim.verdict == "not measured"
    assert claim.measured == "The split has 1 videos; this part needs 2."


def test_the_page_shows_this_code_and_its_lines_run(model, tmp_path, monkeypatch, capsys):
    own, use = blocks(PAGE, "python")
    assert inspect.getsource(CaptionLengthProbe) in own
    monkeypatch.chdir(tmp_path)
    exec(compile(use, PAGE, "exec"), dict(globals()))
    assert "'mean_words': 2.0" in capsys.readouterr().out
    check_report(tmp_path / "report")


def test_an_installed_probe_is_chosen_on_the_command_line(model, tmp_path):
    arguments = ["analyze", model, "--data", tmp_path / "data", "--frames", 3, "--out", tmp_path / "out"]
    with installed(tmp_path, "my_lengths", blocks(PAGE, "python")[0], points(PAGE)):
        result = CliRunner().invoke(app, [*map(str, arguments), "--only", "caption-length"])
    assert result.exit_code == 0, result.exception
    assert "holds: 2.0 words" in result.stdout
    check_report(tmp_path / "out")

"""`gare analyze` and `gare train --probe` on eight real videos, as a user runs them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from click.testing import Result
from matplotlib.figure import Figure
from safetensors.torch import load_file
from typer.testing import CliRunner

from browser import chromium, serious_violations
from gare import GARE, GareConfig
from gare.analysis.training_probe import TrainingProbe
from gare.cli.main import app
from gare.data.manifest import Header, Manifest
from gare.errors import GareError
from gare.train import RunConfig, train
from toy_data import recipe, write_dataset
from warm import run_gare


def gare(*arguments: object) -> Result:
    """In this process: a second of imports saved each time."""
    return CliRunner().invoke(app, list(map(str, arguments)))


def config(manifest: Path, **changes: object) -> RunConfig:
    return RunConfig.load(recipe(manifest, **changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run with a probe, the same without, and a baseline."""
    folder = tmp_path_factory.mktemp("analysis")
    manifest = write_dataset(folder / "data")
    train(config(manifest), folder / "probed", observers=[TrainingProbe(2)])
    train(config(manifest), folder / "plain")
    values = recipe(manifest)
    values["model"]["increment"] = {"enabled": False}
    train(RunConfig.load(values), folder / "baseline", observers=[TrainingProbe()])
    return folder


@pytest.fixture(scope="module")
def report(runs) -> Path:
    table = Path(__file__).resolve().parents[2] / "experiments" / "results" / "core"
    result = gare(
        *("analyze", runs / "probed" / "last", "--data", runs / "data", "--frames", 3, "--split", "test"),
        *("--baseline", runs / "baseline" / "last", "--run", runs / "probed", "--ablation", table),
        *("--out", runs / "report"),
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str(runs / "report" / "report.html")
    return runs / "report"


@pytest.fixture
def without_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of a report's time goes into the fonts of its PDFs; `report` has them."""
    save = Figure.savefig

    def save_others(figure: Figure, path: Path, **options: object) -> None:
        if Path(path).suffix != ".pdf":
            save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", save_others)


def test_a_probe_changes_no_weight(runs):
    probed, plain = (load_file(runs / name / "last" / "model.safetensors") for name in ("probed", "plain"))
    assert all(probed[name].equal(plain[name]) for name in plain)
    assert not (runs / "plain" / "probe.jsonl").exists()


def test_records_come_every_few_steps(runs):
    records = [json.loads(line) for line in (runs / "probed" / "probe.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 2, 4]
    assert {"angle_to_gap/positive", "step_error/negative", "term/kl"} <= records[-1].keys()
    baseline = [json.loads(line) for line in (runs / "baseline" / "probe.jsonl").read_text().splitlines()]
    assert len(baseline) == 6
    assert "radius/positive" not in baseline[0]


def test_resuming_drops_what_comes_again(runs, tmp_path):
    """As after a kill: a record past the checkpoint, and half a line."""
    manifest = runs / "data" / "manifest.csv"
    train(config(manifest, epochs=1), tmp_path / "run", observers=[TrainingProbe(1)])
    lines = (tmp_path / "run" / "probe.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    (tmp_path / "run" / "probe.jsonl").write_text("\n".join([*lines, '{"step": 9}', '{"step": 1']))
    train(config(manifest, epochs=1), tmp_path / "run", resume=True, observers=[TrainingProbe(1)])
    after = (tmp_path / "run" / "probe.jsonl").read_text().splitlines()
    assert after == lines


def test_numbers_pictures_and_report_are_there(report):
    names = {path.name for path in (report / "numbers").iterdir()}
    probes = ("tension", "geometry", "dynamics", "trust_region", "hard_negatives")
    probes += ("coverage", "efficiency", "ablations", "bottleneck")
    assert {f"{probe}.json" for probe in probes} <= names
    tension = json.loads((report / "numbers" / "tension.json").read_text())["values"]
    assert tension["model"]["autograd_difference"] < 1e-9
    columns = parquet.read_table(report / "numbers" / "tension.model.parquet").column_names
    assert {"positive_mean", "negative_variance", "delta_positive_mean"} <= set(columns)
    for picture in (report / "figures").glob("*.pdf"):
        assert picture.read_bytes().startswith(b"%PDF")
        assert {picture.with_suffix(kind).exists() for kind in (".svg", ".png")} == {True}


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values["id"]} if "id" in values else set()
        self.links += [values[name] for name in ("href", "src") if name in values]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_whole_and_needs_no_network(report):
    page, text = Page(), (report / "report.html").read_text(encoding="utf-8")
    page.feed(text)
    assert page.open == []
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        elif not link.startswith("data:"):
            assert (report / link).is_file(), link
    assert "http://" not in re.sub(r"data:[^\"]*", "", text)
    assert "https://" not in re.sub(r"data:[^\"]*", "", text)
    assert text.count("<figure") >= 20
    assert "not measured" not in text


@pytest.mark.usefixtures("without_pdf")
def test_what_is_measured_is_kept_and_force_measures_again(runs, report):
    arguments = ("analyze", runs / "probed" / "last", "--data", runs / "data", "--frames", 3, "--out", report)
    both = ("--baseline", runs / "baseline" / "last", "--only", "tension", "--json")
    again = gare(*arguments, *both)
    assert "tension: kept from before" in again.stderr, again.stderr
    values = json.loads(again.stdout)
    assert values["numbers"].keys() == {"tension"}
    assert {claim["probe"] for claim in values["claims"] if claim["holds"] is not None} == {"tension"}
    forced = gare(*arguments, *both, "--force")
    assert "kept from before" not in forced.stderr
    assert json.loads(forced.stdout)["numbers"] == values["numbers"]


@pytest.mark.usefixtures("without_pdf")
def test_false_negatives_alone_leave_a_report_as_it_is(runs, tmp_path):
    (tmp_path / "report.html").write_text("the whole report")
    result = gare(
        *("analyze", runs / "plain" / "last", "--data", runs / "data", "--frames", 3, "--out", tmp_path),
        "--false-negatives",
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("# ")
    assert not (tmp_path / "numbers" / "tension.json").exists()
    assert (tmp_path / "report.html").read_text() == "the whole report"
    assert "Likely false negatives" in (tmp_path / "false-negatives.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("without_pdf")
def test_captions_and_ids_may_hold_anything(runs, tmp_path):
    """Formulas, markup, tabs, line breaks, other scripts; an id longer than a file name may be."""
    captions = ["costs $5 or $10", "$\\frac{$", "tab\tand\nline", "<b>bold</b> & `x", "猫 🐶", "[/] [red]"]
    manifest = Manifest.load(write_dataset(tmp_path / "data"))
    test = [row for row in manifest.rows if row.split == "test"][: len(captions)]
    rows = [
        replace(row, video_id="猫/ $1$ " * 30 + str(place), caption=caption)
        for place, (row, caption) in enumerate(zip(test, captions, strict=True))
    ]
    Manifest(Header("odd <data>"), tuple(rows)).save(tmp_path / "data" / "manifest.csv")
    arguments = ("analyze", runs / "plain" / "last", "--data", tmp_path / "data", "--frames", 3)
    result = gare(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.exception
    page, text = Page(), (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    page.feed(text)
    assert page.open == []
    assert "odd &lt;data&gt;" in text
    listed = gare(*arguments, "--out", tmp_path / "out", "--false-negatives").stdout.splitlines()
    assert all(len(line.split("\t")) == 6 for line in listed if not line.startswith("#"))


@pytest.mark.usefixtures("without_pdf")
@pytest.mark.parametrize("videos", [1, 2])
def test_a_split_may_be_tiny(runs, tmp_path, videos):
    write_dataset(tmp_path / "data", videos=videos)
    result = gare(
        *("analyze", runs / "plain" / "last", "--data", tmp_path / "data", "--frames", 3, "--out", tmp_path),
    )
    assert result.exit_code == 0, result.exception
    assert f"The split has {videos} videos" in result.stderr
    claims = {claim["probe"]: claim for claim in json.loads((tmp_path / "claims.json").read_text())}
    assert (claims["tension"]["verdict"] == "not measured") == (videos == 1)


@pytest.mark.usefixtures("without_pdf")
def test_increments_of_length_zero_are_no_crash(runs, tmp_path):
    model = GARE.from_pretrained(runs / "plain" / "last")
    with torch.no_grad():
        for parameter in model.interaction.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path / "model")
    result = gare(
        *("analyze", tmp_path / "model", "--data", runs / "data", "--frames", 3, "--out", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.exception
    assert "|t + Δ| > |t|" in result.stdout
    assert "holds: matching pairs" not in result.stdout


@pytest.mark.usefixtures("without_pdf")
def test_a_baseline_of_another_size(runs, tmp_path):
    torch.manual_seed(0)
    values = {"encoder": {"name": "tiny", "dim": 24}, "increment": {"enabled": False}}
    GARE(GareConfig.load(values)).save_pretrained(tmp_path / "wide")
    result = gare(
        *("analyze", runs / "plain" / "last", "--data", runs / "data", "--frames", 3),
        *("--baseline", tmp_path / "wide", "--out", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.exception
    numbers = tmp_path / "out" / "numbers"
    assert parquet.read_table(numbers / "tension.baseline.parquet").num_rows == 24
    assert parquet.read_table(numbers / "tension.model.parquet").num_rows == 16


def test_a_record_uses_the_temperature_its_batch_was_seen_with(tmp_path):
    """The update may change it; gradients and losses of the state before must not see that."""
    manifest = write_dataset(tmp_path / "data")
    values = recipe(manifest, epochs=1, batch_size=8)
    values["model"]["temperature"] = {"value": 0.05, "learnable": True}
    values["model"]["increment"] = {"dropout": 0.0}
    values["optimizer"]["learning_rate"] = 0.3
    train(RunConfig.load(values), tmp_path / "run", observers=[TrainingProbe(1)])
    record = json.loads((tmp_path / "run" / "probe.jsonl").read_text().splitlines()[0])
    assert record["loss_before"] == pytest.approx(record["term/contrastive"], rel=1e-5)


def test_the_report_in_a_browser(report):
    """Nothing is fetched, nothing overflows a phone, and axe finds nothing serious."""
    with chromium() as browser:
        for width in (1280, 390):
            page, asked = browser.new_page(viewport={"width": width, "height": 900}), []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.goto((report / "report.html").as_uri())
            assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            shown = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
            assert page.evaluate(shown)
            assert serious_violations(page) == []


def test_a_baseline_by_itself_is_analysed_as_far_as_it_goes(runs, tmp_path):
    result = gare(
        *(
            "analyze",
            runs / "baseline" / "last",
            "--data",
            runs / "data",
            "--frames",
            3,
            "--out",
            tmp_path / "o",
        ),
        *("--only", "tension,geometry,bottleneck,dynamics", "--run", runs / "baseline"),
    )
    assert result.exit_code == 0, result.stderr
    assert "bottleneck: left out" in result.stderr
    judged = [line for line in result.stdout.splitlines() if ": " in line and "not measured" not in line]
    assert len(judged) == 2
    assert all(line.startswith("Without increments") for line in judged)
    assert "not measured: left out by --only" in result.stdout  # of efficiency


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "tensions"), "no probe 'tensions'"),
        (("--run", "nowhere", "--only", "dynamics"), "gare train … --probe"),
        (("--ablation", "nowhere", "--only", "ablations"), "gare ablate"),
        (("--split", "dev"), "dev"),
        (("--baseline", "nowhere"), "not a folder"),
        (("--out", "/proc/nowhere"), "cannot write"),
        (("--out", __file__), "cannot write"),
    ],
)
def test_mistakes_get_one_line(runs, report, options, message):
    result = gare(
        *("analyze", runs / "probed" / "last", "--data", runs / "data", "--frames", 3, "--out", report),
        *options,
    )
    assert isinstance(result.exception, GareError)
    assert message in str(result.exception)


def test_a_mistake_on_the_command_line_shows_no_traceback(runs):
    result = run_gare("analyze", "nowhere", "--data", runs / "data", "--out", runs / "x", "--frames", 3)
    assert result.returncode == 1
    assert "not a folder" in result.stderr
    assert "Traceback" not in result.stderr

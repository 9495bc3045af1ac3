"""An encoder of one's own, written here alone and in docs/how-to/add-an-encoder.md: colour histograms.

It is registered, trained, evaluated, indexed and searched with, and analysed like any other: once by a line
of Python, once as an installed package.
"""

from __future__ import annotations

import colorsys
import inspect
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

import gare
from clips import steady, write_video
from encoder_laws import LAWS
from gare import ENCODERS, GARE, Encoder, GareConfig
from gare.encoders import EncoderConfig, ImageFormat, build_encoder
from gare.errors import CheckpointError, ConfigError
from gare.settings import PositiveInt
from strangers import as_it_was, blocks, install, installed
from toy_data import COLOURS, recipe, write_dataset

PAGE = "add-an-encoder.md"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ColourEncoderConfig(EncoderConfig):
    """Colour histograms and a list of words."""

    name: Literal["colours"] = "colours"
    dim: PositiveInt = 16
    vocabulary: tuple[str, ...] = (
        "light",
        "red",
        "orange",
        "yellow",
        "lime",
        "teal",
        "azure",
        "purple",
        "pink",
    )
    """The words it knows; all others are one."""


class ColourEncoder(Encoder):
    """How much of a picture has which colour, and a vector for each word."""

    Config = ColourEncoderConfig
    IMAGE_TOWER, TEXT_TOWER = ("palette",), ("words",)

    def __init__(
        self, config: ColourEncoderConfig, *, weights: bool = True, tokenizer_folder: Path | None = None
    ) -> None:
        super().__init__(config)
        self.config, self.dim, self.max_words = config, config.dim, 16
        self.image_format = ImageFormat(32, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        levels = torch.tensor([0.0, 0.5, 1.0])
        self.register_buffer("palette", torch.cartesian_prod(levels, levels, levels))
        self.image_projection = nn.Linear(len(self.palette), config.dim)
        self.words = nn.Embedding(1 + len(config.vocabulary), config.dim)

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        number = {word: 1 + i for i, word in enumerate(self.config.vocabulary)}
        rows = [[number.get(word, 0) for word in text.lower().split()] or [0] for text in texts]
        tokens = [torch.tensor(row[: self.max_words]) for row in rows]
        token_ids_TW = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        lengths_T = torch.tensor([len(row) for row in tokens])
        return token_ids_TW, torch.arange(token_ids_TW.shape[1]) < lengths_T[:, None]

    def encode_text(self, token_ids_TW: Tensor, mask_TW: Tensor) -> tuple[Tensor, Tensor]:
        words_TWD = self.words(token_ids_TW)
        kept_TW1 = mask_TW[..., None].to(words_TWD.dtype)
        return (words_TWD * kept_TW1).sum(dim=1) / kept_TW1.sum(dim=1), words_TWD

    def image_features(self, pixels_NCHW: Tensor) -> Tensor:
        """The share of each colour of the palette, [N, E]."""
        pixels_NPC = pixels_NCHW.flatten(2).mT
        distance_NPE = torch.cdist(pixels_NPC, self.palette.expand(len(pixels_NPC), -1, -1))
        return (-8 * distance_NPE).softmax(dim=-1).mean(dim=1)

    def project_images(self, features_NE: Tensor) -> Tensor:
        return self.image_projection(features_NE)


@pytest.fixture(autouse=True)
def registered():
    with as_it_was(ENCODERS):
        ENCODERS.register("colours", ColourEncoder)
        yield


def build(**encoder) -> GARE:
    torch.manual_seed(0)
    return GARE(
        GareConfig.load({"encoder": {"name": "colours", **encoder}, "temporal": {"num_layers": 1}})
    ).eval()


# --- the page -----------------------------------------------------------------------------------------------


def test_the_page_shows_this_code_and_its_lines_run(tmp_path, monkeypatch):
    own, *rest = blocks(PAGE, "python")
    for part in (ColourEncoderConfig, ColourEncoder):
        assert inspect.getsource(part) in own
    monkeypatch.chdir(tmp_path)
    names = dict(globals())
    for code in rest:
        exec(compile(code, PAGE, "exec"), names)


def page_settings() -> dict:
    """The lines of a recipe that the page shows."""
    (own,) = (block for block in blocks(PAGE, "toml") if "[model.encoder]" in block)
    return tomllib.loads(own)["model"]


def page_points() -> str:
    (own,) = (block for block in blocks(PAGE, "toml") if "entry-points" in block)
    (points,) = tomllib.loads(own)["project"]["entry-points"].values()
    return "[gare.encoders]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())


# --- the laws, settings, files ------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_it_keeps_the_laws_of_all_encoders(law):
    torch.manual_seed(0)
    law(build_encoder(ColourEncoderConfig(), weights=False).eval())


def test_its_settings_are_checked_like_any_others():
    config = GareConfig.load({"encoder": {"name": "colours", "vocabulary": ["red", "blue"]}})
    assert config.encoder == ColourEncoderConfig(vocabulary=("red", "blue"))
    assert GareConfig.load(config.to_values()) == config
    with pytest.raises(ConfigError, match=r"encoder\.dim: must be at least 1, not 0"):
        GareConfig.load({"encoder": {"name": "colours", "dim": 0}})
    with pytest.raises(ConfigError, match="'transformers' or 'own' or 'colours', not 'colors'"):
        GareConfig.load({"encoder": {"name": "colors"}})


def test_a_saved_model_comes_back_where_it_is_registered_and_says_so_where_it_is_not(tmp_path):
    model = build(dim=8)
    model.save_pretrained(tmp_path / "model")
    again = GARE.from_pretrained(tmp_path / "model")
    assert again.fingerprint() == model.fingerprint()
    red = [Image.new("RGB", (50, 40), "red")]
    text = model.encode_text(["red light", "something else"])
    scores = model.score(text, model.encode_video([red]))
    assert torch.equal(
        again.score(again.encode_text(["red light", "something else"]), again.encode_video([red])), scores
    )
    with as_it_was(ENCODERS):
        ENCODERS._entries.pop("colours")
        with pytest.raises(CheckpointError, match=r"must be 'clip' or .* not 'colours'"):
            GARE.from_pretrained(tmp_path / "model")


def test_as_an_installed_package_it_needs_no_line_of_python(tmp_path):
    with as_it_was(ENCODERS):
        ENCODERS._entries.pop("colours")
        with installed(tmp_path, "my_colours", blocks(PAGE, "python")[0], page_points()):
            assert "colours" in ENCODERS
            assert type(build().encoder).__module__ == "my_colours"


# --- from a recipe to a hit ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("colours"))


@pytest.fixture(scope="module")
def trained(manifest, tmp_path_factory) -> Path:
    """A model trained by a recipe."""
    from gare.train import RunConfig, train

    with as_it_was(ENCODERS):
        ENCODERS.register("colours", ColourEncoder)
        values = recipe(manifest, epochs=80, batch_size=8)
        values["model"] = {
            **page_settings(),
            "temporal": {"num_layers": 0},
            "interaction": {"name": "text_conditioned", "pooling_temperature": 0.1},
            "temperature": {"value": 0.05},
        }
        values["optimizer"] = {"learning_rate": 1e-2, "image_learning_rate": 1e-2, "text_learning_rate": 1e-2}
        folder = tmp_path_factory.mktemp("runs")
        train(RunConfig.load(values), folder / "run", device=CPU)
    return folder / "run" / "last"


def test_it_learns_by_a_recipe(trained):
    lines = [json.loads(line) for line in (trained.parent / "metrics.jsonl").read_text().splitlines()]
    losses = [line["term/contrastive"] for line in lines if "term/contrastive" in line]
    assert losses[-1] < 0.3 * losses[0]
    torch.manual_seed(0)
    model = GARE.from_pretrained(trained)
    fresh = GARE(model.config).encoder
    assert torch.equal(model.encoder.palette, fresh.palette)
    for name, parameter in model.encoder.named_parameters():
        assert not torch.equal(parameter, fresh.get_parameter(name)), name


def test_its_parts_learn_at_their_own_rates():
    from gare.train.optimizers import parameter_groups
    from gare.train.run_config import OptimizerConfig

    config = OptimizerConfig(learning_rate=1e-3, image_learning_rate=1e-6, text_learning_rate=1e-5)
    groups = parameter_groups(build(), config)
    rates = {name: group["lr"] for group in groups for name in group["names"]}
    assert rates["encoder.words.weight"] == 1e-5
    assert rates["encoder.image_projection.weight"] == 1e-3
    assert "encoder.palette" not in rates


def evaluate_arguments(trained, manifest) -> list[str]:
    options = ["--frames", 3, "--device", "cpu", "--selected-on", "none", "--json"]
    return list(map(str, ["evaluate", trained, "--data", manifest, *options]))


def recall_at_1(printed: str) -> float:
    return json.loads(printed)["text_to_video"]["by_ties"]["pessimistic"]["recall_at_1"]


def test_it_is_evaluated_by_the_command(trained, manifest):
    from gare.cli.main import app

    done = CliRunner().invoke(app, evaluate_arguments(trained, manifest))
    assert done.exit_code == 0, done.output
    assert recall_at_1(done.stdout) >= 0.75


def test_a_process_that_only_has_the_package_evaluates_it(trained, manifest, tmp_path):
    install(tmp_path, "my_colours", blocks(PAGE, "python")[0], page_points())
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "gare", *evaluate_arguments(trained, manifest)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert recall_at_1(done.stdout) >= 0.75


def picture(colour: str) -> Image.Image:
    red, green, blue = colorsys.hsv_to_rgb(COLOURS.index(colour) / len(COLOURS), 1.0, 1.0)
    return Image.new("RGB", (64, 48), (int(255 * red), int(255 * green), int(255 * blue)))


def test_a_library_finds_the_clip_and_the_moment_of_a_colour(trained, tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    for name, colours in {"a.mp4": ["red", "azure"], "b.mp4": ["purple", "yellow"]}.items():
        shown = [picture(colour) for colour in colours for _ in range(30)]
        write_video(videos / name, steady(6), pictures=shown)
    with gare.Library.open(tmp_path / "library", model=trained) as library:
        report = library.index(videos)
        assert (report.new, report.failed) == (2, 0)
        for colour, name, start in (("red", "a.mp4", 0), ("azure", "a.mp4", 3), ("yellow", "b.mp4", 3)):
            hit, other = library.search(f"{colour} light", top=2, explain=True)
            assert Path(hit.path).name == name, colour
            assert start <= hit.moment <= start + 3, colour
            assert hit.score > other.score
            assert hit.explanation.rank == 1
        (hit, *_) = library.search(image=picture("azure"), top=1)
        assert Path(hit.path).name == "a.mp4"


def test_it_is_analysed(trained, manifest, tmp_path):
    from gare.cli.main import app

    arguments = ["analyze", trained, "--data", manifest.parent, "--frames", 3, "--device", "cpu"]
    only = ["--out", tmp_path / "report", "--only", "geometry,efficiency"]
    done = CliRunner().invoke(app, list(map(str, [*arguments, *only])))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report" / "report.html").is_file()

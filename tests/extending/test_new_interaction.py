"""An interaction of one's own, written here alone and in docs/how-to/add-an-interaction.md: MaxSim.

It has weights. It is registered, trained, evaluated, indexed and searched with, and analysed like any other:
once by a line of Python, once as an installed package.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import gare
from clips import steady, write_video
from features import variants
from gare import (
    GARE,
    INTERACTIONS,
    FrameWeights,
    GareConfig,
    Interaction,
    PairScores,
    TextFeatures,
    VideoFeatures,
)
from gare.errors import CheckpointError, ConfigError
from gare.interaction import InteractionConfig, ScoreCards, features_of
from gare.interaction.pooled_cosine import PooledCosine, PooledCosineConfig
from gare.settings import PositiveInt
from interaction_laws import LAWS, random_scene
from strangers import as_it_was, blocks, install, installed
from toy_data import recipe, write_dataset

PAGE = "add-an-interaction.md"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class MaxSimConfig(InteractionConfig):
    """Each word finds its best frame."""

    name: Literal["maxsim"] = "maxsim"
    width: PositiveInt = 32
    """Words and frames are compared in so many dimensions."""


class MaxSim(Interaction):
    """The mean over words of the largest cosine with a frame (MeanMaxSim of Video-ColBERT)."""

    Config = MaxSimConfig
    reads_words = True

    def __init__(self, config: MaxSimConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.projection = nn.Linear(dim, config.width, bias=False)

    def score_pairs(self, text: TextFeatures, video: VideoFeatures) -> PairScores:
        self.check(text, video)
        best_TWV = self._cosines(text, video).amax(dim=-1)
        return PairScores(torch.einsum("twv,tw->tv", best_TWV, word_shares(text)), None)

    def frame_weights(self, text: TextFeatures, video: VideoFeatures | ScoreCards) -> FrameWeights:
        """The share of the words that chose each frame."""
        cosines_TWVF = self._cosines(text, features_of(video))
        chosen_TWVF = F.one_hot(cosines_TWVF.argmax(dim=-1), cosines_TWVF.shape[-1])
        shares_TW = word_shares(text)
        return FrameWeights(torch.einsum("twvf,tw->tvf", chosen_TWVF.to(shares_TW.dtype), shares_TW))

    def _cosines(self, text: TextFeatures, video: VideoFeatures) -> Tensor:
        """Every word with every frame, [T, W, V, F]; −inf where a frame is padding."""
        words_TWE = self._unit(text.words_TWD, text.mask_TW)
        frames_VFE = self._unit(video.frames_VFD, video.mask_VF)
        cosines_TWVF = torch.einsum("twe,vfe->twvf", words_TWE, frames_VFE)
        return cosines_TWVF.masked_fill(~video.mask_VF, float("-inf"))

    def _unit(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens projected, at length one; padding may hold anything, so it becomes zero first."""
        return F.normalize(self.projection(tokens.masked_fill(~mask[..., None], 0)), dim=-1)


def word_shares(text: TextFeatures) -> Tensor:
    """One over the number of words of each text, zero on padding, [T, W]."""
    mask_TW = text.mask_TW.to(text.words_TWD.dtype)
    return mask_TW / mask_TW.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class SharpPoolingConfig(PooledCosineConfig):
    """Text-conditioned pooling whose sharpness is learned."""

    name: Literal["sharp"] = "sharp"


class SharpPooling(PooledCosine):
    """Softmax over the frames of t·f times a learned number."""

    Config = SharpPoolingConfig
    same_for_every_text = False

    def __init__(self, config: SharpPoolingConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.log_sharpness = nn.Parameter(torch.zeros(()))

    def weights(self, logits_VFT: Tensor, mask_VF: Tensor) -> Tensor:
        logits_VFT = logits_VFT * self.log_sharpness.exp()
        return logits_VFT.masked_fill(~mask_VF[..., None], float("-inf")).softmax(dim=1)


@pytest.fixture(autouse=True)
def registered():
    with as_it_was(INTERACTIONS):
        INTERACTIONS.register("maxsim", MaxSim)
        INTERACTIONS.register("sharp", SharpPooling)
        yield


def build(**interaction) -> GARE:
    torch.manual_seed(0)
    values = {"encoder": {"name": "tiny"}, "temporal": {"num_layers": 1}, "interaction": interaction}
    return GARE(GareConfig.load(values)).eval()


# --- the page -----------------------------------------------------------------------------------------------


def test_the_page_shows_this_code_and_its_lines_run(tmp_path, monkeypatch):
    own, *rest = blocks(PAGE, "python")
    for part in (MaxSimConfig, MaxSim, word_shares):
        assert inspect.getsource(part) in own
    pooling = next(code for code in rest if "class SharpPooling" in code)
    for part in (SharpPoolingConfig, SharpPooling):
        assert inspect.getsource(part) in pooling
    monkeypatch.chdir(tmp_path)
    names = dict(globals())
    for code in rest:
        if code is not pooling:
            exec(compile(code, PAGE, "exec"), names)


def page_settings() -> dict:
    """The lines of a recipe that the page shows."""
    (own,) = (block for block in blocks(PAGE, "toml") if "[model.interaction]" in block)
    return tomllib.loads(own)["model"]["interaction"]


def page_points() -> str:
    (own,) = (block for block in blocks(PAGE, "toml") if "entry-points" in block)
    (points,) = tomllib.loads(own)["project"]["entry-points"].values()
    return "[gare.interactions]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())


# --- the laws, settings, files ------------------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [MaxSimConfig, SharpPoolingConfig])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_it_keeps_the_laws_of_all_interactions(law, config_class):
    @settings(max_examples=10)
    @given(st.integers(0, 2**31 - 1), st.sampled_from(variants(config_class)))
    def check(seed, config):
        law(random_scene(seed, config))

    check()


def test_its_settings_are_checked_like_any_others():
    assert GareConfig.load({"interaction": {"name": "maxsim"}}).interaction == MaxSimConfig()
    config = GareConfig.load({"interaction": {"name": "maxsim"}}, ["interaction.width=8"])
    assert config.interaction.width == 8
    assert GareConfig.load(config.to_values()) == config
    with pytest.raises(ConfigError, match=r"interaction\.width: must be at least 1, not 0"):
        GareConfig.load({"interaction": {"name": "maxsim", "width": 0}})
    with pytest.raises(ConfigError, match=r"unknown key 'interaction\.heads'; known here: name, width"):
        GareConfig.load({"interaction": {"name": "maxsim", "heads": 2}})
    with pytest.raises(ConfigError, match=r"'token_wise' or .* or 'maxsim' or 'sharp', not 'maxsin'"):
        GareConfig.load({"interaction": {"name": "maxsin"}})


def test_a_saved_model_comes_back_where_it_is_registered_and_says_so_where_it_is_not(tmp_path):
    model = build(name="maxsim", width=8)
    model.save_pretrained(tmp_path / "model")
    again = GARE.from_pretrained(tmp_path / "model")
    assert again.fingerprint() == model.fingerprint()
    assert again.interaction.projection.weight.shape == (8, 16)
    text = model.encode_text(["a dog", "rain on a window"])
    video = VideoFeatures(torch.randn(3, 4, 16), torch.ones(3, 4, dtype=torch.bool))
    assert torch.equal(again.score(text, again.score_cards(video)), model.score(text, video))
    with as_it_was(INTERACTIONS):
        INTERACTIONS._entries.pop("maxsim")
        with pytest.raises(CheckpointError, match=r"must be 'gare' or .* not 'maxsim'"):
            GARE.from_pretrained(tmp_path / "model")


def test_as_an_installed_package_it_needs_no_line_of_python(tmp_path):
    with as_it_was(INTERACTIONS):
        INTERACTIONS._entries.pop("maxsim")
        with installed(tmp_path, "my_maxsim", blocks(PAGE, "python")[0], page_points()):
            assert "maxsim" in INTERACTIONS
            model = build(name="maxsim")
            assert type(model.interaction).__module__ == "my_maxsim"


# --- from a recipe to a hit ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("colours"))


@pytest.fixture(scope="module")
def trained(manifest, tmp_path_factory) -> dict[str, Path]:
    """A model of each interaction, trained by a recipe."""
    from gare.train import RunConfig, train

    models = {}
    with as_it_was(INTERACTIONS):
        INTERACTIONS.register("maxsim", MaxSim)
        INTERACTIONS.register("sharp", SharpPooling)
        for interaction in (page_settings(), {"name": "sharp"}):
            values = recipe(manifest, epochs=60, batch_size=8)
            values["model"] = {**values["model"], "interaction": interaction}
            folder = tmp_path_factory.mktemp(interaction["name"])
            config = RunConfig.load(values)
            train(config, folder / "run", device=CPU)
            models[interaction["name"]] = folder / "run" / "last"
            assert RunConfig.load(folder / "run" / "config.toml") == config
    return models


@pytest.mark.parametrize(("name", "weight"), [("maxsim", "projection.weight"), ("sharp", "log_sharpness")])
def test_it_learns_by_a_recipe(trained, name, weight):
    run = trained[name].parent
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["term/contrastive"] for line in lines if "term/contrastive" in line]
    assert losses[-1] < 0.5 * losses[0]
    torch.manual_seed(0)
    model = GARE.from_pretrained(trained[name])
    fresh = GARE(model.config).interaction.get_parameter(weight)
    assert not torch.equal(model.interaction.get_parameter(weight), fresh)


def evaluate_arguments(model: Path, manifest: Path) -> list[str]:
    options = ["--frames", 3, "--device", "cpu", "--selected-on", "none", "--json"]
    return list(map(str, ["evaluate", model, "--data", manifest, *options]))


def recall_at_1(printed: str) -> float:
    return json.loads(printed)["text_to_video"]["by_ties"]["pessimistic"]["recall_at_1"]


@pytest.mark.parametrize("name", ["maxsim", "sharp"])
def test_it_is_evaluated_by_the_command(trained, manifest, name):
    from gare.cli.main import app

    done = CliRunner().invoke(app, evaluate_arguments(trained[name], manifest))
    assert done.exit_code == 0, done.output
    assert recall_at_1(done.stdout) >= 0.75


def test_a_process_that_only_has_the_package_evaluates_it(trained, manifest, tmp_path):
    install(tmp_path, "my_maxsim", blocks(PAGE, "python")[0], page_points())
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "gare", *evaluate_arguments(trained["maxsim"], manifest)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert recall_at_1(done.stdout) >= 0.75


@pytest.mark.parametrize("name", ["maxsim", "sharp"])
def test_a_library_is_indexed_and_searched_with_it(trained, tmp_path, name):
    (tmp_path / "videos").mkdir()
    for number in range(3):
        write_video(tmp_path / "videos" / f"{number}.mp4", steady(4 + number))
    with gare.Library.open(tmp_path / "library", model=trained[name]) as library:
        report = library.index(tmp_path / "videos")
        assert (report.new, report.failed) == (3, 0)
        hits = library.search("red light", top=3, explain=True)
        every = library.search("red light", top=3, exhaustive=True)
        assert [hit.id for hit in hits] == [hit.id for hit in every]
        for hit in hits:
            assert hit.start <= hit.moment <= hit.end
            assert sum(hit.frame_weights) == pytest.approx(1, abs=1e-3)
            assert hit.explanation.radius is None
            assert hit.explanation.plain_score == pytest.approx(hit.score, abs=1e-5)
        model = GARE.from_pretrained(trained[name])
        by_hand = model.score(model.encode_text(["red light"]), model.encode_video([hits[0].path]))
        assert hits[0].score == pytest.approx(by_hand.item(), abs=2e-3)  # stored frames are float16


def test_it_is_analysed_as_far_as_it_has_vectors(trained, manifest, tmp_path):
    """MaxSim has no single vector for a video: what it costs can be told, the geometry of pairs cannot."""
    from gare.cli.main import app

    def analyze(name, *options):
        arguments = ["analyze", trained[name], "--data", manifest.parent, "--frames", 3, "--device", "cpu"]
        return CliRunner().invoke(app, [*map(str, arguments), "--out", str(tmp_path / name), *options])

    done = analyze("sharp", "--only", "geometry,efficiency")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "sharp" / "report.html").is_file()
    done = analyze("maxsim", "--only", "efficiency")
    assert done.exit_code == 0, done.output
    done = analyze("maxsim", "--only", "geometry", "--force")
    said = done.output + str(done.exception) + (tmp_path / "maxsim" / "report.html").read_text()
    assert "no single vector for a video" in said

"""What version 0.1 wrote opens, scores as it did, and goes on. That version made `tests/assets/v0.1`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clips import steady, write_video
from gare import GARE, GareConfig, Library, VideoFeatures
from gare.errors import LibraryError
from gare.evaluate.evaluation_results import EvaluationResult
from gare.model.version_0_1 import upgraded_state
from gare.train import RunConfig, train
from toy_data import write_dataset

ASSETS = Path(__file__).parents[1] / "assets" / "v0.1"
MODELS = sorted(path.name for path in (ASSETS / "models").iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_scores_as_it_did(name, tmp_path):
    folder = ASSETS / "models" / name
    expected, facts = (
        load_file(folder / "expected.safetensors"),
        json.loads((folder / "expected.json").read_text()),
    )
    model = GARE.from_pretrained(folder)
    text = model.encode_text(facts["texts"])
    video = VideoFeatures(expected["frames"], expected["mask"])
    torch.testing.assert_close(text.text_TD, expected["text"])
    for scores_TV in (model.score(text, video), model.score(text, video, method="dense")):
        torch.testing.assert_close(scores_TV, expected["scores"], atol=1e-6, rtol=0)
    weights = model.frame_weights(text, video).pool_TVF
    torch.testing.assert_close(weights, expected["frame_weights"], atol=1e-6, rtol=0)
    assert model.is_known_as(facts["fingerprint"])
    assert not model.is_known_as("0" * 32)
    model.save_pretrained(tmp_path)  # in today's form, it is the same model
    again = GARE.from_pretrained(tmp_path)
    assert again.fingerprint() == model.fingerprint()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"backbone": {"family": "tiny", "dim": 8}}, {"encoder": {"name": "tiny", "dim": 8}}),
        ({"increment": {"enabled": False}}, {"interaction": {"name": "mean"}}),
        (
            {"increment": {"enabled": False, "dropout": 0.1}, "interaction": {"pooling": "text_conditioned"}},
            {"interaction": {"name": "text_conditioned"}},
        ),
        (
            {"increment": {"enabled": False, "num_heads": 2}, "interaction": {"pooling": "cross_attention"}},
            {"interaction": {"name": "xpool", "num_heads": 2}},
        ),
        ({"interaction": {"pooling": "token_wise"}}, {"interaction": {"name": "token_wise"}}),
        (
            {"increment": {"dropout": 0.0}, "interaction": {"context": "words"}},
            {"interaction": {"name": "gare", "dropout": 0.0, "context": "words"}},
        ),
        (
            {"preset": "released", "increment": {"enabled": False}},
            {
                "preset": "released",
                "interaction": {"name": "text_conditioned", "mask_frames": False, "pooling_temperature": 3.0},
            },
        ),
        (
            {"backbone": {"family": "mini", "skipped_blocks": 0.2}},
            {"encoder": {"name": "mini", "stochastic_depth": 0.2}},
        ),
    ],
)
def test_old_settings_mean_what_they_meant(old, new):
    assert GareConfig.load(old) == GareConfig.load(new)


def test_a_library_opens_searches_as_it_did_and_takes_more(tmp_path):
    library_folder = tmp_path / "library"
    shutil.copytree(ASSETS / "library", library_folder)
    expected = json.loads((ASSETS / "library.json").read_text())
    with Library.open(library_folder, model=ASSETS / "models" / "gare") as library:
        hits = library.search("a red light", top=3)
        assert [Path(hit.path).name for hit in hits] == [fact["name"] for fact in expected]
        for hit, fact in zip(hits, expected, strict=True):
            assert hit.score == pytest.approx(fact["score"], abs=1e-6)
            assert hit.moment == fact["moment"]
            assert hit.frame_weights == pytest.approx(fact["frame_weights"])
        (tmp_path / "more").mkdir()
        write_video(tmp_path / "more" / "new.mp4", steady(2.7))  # the library has one of two seconds
        report = library.index(tmp_path / "more")
        assert (report.new, report.deleted) == (1, 0)
        assert len(library) == 4


def test_results_are_read_and_written_again_as_they_were(tmp_path):
    """Twelve captions of eight videos, with both ways of rescoring."""
    stored = ASSETS / "results" / "results.json"
    result = EvaluationResult.read(stored)
    assert result.gare_version == "0.1.0"
    assert [one.rescoring for one in result.rescored] == ["dsl", "qb_norm"]
    ranks = torch.tensor(result.text_to_video.ranks)
    assert result.text_to_video.main.recall_at_1 == pytest.approx((ranks == 1).float().mean().item())
    result.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(stored.read_text())


def test_a_library_of_another_model_is_still_refused(tmp_path):
    shutil.copytree(ASSETS / "library", tmp_path / "library")
    with pytest.raises(LibraryError, match="made by"):
        Library.open(tmp_path / "library", model=ASSETS / "models" / "baseline_mean")


@pytest.mark.parametrize("name", ["gare", "xpool_preload"])
def test_a_training_run_goes_on_where_it_was(name, tmp_path):
    """Stopped after three of six steps by version 0.1; the end is that of its own uninterrupted run."""
    run = tmp_path / "run"
    shutil.copytree(ASSETS / "training" / name, run)
    manifest = write_dataset(tmp_path / "data")
    config_file = run / "config.toml"
    config_file.write_text(config_file.read_text().replace("MANIFEST", str(manifest)))
    train(RunConfig.load(config_file), run, resume=True)
    model = GARE.from_pretrained(run / "last")
    expected = load_file(run / "last-of-an-uninterrupted-run.safetensors")
    weights = upgraded_state(expected, model.config.interaction.name)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(
            tensor, weights[key], atol=1e-6, rtol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )

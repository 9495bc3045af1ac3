"""A model's card has its results as the hub reads them, and no others."""

from __future__ import annotations

import json

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from typer.testing import CliRunner

from gare import GARE, GareConfig
from gare.cli.main import app
from gare.errors import CheckpointError, EvaluationError
from gare.evaluate.evaluation_results import EvaluationResult
from gare.model.model_card import CardResult, read_results
from gare.train import RunConfig, train
from toy_data import recipe, write_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short real training run: its folder, and the folder of its data."""
    folder = tmp_path_factory.mktemp("run")
    manifest = write_dataset(folder / "data")
    train(RunConfig.load(recipe(manifest, epochs=1)), folder / "run", device=torch.device("cpu"))
    return folder


@pytest.fixture
def saved(run, tmp_path):
    """A copy of the best model, and results.json of it."""
    model = GARE.from_pretrained(run / "run/best")
    model.card_results = ()
    model.save_pretrained(tmp_path / "model")
    done = gare("evaluate", tmp_path / "model", "--data", run / "data", "--frames", 3, "--selected-on", "val",
                "--rescore", "dsl", "--out", tmp_path / "results.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    return tmp_path


def gare(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def values_of(card: ModelCard, task: str, config: str | None = None) -> dict[str, float]:
    return {
        each.metric_type: each.metric_value
        for each in card.data.eval_results
        if (each.task_type, each.dataset_config) == (task, config)
    }


def test_a_trained_model_has_what_selected_it_on_its_card(run):
    card = ModelCard.load(run / "run/best/README.md")
    logged = [json.loads(line) for line in (run / "run/metrics.jsonl").read_text().splitlines()]
    measured = next(line for line in reversed(logged) if "split" in line)
    for direction, task in {
        "text_to_video": "text-to-video-retrieval",
        "video_to_text": "video-to-text-retrieval",
    }.items():
        found = values_of(card, task)
        assert len(found) == 6
        for name, value in found.items():
            assert value == pytest.approx(measured[f"{direction}/{name}"], abs=1e-6)
    each = card.data.eval_results[0]
    assert (each.dataset_name, each.dataset_split) == ("colours", "val")
    assert each.dataset_args["selected_on"] == "val"
    assert each.dataset_args["ties"] == "pessimistic"
    assert card.data.library_name == "gare"
    assert "| colours | val |" in card.text
    index = eval_results_to_model_index(card.data.model_name, card.data.eval_results)
    assert model_index_to_eval_results(index)[1] == card.data.eval_results


def test_the_last_model_of_a_run_claims_nothing(run):
    card = ModelCard.load(run / "run/last/README.md")
    assert card.data.eval_results is None
    assert "Nothing was measured" in card.text


def test_results_are_written_into_a_card(saved):
    done = gare("card", saved / "model", saved / "results.json")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(saved / "model/README.md")
    card = ModelCard.load(saved / "model/README.md")
    result = EvaluationResult.read(saved / "results.json")
    found = values_of(card, "text-to-video-retrieval")
    assert found["recall_at_1"] == pytest.approx(result.text_to_video.main.recall_at_1, abs=1e-6)
    rescored = values_of(card, "video-to-text-retrieval", "dsl")
    assert rescored["mean_rank"] == pytest.approx(result.rescored[0].video_to_text.main.mean_rank, abs=1e-6)
    again = gare("card", saved / "model", saved / "results.json")
    assert again.exit_code == 0
    assert len(ModelCard.load(saved / "model/README.md").data.eval_results) == 24  # not twice


def test_results_go_with_the_model_until_its_weights_change(saved, monkeypatch):
    gare("card", saved / "model", saved / "results.json")
    model = GARE.from_pretrained(saved / "model")
    model.save_pretrained(saved / "copy")
    assert read_results(saved / "copy") == read_results(saved / "model") != ()
    pushed = {}

    def upload(self, *, repo_id, folder_path, **_):
        pushed[repo_id] = read_results(folder_path)
        return "commit"

    class Created:
        repo_id = "me/model"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, **_: Created)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    model.push_to_hub("me/model")
    assert pushed == {"me/model": read_results(saved / "model")}
    with torch.no_grad():
        model.log_logit_scale += 1
    model.save_pretrained(saved / "changed")
    assert read_results(saved / "changed") == ()


def test_results_of_other_weights_are_refused_and_nothing_changes(saved):
    model = GARE.from_pretrained(saved / "model")
    with torch.no_grad():
        model.log_logit_scale += 1
    model.save_pretrained(saved / "other")
    before = (saved / "other/README.md").read_bytes()
    done = gare("card", saved / "other", saved / "results.json")
    assert isinstance(done.exception, EvaluationError)
    assert "was measured with other weights" in str(done.exception)
    assert (saved / "other/README.md").read_bytes() == before
    assert isinstance(gare("card", saved / "none", saved / "results.json").exception, CheckpointError)
    assert isinstance(gare("card", saved / "model", saved / "none.json").exception, EvaluationError)


def test_what_somebody_wrote_stays(saved):
    theirs = """---
license: mit
tags: [mine]
model-index:
- name: my model
  results:
  - task: {type: classification}
    dataset: {type: d, name: D}
    metrics: [{type: accuracy, value: 0.5}]
---
# My model

<!-- results of gare -->
old
<!-- end of results -->

My words | stay.
"""
    path = saved / "model/README.md"
    path.write_text(theirs)
    assert gare("card", saved / "model", saved / "results.json").exit_code == 0
    card = ModelCard.load(path)
    assert (card.data.license, card.data.tags, card.data.model_name) == ("mit", ["mine"], "my model")
    assert values_of(card, "classification") == {"accuracy": 0.5}
    assert len(values_of(card, "text-to-video-retrieval")) == 6
    assert "My words | stay." in card.text
    assert "\nold\n" not in card.text
    assert "| colours | test |" in card.text
    path.write_text("plain words, no metadata\n")
    assert gare("card", saved / "model", saved / "results.json").exit_code == 0
    assert "plain words, no metadata" in ModelCard.load(path).text
    path.write_text("---\na: [1\n---\n")
    done = gare("card", saved / "model", saved / "results.json")
    assert isinstance(done.exception, CheckpointError)
    assert path.read_text() == "---\na: [1\n---\n"
    GARE.from_pretrained(saved / "model")  # it does not keep the model from being loaded


def test_results_given_by_hand(tmp_path):
    model = GARE(GareConfig.load({"encoder": {"name": "tiny"}})).eval()
    facts = {"fingerprint": model.fingerprint(), "selected_on": "none"}
    result = CardResult("My | set", "test", "text_to_video", {"recall_at_1": 0.25}, facts)
    model.save_pretrained(tmp_path, model_card_kwargs={"results": [result]})
    assert read_results(tmp_path) == (result,)
    assert GARE.from_pretrained(tmp_path).card_results == (result,)

"""Every baseline from a recipe to results.json, and QB-Norm beside it, through the command line."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from gare import GARE
from gare.cli.main import app
from gare.data.loader import FrameSource
from gare.errors import EvaluationError
from gare.evaluate.model_evaluation import encode_gallery, evaluate_model
from gare.train import RunConfig, train
from toy_data import recipe, write_dataset
from warm import run_gare as run

CPU = torch.device("cpu")


def settings(manifest, pooling, **changes):
    values = recipe(manifest, **changes)
    values["model"] = {
        **values["model"],
        "interaction": {"pooling": pooling},
        "increment": {"enabled": False},
    }
    return values


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("colours"))


@pytest.fixture(scope="module")
def trained(manifest, tmp_path_factory):
    config = RunConfig.load(settings(manifest, "cross_attention", epochs=1))
    return train(config, tmp_path_factory.mktemp("runs") / "run", device=CPU)


@pytest.mark.parametrize("pooling", ["mean", "text_conditioned", "cross_attention", "token_wise"])
def test_a_baseline_learns_and_is_evaluated(manifest, tmp_path, pooling):
    config = RunConfig.load(
        settings(manifest, pooling, epochs=40, batch_size=8, chunk_size=4, evaluate_every=20)
    )
    best = train(config, tmp_path / "run", device=CPU)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["term/contrastive"] < 0.5 * steps[0]["term/contrastive"]
    result, scored = evaluate_model(
        GARE.from_pretrained(best), FrameSource.open(manifest, 3), "test", selected_on="val"
    )
    assert scored.scores_TV.shape == (8, 8)
    assert result.text_to_video.main.recall_at_1 >= 0.75
    assert result.rescored == ()


def test_the_table_of_baselines_runs_by_name(manifest, tmp_path):
    (tmp_path / "recipe.toml").write_text(RunConfig.load(recipe(manifest, epochs=1)).to_toml())
    done = run(
        "ablate", "baselines", "--recipe", tmp_path / "recipe.toml", "--out", tmp_path / "out",
        "--seeds", 1, "--device", "cpu",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "table.json").read_text())["rows"]
    assert [row["name"].split()[0] for row in rows] == [
        "mean", "text-conditioned", "cross-attention", "token-wise", "GARE,", "GARE",
    ]  # fmt: skip


def test_unknown_names_list_the_known_ones(tmp_path):
    for arguments, known in (
        (["train", "nothing", "--out", tmp_path], "msrvtt_frames_mini"),
        (["ablate", "nothing", "--recipe", "own_csv", "--out", tmp_path], "baselines"),
    ):
        done = run(*arguments)
        assert done.returncode == 1
        assert known in done.stderr
        assert "Traceback" not in done.stderr
    for verb, known in (("train", "msrvtt9k_released"), ("ablate", "baselines")):
        assert known in "".join(run(verb, "--help").stdout.replace("│", "").split())


def test_qbnorm_is_a_labelled_result_of_its_own(manifest, trained, tmp_path):
    evaluate = ["evaluate", trained, "--data", manifest, "--frames", 3, "--device", "cpu"]
    done = run(
        *evaluate, "--rescore", "qbnorm", "--querybank", f"{manifest}:val", "--out", tmp_path / "results.json"
    )
    assert done.returncode == 0, done.stderr
    plain, rescored = done.stdout.split("Rescored in the light of other queries")
    assert "QB-Norm" not in plain
    assert "Query bank: colours:val, 8 queries." in rescored
    assert "text→video, rescored: QB-Norm" in rescored
    assert "video→text" not in rescored  # the bank holds texts
    saved = json.loads((tmp_path / "results.json").read_text())
    assert (saved["rescoring"], saved["rescored"][0]["rescoring"]) == ("none", "qb_norm")
    assert saved["rescored"][0]["querybank"] == "colours:val, 8 queries"
    assert saved["rescored"][0]["video_to_text"] == saved["video_to_text"]
    assert json.loads(run(*evaluate, "--json").stdout)["text_to_video"] == saved["text_to_video"]


def test_qbnorm_scores_the_bank_against_the_gallery(manifest, trained):
    """The command's numbers are those of the formula on scores made by hand."""
    from gare.evaluate import QueryBank, querybank_norm, retrieval_metrics

    model, source = GARE.from_pretrained(trained), FrameSource.open(manifest, 3)
    bank = QueryBank("hand", ("red sky", "a pink and teal thing", "lime"))
    result, scored = evaluate_model(
        model, source, "test", selected_on="val", rescoring="qb_norm", querybank=bank
    )
    with torch.no_grad():
        videos = encode_gallery(model, source, "test")
        bank_scores = torch.cat([model.score(model.encode_text([query]), videos) for query in bank.queries])
    expected = retrieval_metrics(querybank_norm(scored.scores_TV, bank_scores), scored.video_of_text)
    assert list(result.rescored[0].text_to_video.ranks) == expected.ranks.tolist()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--rescore", "qbnorm"], 1, "QB-Norm and a query bank go together"),
        (["--querybank", "{data}:val"], 1, "QB-Norm and a query bank go together"),
        (["--rescore", "qbnorm", "--querybank", "{data}:train"], 1, "that leaks"),
        (["--rescore", "qbnorm", "--querybank", "{data}:test"], 1, "that leaks"),
        (
            ["--rescore", "qbnorm", "--querybank", "{data}:train", "--drop-overlap"],
            1,
            "every query of the bank",
        ),
        (["--rescore", "qbnorm", "--querybank", "nowhere"], 1, "there is no query bank at nowhere"),
        (["--rescore", "hungarian"], 2, "is not one of none, dsl, qbnorm"),
        (["--protocol", "best"], 2, "is not one of max_caption, any_caption, one_caption"),
    ],
)
def test_banks_that_are_missing_or_leak_are_refused(manifest, trained, arguments, code, message):
    arguments = [argument.format(data=manifest) for argument in arguments]
    done = CliRunner().invoke(
        app,
        ["evaluate", str(trained), "--data", str(manifest), "--frames", "3", "--device", "cpu", *arguments],
    )
    if code == 1:
        assert isinstance(done.exception, EvaluationError)
        assert message in str(done.exception)
    else:
        assert done.exit_code == code
        assert message in " ".join(done.stderr.replace("│", " ").split())

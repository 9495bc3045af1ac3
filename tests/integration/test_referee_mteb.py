"""What MTEB itself writes is read: its predictions as scores, its result file as reported numbers."""

from __future__ import annotations

import json

import datasets
import mteb
import pytest
import torch
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from typer.testing import CliRunner

from gare.cli.main import app
from gare.evaluate.protocol_grid import Protocol, ProtocolGrid
from gare.evaluate.reported_numbers import read_mteb_result
from gare.evaluate.score_files import read_scores
from gare.evaluate.score_table import table_of_matrix
from gare.evaluate.trec_files import write_qrels


class LocalTask(AbsTaskRetrieval):
    """Texts and documents that stand for videos; nothing is downloaded."""

    metadata = TaskMetadata(
        type="Retrieval",
        name="GareRefereeRetrieval",
        main_score="ndcg_at_10",
        description="Scores of a test.",
        dataset={"path": "local", "revision": "1"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        date=("2025-01-01", "2025-01-01"),
        domains=[],
        task_subtypes=[],
        license="cc0-1.0",
        annotations_creators="derived",
        dialect=[],
        sample_creation="created",
        bibtex_citation="",
        category="t2t",
        modalities=["text"],
    )

    def __init__(self, table):
        super().__init__()
        rows = [
            datasets.Dataset.from_dict({"id": list(ids), "text": list(ids)})
            for ids in (table.text_ids, table.video_ids)
        ]
        right = {
            text: {table.video_ids[column]: 1}
            for text, column in zip(table.text_ids, table.video_T.tolist(), strict=True)
        }
        split = {"queries": rows[0], "corpus": rows[1], "relevant_docs": right, "top_ranked": None}
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


class ScoresOfTable:
    """A search model of MTEB that answers with the scores of a table."""

    def __init__(self, table):
        self.table = table
        self.mteb_model_meta = ModelMeta.create_empty({"name": "test/table", "revision": "1"})

    def index(self, corpus, **_):
        pass

    def search(self, queries, **_):
        rows = zip(self.table.text_ids, self.table.scores_TV.tolist(), strict=True)
        return {text: dict(zip(self.table.video_ids, row, strict=True)) for text, row in rows}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Predictions, result and qrels of a task whose scores tie often."""
    folder = tmp_path_factory.mktemp("mteb")
    generator = torch.Generator().manual_seed(3)
    scores_TV = torch.randint(0, 8, (24, 12), generator=generator) / 8
    table = table_of_matrix(
        scores_TV,
        video_of_text=torch.arange(24) % 12,
        text_ids=[f"q{number}" for number in range(24)],
        video_ids=[f"d{number}" for number in range(12)],
    )
    result = mteb.evaluate(
        ScoresOfTable(table),
        LocalTask(table),
        cache=None,
        co2_tracker=False,
        show_progress_bar=False,
        prediction_folder=folder,
    )
    result.task_results[0].to_disk(folder / "result.json")
    write_qrels(table, folder / "qrels.txt")
    return folder, table


def test_predictions_are_scores(files):
    folder, table = files
    (predictions,) = folder.glob("*_predictions.json")
    again = read_scores(predictions, qrels=folder / "qrels.txt")
    for ties in ("pessimistic", "optimistic", "trec"):
        protocol = Protocol(ties=ties)
        assert ProtocolGrid(again).measure(protocol).ranks.equal(ProtocolGrid(table).measure(protocol).ranks)


def test_its_numbers_are_explained_by_its_tie_rule(files):
    folder, _ = files
    names = {str(each.measure) for each in read_mteb_result(folder / "result.json").numbers["text_to_video"]}
    assert {"nDCG@10", "R@1", "R@5", "R@10"} <= names
    (predictions,) = folder.glob("*_predictions.json")
    arguments = ["compare", predictions, folder / "result.json", "--qrels", folder / "qrels.txt", "--json"]
    outcome = CliRunner().invoke(app, [*map(str, arguments), "--changes", "1"])
    assert json.loads(outcome.stdout)["text_to_video"]["explained_by"] == [{"ties": "trec"}]

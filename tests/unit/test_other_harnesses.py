"""ranx, torchmetrics and trec_eval say the same of the same scores, on every measure they share with us."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import pytrec_eval
import torch
from torchmetrics.functional.retrieval import (
    retrieval_average_precision,
    retrieval_hit_rate,
    retrieval_normalized_dcg,
    retrieval_recall,
    retrieval_reciprocal_rank,
)

from gare.evaluate.named_measures import Measure
from gare.evaluate.protocol_grid import Protocol, ProtocolGrid
from gare.evaluate.score_table import table_of_matrix
from gare.evaluate.trec_files import write_qrels, write_run
from servers import HANG_S

CUTOFFS = (1, 3, 5, 10, 50)
RANX = """
import json, sys
from ranx import Qrels, Run, evaluate
qrels, run = Qrels.from_file(sys.argv[1], kind="trec"), Run.from_file(sys.argv[2], kind="trec")
print(json.dumps({name: float(value) for name, value in evaluate(qrels, run, sys.argv[3:]).items()}))
"""


def make_table(ties):
    """60 texts of 60 videos. Without ties every score of a row is another; with them a row has six values."""
    generator = torch.Generator().manual_seed(7)
    scores_TV = torch.stack([torch.randperm(60, generator=generator) for _ in range(60)]) / 60
    scores_TV[torch.arange(60), torch.arange(60)] += 0.375  # between the others
    return table_of_matrix((scores_TV * 4).round() / 4 if ties else scores_TV + torch.eye(60) / 128)


def ranx_says(table, folder, names):
    """What ranx makes of our TREC files, in a process of its own.

    Compiled it would take a minute and warn; its functions are the same without numba's compiler. It keeps
    ids as hashes, so these are fixed.
    """
    write_qrels(table, folder / "qrels.txt")
    write_run(table, folder / "run.trec")
    outcome = subprocess.run(
        [sys.executable, "-c", RANX, str(folder / "qrels.txt"), str(folder / "run.trec"), *names],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


def ours(table, ties="pessimistic"):
    ranks = ProtocolGrid(table).measure(Protocol(ties=ties)).ranks
    return lambda name: Measure.named(name).of_ranks(ranks)


def test_no_score_of_the_table_without_ties_is_tied():
    scores_TV = make_table(ties=False).scores_TV
    assert all(len(row.unique()) == 60 for row in scores_TV)


def test_ranx_agrees(tmp_path):
    table = make_table(ties=False)
    same = {"mrr": "mrr", "map": "mrr", **{f"mrr@{k}": f"mrr@{k}" for k in CUTOFFS}}
    same |= {f"map@{k}": f"mrr@{k}" for k in CUTOFFS}  # one relevant document: the same
    same |= {f"{kind}@{k}": f"recall@{k}" for kind in ("hit_rate", "recall") for k in CUTOFFS}
    same |= {f"ndcg@{k}": f"ndcg@{k}" for k in CUTOFFS}
    theirs, mine = ranx_says(table, tmp_path, list(same)), ours(table)
    assert {name: mine(same[name]) for name in same} == pytest.approx(theirs, abs=1e-12)
    assert 0.1 < mine("recall@1") < 0.9  # so that there is something to agree on


def test_ranx_lies_between_our_bounds_where_scores_tie(tmp_path):
    table = make_table(ties=True)
    theirs = ranx_says(table, tmp_path, ["mrr", "hit_rate@1", "hit_rate@10", "ndcg@10"])
    low, high = ours(table), ours(table, "optimistic")
    assert low("recall@10") < high("recall@10")
    for name, value in theirs.items():
        assert low(name) - 1e-12 <= value <= high(name) + 1e-12


@pytest.mark.parametrize("ties", [False, True])
def test_trec_eval_agrees_to_the_last_tie(ties):
    """It orders equal scores by document id; so does our tie policy "trec", and so do the runs we write."""
    table = make_table(ties)
    rows = zip(table.text_ids, table.scores_TV.tolist(), strict=True)
    run = {text: dict(zip(table.video_ids, row, strict=True)) for text, row in rows}
    qrels = {text: {table.video_ids[place]: 1} for place, text in enumerate(table.text_ids)}
    names = {"recip_rank": "mrr", "map": "mrr", "ndcg_cut_10": "ndcg@10"}
    names |= {f"success_{k}": f"recall@{k}" for k in (1, 5, 10)} | {
        f"recall_{k}": f"recall@{k}" for k in (5, 10)
    }
    wanted = {"recip_rank", "map", "ndcg_cut", "success", "recall"}
    by_query = pytrec_eval.RelevanceEvaluator(qrels, wanted).evaluate(run).values()
    mine = ours(table, "trec")
    for theirs, name in names.items():
        assert mine(name) == pytest.approx(sum(each[theirs] for each in by_query) / len(by_query), abs=1e-12)


def torchmetrics_says(table, measure, **options):
    """The mean over queries, in float64 but for what torchmetrics rounds itself."""
    target_TV = torch.eye(len(table.scores_TV), dtype=torch.int64)
    rows = zip(table.scores_TV.double(), target_TV, strict=True)
    return sum(float(measure(scores, target, **options)) for scores, target in rows) / len(target_TV)


def test_torchmetrics_agrees():
    table = make_table(ties=False)
    mine = ours(table)
    assert torchmetrics_says(table, retrieval_reciprocal_rank) == pytest.approx(mine("mrr"), abs=1e-6)
    assert torchmetrics_says(table, retrieval_average_precision) == pytest.approx(mine("mrr"), abs=1e-6)
    for cutoff in CUTOFFS:
        shared = {
            retrieval_hit_rate: f"recall@{cutoff}",
            retrieval_recall: f"recall@{cutoff}",
            retrieval_normalized_dcg: f"ndcg@{cutoff}",
            retrieval_reciprocal_rank: f"mrr@{cutoff}",
        }
        for measure, name in shared.items():
            theirs = torchmetrics_says(table, measure, top_k=cutoff)
            assert theirs == pytest.approx(mine(name), abs=1e-6), name


def test_torchmetrics_wants_scores_above_zero():
    """It drops a relevant document whose score is not positive; the others and we look at the order alone."""
    table = make_table(ties=False)
    lowered = dataclasses.replace(table, scores_TV=table.scores_TV - 2)
    assert ours(lowered)("mrr") == ours(table)("mrr")
    assert torchmetrics_says(lowered, retrieval_reciprocal_rank) == 0


def test_torchmetrics_lies_between_our_bounds_where_scores_tie():
    table = make_table(ties=True)
    low, high = ours(table), ours(table, "optimistic")
    for measure, name in ((retrieval_reciprocal_rank, "mrr"), (retrieval_hit_rate, "recall@10")):
        options = {} if name == "mrr" else {"top_k": 10}
        assert low(name) - 1e-6 <= torchmetrics_says(table, measure, **options) <= high(name) + 1e-6

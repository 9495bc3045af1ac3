"""Every choice of a protocol against a slow loop, and the table of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from gare.errors import EvaluationError
from gare.evaluate import dual_softmax, evaluate_scores, querybank_norm, retrieval_metrics
from gare.evaluate.named_measures import Measure
from gare.evaluate.protocol_grid import CHOICES, MEANINGS, Protocol, ProtocolGrid, read_subset
from gare.evaluate.protocol_table import legend, protocol_markdown, protocol_rows
from gare.evaluate.score_table import table_of_matrix

VIDEO_OF_TEXT = torch.arange(30) % 10


def make_table(seed=0, decimals=1, video_of_text=VIDEO_OF_TEXT, num_videos=10):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(video_of_text), num_videos, generator=generator) / 3
    scores[torch.arange(len(video_of_text)), video_of_text] += 0.3
    return table_of_matrix((scores * 10**decimals).round() / 10**decimals, video_of_text=video_of_text)


def ranks(table, **choices):
    return ProtocolGrid(table).measure(Protocol(**choices)).ranks


@pytest.mark.parametrize("captions", ["max_caption", "any_caption"])
@pytest.mark.parametrize("ties", ["pessimistic", "average", "optimistic", "legacy"])
def test_the_base_is_what_evaluate_scores_says(captions, ties):
    table = make_table()
    expected = evaluate_scores(table.scores_TV, table.video_T, protocol=captions)
    for direction in ("text_to_video", "video_to_text"):
        found = ranks(table, direction=direction, captions=captions, ties=ties)
        assert torch.equal(found, getattr(expected, direction)[ties].ranks)


def test_trec_ties_equal_sorting_by_score_and_id():
    table = make_table()
    found = []
    for row, target in zip(table.scores_TV.tolist(), table.video_T.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda v: (row[v], table.video_ids[v]), reverse=True)
        found.append(order.index(target) + 1)
    assert ranks(table, ties="trec").tolist() == found
    square = make_table(video_of_text=torch.tensor([2, 0, 1, 3]), num_videos=4)
    found = []
    for video in range(4):
        texts = sorted(
            range(4),
            key=lambda text: (
                square.scores_TV[text, video].item(),
                square.video_ids[int(square.video_T[text])],
            ),
            reverse=True,
        )
        found.append([int(square.video_T[text]) for text in texts].index(video) + 1)
    assert ranks(square, direction="video_to_text", ties="trec").tolist() == found


def test_first_and_mean_captions():
    table = make_table()
    first_VV = table.scores_TV[:10]  # texts 0…9 are the first of videos 0…9
    mean_VV = table.scores_TV.double().reshape(3, 10, 10).mean(dim=0)
    for captions, expected in (("first_caption", first_VV), ("mean_caption", mean_VV)):
        found = ranks(table, captions=captions)
        assert torch.equal(found, retrieval_metrics(expected).ranks)
        found = ranks(table, direction="video_to_text", captions=captions)
        assert torch.equal(found, retrieval_metrics(expected.mT).ranks)


def test_a_subset_leaves_other_videos_and_their_texts_out():
    table = make_table()
    grid = ProtocolGrid(table, torch.tensor([1, 4, 7]))
    kept = (table.video_T % 3 == 1).nonzero().flatten()
    expected = evaluate_scores(table.scores_TV[kept][:, [1, 4, 7]], table.video_T[kept] // 3)
    for direction in ("text_to_video", "video_to_text"):
        found = grid.measure(Protocol(direction, subset="chosen"))
        assert torch.equal(found.ranks, getattr(expected, direction)["pessimistic"].ranks)
        assert found.num_candidates == 3


def test_videos_without_a_text_stay_in_the_gallery_unless_paired():
    table = make_table(video_of_text=torch.arange(6), num_videos=9)
    grid = ProtocolGrid(table)
    assert torch.equal(grid.measure(Protocol()).ranks, retrieval_metrics(table.scores_TV).ranks)
    paired = retrieval_metrics(table.scores_TV[:, :6])
    assert torch.equal(grid.measure(Protocol(subset="paired")).ranks, paired.ranks)
    back = retrieval_metrics(table.scores_TV[:, :6].mT)
    assert torch.equal(grid.measure(Protocol("video_to_text")).ranks, back.ranks)


def test_rescoring_is_that_of_the_library():
    table = make_table(decimals=3)
    bank = torch.randn(12, 10, generator=torch.Generator().manual_seed(9))
    scores, pairs = table.scores_TV, table.video_T
    grid = ProtocolGrid(table.with_bank(bank))
    expected = {
        "dsl": (dual_softmax(scores), dual_softmax(scores.mT).mT),
        "qb_norm_on_test": (querybank_norm(scores, scores), querybank_norm(scores.mT, scores.mT).mT),
    }
    for name, (forward, backward) in expected.items():
        both = evaluate_scores(forward, pairs, video_to_text_scores=backward)
        for direction in ("text_to_video", "video_to_text"):
            found = grid.measure(Protocol(direction, rescoring=name)).ranks
            assert torch.equal(found, getattr(both, direction)["pessimistic"].ranks)
    found = grid.measure(Protocol(rescoring="qb_norm")).ranks
    assert torch.equal(found, retrieval_metrics(querybank_norm(scores, bank), pairs).ranks)
    assert grid.measure(Protocol(rescoring="hungarian")).num_queries == 30


def test_precision_rounds_the_scores():
    table = make_table(decimals=4)
    for precision, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        expected = retrieval_metrics(table.scores_TV.to(dtype).float(), table.video_T).ranks
        assert torch.equal(ranks(table, precision=precision), expected)
    large = dataclasses.replace(table, scores_TV=table.scores_TV * 1e6)
    assert "too large" in ProtocolGrid(large).left_out["precision", "float16"]
    with pytest.raises(EvaluationError, match="float16 cannot be applied: some scores are too large"):
        ranks(large, precision="float16")


def test_choices_that_cannot_matter_are_left_out_with_the_reason():
    grid = ProtocolGrid(make_table(video_of_text=torch.arange(10)))
    assert grid.choices("captions") == ("max_caption",)
    assert grid.left_out["rescoring", "qb_norm"] == "no scores of a query bank were given"
    assert grid.left_out["subset", "chosen"] == "no subset was given"
    assert {value for name, values in CHOICES.items() if name != "direction" for value in values} == set(
        MEANINGS
    )


def test_changed_protocols_are_distinct_and_differ_in_that_many_choices():
    grid = ProtocolGrid(make_table(), torch.arange(5))
    for direction in ("text_to_video", "video_to_text"):
        base = Protocol(direction)
        for size in (1, 2):
            found = list(grid.changed(base, size))
            assert len(found) == len(set(found)) > 10
            assert all(len(base.changes(each)) == size for each in found)


def test_the_table_has_a_row_for_each_choice_with_intervals():
    grid = ProtocolGrid(make_table(), torch.arange(5))
    rows = protocol_rows(grid, Protocol())
    assert rows[0].changes == {}
    assert len(rows) == 1 + len(list(grid.changed(Protocol(), 1))) - 1  # but for the direction
    by_change = {next(iter(row.changes.items()), None): row for row in rows}
    legacy = by_change["ties", "legacy"]
    assert legacy.num_ranks > legacy.num_queries
    assert legacy.interval is None
    dsl = by_change["rescoring", "dsl"]
    assert dsl.moved_interval.low <= dsl.moved <= dsl.moved_interval.high
    assert by_change["subset", "chosen"].moved_interval is None
    assert by_change["subset", "chosen"].num_candidates == 5
    text = protocol_markdown(rows, "text_to_video")
    assert text.count("\n") == len(rows) + 1
    assert "| rescoring: dsl | 30 | 10 |" in text
    assert "- dsl: dual softmax" in legend(rows)
    json.dumps([row.to_values() for row in rows])


def test_no_ndcg_where_a_query_has_several_right_captions():
    rows = protocol_rows(ProtocolGrid(make_table()), Protocol("video_to_text"))
    found = {row.changes.get("captions"): row.numbers["nDCG@10"] for row in rows if "captions" in row.changes}
    assert found["any_caption"] is None
    assert found["first_caption"] > 0


def test_a_subset_is_a_number_or_a_file(tmp_path):
    assert read_subset("2", ("a", "b", "c")).tolist() == [0, 1]
    (tmp_path / "ids.txt").write_text("c\na\n\n")
    assert read_subset(str(tmp_path / "ids.txt"), ("a", "b", "c")).tolist() == [0, 2]
    (tmp_path / "wrong.txt").write_text("z\n")
    for given, message in (
        ("4", "there are 3 videos"),
        (str(tmp_path / "wrong.txt"), "'z', which has no column"),
    ):
        with pytest.raises(EvaluationError, match=message):
            read_subset(given, ("a", "b", "c"))
    with pytest.raises(EvaluationError, match="give a number or a file"):
        read_subset(str(tmp_path / "none.txt"), ("a",))


@pytest.mark.parametrize("name", ["R@1", "hit_rate_at_1", "recall_at_1", "Recall@1", "success@1"])
def test_many_names_mean_recall(name):
    assert Measure.named(name).of_ranks(torch.tensor([1, 2, 1, 1])) == 0.75


@pytest.mark.parametrize("name", ["R", "bleu", "ndcg", "MdR@5", "R@0", ""])
def test_a_measure_that_is_not_known_is_refused(name):
    with pytest.raises(ValueError, match=r"not a measure|has none"):
        Measure.named(name)

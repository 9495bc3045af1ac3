"""Scores of any system: every format gives the same table, and what is wrong is said."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from gare.errors import EvaluationError
from gare.evaluate.protocol_grid import Protocol, ProtocolGrid
from gare.evaluate.rank_files import read_ranks, write_ranks
from gare.evaluate.score_files import read_scores, write_scores
from gare.evaluate.score_table import table_of_matrix
from gare.evaluate.trec_files import read_run, write_qrels, write_run

VIDEO_OF_TEXT = [0, 0, 1, 2, 2, 2, 3, 1]
TEXTS = [f"t{number}" for number in range(len(VIDEO_OF_TEXT))]
VIDEOS = ["va", "vb", "vc", "vd"]


def make_scores(seed=0, ties=True):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(len(TEXTS), len(VIDEOS), generator=generator) / 4
    return (4 * scores).round() / 4 if ties else scores


@pytest.fixture
def table():
    return table_of_matrix(make_scores(), video_of_text=VIDEO_OF_TEXT, text_ids=TEXTS, video_ids=VIDEOS)


def all_ranks(table):
    grid = ProtocolGrid(table)
    found = {}
    for direction in grid.choices("direction"):
        base = Protocol(direction)
        for protocol in (base, *grid.changed(base, 1), *grid.changed(base, 2)):
            if protocol.ties != "trec":  # names may differ
                found[protocol] = grid.measure(protocol).ranks.tolist()
    return found


def write_npz(table, path):
    np.savez(
        path,
        scores=table.scores_TV.numpy(),
        video_of_text=np.array(VIDEO_OF_TEXT),
        text_ids=np.array(TEXTS),
        video_ids=np.array(VIDEOS),
    )


def write_long_csv(table, path):
    lines = ["text_id,video_id,score"]
    for text, row in zip(TEXTS, table.scores_TV.tolist(), strict=True):
        lines += [f"{text},{video},{score!r}" for video, score in zip(VIDEOS, row, strict=True)]
    path.write_text("\n".join(lines) + "\n")


def write_wide_csv(table, path):
    rows = [",".join(["", *VIDEOS])]
    rows += [
        ",".join([text, *map(repr, row)]) for text, row in zip(TEXTS, table.scores_TV.tolist(), strict=True)
    ]
    path.write_text("\n".join(rows) + "\n")


def write_wide_parquet(table, path):
    columns = {name: table.scores_TV[:, place].numpy() for place, name in enumerate(VIDEOS)}
    pyarrow.parquet.write_table(pyarrow.table({"text_id": TEXTS, **columns}), path)


def write_mteb_predictions(table, path):
    run = {
        text: dict(zip(VIDEOS, row, strict=True))
        for text, row in zip(TEXTS, table.scores_TV.tolist(), strict=True)
    }
    meta = {"model_name": "someone/something", "revision": "main"}
    path.write_text(json.dumps({"mteb_model_meta": meta, "default": {"test": run}}))


WRITERS = {
    "m.npz": write_npz,
    "m.safetensors": write_scores,
    "long.csv": write_long_csv,
    "wide.csv": write_wide_csv,
    "wide.parquet": write_wide_parquet,
    "Task_predictions.json": write_mteb_predictions,
    "run.trec": write_run,
    "run.txt": write_run,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_ranks_under_every_protocol(table, tmp_path, name):
    WRITERS[name](table, tmp_path / name)
    write_qrels(table, tmp_path / "qrels.txt")
    knows_pairs = name in ("m.npz", "m.safetensors")
    again = read_scores(tmp_path / name, qrels=None if knows_pairs else tmp_path / "qrels.txt")
    assert again.text_ids == table.text_ids
    assert all_ranks(again) == all_ranks(table)


def test_a_plain_matrix_is_pairs_or_needs_to_be_told(tmp_path):
    np.save(tmp_path / "square.npy", np.eye(3, dtype=np.float32))
    np.savetxt(tmp_path / "square.csv", np.eye(3), delimiter=",")
    for name in ("square.npy", "square.csv"):
        assert read_scores(tmp_path / name).video_T.tolist() == [0, 1, 2]
    np.save(tmp_path / "tall.npy", make_scores().numpy())
    with pytest.raises(EvaluationError, match=r"8 texts and 4 videos are not pairs.*--qrels"):
        read_scores(tmp_path / "tall.npy")
    np.save(tmp_path / "pairs.npy", np.array(VIDEO_OF_TEXT))
    told = read_scores(tmp_path / "tall.npy", qrels=tmp_path / "pairs.npy")
    assert told.video_T.tolist() == VIDEO_OF_TEXT


def test_safetensors_of_others_hold_their_matrix_under_any_name(tmp_path):
    save_file({"sim": torch.eye(3)}, tmp_path / "x.safetensors")
    assert read_scores(tmp_path / "x.safetensors").scores_TV.shape == (3, 3)


def test_matrices_that_torch_saved_are_read_and_nothing_in_them_is_run(tmp_path):
    torch.save(make_scores(), tmp_path / "sim.pt")
    torch.save({"scores": make_scores(), "video_of_text": torch.tensor(VIDEO_OF_TEXT)}, tmp_path / "all.pth")
    torch.save({"scores": TEXTS, "model": tmp_path}, tmp_path / "code.pt")
    np.save(tmp_path / "pairs.npy", np.array(VIDEO_OF_TEXT))
    for name, pairs in (("sim.pt", tmp_path / "pairs.npy"), ("all.pth", None)):
        table = read_scores(tmp_path / name, qrels=pairs)
        assert torch.equal(table.scores_TV, make_scores())
        assert table.video_T.tolist() == VIDEO_OF_TEXT
    with pytest.raises(EvaluationError, match="no tensors alone"):
        read_scores(tmp_path / "code.pt")


def test_a_round_trip_keeps_every_score_to_the_bit(tmp_path):
    table = table_of_matrix(make_scores(3, ties=False), video_of_text=VIDEO_OF_TEXT)
    write_run(table, tmp_path / "run.trec")
    write_qrels(table, tmp_path / "qrels.txt")
    again = read_scores(tmp_path / "run.trec", qrels=tmp_path / "qrels.txt")
    order = [again.video_ids.index(name) for name in table.video_ids]
    assert torch.equal(again.scores_TV[:, order], table.scores_TV.double())
    write_run(again, tmp_path / "again.trec")
    assert (tmp_path / "again.trec").read_bytes() == (tmp_path / "run.trec").read_bytes()


def test_equal_scores_are_ordered_by_the_larger_id(tmp_path):
    write_run(
        table_of_matrix(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), video_ids=["a", "b"]), tmp_path / "run.trec"
    )
    assert (tmp_path / "run.trec").read_text().splitlines()[:2] == ["0 Q0 b 1 0.5 gare", "0 Q0 a 2 0.5 gare"]


def test_ids_with_spaces_are_escaped(tmp_path):
    table = table_of_matrix(torch.eye(2), text_ids=["a dog", "50%"], video_ids=["my clip.mp4", "b"])
    write_run(table, tmp_path / "run.trec")
    write_qrels(table, tmp_path / "qrels.txt")
    again = read_scores(tmp_path / "run.trec", qrels=tmp_path / "qrels.txt")
    assert again.text_ids == ("a%20dog", "50%25")
    assert ProtocolGrid(again).measure(Protocol()).ranks.tolist() == [1, 1]


def test_a_run_that_lists_the_best_only_gives_bounds(tmp_path):
    table = table_of_matrix(make_scores(5, ties=False), video_of_text=VIDEO_OF_TEXT)
    whole = ProtocolGrid(table).measure(Protocol()).ranks
    write_run(table, tmp_path / "run.trec", depth=2)
    write_qrels(table, tmp_path / "qrels.txt")
    grid = ProtocolGrid(read_scores(tmp_path / "run.trec", qrels=tmp_path / "qrels.txt"))
    assert grid.table.num_unlisted == 16
    assert grid.choices("direction") == ("text_to_video",)
    assert grid.choices("rescoring") == ("none",)
    low = grid.measure(Protocol(ties="optimistic")).ranks
    high = grid.measure(Protocol()).ranks
    assert (low <= whole).all()
    assert (whole <= high).all()
    assert torch.equal((high <= 2), (whole <= 2))
    with pytest.raises(EvaluationError, match="would invent"):
        write_run(grid.table, tmp_path / "again.trec")


def test_queries_with_several_relevant_documents_are_videos(table, tmp_path):
    run = tmp_path / "run.trec"
    lines = [
        f"{video} Q0 {text} 1 {table.scores_TV[row, column].item()!r} x"
        for column, video in enumerate(VIDEOS)
        for row, text in enumerate(TEXTS)
    ]
    run.write_text("\n".join(lines))
    qrels = [f"{VIDEOS[column]} 0 {text} 1" for text, column in zip(TEXTS, VIDEO_OF_TEXT, strict=True)]
    (tmp_path / "qrels.txt").write_text("\n".join(qrels))
    again = read_scores(run, qrels=tmp_path / "qrels.txt")
    assert again.query_side == "videos"
    for captions in ("max_caption", "any_caption"):
        protocol = Protocol("video_to_text", captions=captions)
        assert torch.equal(
            ProtocolGrid(again).measure(protocol).ranks, ProtocolGrid(table).measure(protocol).ranks
        )


def test_ranks_in_a_file_give_every_tie_policy(table, tmp_path):
    write_ranks(table, tmp_path / "ranks.csv")
    rivals = read_ranks(tmp_path / "ranks.csv")
    for direction, found in rivals.items():
        for ties in ("pessimistic", "average", "optimistic"):
            expected = ProtocolGrid(table).measure(Protocol(direction, ties)).ranks
            assert torch.equal(found.ranks(ties), expected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npy", b"not an array", "not a numpy array"),
        ("x.npz", b"not a zip", "not a .npz"),
        ("x.safetensors", b"nothing", "not a .safetensors"),
        ("x.parquet", b"nothing", "not a Parquet"),
        ("x.json", b"{", "not JSON"),
        ("x.json", b'{"a": 1}', "neither MTEB's predictions"),
        ("x.json", b'{"q": {"d": null}}', "not every score is a number"),
        ("x.json", b'{"a": {"t": {"q": {"d": 1}}}, "b": {"t": {"q": {"d": 1}}}}', "several subsets"),
        ("x.json", b'{"task_name": "X", "scores": {}}', "finished numbers"),
        ("x.csv", b"", "is empty"),
        ("x.csv", b"1,2\n3\n", "not all numbers"),
        ("x.csv", b"text_id,video_id,score\na,b,none\n", "no query, document and score"),
        ("x.trec", b"1 2 3\n", "line 1: a TREC run has six columns"),
        ("x.trec", b"q Q0 d 1 high tag\n", "'high' is not a number"),
        ("x.trec", b"q Q0 d 1 1 t\nq Q0 d 2 1 t\n", "listed twice"),
        ("x.trec", b"\xff\xfe\n", "UTF-8"),
        ("x.trec", b"0.1 0.2\n0.3 0.4\n", "a matrix is read from .npy"),
        ("x.csv", b"0.1;0.2\n0.3;0.4\n", "x.csv has one column"),
        ("x.csv", b"1,nan\n0,1\n", "x.csv: 1 of 4 scores are NaN"),
        ("x.pt", b"nothing", "no tensors alone"),
        ("x.trec.gz", b"", "compressed"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EvaluationError, match=message):
        read_scores(tmp_path / name)


@pytest.mark.parametrize(
    ("run", "qrels", "message"),
    [
        ("q Q0 d 1 1 t", "q 0 d 1\nr 0 d 1", "no answer to 1 of 2 queries"),
        ("q Q0 d 1 1 t\nr Q0 d 1 1 t", "q 0 d 1", "1 queries of the run are not in the qrels"),
        ("q Q0 d 1 1 t", "q 0 d 0", "0 relevant documents for 'q'"),
        ("q Q0 d 1 1 t\nr Q0 d 1 1 t", "q 0 d 1\nq 0 e 1\nr 0 d 1", "relevant to 'q' and to 'r'"),
        ("q Q0 d 1 nan t", "q 0 d 1", "not a finite number"),
        ("q Q0 d 1 1 t", "q d", "qrels have four columns"),
        ("q Q0 d 1 1 t", "q 0 d nan", "line 1: relevance must be a whole number, not nan"),
        ("q Q0 d 1 1 t", "q 0 d 0.5", "relevance must be a whole number, not 0.5"),
        (
            "\n".join(f"q{i} Q0 w{i} 1 1 t" for i in range(10)),
            "\n".join(f"q{i} 0 v{i} 1" for i in range(10)),
            "no document of the qrels, such as 'v0', is in the run, which has 'w0'",
        ),
    ],
)
def test_a_run_and_qrels_that_do_not_fit_are_refused(tmp_path, run, qrels, message):
    (tmp_path / "run.trec").write_text(run)
    (tmp_path / "qrels.txt").write_text(qrels)
    with pytest.raises(EvaluationError, match=message):
        read_scores(tmp_path / "run.trec", qrels=tmp_path / "qrels.txt")


def test_qrels_in_json_hold_whole_numbers(tmp_path):
    (tmp_path / "run.trec").write_text("q Q0 d 1 1 t")
    for relevance, is_read in ((1, True), (1.0, True), ("1", True), (0.5, False), (math.nan, False)):
        (tmp_path / "qrels.json").write_text(json.dumps({"q": {"d": relevance}}))
        if is_read:
            assert read_scores(tmp_path / "run.trec", qrels=tmp_path / "qrels.json").text_ids == ("q",)
        else:
            with pytest.raises(EvaluationError, match="document: whole number"):
                read_scores(tmp_path / "run.trec", qrels=tmp_path / "qrels.json")


def test_nan_in_a_matrix_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[np.nan, 1], [0, 1]]))
    with pytest.raises(EvaluationError, match="NaN or infinite"):
        read_scores(tmp_path / "x.npy")


def test_beir_qrels_are_read(table, tmp_path):
    write_run(table, tmp_path / "run.trec")
    lines = [
        "query-id\tcorpus-id\tscore",
        *(f"{t}\t{VIDEOS[v]}\t1" for t, v in zip(TEXTS, VIDEO_OF_TEXT, strict=True)),
    ]
    (tmp_path / "test.tsv").write_text("\n".join(lines))
    assert read_scores(tmp_path / "run.trec", qrels=tmp_path / "test.tsv").text_ids == tuple(TEXTS)
    assert set(read_run(tmp_path / "run.trec")) == set(TEXTS)

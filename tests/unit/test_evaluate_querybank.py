"""Where QB-Norm's queries come from, and that they are never those of the test."""

from __future__ import annotations

import pytest

from gare.errors import DataError, EvaluationError
from gare.evaluate import QueryBank, read_querybank
from toy_data import COLOURS, write_dataset


def test_a_manifest_names_its_split_and_train_is_the_default(tmp_path):
    manifest = write_dataset(tmp_path)
    for place in (str(tmp_path), str(manifest), f"{tmp_path}:train"):
        bank = read_querybank(place)
        assert bank.queries == tuple(f"{colour} light" for colour in COLOURS)
        assert str(bank) == "colours:train, 8 queries"
    assert read_querybank(f"{manifest}:val").queries[0] == "red light fades"


def test_a_text_file_has_a_query_a_line(tmp_path):
    (tmp_path / "bank.txt").write_text("\ufeffa dog\n\n  rain on a window \n", encoding="utf-8")
    assert read_querybank(str(tmp_path / "bank.txt")).queries == ("a dog", "rain on a window")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no query bank at"), (b"", "has no queries"), (b"\xff\xfe", "not a text")],
)
def test_banks_that_are_none(tmp_path, content, message):
    if content is not None:
        (tmp_path / "bank.txt").write_bytes(content)
    with pytest.raises(EvaluationError, match=message):
        read_querybank(str(tmp_path / "bank.txt"))
    with pytest.raises(DataError, match=r"has no manifest\.csv"):
        read_querybank(f"{tmp_path}:train")


def test_queries_of_the_test_are_refused_whatever_their_case():
    bank = QueryBank("mine", ("A  dog", "rain", "a cat"))
    bank.refuse_overlap(["a bird"])
    with pytest.raises(
        EvaluationError, match=r"1 of the 3 queries of bank mine .* such as 'A  dog': that leaks"
    ):
        bank.refuse_overlap(["a dog "])
    kept = bank.without(["a dog "])
    assert (kept.queries, str(kept)) == (
        ("rain", "a cat"), "mine, 2 queries, 1 left out that are test captions too",
    )  # fmt: skip
    kept.refuse_overlap(["a dog "])
    with pytest.raises(EvaluationError, match="every query of the bank mine is a caption"):
        bank.without(["a dog", "rain", "a cat"])

"""The made-up library of benchmarks: made once, made further, and used again."""

from __future__ import annotations

import pytest

from gare.bench import synthetic_library
from gare.bench.synthetic_library import make_library
from gare.bench.synthetic_vectors import synthetic_model
from gare.library.library import Library


@pytest.fixture
def model():
    return synthetic_model(16, 3)


def vectors_of(place, model) -> dict[str, tuple[float, ...]]:
    with Library.open(place, model=model) as library:
        batches = list(library.store.scan(columns=["id", "vector"]))
        assert library.store.frames_keys() is not None
        assert len(library.store.frames_keys() or ()) == len(library)
    return {row["id"]: tuple(row["vector"]) for batch in batches for row in batch.to_pylist()}


def test_it_is_made_further_with_new_vectors_and_then_used_as_it_is(tmp_path, model, monkeypatch):
    monkeypatch.setattr(synthetic_library, "_ROWS_AT_ONCE", 100)
    monkeypatch.setattr(synthetic_library, "_ROWS_MADE", 40)
    make_library(tmp_path / "x", model, 130, lambda line: None)
    first = vectors_of(tmp_path / "x", model)
    make_library(tmp_path / "x", model, 250, lambda line: None)
    vectors = vectors_of(tmp_path / "x", model)
    assert len(vectors) == len(set(vectors.values())) == 250
    assert first.items() <= vectors.items()
    said: list[str] = []
    make_library(tmp_path / "x", model, 250, said.append)
    assert said == []


def test_a_making_that_was_interrupted_goes_on(tmp_path, model, monkeypatch):
    monkeypatch.setattr(synthetic_library, "_ROWS_AT_ONCE", 100)

    def stop(line: str) -> None:
        if line.strip() == "200":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_library(tmp_path / "x", model, 300, stop)
    make_library(tmp_path / "x", model, 300, lambda line: None)
    make_library(tmp_path / "whole", model, 300, lambda line: None)
    assert vectors_of(tmp_path / "x", model) == vectors_of(tmp_path / "whole", model)

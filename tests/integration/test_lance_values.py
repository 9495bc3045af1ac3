"""Large values are read where they lie in the files of a table, and are those that Lance reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from gare.library.store import open_store
from gare.library.store.lance_values import ValueFiles
from gare.library.store.store_schema import ModelStamp
from stores import make_rows

SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.large_binary(), nullable=False)])


def table_of(lengths: list[int], seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    values = [rng.bytes(length) for length in lengths]
    return pa.table({"key": [f"{number:05}" for number in range(len(values))], "value": values}, SCHEMA)


def addresses_of(dataset: lance.LanceDataset) -> np.ndarray:
    table = dataset.scanner(columns=["key"], with_row_address=True).to_table()
    return np.random.default_rng(1).permutation(table["_rowaddr"].to_numpy())


def stored(dataset: lance.LanceDataset, addresses: np.ndarray) -> list[bytes]:
    values: list[bytes] = dataset._take_rows(addresses.tolist(), columns=["value"])["value"].to_pylist()
    return values


@pytest.mark.parametrize(
    "lengths",
    [[300] * 50, list(range(200, 700)), [12288] * 3000, [0, 5000, 1, 4096], [30_000] * 3],
    ids=["few", "of many lengths", "several pages", "empty and large", "larger than two bytes count"],
)
def test_they_are_those_that_lance_reads(lengths, tmp_path):
    place = tmp_path / "a folder of 'x' & ünï %20"
    for seed in (0, 1):  # two fragments
        lance.write_dataset(table_of(lengths, seed), place, mode="append" if seed else "create")
    dataset = lance.dataset(place)
    dataset.delete("key = '00002'")
    dataset.add_columns({"more": "1"})  # a second file for each fragment
    files, addresses = ValueFiles(place), addresses_of(dataset)
    found = files.read(dataset, "value", addresses)
    assert found is not None, "Lance lays its files out in another way: see lance_values.py"
    found.validate(full=True)
    assert found.to_pylist() == stored(dataset, addresses)
    twice = np.concatenate([addresses[:2], addresses[:2]])
    assert files.read(dataset, "value", twice).to_pylist() == 2 * found.to_pylist()[:2]
    dataset.optimize.compact_files()
    dataset = lance.dataset(place)
    addresses = addresses_of(dataset)
    assert files.read(dataset, "value", addresses).to_pylist() == stored(dataset, addresses)


def test_what_lies_otherwise_is_left_to_lance(tmp_path):
    squeezed = SCHEMA.field("value").with_metadata({"lance-encoding:compression": "zstd"})
    small, large = table_of([3] * 2000), table_of([3000] * 20)
    cases = {
        "small": lance.write_dataset(small, tmp_path / "small"),
        "older": lance.write_dataset(large, tmp_path / "older", data_storage_version="2.0"),
        "nulls": lance.write_dataset(
            pa.table(
                {
                    "key": large["key"],
                    "value": pa.array([None, *large["value"].to_pylist()[1:]], pa.large_binary()),
                }
            ),
            tmp_path / "nulls",
        ),
        "squeezed": lance.write_dataset(large.cast(SCHEMA.set(1, squeezed)), tmp_path / "squeezed"),
    }
    for name, dataset in cases.items():
        assert ValueFiles(tmp_path / name).read(dataset, "value", addresses_of(dataset)) is None, name
    assert (
        ValueFiles(tmp_path / "nowhere").read(cases["small"], "value", addresses_of(cases["small"])) is None
    )


def test_wherever_a_file_is_damaged_no_whole_value_is_taken_for_another(tmp_path):
    """A value is what was written, or bytes of its own are overwritten, or Lance is asked."""
    whole = lance.write_dataset(table_of([300] * 40), tmp_path / "whole")
    addresses = addresses_of(whole)
    written = stored(whole, addresses)
    size, asked, damaged = data_file(tmp_path / "whole").stat().st_size, 0, 0
    for start in range(0, size, 64):
        place = tmp_path / f"damaged-{start}"
        shutil.copytree(tmp_path / "whole", place)
        with data_file(place).open("r+b") as file:
            file.seek(start)
            file.write(b"\xff" * min(64, size - start))
        found = ValueFiles(place).read(whole, "value", addresses)
        shutil.rmtree(place)
        if found is None:
            asked += 1
            continue
        for value, expected in zip(found.to_pylist(), written, strict=True):
            assert len(value) == len(expected)
            damaged += value != expected
            assert value == expected or b"\xff" * 8 in value
    assert asked > 0
    assert damaged > 0


@pytest.mark.parametrize("length", [0, 100, 5_000, -1])
def test_of_a_file_that_is_cut_short_nothing_is_taken(length, tmp_path):
    dataset = lance.write_dataset(table_of([300] * 40), tmp_path / "table")
    files, addresses, file = (
        ValueFiles(tmp_path / "table"),
        addresses_of(dataset),
        data_file(tmp_path / "table"),
    )
    assert files.read(dataset, "value", addresses) is not None  # where they lie is known
    with file.open("r+b") as opened:
        opened.truncate(length if length >= 0 else 12_000)
    assert files.read(dataset, "value", addresses) is None
    assert ValueFiles(tmp_path / "table").read(dataset, "value", addresses) is None
    file.unlink()
    assert files.read(dataset, "value", addresses) is None


@pytest.mark.parametrize(("dim", "num_frames"), [(64, 4), (768, 32)])
def test_frames_of_a_library_are_read_so(dim, num_frames, tmp_path, monkeypatch):
    stamp = ModelStamp("tiny", "f00d", dim=dim, stage1_dim=dim + 1, num_frames=num_frames)
    store = open_store(tmp_path / "library", stamp=stamp, create=True)
    items, frames = make_rows([f"/videos/{number}.mp4" for number in range(100)], stamp=stamp)
    store.upsert(items, frames)
    ids = items["id"].to_pylist()[::-1]
    read, answers = ValueFiles.read, []

    def noted(self, *arguments):
        answers.append(read(self, *arguments))
        return answers[-1]

    monkeypatch.setattr(ValueFiles, "read", noted)
    found = store.fetch(ids, ["id", "vectors"])
    assert answers
    assert None not in answers
    assert found.to_pylist() == [
        {"id": item, "vectors": vectors}
        for item, vectors in zip(ids, frames["vectors"].to_pylist()[::-1], strict=True)
    ]


def data_file(place: Path) -> Path:
    return next((place / "data").iterdir())

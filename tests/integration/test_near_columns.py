"""What is kept in memory of a table: a candidate costs one request, damage no more."""

from __future__ import annotations

import shutil
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from gare.errors import DamagedLibraryError
from gare.library.search.item_frames import SCORE_COLUMNS
from gare.library.search.search_hit import HIT_COLUMNS
from gare.library.store import open_store
from gare.library.store.lance_snapshot import RowMap
from gare.library.store.lance_storage import explained
from gare.library.store.row_checksums import CHECKSUM_COLUMN
from stores import STAMP, make_rows

PATHS = [f"/videos/{number}.mp4" for number in range(60)]


@pytest.mark.parametrize("kind", ["s3", "folder"])
def test_what_is_kept_is_what_is_stored(kind, new_library):
    store = open_store(new_library(kind), stamp=STAMP, create=True)
    for first in range(0, 60, 20):  # several fragments
        items, frames = make_rows(PATHS[first : first + 20])
        store.upsert(items, frames)
    store.delete([items["id"][3].as_py()])
    ids = [row for batch in store.scan(columns=["id"]) for row in batch["id"].to_pylist()][::-3]
    kept = ["id", *store._items.near_columns]
    found = store.fetch(ids, list(dict.fromkeys([*SCORE_COLUMNS, *kept])))
    assert all(map(store._items.snapshot().rows.keeps, kept))
    stored = {row["id"]: row for batch in store.scan(columns=kept) for row in batch.to_pylist()}
    times = {
        row["frames_key"]: row["times"]
        for row in store._frames.snapshot().dataset.to_table(columns=["frames_key", "times"]).to_pylist()
    }
    assert found["id"].to_pylist() == ids
    for row in found.to_pylist():
        assert {name: row[name] for name in kept} == stored[row["id"]]
        assert row["times"] == times[row["frames_key"]]


def test_on_object_storage_a_candidate_costs_one_request(new_library):
    store = open_store(new_library("s3"), stamp=STAMP, create=True)
    items, frames = make_rows(PATHS)
    store.upsert(items, frames)
    ids = items["id"].to_pylist()
    store.fetch(ids[::7], SCORE_COLUMNS)  # reads where rows lie
    tables = [table.snapshot().dataset for table in (store._items, store._frames)]
    for table in tables:
        table.io_stats_incremental()
    store.fetch(ids[::7], SCORE_COLUMNS)
    of_items, of_frames = (table.io_stats_incremental().read_iops for table in tables)
    assert of_items == 0
    assert 0 < of_frames <= len(ids[::7])
    store.fetch(ids[::7], [*HIT_COLUMNS, CHECKSUM_COLUMN])
    assert [table.io_stats_incremental().read_iops for table in tables] == [0, 0], "a hit costs none"


def test_wherever_a_file_is_damaged_rows_are_found_if_their_keys_can_be_read(tmp_path):
    texts = np.random.default_rng(0).bytes(64 * 200).hex()
    table = pa.table(
        {
            "key": [f"{number:04}" for number in range(100)],
            "near": [[float(number)] * (number % 5) for number in range(100)],
            "text": [texts[256 * number : 256 * (number + 1)] for number in range(100)],
        }
    )
    lance.write_dataset(table, tmp_path / "whole")
    num_without = 0
    size = _data_file(tmp_path / "whole").stat().st_size
    for start in range(0, size, 256):
        place = tmp_path / f"damaged-{start}"
        shutil.copytree(tmp_path / "whole", place)
        with open(_data_file(place), "r+b") as file:
            file.seek(start)
            file.write(b"\xff" * min(256, size - start))
        if (keys_alone := _load(place, [])) is None:
            continue
        rows = _load(place, ["near", "text"])
        assert rows is not None, f"damage at {start} hides the keys"
        assert rows.find(["0042"]) == keys_alone.find(["0042"])
        num_without += not rows.keeps("near")
    assert num_without > 0


def _load(place: Path, near: list[str]) -> RowMap | None:
    try:
        with explained(str(place)):
            dataset = lance.dataset(place)
            rows = RowMap(dataset)
            rows.load(dataset, ["key"], near)
    except DamagedLibraryError:
        return None
    return rows


def _data_file(place: Path) -> Path:
    return next((place / "data").iterdir())

"""Rows come in the order in which they are asked for, however they are read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from gare.library.store.lance_storage import Place
from gare.library.store.lance_table import LanceTable

_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("blob", pa.large_binary(), nullable=False),
        pa.field("numbers", pa.list_(pa.float32()), nullable=False),
    ]
)


@pytest.fixture
def table(tmp_path):
    """Four fragments of rows of all lengths, some of them empty; a few were removed."""
    table = LanceTable(Place(str(tmp_path), False), "rows", ("key",), ("numbers",))
    table.create(_SCHEMA)
    for first in range(0, 400, 100):
        rows = [
            {
                "key": f"k{number}",
                "blob": bytes([number % 256]) * (number % 7),
                "numbers": [float(number)] * (number % 3),
            }
            for number in range(first, first + 100)
        ]
        table.append(pa.Table.from_pylist(rows, schema=_SCHEMA))
    table.remove(["k3", "k250"])
    return table


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
def test_rows_come_in_the_order_of_their_addresses(table, count):
    numbers = np.random.default_rng(count).permutation([n for n in range(400) if n not in (3, 250)])[:count]
    snapshot = table.snapshot()
    addresses = snapshot.rows.addresses(snapshot.rows.find(f"k{number}" for number in numbers))
    taken = snapshot.take(addresses, ["blob", "numbers"])
    assert taken["blob"].to_pylist() == [bytes([n % 256]) * (n % 7) for n in numbers]
    assert taken["numbers"].to_pylist() == [[float(n)] * (n % 3) for n in numbers]
    kept = snapshot.rows.columns_at(["key", "numbers"], addresses)
    assert kept["key"].to_pylist() == [f"k{n}" for n in numbers]
    assert kept["numbers"].to_pylist() == taken["numbers"].to_pylist()


def test_an_address_may_be_asked_for_twice(table):
    snapshot = table.snapshot()
    names = [f"k{number}" for number in (5, 399, 5, 120) * 20]
    addresses = snapshot.rows.addresses(snapshot.rows.find(names))
    assert snapshot.take(addresses, ["key"])["key"].to_pylist() == names
    assert snapshot.rows.values_at("key", addresses) == names

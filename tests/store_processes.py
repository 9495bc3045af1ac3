"""What other processes do to a store in tests: `python store_processes.py write|read|fill URI SEED …`.

Each prints a line when something was acknowledged, so that its parent knows what must not be lost.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import types
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa

if __name__ == "__main__":
    # The package imports torch, which takes seconds and has no part in this: only its folder is made known.
    _spec = importlib.util.find_spec("gare")
    assert _spec is not None
    sys.modules["gare"] = types.ModuleType("gare")
    sys.modules["gare"].__path__ = list(_spec.submodule_search_locations or [])

from gare.errors import LibraryError
from gare.library.store import Store, lance_upkeep, open_store
from stores import STAMP, make_files, make_rows


def say(*words: object) -> None:
    print(*words, flush=True)


def write(store: Store, seed: int, rounds: int) -> None:
    """Add, replace, delete and maintain, in a random order."""
    chance = random.Random(seed)
    mine: list[str] = []
    for number in range(rounds):
        paths = [f"/{seed}/{number}/{part}.mp4" for part in range(3)]
        items, frames = make_rows(paths, seed=number)
        store.upsert(items, frames)
        store.record_files(make_files(paths))
        say("added", *items["id"].to_pylist())
        mine += items["id"].to_pylist()
        action = chance.random()
        if action < 0.15:
            store.upsert(items, frames)
        elif action < 0.35:
            gone = mine.pop(chance.randrange(len(mine)))
            say("deleting", gone)
            store.delete([gone])
            say("deleted", gone)
        elif action < 0.7:
            say("maintaining")
            store.maintain()


def read(store: Store, stop: Path) -> None:
    """Search and fetch; what a search finds must be there to fetch, unless it was deleted meanwhile."""
    chance = np.random.default_rng(os.getpid())
    num_searches = 0
    while num_searches < 5 or not stop.exists():
        (hits,) = store.search(chance.normal(size=(1, STAMP.stage1_dim)), 20)
        got = store.fetch(hits.ids, ["id", "vectors", "path"])
        missing = set(hits.ids) - set(got["id"].to_pylist())
        assert not missing or store.fetch(sorted(missing), ["id"]).num_rows == 0, missing
        assert len(set(hits.ids)) == len(hits.ids)
        num_searches += 1
    say("searches", num_searches)


def fill(store: Store) -> None:
    """Add rows until something refuses."""
    for number in range(10_000):
        paths = [f"/fill/{number}/{part}.mp4" for part in range(50)]
        items, frames = make_rows(paths)
        field = frames.schema.field("thumbnail")
        frames = frames.set_column(3, field, pa.array([os.urandom(4000) for _ in paths], field.type))
        try:
            store.upsert(items, frames)
        except LibraryError as error:
            say("refused", str(error).replace("\n", " "))
            return
        say("added", *items["id"].to_pylist())


def main() -> None:
    action, uri, *rest = sys.argv[1:]
    store = open_store(uri, stamp=STAMP, create=action != "read")
    store.orphan_age = store.version_age = timedelta(minutes=5)  # type: ignore[attr-defined]
    if uri.startswith("postgresql"):
        from gare.library.store import postgres_link

        postgres_link._RECONNECT_S = 600.0  # a busy machine may take long to make a replica the primary
    lance_upkeep.INDEX_FROM_ROWS = 20  # so that indexes are built, extended and remapped under fire
    say("open")
    if action == "write":
        write(store, int(rest[0]), int(rest[1]))
    elif action == "read":
        read(store, Path(rest[0]))
    else:
        fill(store)
    store.close()


if __name__ == "__main__":
    main()

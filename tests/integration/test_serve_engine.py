"""Many people at once, in one process: everyone is answered, with their own answer."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.datastructures import UploadFile

from gare.errors import QueryError
from gare.library.library import Library
from gare.library.search.resident_search import ResidentSearch
from gare.library.search.search_request import SearchRequest
from gare.library.search.searcher import Searcher
from gare.serve.batching import Engine
from gare.serve.observability import LoggedProgress, Metrics
from gare.serve.problems import Problem
from gare.serve.serve_options import ServeOptions
from gare.serve.upload_decoding import Upload
from gare.serve.uploads import Uploads, _copy
from serve_library import COLOURS, Served
from servers import HANG_S

QUERIES = (*COLOURS, "red ^2 + blue", "green -yellow", "a white ball on pink")


@pytest.fixture(scope="module")
def library(served: Served) -> Iterator[Library]:
    with Library.open(served.library, read_only=True) as opened:
        yield opened


@contextmanager
def running(library: Library, **options: int) -> Iterator[Engine]:
    engine = Engine(library, ServeOptions(**options), Metrics())
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
        for thread in engine._threads:  # closing waits ten seconds at most
            thread.join(HANG_S)
            assert not thread.is_alive()


def asked(query: str) -> SearchRequest:
    return SearchRequest(words=query, top=5)


def broken() -> None:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("max_batch", [1, 16])
def test_a_crowd_is_answered_one_by_one_right(library, max_batch):
    expected = {query: library.search(query, top=5) for query in QUERIES}
    item = expected["red"][0].id
    alike = [hit.id for hit in library.search(like=item, top=5)]

    async def crowd() -> None:
        works = []
        for turn in range(12):
            works += [engine.search(asked(query)) for query in QUERIES]
            works += [engine.search(SearchRequest(like=name, top=5)) for name in (item, "nobody")]
            works += [engine.call(broken), engine.call(lambda turn=turn: turn)]
        results = await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), HANG_S)
        size = len(QUERIES) + 4
        for turn in range(12):
            *found, near, nobody, failed, number = results[turn * size : (turn + 1) * size]
            for query, hits in zip(QUERIES, found, strict=True):
                assert [hit.id for hit in hits] == [hit.id for hit in expected[query]]
                assert hits[0].score == pytest.approx(expected[query][0].score, abs=1e-5)
            assert [hit.id for hit in near] == alike
            assert isinstance(nobody, QueryError)
            assert isinstance(failed, ZeroDivisionError)
            assert number == turn

    with running(library, max_batch=max_batch, max_waiting=1000) as engine:
        asyncio.run(crowd())


def test_those_who_went_away_hold_up_nobody(library):
    async def come_and_go(engine: Engine) -> None:
        for turn in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.search(asked(f"red {turn}")), 1e-6)
        assert await asyncio.wait_for(engine.search(asked("red")), HANG_S)

    with running(library) as engine:
        asyncio.run(come_and_go(engine))
        # The answers that nobody waits for any more come when their loop has ended; the next one is served.
        asyncio.run(come_and_go(engine))


def test_known_words_do_not_wait_for_the_encoder(library):
    """A clip may have it for seconds."""
    go_on, has_it = threading.Event(), threading.Event()

    async def both(engine: Engine) -> None:
        await engine.search(asked("lime"))
        slow = asyncio.ensure_future(engine.call(lambda: (has_it.set(), go_on.wait(HANG_S))))
        await asyncio.to_thread(has_it.wait, HANG_S)
        assert await asyncio.wait_for(engine.search(asked("lime")), HANG_S)
        go_on.set()
        await slow

    with running(library) as engine:
        asyncio.run(both(engine))


def test_those_who_come_together_share_the_encoder_and_the_reading(library, monkeypatch):
    """However many they are: one call of the text tower, and one reading of what is shown per batch."""
    calls: Counter[str] = Counter()

    def counted(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            is_shown = name == "fetch" and "modified" in arguments[1]  # scoring reads no date
            calls["show" if is_shown else name] += 1
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapped)

    async def crowd(engine: Engine) -> None:
        searches = [engine.search(asked(f"{query} for the first time")) for query in QUERIES]
        waiting = asyncio.gather(*searches)
        await asyncio.sleep(0)
        engine.start()
        assert all(await asyncio.wait_for(waiting, HANG_S))

    engine = Engine(library, ServeOptions(), Metrics())
    library.searcher.encoder.texts.get(["a warm-up"])
    counted(library.model, "encode_text")
    counted(library.store, "search")
    counted(library.store, "fetch")
    try:
        asyncio.run(crowd(engine))
    finally:
        engine.close()
    num_batches = sum(bucket.get() for bucket in engine.metrics.batch._buckets)
    assert num_batches < len(QUERIES)
    assert calls == {
        "encode_text": 1,
        "search": len(QUERIES),
        "fetch": len(QUERIES),
        "show": num_batches,
    }


def test_closing_answers_who_waits_and_refuses_who_comes(library):
    engine = Engine(library, ServeOptions(), Metrics())

    async def close_early() -> None:
        waiting = [asyncio.ensure_future(engine.search(asked(query))) for query in QUERIES]
        await asyncio.sleep(0)
        engine.start()
        with ThreadPoolExecutor(1) as pool:
            await asyncio.get_running_loop().run_in_executor(pool, engine.close)
        assert all(await asyncio.wait_for(asyncio.gather(*waiting), HANG_S))
        with pytest.raises(Problem, match="shutting down"):
            await engine.search(asked("red"))

    asyncio.run(close_early())


def test_uploads_lie_where_nobody_else_looks(library, tmp_path):
    options = ServeOptions()
    uploads = Uploads(Engine(library, options, Metrics()), options, Metrics())
    try:
        assert uploads._folder.stat().st_mode & 0o077 == 0
        content = tempfile.TemporaryFile()  # noqa: SIM115 - UploadFile closes it
        upload = UploadFile(content, filename="x")
        _copy(upload, uploads._folder / "upload")
        assert (uploads._folder / "upload").stat().st_mode & 0o077 == 0
        content.close()
    finally:
        uploads.close()
    assert not uploads._folder.exists()


def test_an_upload_whose_time_is_up_does_not_become_the_next_one(library, tmp_path):
    def upload(colour: str) -> Upload:
        path: Path = tmp_path / f"{colour}.png"
        Image.new("RGB", (64, 64), colour).save(path)
        return Upload(str(path), "image", 1, 32)

    async def five(uploads: Uploads) -> np.ndarray:
        for _ in range(4):
            given_up = asyncio.ensure_future(uploads._decode(upload("red")))
            await asyncio.sleep(0.005)  # it is with the process
            given_up.cancel()
        return await asyncio.wait_for(uploads._decode(upload("blue")), HANG_S)

    options = ServeOptions(max_uploads=1)
    uploads = Uploads(Engine(library, options, Metrics()), options, Metrics())
    try:
        pixels = asyncio.run(five(uploads))
    finally:
        uploads.close()
    assert pixels.reshape(-1, 3).mean(axis=0).round().tolist() == [0, 0, 255]


def test_a_server_fills_the_table_of_a_gpu_when_it_starts_and_answers_a_crowd_from_it(served, monkeypatch):
    """The CPU stands for the GPU; the log says how far it is."""

    def on_cpu(searcher: Searcher) -> ResidentSearch:
        parts = searcher.store, searcher.model, searcher.scorer, searcher.damaged, None
        return ResidentSearch(*parts, [torch.device("cpu")])

    told: list[tuple[int, int]] = []
    monkeypatch.setattr(LoggedProgress, "__call__", lambda self, *progress: told.append(progress))
    with Library.open(served.library, read_only=True) as library:
        expected = {query: library.search(query, top=5, exact=True) for query in QUERIES}
        library.search_exactly_with(on_cpu)
        with running(library) as engine:
            deadline = time.monotonic() + HANG_S
            while not told and time.monotonic() < deadline:
                time.sleep(0.01)
            assert told[-1] == (len(library), len(library))
            works = [engine.search(SearchRequest(words=query, top=5, exact=True)) for query in QUERIES]

            async def crowd() -> list[Any]:
                return await asyncio.wait_for(asyncio.gather(*works), HANG_S)

            for query, hits in zip(QUERIES, asyncio.run(crowd()), strict=True):
                assert [hit.id for hit in hits] == [hit.id for hit in expected[query]]
                assert hits.certificate is not None
        assert library.searcher.proven.is_resident
        assert len(told) == 1


def test_progress_in_the_log_is_rare_and_says_how_long_it_takes(caplog):
    progress = LoggedProgress("library to the GPU", every_s=0.0)
    quiet = LoggedProgress("never", every_s=1e6)
    with caplog.at_level("INFO", "gare.serve"):
        for done in (10, 20):
            progress(done, 40)
            quiet(done, 40)
    assert [record.message for record in caplog.records] == ["library to the GPU"] * 2
    assert caplog.records[-1].fields["of"] == 40
    assert caplog.records[-1].fields["seconds_left"] >= 0

"""Pictures and clips to search with: taken in within limits, decoded in limited processes, kept a while."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from gare.data.decoder_messages import Failure
from gare.data.workers import Limits, WorkerPool
from gare.library.search.searcher import Searcher
from gare.model.gare import stack_clips
from gare.serve.batching import Engine
from gare.serve.observability import Metrics
from gare.serve.problems import Problem
from gare.serve.serve_options import ServeOptions
from gare.serve.upload_decoding import Kind, Upload, UploadTask, decode_upload, sniff
from gare.types import VideoFeatures

_KEPT = 64
_MOST_FIELDS = 32
_FIELD_BYTES = 4096


@dataclass(frozen=True)
class KeptUpload:
    """What is left of an upload: its features, under a name that nobody can guess."""

    id: str
    kind: Kind
    features: VideoFeatures
    made_by: str
    """The fingerprint of the model that made them."""


class Uploads:
    """Takes uploads in, decodes and encodes them, and keeps their features a while."""

    def __init__(self, engine: Engine, options: ServeOptions, metrics: Metrics) -> None:
        self._engine, self._options, self._metrics = engine, options, metrics
        self._kept: OrderedDict[str, KeptUpload] = OrderedDict()
        self._by_client: Counter[str] = Counter()
        self._num_busy = 0
        self._is_closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="gare-uploads-"))
        self._pools: asyncio.Queue[WorkerPool[Upload, np.ndarray | Failure]] = asyncio.Queue()
        limits = Limits(
            seconds=options.decode_seconds,
            cpu_seconds=int(options.decode_seconds) + 1,
            memory_bytes=options.decode_bytes,
            file_seconds=4 * options.decode_seconds,
            bytes_per_second=math.inf,
        )
        self._all_pools = [
            WorkerPool(decode_upload, 1, task=UploadTask, limits=limits, items_per_process=1)
            for _ in range(options.max_uploads)
        ]  # each starts its process when it is first needed
        for pool in self._all_pools:
            self._pools.put_nowait(pool)

    def close(self) -> None:
        """End the decoding processes."""
        self._is_closed = True
        for pool in self._all_pools:
            pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def get(self, upload_id: str) -> KeptUpload:
        """An upload that is still kept; an error if it is not."""
        if upload_id not in self._kept:
            raise Problem(
                410,
                "upload_gone",
                "the picture or clip you searched with is not kept any more; drop it again",
            )
        self._kept.move_to_end(upload_id)
        return self._kept[upload_id]

    @contextlib.asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[tuple[KeptUpload, FormData]]:
        """The upload of a request, decoded and encoded, and the other fields of its form."""
        client = request.client.host if request.client else ""
        if self._by_client[client] >= self._options.max_uploads_per_client:
            self._metrics.refused.labels("uploads_per_client").inc()
            raise Problem(429, "too_many_uploads", "wait for your last upload to finish", retry_after=2)
        if self._num_busy >= 2 * self._options.max_uploads:
            self._metrics.refused.labels("uploads").inc()
            raise Problem(503, "busy", "too many uploads at once; try again in a few seconds", retry_after=3)
        self._by_client[client] += 1
        self._num_busy += 1
        try:
            async with request.form(max_files=1, max_fields=_MOST_FIELDS, max_part_size=_FIELD_BYTES) as form:
                file = form.get("file")
                if not isinstance(file, UploadFile):
                    raise Problem(422, "no_file", "send one image or clip in the form field 'file'")
                kept = await self._take_in(file)
                yield kept, form
        finally:
            self._num_busy -= 1
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]

    async def take_again(self, form: FormData) -> KeptUpload:
        """The same upload once more: the model was changed while it was searched with."""
        file = form["file"]
        assert isinstance(file, UploadFile)
        await file.seek(0)
        return await self._take_in(file)

    async def _take_in(self, file: UploadFile) -> KeptUpload:
        kind = sniff(await file.read(512))
        if kind is None:
            self._metrics.uploads.labels("refused").inc()
            raise Problem(
                415, "not_media", "this is neither an image (JPEG, PNG, WebP, GIF, BMP) nor a video"
            )
        await file.seek(0)
        path = self._folder / secrets.token_hex(8)
        try:
            await asyncio.to_thread(_copy, file, path)
            # One model decides how it is decoded and encodes it, whatever model the library has then.
            searcher = await self._engine.call(lambda: self._engine.library.searcher)
            wanted = searcher.model.encoder.image_format
            num_frames = searcher.model.config.num_frames
            pixels = await self._decode(Upload(str(path), kind, num_frames, wanted.size, wanted.fit))
        finally:
            path.unlink(missing_ok=True)
        features = await self._engine.call(lambda: _encode(searcher, pixels))
        self._metrics.uploads.labels("taken").inc()
        kept = KeptUpload(secrets.token_urlsafe(12), kind, features, made_by=searcher.store.stamp.fingerprint)
        self._kept[kept.id] = kept
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return kept

    async def _decode(self, upload: Upload) -> np.ndarray:
        # A request that ran out of time must not give back a process that still works on its file: the next
        # upload would get these frames. So that part goes on by itself.
        result = await asyncio.shield(asyncio.ensure_future(self._decode_in_turn(upload)))
        if isinstance(result, Failure):
            self._metrics.uploads.labels("unreadable").inc()
            message = result.message.replace(upload.path, "the upload")  # where it lay is nobody's business
            raise Problem(422, "unreadable_upload", f"the file cannot be used: {message}")
        return result

    async def _decode_in_turn(self, upload: Upload) -> np.ndarray | Failure:
        pool = await self._pools.get()
        try:
            return await asyncio.to_thread(self._decode_in, pool, upload)
        finally:
            self._pools.put_nowait(pool)

    def _decode_in(
        self, pool: WorkerPool[Upload, np.ndarray | Failure], upload: Upload
    ) -> np.ndarray | Failure:
        """One upload through one process. The pool ends what is too slow, too large or crashed."""
        pool.submit(upload)
        result: np.ndarray | Failure | None = None
        # Starting a process, too, has its limit in the pool.
        deadline = time.monotonic() + 4 * self._options.decode_seconds + 120
        while time.monotonic() < deadline and not self._is_closed:  # a closed pool says nothing any more
            try:
                event = pool.next_event(timeout=1.0)
            except Exception as error:  # of the decoder
                return Failure("unreadable", f"it cannot be read: {error}")
            if event is None:
                continue
            if event.lost is not None:
                return Failure(event.lost.kind, f"decoding was stopped: {event.lost}")
            if event.result is not None:
                result = event.result
            if event.is_last:
                break
        return result if result is not None else Failure("unreadable", "it gave no frame")


@torch.no_grad()
def _encode(searcher: Searcher, pixels_FHWC: np.ndarray) -> VideoFeatures:
    clip_FCHW = torch.from_numpy(pixels_FHWC.copy()).permute(0, 3, 1, 2)
    with searcher.encoder.texts.encoding:
        return searcher.model.encode_frames(*stack_clips([clip_FCHW]))


def _copy(file: UploadFile, path: Path) -> None:
    with open(path, "xb", opener=partial(os.open, mode=0o600)) as target:
        shutil.copyfileobj(file.file, target, 2**20)

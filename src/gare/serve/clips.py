"""Clips that a server cuts: a few at once, within limits, and kept no longer than they are sent."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from anyio import to_thread
from starlette.responses import Response, StreamingResponse

from gare.data.boxed_cut import CutClip, cut_clip
from gare.data.workers import Limits
from gare.errors import ClipError
from gare.library.editing.moments import Moment
from gare.library.store.read_deadline import check_deadline
from gare.serve.observability import Metrics
from gare.serve.problems import Problem
from gare.serve.serve_options import ServeOptions

_CHUNK = 256 * 1024
_TYPES = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/quicktime",
    ".mkv": "video/x-matroska",
    ".webm": "video/webm",
}


@dataclass(frozen=True)
class OpenClip:
    """A clip that is open, and has no name any more."""

    clip: CutClip
    file: BinaryIO


class Clips:
    """Cuts parts of files, in processes with limits."""

    def __init__(self, options: ServeOptions, metrics: Metrics) -> None:
        self._options, self._metrics = options, metrics
        self._places = threading.BoundedSemaphore(options.max_clips)

    @cached_property
    def limits(self) -> Limits:
        """What a process may use that cuts, or looks at a file."""
        seconds = self._options.answer_seconds
        return Limits(
            seconds=seconds,
            cpu_seconds=math.ceil(seconds) * (os.cpu_count() or 1) + 1,
            memory_bytes=2 * self._options.decode_bytes,
            written_bytes=self._options.clip_bytes,
            file_seconds=seconds,
            bytes_per_second=math.inf,
        )

    @cached_property
    def _folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="gare-clips-"))

    def close(self) -> None:
        """Take the folder of clips away."""
        if "_folder" in vars(self):
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among those that work now; 503 if there is none."""
        if not self._places.acquire(blocking=False):
            self._metrics.refused.labels("clips").inc()
            raise Problem(503, "busy", "too many clips at once; try again in a few seconds", retry_after=3)
        try:
            yield
        finally:
            self._places.release()

    def cut(self, source: int, moment: Moment, suffix: str, *, exact: bool) -> OpenClip:
        """Cut a part of an open file; ended with the request that asked for it."""
        most = self._options.clip_seconds
        if moment.end - moment.start > most:
            raise Problem(422, "too_long", f"a clip has {most:g} seconds at most; ask for a shorter part")
        target = self._folder / f"{secrets.token_hex(8)}{suffix}"
        try:
            made = cut_clip(
                source,
                target,
                moment.start,
                moment.end,
                exact=exact,
                limits=self.limits,
                on_wait=check_deadline,
            )
            return OpenClip(made, target.open("rb"))
        except ClipError as error:
            status = 413 if error.kind == "too_large" else 422
            raise Problem(status, "cannot_cut", str(error)) from None
        finally:
            target.unlink(missing_ok=True)  # what is open can still be read


def clip_response(made: OpenClip, name: str) -> Response:
    """The clip as a download."""
    plain = name.encode("ascii", "replace").decode().replace("?", "_")
    headers = {
        "Content-Type": _TYPES[Path(name).suffix],
        "Content-Length": str(made.clip.num_bytes),
        "Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}",
        "X-Clip-Start": f"{made.clip.start:.6f}",
        "X-Clip-End": f"{made.clip.end:.6f}",
    }
    return _Download(made.file, headers)


class _Download(StreamingResponse):
    """Closes its file however it ends."""

    def __init__(self, file: BinaryIO, headers: dict[str, str]) -> None:
        super().__init__(_read(file), 200, headers)
        self._file = file

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


async def _read(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await to_thread.run_sync(file.read, _CHUNK):
        yield chunk

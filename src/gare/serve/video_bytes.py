"""The bytes of indexed videos, whole or in ranges. A file is named by an item, never by the client.

Starlette's `FileResponse` is not used: it opens the path once more after the check, so that a file swapped in
between would be sent, and it answers bad ranges in plain text instead of the error shape of the API.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Literal

from anyio import to_thread
from starlette.responses import Response, StreamingResponse

from gare.serve.content_check import ContentChecks
from gare.serve.problems import Problem

_CHUNK = 256 * 1024
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)
_MOST_DIGITS = 18
_TYPES = {
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/mp4",  # browsers play it under that name
    ".webm": "video/webm",
    ".mkv": "video/x-matroska",
    ".ogv": "video/ogg",
    ".avi": "video/x-msvideo",
    ".mpg": "video/mpeg",
    ".mpeg": "video/mpeg",
    ".ts": "video/mp2t",
}


@dataclass
class OpenVideo:
    """A regular file that is open, and as it was when it was indexed."""

    handle: int
    path: str
    size: int
    modified_ns: int

    @property
    def etag(self) -> str:
        """Changes when the file does."""
        return f'"{self.modified_ns:x}-{self.size:x}"'

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)


def open_video(item: Mapping[str, Any], checks: ContentChecks) -> OpenVideo:
    """Open the file of an item, a row with its path, date, content and the time it was added.

    Raises:
        Problem: it is gone, no regular file, or not the one that was indexed: what took its place (a link,
            say) may be something that nobody wanted to show.
    """
    try:
        handle = os.open(
            item["path"], os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        )
    except OSError:
        raise Problem(
            410, "file_gone", "the file is not there any more, or cannot be read; index its folder again"
        ) from None
    try:
        found = os.fstat(handle)
        is_dated = abs(found.st_mtime - item["modified"].timestamp()) < 1e-3
        if not stat.S_ISREG(found.st_mode) or not is_dated:
            raise _changed()
        if not checks.is_same(handle, content=item["content"], added=item["added"]):
            raise _changed()
    except BaseException:
        os.close(handle)
        raise
    return OpenVideo(handle, item["path"], found.st_size, found.st_mtime_ns)


def _changed() -> Problem:
    return Problem(410, "file_changed", "the file changed after it was indexed; index its folder again")


def video_response(video: OpenVideo, headers: Mapping[str, str], method: str) -> Response:
    """200 with everything, 206 with the part that was asked for, 304 or 416."""
    base = {
        "Accept-Ranges": "bytes",
        "ETag": video.etag,
        "Last-Modified": formatdate(video.modified_ns / 1e9, usegmt=True),
        "Cache-Control": "private, no-cache",
        "Content-Type": _TYPES.get(os.path.splitext(video.path)[1].lower(), "application/octet-stream"),
        "Content-Disposition": "inline",
    }
    if is_known(headers.get("if-none-match", ""), video.etag):
        video.close()
        return Response(status_code=304, headers=base)
    wanted = find_range(headers, video)
    if wanted == "unsatisfiable":
        video.close()
        raise Problem(
            416, "bad_range", f"the file has {video.size} bytes", Content_Range=f"bytes */{video.size}"
        )
    first, last = wanted or (0, video.size - 1)
    base["Content-Length"] = str(last - first + 1)
    if wanted:
        base["Content-Range"] = f"bytes {first}-{last}/{video.size}"
    if method == "HEAD":
        video.close()
        return Response(status_code=206 if wanted else 200, headers=base)
    return _Stream(video, first, last, 206 if wanted else 200, base)


def find_range(
    headers: Mapping[str, str], video: OpenVideo
) -> tuple[int, int] | Literal["unsatisfiable"] | None:
    """First and last byte. Several ranges, and what is no range at all, mean the whole file (RFC 9110)."""
    asked = _RANGE.fullmatch(headers.get("range", "").strip())
    if asked is None or asked[0] == "bytes=-" or headers.get("if-range", video.etag) != video.etag:
        return None
    if not asked[1]:  # the last so many bytes
        length = min(_number(asked[2]), video.size)
        return (video.size - length, video.size - 1) if length else "unsatisfiable"
    first, last = _number(asked[1]), _number(asked[2]) if asked[2] else video.size
    if last < first:
        return None if asked[2] else "unsatisfiable"
    return (first, min(last, video.size - 1)) if first < video.size else "unsatisfiable"


def is_known(asked: str, etag: str) -> bool:
    """Whether the client has this version already (If-None-Match).

    >>> is_known('"a", W/"b"', '"b"'), is_known("*", '"b"'), is_known('"a"', '"b"'), is_known("", '"b"')
    (True, True, False, False)
    """
    named = [part.strip().removeprefix("W/") for part in asked.split(",")]
    return etag in named or named == ["*"]


def _number(digits: str) -> int:
    """More digits than any file has bytes mean "to the end": Python refuses to read thousands of them."""
    return int(digits) if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS


class _Stream(StreamingResponse):
    """Closes its file however it ends."""

    def __init__(
        self, video: OpenVideo, first: int, last: int, status: int, headers: Mapping[str, str]
    ) -> None:
        super().__init__(_read(video, first, last), status, headers)
        self._video = video

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._video.close()


async def _read(video: OpenVideo, first: int, last: int) -> AsyncIterator[bytes]:
    at = first
    while at <= last:
        chunk = await to_thread.run_sync(os.pread, video.handle, min(_CHUNK, last - at + 1), at)
        if not chunk:
            return  # cut short meanwhile; the length does not fit, and the client notices
        at += len(chunk)
        yield chunk

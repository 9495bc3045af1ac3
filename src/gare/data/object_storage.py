"""Addresses on object storage, `s3://bucket/key` and `gs://bucket/key`: told apart, listed, opened.

A file of its own, because datasets in shards and the sources of a library are both read from there.
"""

from __future__ import annotations

import io
import os
import re
from typing import IO, Any

SCHEMES = ("s3://", "gs://")
_CONNECT_S, _REQUEST_S = 10.0, 60.0
_READ_AHEAD = 2**18
"""Bytes asked for at once: the headers of small files in a tar lie close together."""


def is_remote(path: str) -> bool:
    """Whether a path is an address on object storage.

    >>> is_remote("s3://bucket/dog.mp4"), is_remote("/videos/dog.mp4")
    (True, False)
    """
    return path.startswith(SCHEMES)


def address_of(path: str | os.PathLike[str]) -> str | None:
    """The address that a path stands for; None for a path of this machine. A `Path` swallows a slash.

    >>> from pathlib import Path
    >>> address_of(Path("s3://bucket/shards/")), address_of("s3:folder")
    ('s3://bucket/shards', None)
    """
    found = re.fullmatch(r"(s3|gs):/+(.*?)/*", os.fspath(path))
    return f"{found[1]}://{found[2]}" if found else None


def open_storage(uri: str) -> tuple[Any, str]:
    """The filesystem of an address, and the path there. Keys come from the usual variables."""
    from pyarrow import fs

    scheme, _, path = uri.partition("://")
    if scheme == "gs":
        return fs.GcsFileSystem(), path
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    options: dict[str, Any] = {"connect_timeout": _CONNECT_S, "request_timeout": _REQUEST_S}
    if endpoint:
        options["scheme"], _, options["endpoint_override"] = endpoint.rstrip("/").partition("://")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region or endpoint:
        options["region"] = region or "us-east-1"
    return fs.S3FileSystem(**options), path


def list_objects(uri: str) -> list[Any]:
    """What pyarrow knows of the object at an address, or of all objects below it."""
    from pyarrow import fs

    system, path = open_storage(uri)
    (info,) = system.get_file_info([path])
    if info.type == fs.FileType.File:
        return [info]
    selector = fs.FileSelector(path, allow_not_found=True, recursive=True)
    return [each for each in system.get_file_info(selector) if each.type == fs.FileType.File]


def open_binary(path: str) -> IO[bytes]:
    """A file, here or on object storage, to be read in ranges: only what is asked for travels."""
    if not is_remote(path):
        return open(path, "rb")
    system, key = open_storage(path)
    return io.BufferedReader(system.open_input_file(key), _READ_AHEAD)

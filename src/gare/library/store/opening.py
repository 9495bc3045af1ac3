"""Which store an address means."""

from __future__ import annotations

import os
from pathlib import Path

from gare.errors import LibraryError
from gare.library.schema import ModelStamp
from gare.library.store.base import Store


def open_store(
    uri: str | Path, *, stamp: ModelStamp | None = None, create: bool = False, read_only: bool = False
) -> Store:
    """Open a library: a folder, `s3://bucket/prefix` or `postgresql://user@host/database`.

    Args:
        stamp: the model whose vectors are expected; None takes a library of any model.
        create: make the library where there is none; needs a stamp.
        read_only: never write, not even to repair.

    Raises:
        LibraryError: there is none, it is of another model, damaged, too new, or out of reach.
    """
    if create and (stamp is None or read_only):
        raise ValueError("a library is created for a model and to be written: pass stamp, and not read_only")
    uri = str(uri)
    scheme, separator, rest = uri.partition("://")
    if not separator:
        from gare.library.store.lance import LanceStore

        path = os.path.abspath(os.path.expanduser(uri))
        if os.path.exists(path) and not os.path.isdir(path):
            raise LibraryError(f"{path} is a file; a library is a folder, s3://… or postgresql://…")
        return LanceStore(path, stamp=stamp, create=create, read_only=read_only)
    if scheme == "s3":
        if not rest.partition("/")[0]:
            raise LibraryError(f"{uri} names no bucket; write s3://bucket/prefix")
        from gare.library.store.lance import LanceStore

        return LanceStore(uri, stamp=stamp, create=create, read_only=read_only)
    if scheme in ("postgresql", "postgres"):
        from gare.library.store.postgres import PostgresStore

        return PostgresStore(uri, stamp=stamp, create=create, read_only=read_only)
    raise LibraryError(f"{uri}: a library is a folder, s3://… or postgresql://…, not {scheme}://")

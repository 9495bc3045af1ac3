"""Where a library lives: a folder, an object store, PostgreSQL, or a store that somebody else brings.

`STORES` has the store of each scheme of addresses. Adding one needs no change of this package: see
`gare.library.store.store_protocol`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gare.errors import LibraryError
from gare.extras import require
from gare.library.store.address_secrets import shown_address
from gare.library.store.store_damage import Surgeon
from gare.library.store.store_protocol import Hits, Progress, Stats, Store, fetch_readable
from gare.library.store.store_schema import ModelStamp, check_same_model
from gare.registry import Registry

__all__ = [
    "STORES",
    "Hits",
    "ModelStamp",
    "Progress",
    "Stats",
    "Store",
    "fetch_readable",
    "find_surgeon",
    "open_store",
]

_DATABASE = re.compile(r"^postgres\w*:|(^|\s)password\s*=", re.IGNORECASE)  # meant as an address, but is none


def open_store(
    uri: str | Path, *, stamp: ModelStamp | None = None, create: bool = False, read_only: bool = False
) -> Store:
    """Open a library: a folder, or an address such as `s3://bucket/prefix` or `postgresql://user@host/database`.

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
    scheme, separator, _ = uri.partition("://")
    scheme = scheme if separator else "file"
    if scheme not in STORES:
        known = ", ".join(f"{name}://…" for name in STORES)
        raise LibraryError(
            f"{shown_address(uri)}: there is no store for {scheme}://. A library is a folder, or {known}"
        )
    if not separator and _DATABASE.search(uri) and not os.path.isdir(uri):
        raise LibraryError(
            f"{shown_address(uri)} looks like the address of a database; write postgresql://user@host/database"
        )
    store = STORES[scheme](uri, stamp=stamp, create=create, read_only=read_only)
    check_same_model(store.uri, store.stamp, stamp)  # whoever wrote the store may have left it out
    return store


# The stores are imported when one is opened: not everyone has PostgreSQL's driver.


def _open_folder(uri: str, **how: Any) -> Store:
    from gare.library.store.lance_store import LanceStore

    path = os.path.abspath(os.path.expanduser(uri.removeprefix("file://")))
    above = path
    while not os.path.exists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise LibraryError(f"{above} is a file; a library is a folder, s3://… or postgresql://…")
    return LanceStore(path, **how)


def _open_bucket(uri: str, **how: Any) -> Store:
    from gare.library.store.lance_store import LanceStore

    if not uri.removeprefix("s3://").partition("/")[0]:
        raise LibraryError(f"{uri} names no bucket; write s3://bucket/prefix")
    return LanceStore(uri, **how)


def _open_postgres(uri: str, **how: Any) -> Store:
    require("postgres", "a library in PostgreSQL")
    from gare.library.store.postgres_store import PostgresStore

    return PostgresStore(uri, **how)


def find_surgeon(uri: str | Path) -> Surgeon | None:
    """What finds and mends damage below the rows of the library at this address; None for a store of somebody
    else."""
    uri = str(uri)
    scheme, separator, _ = uri.partition("://")
    scheme = scheme if separator else "file"
    if scheme in ("file", "s3"):
        from gare.library.store.lance_repair import LanceSurgeon

        return LanceSurgeon(uri)
    if scheme in ("postgresql", "postgres"):
        require("postgres", "a library in PostgreSQL")
        from gare.library.store.postgres_repair import PostgresSurgeon

        return PostgresSurgeon(uri)
    return None


STORES: Registry[Callable[..., Store]] = Registry(
    "store",
    {
        "file": _open_folder,  # what has no scheme is a folder too
        "s3": _open_bucket,
        "postgresql": _open_postgres,
        "postgres": _open_postgres,
    },
)
"""What opens a library, by the scheme of its address: a subclass of `Store`, or a function like one."""

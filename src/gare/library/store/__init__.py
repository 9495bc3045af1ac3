"""Where a library lives: a folder, an object store, or PostgreSQL."""

from gare.library.store.base import Hits, Stats, Store

__all__ = ["Hits", "Stats", "Store"]

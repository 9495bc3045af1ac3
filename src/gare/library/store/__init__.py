"""Where a library lives: a folder, an object store, or PostgreSQL."""

from gare.library.store.base import Hits, Stats, Store
from gare.library.store.opening import open_store

__all__ = ["Hits", "Stats", "Store", "open_store"]

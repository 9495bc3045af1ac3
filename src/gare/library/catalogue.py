"""Which items the store has, by file and by content: what makes a moved file cost nothing."""

from __future__ import annotations

import secrets
from collections.abc import Set
from dataclasses import dataclass

from gare.library.store.base import Store


def make_frames_key(content: str, split: str, start: float) -> str:
    """Names one encoding of one stretch. It begins with what the vectors depend on, so that they can be found
    again for the same content; the end makes it unique."""
    return f"{content}/{split}/{start:.3f}/{secrets.token_hex(6)}"


@dataclass(frozen=True)
class Source:
    """A file whose vectors can be used again."""

    path: str
    item_ids: tuple[str, ...]


class Catalogue:
    """A picture of the items table, taken when it is first needed and kept up to date with our own writes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_path: dict[str, dict[str, str]] = {}  # path → id → recipe
        self._by_recipe: dict[str, set[str]] = {}  # recipe → paths
        self._is_read = False

    def item_ids(self, path: str) -> set[str]:
        self._read()
        return set(self._by_path.get(path, ()))

    def find(self, content: str, split: str, path: str, preferred: Set[str] = frozenset()) -> Source | None:
        """A file with this content, cut in this way: that of the path itself, a preferred one, or any."""
        self._read()
        recipe = f"{content}/{split}"
        paths = self._by_recipe.get(recipe)
        if not paths:
            return None
        source = path if path in paths else min(paths & preferred or paths)
        ids = [item_id for item_id, made_by in self._by_path[source].items() if made_by == recipe]
        return Source(source, tuple(sorted(ids)))

    def replace(self, path: str, items: dict[str, str]) -> None:
        """The file now has these items: frames key by id."""
        self.forget(path)
        for item_id, frames_key in items.items():
            self._add(item_id, path, frames_key)

    def forget(self, path: str) -> None:
        self._read()
        for recipe in set(self._by_path.pop(path, {}).values()):
            self._by_recipe[recipe].discard(path)

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        for batch in self._store.scan(columns=["id", "path", "frames_key"]):
            for row in batch.to_pylist():
                self._add(row["id"], row["path"], row["frames_key"])

    def _add(self, item_id: str, path: str, frames_key: str) -> None:
        recipe = "/".join(frames_key.split("/")[:2])
        self._by_path.setdefault(path, {})[item_id] = recipe
        self._by_recipe.setdefault(recipe, set()).add(path)

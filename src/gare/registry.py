"""Tables from a name to a class that others may add to: encoders, interactions, datasets, stores, …

The table itself is a dict literal in the package it belongs to. Others add to it in one of two ways:

- in Python: `INTERACTIONS.register("maxsim", MaxSim)`;
- as an installed package, by an entry point in the table's group:
  `[project.entry-points."gare.interactions"]` with `maxsim = "my_package:MaxSim"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from gare.errors import ConfigError

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """A table from names to classes (or functions) of one kind.

    Args:
        kind: what an entry is called in messages, "interaction".
        entries: what the package itself brings.
        more: a module that registers others when it is imported, which is when names are first looked up.

    Entry points are looked up in the group `gare.<kind>s` when a name is not in the table.

    >>> shapes = Registry("shape", {"circle": 0})
    >>> shapes.register("square", 4)
    4
    >>> shapes["square"], sorted(shapes)
    (4, ['circle', 'square'])
    >>> shapes["star"]
    Traceback (most recent call last):
    ...
    gare.errors.ConfigError: there is no shape 'star'; there are: circle, square
    """

    def __init__(self, kind: str, entries: Mapping[str, Entry], *, more: str = "") -> None:
        self.kind, self.group = kind, f"gare.{kind.replace(' ', '_')}s"
        self._entries = dict(entries)
        self._more = more

    def register(self, name: str, entry: Entry) -> Entry:
        """Add an entry under a name that is still free."""
        self._load_more()
        if name in self._entries and self._entries[name] is not entry:
            raise ValueError(f"there is already {_a(self.kind)} '{name}'; choose another name")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> Entry:
        self._load_more()
        if name not in self._entries:
            offered = self._offered().get(name)
            if offered is None:
                raise ConfigError(f"there is no {self.kind} '{name}'; there are: {', '.join(self)}")
            self._entries[name] = self._load(offered)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._load_more()
        return name in self._entries or name in self._offered()

    def __iter__(self) -> Iterator[str]:
        self._load_more()
        return iter(dict.fromkeys([*self._entries, *sorted(self._offered())]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _load_more(self) -> None:
        if self._more:  # each time: it waits for another thread that is in the middle of that import
            import_module(self._more)

    def _load(self, point: EntryPoint) -> Entry:
        try:
            entry: Entry = point.load()
        except Exception as error:  # an installed package may fail in any way while it is imported
            package = point.dist.name if point.dist else point.value
            offer = f"the package {package} offers the {self.kind} '{point.name}'"
            raise ConfigError(f"{offer}, but it cannot be loaded: {error}") from error
        return entry

    def _offered(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"

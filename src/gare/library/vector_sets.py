"""The vectors of a library, one set for each model that encoded it. One of them is current.

The first set lies where the library is. Another one is a whole store of its own below the same address, with
its own items, frames and ledger. Notes of the first store say which sets there are and which one is current;
both are written in one step, so that a reader sees the old set or the new one and nothing between.

Items have the same ids in every set: an id is a path and a moment.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from gare.errors import DamagedLibraryError, LibraryError, MissingLibraryError
from gare.library.search.exact_search import ExactSearch
from gare.library.search.searcher import Searcher
from gare.library.store import ModelStamp, Store
from gare.model import GARE

CURRENT_NOTE = "current_set"
"""The name of the note that says which set is searched; it is empty or missing for the first."""
_SET_NOTE = "set:"
_NAME_LENGTH = 16

SetState = Literal["complete", "building", "leaving", "forgotten"]


@dataclass(frozen=True)
class VectorSet:
    """The vectors that one model made of a library."""

    name: str
    """The beginning of the model's fingerprint."""
    stamp: ModelStamp
    state: SetState
    """`building` until every file is in it; `leaving` while it is removed."""
    is_current: bool
    """Whether searches use it."""


class MissingSetError(LibraryError):
    """A set that the notes speak of is not there."""


class OpenSet:
    """A set that is open: its store, and the model that made it, which is loaded when it is first needed.

    Args:
        load: finds the model of a stamp.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        model: GARE | None,
        load: Callable[[Store], GARE],
        *,
        exact_search: Callable[[Searcher], ExactSearch] | None = None,
    ) -> None:
        self.name, self.store = name, store
        self._model, self._load, self._exact_search = model, load, exact_search

    @cached_property
    def model(self) -> GARE:
        return self._model if self._model is not None else self._load(self.store)

    @cached_property
    def searcher(self) -> Searcher:
        return Searcher(self.store, self.model, exact_search=self._exact_search)

    def searching_with(self, exact_search: Callable[[Searcher], ExactSearch] | None) -> OpenSet:
        """The same set with other exact searches; a model that is loaded is used again."""
        model = self.model if "model" in vars(self) else self._model
        return OpenSet(self.name, self.store, model, self._load, exact_search=exact_search)

    @property
    def is_loaded(self) -> bool:
        """Whether somebody has searched it."""
        return "searcher" in vars(self)


class VectorSets:
    """The sets of one library: listed, opened, made current, forgotten."""

    def __init__(self, home: Store, *, read_only: bool) -> None:
        self.home = home
        self._read_only = read_only
        self._stores: dict[str, Store] = {}
        self._retired: list[Store] = []
        self._opening = threading.Lock()

    @property
    def home_name(self) -> str:
        """The name of the first set."""
        return set_name(self.home.stamp)

    def current_name(self) -> str:
        """The name of the set that searches use now."""
        return self.home.get_notes().get(CURRENT_NOTE) or self.home_name

    def all(self) -> list[VectorSet]:
        """Every set that takes room, the first one first."""
        notes = self.home.get_notes()
        current = notes.get(CURRENT_NOTE) or self.home_name
        sets = []
        for key, note in sorted({_SET_NOTE + self.home_name: "{}", **notes}.items()):
            if key.startswith(_SET_NOTE) and note:
                name, facts = key.removeprefix(_SET_NOTE), json.loads(note)
                stamp = self.home.stamp if name == self.home_name else ModelStamp(**facts["stamp"])
                sets.append(VectorSet(name, stamp, facts.get("state", "complete"), name == current))
        sets = [found for found in sets if found.state != "forgotten"]
        return sorted(sets, key=lambda found: (found.name != self.home_name, found.stamp.name))

    def find(self, model: GARE) -> VectorSet | None:
        """The set that a loaded model made; None where there is none."""
        return next((found for found in self.all() if model.is_known_as(found.stamp.fingerprint)), None)

    def named(self, wanted: str) -> VectorSet:
        """A set by its model's name, a folder relative or not, or by the beginning of its own."""
        sets = self.all()
        folder = os.path.realpath(os.path.expanduser(wanted))  # as a folder is noted, also one that is gone
        exact = [found for found in sets if wanted in (found.stamp.name, found.name)]
        exact = exact or [found for found in sets if folder == found.stamp.name]
        fitting = exact or [found for found in sets if wanted and found.name.startswith(wanted)]
        if len(fitting) == 1:
            return fitting[0]
        known = ", ".join(f"{found.stamp.name} ({found.name})" for found in sets)
        if fitting:
            raise LibraryError(
                f"several models of {self.home.uri} are called {wanted}; say which by the "
                f"name in brackets: {known}"
            )
        raise LibraryError(f"{self.home.uri} has no vectors of {wanted}; it has those of {known}")

    def open(self, name: str, *, fresh: bool = False) -> Store:
        """The store of a set.

        Args:
            fresh: not one that was opened before: the set may have been forgotten and made again since.
        """
        if name == self.home_name:
            return self.home
        with self._opening:
            if fresh and (before := self._stores.pop(name, None)):
                self._retired.append(before)  # a search may still be under way there
            if name not in self._stores:
                try:
                    self._stores[name] = self.home.beside(
                        name, stamp=None, create=False, read_only=self._read_only
                    )
                except MissingLibraryError:
                    raise MissingSetError(
                        f"library {self.home.uri}: the vectors of set {name} are gone; see what there is: "
                        f"gare models --library {self.home.uri}"
                    ) from None
            return self._stores[name]

    def open_current(self) -> Store:
        """The store that searches use; the first one, if somebody removed it by hand."""
        name = self.current_name()
        try:
            return self.open(name)
        except MissingSetError:
            lost = next((found.stamp.name for found in self.all() if found.name == name), name)
        if not self._read_only:
            self.home.set_notes({CURRENT_NOTE: "", _SET_NOTE + name: ""})
        self.home.repairs += (
            f"the vectors of {lost} are gone, so those of {self.home.stamp.name} are searched again. To have "
            f"the others: gare index --model {lost}",
        )
        return self.home

    def begin(self, stamp: ModelStamp) -> str:
        """Make a set for this model, or go on with one that there is; its name."""
        name = set_name(stamp)
        state = self._states().get(name)
        if state == "leaving":
            self._remove(name)
        if state not in ("building", "complete"):
            # The note comes first: a store that nobody knows of would stay for ever.
            self._note(name, stamp, "building")
        if name != self.home_name:
            with self._opening:
                self._stores[name] = self._create(name, stamp, is_new=state is None)
        return name

    def _create(self, name: str, stamp: ModelStamp, *, is_new: bool) -> Store:
        try:
            return self.home.beside(name, stamp=stamp, create=True, read_only=False)
        except DamagedLibraryError:
            if not is_new:
                raise
        # Somebody went on writing into a set that was forgotten.
        self.home.drop_beside(name)
        return self.home.beside(name, stamp=stamp, create=True, read_only=False)

    def use(self, name: str) -> None:
        """Make a set the current one; from now on it counts as complete."""
        stamp = self.named(name).stamp
        self.home.set_notes({CURRENT_NOTE: name, **self._set_note(name, stamp, "complete")})

    def forget(self, name: str) -> None:
        """Remove a set that is not current. A kill in between leaves a set that can be removed again."""
        if name == self.current_name():
            raise LibraryError(
                f"searches of {self.home.uri} use the vectors of this model; change to another one first: "
                f"gare models --library {self.home.uri} --use NAME"
            )
        stamp = self.named(name).stamp
        self._note(name, stamp, "leaving")
        self._remove(name)

    def close(self) -> None:
        """Close every store that was opened."""
        for store in (*self._retired, *self._stores.values(), self.home):
            store.close()

    def _states(self) -> dict[str, SetState]:
        return {found.name: found.state for found in self.all()}

    def _remove(self, name: str) -> None:
        with self._opening:
            if store := self._stores.pop(name, None):
                store.close()
        if name == self.home_name:
            self.home.discard()
            self._note(name, self.home.stamp, "forgotten")
        else:
            self.home.drop_beside(name)
            self.home.set_notes({_SET_NOTE + name: ""})

    def _note(self, name: str, stamp: ModelStamp, state: SetState) -> None:
        self.home.set_notes(self._set_note(name, stamp, state))

    def _set_note(self, name: str, stamp: ModelStamp, state: SetState) -> dict[str, str]:
        facts: dict[str, Any] = {"state": state, "stamp": asdict(stamp)}
        return {_SET_NOTE + name: json.dumps(facts, ensure_ascii=False)}


def set_name(stamp: ModelStamp) -> str:
    """What the set of a model is called.

    >>> set_name(ModelStamp("mine", "0123456789abcdef0123456789abcdef", 8, 9, 4))
    '0123456789abcdef'
    """
    return stamp.fingerprint[:_NAME_LENGTH]

"""A library of videos as one object: index folders, search them, ask about single items.

It is long because it is the one class that Python users of a library meet, with all they can ask of it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from gare.errors import LibraryError, MissingLibraryError, QueryError
from gare.library.check import CheckReport
from gare.library.filters import Filter, parse_filter, simplify
from gare.library.index.commit import delete_items
from gare.library.index.index_report import FileFailure, IndexProgress, IndexReport
from gare.library.index.index_run import IndexOptions, index_folders
from gare.library.library_model import load_model, load_model_of, model_stamp, usable_device
from gare.library.model_change import change_to, encode_again, num_behind
from gare.library.search.exact_search import ExactSearch
from gare.library.search.resident_search import exact_search_on
from gare.library.search.search_hit import Hits
from gare.library.search.search_request import By, SearchRequest
from gare.library.search.searcher import Searcher
from gare.library.search.stage1 import recommended_candidates
from gare.library.search.stage1_audit import Audit, audit
from gare.library.store import ModelStamp, Progress, Stats, Store, open_store
from gare.library.store.read_deadline import checked
from gare.library.store.store_schema import check_same_model
from gare.library.vector_exchange import add_vectors, export_vectors, fetch_features, fetch_vectors
from gare.library.vector_set_checks import check_sets, repair_sets
from gare.library.vector_sets import MissingSetError, OpenSet, VectorSet, VectorSets, set_name
from gare.model import GARE
from gare.model.named_models import ModelLike
from gare.types import VideoFeatures

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_MODEL = "gare-mini"
LIBRARY_FOLDER = ".gare"
_LOOK_S = 1.0  # another process may change the model
_LOOK_AGAIN_S = 30.0  # a model that cannot be loaded will not be there a second later
_log = logging.getLogger("gare.library")
_ITEM_COLUMNS = (
    "id",
    "path",
    "start",
    "end",
    "file_duration",
    "width",
    "height",
    "modified",
    "added",
    "tags",
    "content",
)


class Library:
    """Videos that can be searched.

    Examples:
        with gare.Library.open("~/Videos/.gare") as library:
            library.index("~/Videos")
            for hit in library.search("a dog catches a frisbee", top=5):
                print(hit.path, hit.moment, hit.score)
    """

    def __init__(
        self,
        store: Store,
        model: GARE | None,
        *,
        device: torch.device | str = "cpu",
        sets: VectorSets | None = None,
        is_pinned: bool = False,
    ) -> None:
        """`is_pinned` stays with this set of vectors when the library changes to another one."""
        self._device = torch.device(device)
        self._sets = sets or VectorSets(store, read_only=False)
        self._exact_search = exact_search_on(self._device)
        self._open = OpenSet(
            set_name(store.stamp), store, model, self._load_model, exact_search=self._exact_search
        )
        self._given = None if model is None else (self._open.name, model)
        self._is_pinned = is_pinned
        self._wanted: tuple[str, GARE] | None = None
        self._following = threading.RLock()
        self._looked = time.monotonic()
        self._said = ""
        self.is_followed = False
        """Somebody calls `refresh` now and then, so that a search need not."""

    @classmethod
    def open(
        cls,
        place: str | os.PathLike[str],
        *,
        model: ModelLike | None = None,
        device: torch.device | str = "cpu",
        create: bool = True,
        read_only: bool = False,
        change_model: bool = False,
    ) -> Library:
        """Open the library at `place`: a folder, `s3://bucket/prefix`, `postgresql://…`, or an address of a
        store that was registered in `gare.library.store.STORES`.

        Args:
            model: a loaded model, an encoder of your own, or what `GARE.from_pretrained` takes by name; None
                is the one that made the library, and gare-mini for a new one. One that made vectors which the
                library keeps opens those.
            device: where the model is. On a GPU exact searches hold the library in its memory, `cuda` in
                that of all GPUs. Without one, `cuda` is the CPU, and a warning says so.
            create: make a new library where there is none.
            read_only: never write, not even to repair.
            change_model: with another model than the library's own, the first `index` changes to it.

        Raises:
            LibraryError: there is none, it is damaged, or made by another model.
        """
        place, device = str(place), usable_device(device)
        home = _try_open(place, read_only=read_only)
        if home is None and (not create or read_only):
            if os.path.isdir(inside := os.path.join(os.path.expanduser(place), LIBRARY_FOLDER)):
                raise MissingLibraryError(f"there is no library at {place}, but there is one at {inside}")
            return cls(open_store(place, read_only=read_only), None, device=device)  # says what is wrong
        if home is None:
            name, loaded = load_model(DEFAULT_MODEL if model is None else model, device)
            stamp = model_stamp(loaded, name)
            home = open_store(place, stamp=stamp, create=not read_only, read_only=read_only)
            return cls(home, loaded, device=device)
        sets = VectorSets(home, read_only=read_only)
        try:
            return cls._open_sets(sets, model, device=device, change_model=change_model)
        except BaseException:
            sets.close()
            raise

    @classmethod
    def _open_sets(
        cls,
        sets: VectorSets,
        model: ModelLike | None,
        *,
        device: torch.device | str,
        change_model: bool,
    ) -> Library:
        """Open the current set, or the one of this model."""
        current = sets.open_current()
        if model is None:
            return cls(current, None, device=device, sets=sets)
        name, loaded = load_model(model, device)
        if loaded.is_known_as(current.stamp.fingerprint):
            return cls(current, loaded, device=device, sets=sets)
        if change_model:
            library = cls(current, None, device=device, sets=sets)
            library._wanted = (name, loaded)
            return library
        found = sets.find(loaded)
        if found is None or found.state != "complete":
            check_same_model(sets.home.uri, current.stamp, model_stamp(loaded, name))
            raise LibraryError(f"{sets.home.uri} has no vectors of {name}")
        return cls(sets.open(found.name), loaded, device=device, sets=sets, is_pinned=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of items: whole videos, or the segments of them."""
        self._follow()
        return self.store.count()

    def close(self) -> None:
        """Close the store."""
        self._sets.close()

    @property
    def store(self) -> Store:
        """Where the current vectors are, with all that is known of the items."""
        return self._open.store

    @property
    def home(self) -> Store:
        """Where the first vectors are, with the notes that concern the whole library."""
        return self._sets.home

    @property
    def model(self) -> GARE:
        """The model that made the current vectors; loaded when it is first needed."""
        return self._open.model

    @property
    def searcher(self) -> Searcher:
        """What searches the current vectors; it loads the model. One search should use one searcher."""
        return self._open.searcher

    def search_exactly_with(self, exact_search: Callable[[Searcher], ExactSearch] | None) -> None:
        """Exact searches go elsewhere from now on, such as to `gare.cluster.sharded_search`; None: back here.

        Searches that are under way end as they began.
        """
        with self._following:
            self._exact_search = exact_search or exact_search_on(self._device)
            self._open = self._open.searching_with(self._exact_search)

    @property
    def has_given_model(self) -> bool:
        """Whether the current vectors are those of the model that the library was opened with."""
        return self._given is not None and self._given[0] == self._open.name

    def _load_model(self, store: Store) -> GARE:
        stamp = store.stamp
        if self._given is not None and self._given[0] == set_name(stamp):
            return self._given[1]
        try:
            return load_model_of(self.home.uri, stamp, self._device)
        except LibraryError as error:
            kept = [
                found.stamp.name
                for found in self.sets()
                if found.state == "complete" and not found.is_current
            ]
            if not kept:
                raise
            raise LibraryError(
                f"{error}. Or go back to the vectors of {kept[0]}: gare models --library {self.home.uri} "
                f"--use {kept[0]}"
            ) from None

    # --- the model ------------------------------------------------------------------------------------------

    def sets(self) -> list[VectorSet]:
        """The vectors that the library keeps, one set for each model that encoded it."""
        return self._sets.all()

    def describe_set(self, found: VectorSet) -> dict[str, Any]:
        """What there is to say about a set, as plain values."""
        store = None
        if found.state != "leaving":  # its tables go one by one
            with suppress(MissingSetError):  # it was removed by hand, or is only just begun
                store = self._sets.open(found.name)
        return {
            "set": found.name,
            "model": found.stamp.name,
            "fingerprint": found.stamp.fingerprint,
            "dim": found.stamp.dim,
            "state": found.state,
            "is_current": found.is_current,
            "num_items": store.count() if store else 0,
            "num_bytes": store.num_bytes() if store else None,
        }

    def open_set(self, name: str) -> Store:
        """The store of one of the sets; the library closes it."""
        return self._sets.open(name)

    def change_model(
        self,
        model: ModelLike,
        *folders: str | os.PathLike[str],
        options: IndexOptions | None = None,
        on_progress: Callable[[IndexProgress], None] = lambda progress: None,
    ) -> IndexReport:
        """Encode everything again with another model, beside the vectors that there are, then search with it.

        Whoever searches meanwhile, here or elsewhere, goes on with the old vectors until all are there.
        Ctrl-C or a crash loses nothing: call it again. Vectors of this model that the library has kept are
        brought up to date and used. Folders that are named here are indexed afterwards.
        """
        self._wanted = load_model(model, self._device)
        return self.index(*folders, options=options, on_progress=on_progress)

    @property
    def wanted_model(self) -> str | None:
        """The model that the next `index` changes to, if any."""
        return None if self._wanted is None else self._wanted[0]

    def use_model(self, name: str) -> int:
        """Search with vectors that the library has kept, at once; the number of files they are behind.

        Args:
            name: the name of a model, or the beginning of the name of its set.
        """
        chosen = self._sets.named(name)
        if chosen.state != "complete":
            raise LibraryError(
                f"the vectors of {chosen.stamp.name} are not complete; go on with them first: "
                f"gare index --library {self.home.uri} --model {chosen.stamp.name}"
            )
        self._follow(now=True)
        source = self._sets.open(self._sets.current_name())
        if not chosen.is_current:
            change_to(self._sets, source, chosen.name, is_complete=False)
        behind = num_behind(source, self._sets.open(chosen.name))
        self._follow(now=True)
        return behind

    def forget_model(self, name: str) -> VectorSet:
        """Free the vectors of a model that is not the current one."""
        chosen = self._sets.named(name)
        self._sets.forget(chosen.name)
        return chosen

    def refresh(self) -> bool:
        """Take up a change of model that was made elsewhere; whether there was one.

        The new model is loaded before anything changes. Searches that are under way end with the old one.
        """
        with self._following:
            name = self._sets.current_name()
            self._looked = time.monotonic()
            if self._is_pinned or name == self._open.name:
                return False
            opened = OpenSet(
                name,
                self._sets.open(name, fresh=True),
                None,
                self._load_model,
                exact_search=self._exact_search,
            )
            if self._open.is_loaded:
                opened.searcher.encoder.texts.get(["a warm-up"])
            self._open = opened
            return True

    def _follow(self, *, now: bool = False) -> None:
        """Look whether the model was changed, now or if the last look is old."""
        wait = _LOOK_AGAIN_S if self._said else _LOOK_S
        if not now and (self.is_followed or time.monotonic() - self._looked < wait):
            return
        try:
            self.refresh()
            self._said = ""
        except LibraryError as error:  # the old vectors are still there
            if self._said != str(error):
                _log.warning("the model of %s was changed, but not here: %s", self.home.uri, error)
            self._said = str(error)

    # --- searching ------------------------------------------------------------------------------------------

    def search(
        self,
        query: str | None = None,
        *,
        image: str | os.PathLike[str] | Image | None = None,
        video: str | os.PathLike[str] | None = None,
        like: str | None = None,
        top: int = 10,
        where: Filter | str | None = None,
        min_score: float | None = None,
        candidates: int | None = None,
        exhaustive: bool = False,
        exact: bool = False,
        by: By = "file",
        unique: bool = False,
        explain: bool = False,
    ) -> Hits:
        """What matches best: words, or a picture, a clip, an item of the library (one of the four).

        Args:
            query: words; "dog - beach" and "dog ^2 + snow" have unwanted and weighted terms.
            where: a filter, or its text: "folder:holidays duration:>10".
            candidates: how many items are scored exactly; default: what the last audit recommends, or 256.
            exhaustive: score every item.
            exact: the same list as exhaustive, from far fewer scores; `hits.certificate` is its proof.
            by: "file" gives a file once, with its best moment; "moment" as often as it matches.
            unique: fold near-copies into one hit.
            explain: tell what the increment changed.
        """
        request = SearchRequest(
            words=query,
            image=image,
            video=video,
            like=like,
            where=where,
            top=top,
            candidates=candidates,
            exhaustive=exhaustive,
            exact=exact,
            min_score=min_score,
            by=by,
            unique=unique,
            explain=explain,
        )
        return self.find(request)

    def find(self, request: SearchRequest) -> Hits:
        """The hits of a request, best first."""
        self._follow()
        searcher = self.searcher
        hits: Hits | None = None
        try:
            hits = searcher.search(request)
        except (LibraryError, QueryError):
            if not self._left(searcher):
                raise
        if hits is None or (not hits and self._left(searcher)):
            return self.searcher.search(request)
        return hits

    def _left(self, searcher: Searcher) -> bool:
        """Whether the model was changed: its vectors may have been forgotten in the middle of a search."""
        self._follow(now=True)
        return self.searcher is not searcher

    def describe(
        self,
        captions: Sequence[str],
        *,
        video: str | os.PathLike[str] | None = None,
        like: str | None = None,
        top: int = 10,
    ) -> list[tuple[str, float]]:
        """Which of these captions fit a video, or an item of the library; best first."""
        self._follow()
        return self.searcher.rank_captions(captions, video=video, like=like, top=top)

    @property
    def default_candidates(self) -> int:
        """What the last audit recommends; 256 without one, or once the library has outgrown it."""
        return recommended_candidates(self.store)

    def audit(
        self,
        queries: Sequence[str] = (),
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Audit:
        """Compare two-stage search with exhaustive search, and note how many candidates are enough.

        Args:
            queries: sentences; default: everyday ones, none of which the stage-1 vectors were made with.
        """
        self._follow(now=True)
        return audit(self.searcher, queries, on_progress=on_progress)

    # --- contents -------------------------------------------------------------------------------------------

    def index(
        self,
        *folders: str | os.PathLike[str],
        options: IndexOptions | None = None,
        on_progress: Callable[[IndexProgress], None] = lambda progress: None,
    ) -> IndexReport:
        """Bring the library up to date with these folders, or with those it was made of."""
        self._follow(now=True)
        before = self._encode_again(options or IndexOptions(), on_progress)
        if before is not None and (before.interrupted or not folders):
            return before
        roots = [os.path.expanduser(os.fspath(folder)) for folder in folders] or self.folders
        if not roots:
            raise LibraryError("name a folder to index; this library does not know of any yet")
        opened = self._open
        report = index_folders(
            opened.store,
            opened.model,
            roots,
            options=options,
            on_progress=on_progress,
            skip=[self.home.uri],
        )
        if report.did_something and not report.interrupted:
            opened.store.maintain()
        self._follow(now=True)
        if self._open.name != opened.name and not report.interrupted:
            # Somebody changed the model meanwhile, and its vectors may lack what was done here.
            report = self.index(*roots, options=options, on_progress=on_progress)
        return report if before is None else report.after_a_change(before)

    def _encode_again(
        self, options: IndexOptions, on_progress: Callable[[IndexProgress], None]
    ) -> IndexReport | None:
        """Change to the model that is wanted; None where that is the current one."""
        if self._wanted is None:
            return None
        name, loaded = self._wanted
        found = self._sets.find(loaded)
        stamp = found.stamp if found is not None else model_stamp(loaded, name)
        self._given = (set_name(stamp), loaded)
        report = None
        if found is None or not found.is_current:
            source = self._sets.open(self._sets.current_name())
            folders = list(json.loads(source.get_notes().get("folders", "[]")))
            report = encode_again(
                self._sets, source, loaded, stamp, folders, options=options, on_progress=on_progress
            )
            if report.interrupted:
                return report
        self._wanted = None
        self.refresh()
        return report

    @property
    def folders(self) -> list[str]:
        """The folders that were indexed."""
        return list(json.loads(self.store.get_notes().get("folders", "[]")))

    def items(self, where: Filter | str | None = None) -> Iterator[dict[str, Any]]:
        """Every item that passes the filter, as a row of plain values."""
        self._follow()
        where = parse_filter(where) if isinstance(where, str) else where
        where = None if where is None else simplify(where)
        for batch in checked(self.store.scan(where=where, columns=_ITEM_COLUMNS)):
            yield from batch.to_pylist()

    def get(self, item: str) -> dict[str, Any] | None:
        """One item as a row of plain values; None if there is none."""
        self._follow()
        rows: list[dict[str, Any]] = self.store.fetch([item], _ITEM_COLUMNS).to_pylist()
        return rows[0] if rows else None

    def delete(self, items: Sequence[str]) -> int:
        """Take items out of the library; how many there were. Their files stay, and stay out of it until they
        change. Moments of a file go together: whoever removes one means the file."""
        self._follow(now=True)
        return delete_items(self.store, items)

    def check(
        self, *, read_data: str | None = None, recompute: bool = False, with_files: bool = True
    ) -> CheckReport:
        """Check that the library is as it was written; nothing is changed.

        Args:
            read_data: how much of the bulk data to read: "all", "2.5%" or "n/t"; None reads none.
            recompute: also compare stage-1 vectors with what the model makes of the frames that are read.
            with_files: compare the ledger with the files on the disk.
        """
        load = (lambda stamp: self._model_for(stamp)[0]) if recompute else None
        return check_sets(self.home.address, read_data=read_data, load_model=load, with_files=with_files)

    def repair(self, *, read_data: str = "all") -> CheckReport:
        """Check the library and mend what is damaged, down to encoding files again.

        A library that cannot be opened any more is mended by `gare.library.check.repair_library`.
        """
        return repair_sets(self.home.address, self._model_for, read_data=read_data)

    def _model_for(self, stamp: ModelStamp | None) -> tuple[GARE, ModelStamp]:
        if stamp is None or set_name(stamp) == self._open.name:
            return self.model, self.store.stamp
        return load_model_of(self.home.uri, stamp, self._device), stamp

    # --- vectors --------------------------------------------------------------------------------------------

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """The stage-1 vectors of these items, in this order: float32 [items, D + 1].

        Their product with `(u, 1)`, u a text's plain vector, is nearly the score: what finds candidates.
        """
        self._follow(now=True)
        return fetch_vectors(self.store, ids)

    def features(self, ids: Sequence[str]) -> VideoFeatures:
        """The frame vectors of these items, for `GARE.similarity` and `GARE.score`."""
        self._follow(now=True)
        return fetch_features(self.store, ids, self.model.device)

    def export(
        self, path: str | os.PathLike[str], *, where: Filter | str | None = None, overwrite: bool = False
    ) -> int:
        """Write the vectors of every item that passes the filter into a Parquet file; how many items.

        A row has `id`, `path`, `start`, `end`, `file_duration`, `width`, `height`, `tags`, the stage-1
        `vector`, the vectors of its `frames`, and their `times`. The file is complete or not there at all.
        """
        where = parse_filter(where) if isinstance(where, str) else where
        where = None if where is None else simplify(where)
        self._follow(now=True)
        return export_vectors(self.store, path, where=where, overwrite=overwrite)

    def add(
        self,
        vectors: Any,
        *,
        paths: Sequence[str] | None = None,
        start: Sequence[float] | None = None,
        end: Sequence[float] | None = None,
        times: Sequence[Sequence[float]] | None = None,
        tags: Sequence[Sequence[str]] | None = None,
    ) -> int:
        """Add items by their frame vectors, made by the library's model elsewhere; how many.

        An item replaces that of the same path and start. It is no file to this library: `gare index` never
        removes it, and replaces it when it finds a file at its path.

        Args:
            vectors: a Parquet file as `export` writes it (`path` and `frames` are enough), with nothing else
                given. Or arrays [frames, D], one an item; what `GARE.encode` returned; features.
            paths: the path of each item, or another name that is its own.
            start: where it begins in its file, in seconds; default 0.
            end: where it ends.
            times: the moment of each frame; default: evenly spaced.
            tags: the tags of each item.

        Raises:
            LibraryError: vectors of another model, of another size, or that are not finite. Of a file, the
                rows before the wrong one may have been added.
        """
        facts = {"path": paths, "start": start, "end": end, "times": times, "tags": tags}
        self._follow(now=True)
        return add_vectors(self.store, self.model, vectors, facts)

    def failures(self) -> list[FileFailure]:
        """Files that could not be indexed."""
        rows = (row for batch in checked(self.store.scan_files()) for row in batch.to_pylist())
        return [FileFailure(r["path"], r["error_kind"], r["error"]) for r in rows if r["state"] == "failed"]

    def maintain(self, progress: Progress | None = None) -> Stats:
        """Index new vectors, join small files and remove what nobody needs."""
        return self.store.maintain(progress)


def find_library(start: Path | None = None) -> str:
    """The library of a folder: $GARE_LIBRARY, or .gare here or in a folder above."""
    if named := os.environ.get("GARE_LIBRARY"):
        return named
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / LIBRARY_FOLDER).is_dir():
            return str(folder / LIBRARY_FOLDER)
    raise LibraryError(
        f"no library in {start} or above it; make one with 'gare index FOLDER', or name one with --library"
    )


def _try_open(place: str, *, read_only: bool) -> Store | None:
    """The store at this place; None where there is none. A damaged one is an error."""
    try:
        return open_store(place, read_only=read_only)
    except MissingLibraryError:
        return None

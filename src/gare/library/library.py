"""A library of videos as one object: index folders, search them, ask about single items."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from gare.errors import CheckpointError, LibraryError, MissingLibraryError, QueryError
from gare.library.filters import Filter, parse_filter
from gare.library.indexer import IndexOptions, index_folders
from gare.library.query import parse_query
from gare.library.report import FileFailure, IndexProgress, IndexReport
from gare.library.search import DEFAULT_CANDIDATES, Searcher, SearchHit, SearchRules
from gare.library.stamp import model_stamp
from gare.library.store import Stats, Store, open_store
from gare.library.store.base import Progress
from gare.model import GARE
from gare.types import VideoFeatures

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULT_MODEL = "gare-mini"
LIBRARY_FOLDER = ".gare"
AUDIT_NOTE = "audit"
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

    Example:
        with gare.Library.open("~/Videos/.gare") as library:
            library.index("~/Videos")
            for hit in library.search("a dog catches a frisbee", top=5):
                print(hit.path, hit.moment, hit.score)
    """

    def __init__(self, store: Store, model: GARE | None, *, device: torch.device | str = "cpu") -> None:
        self.store = store
        self._model, self._device = model, torch.device(device)

    @classmethod
    def open(
        cls,
        place: str | os.PathLike[str],
        *,
        model: GARE | str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        create: bool = True,
        read_only: bool = False,
    ) -> Library:
        """Open the library at `place`: a folder, `s3://bucket/prefix` or `postgresql://…`.

        Args:
            model: a loaded model, or the name of one; None is the one that made the library, and gare-mini
                for a new one.
            create: make a new library where there is none.
            read_only: never write, not even to repair.

        Raises:
            LibraryError: there is none, it is damaged, or made by another model.
        """
        place = str(place)
        store = _try_open(place, read_only=read_only)
        if model is None and store is not None:
            return cls(store, None, device=device)
        if store is None and (not create or read_only):
            return cls(open_store(place, read_only=read_only), None, device=device)  # says what is wrong
        name, loaded = _load(DEFAULT_MODEL if model is None else model, device)
        stamp = model_stamp(loaded, name)
        if store is not None:
            if replace(store.stamp, name=name) == stamp:
                return cls(store, loaded, device=device)
            store.close()  # opened again below, which says how the models differ
        return cls(
            open_store(place, stamp=stamp, create=not read_only, read_only=read_only), loaded, device=device
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of items: whole videos, or the stretches they were split into."""
        return self.store.count()

    def close(self) -> None:
        self.store.close()

    @cached_property
    def model(self) -> GARE:
        """The model that made the vectors; loaded when it is first needed."""
        if self._model is not None:
            return self._model
        stamp = self.store.stamp
        try:
            _, model = _load(stamp.name, self._device)
        except CheckpointError as error:
            raise LibraryError(
                f"{self.store.uri} was made by {stamp.name}, which cannot be loaded: {error} If it is "
                "elsewhere now, open the library with model=… (--model)"
            ) from None
        if model_stamp(model, stamp.name).fingerprint != stamp.fingerprint:
            raise LibraryError(
                f"{self.store.uri} was made by {stamp.name}, but its weights have changed since; open it "
                "with the old weights (model=…), or index into a new library"
            )
        return model

    @cached_property
    def searcher(self) -> Searcher:
        return Searcher(self.store, self.model)

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
        unique: bool = False,
        explain: bool = False,
    ) -> list[SearchHit]:
        """What matches best: words, or a picture, a clip, an item of the library (one of the four).

        Args:
            query: words; "dog - beach" and "dog ^2 + snow" have unwanted and weighted terms.
            where: a filter, or its text: "folder:holidays duration:>10".
            candidates: how many items are scored exactly; default: what the last audit recommends, or 256.
            exhaustive: score every item.
            unique: fold near-copies into one hit.
            explain: tell what the increment changed.
        """
        if sum(what is not None for what in (query, image, video, like)) != 1:
            raise QueryError("search for one thing: words, an image, a video, or like an item of the library")
        if top < 1:
            raise QueryError(f"top must be at least 1, got {top}")
        if min_score is not None and math.isnan(min_score):
            raise QueryError("min_score must be a number")
        skip: frozenset[str] = frozenset()
        if query is not None:
            probe = self.searcher.text_probe(parse_query(query))
        else:
            probe = self.searcher.video_probe(self.features(image=image, video=video, like=like))
            skip = frozenset([like]) if like else skip
        rules = SearchRules(
            top=top,
            candidates=None if exhaustive else (candidates or self.default_candidates),
            where=parse_filter(where) if isinstance(where, str) else where,
            min_score=min_score,
            unique=unique,
            explain=explain,
            skip=skip,
        )
        return self.searcher.search(probe, rules)

    def describe(
        self,
        captions: Sequence[str],
        *,
        video: str | os.PathLike[str] | None = None,
        like: str | None = None,
        top: int = 10,
    ) -> list[tuple[str, float]]:
        """Which of these captions fit a video, or an item of the library; best first."""
        if not captions:
            raise QueryError("no captions to choose from")
        features = self.features(video=video, like=like)
        return self.searcher.rank_captions(features, captions)[:top]

    def features(
        self,
        *,
        image: str | os.PathLike[str] | Image | None = None,
        video: str | os.PathLike[str] | None = None,
        like: str | None = None,
    ) -> VideoFeatures:
        """Frame vectors of a picture, of a clip, or as stored."""
        if like is not None:
            stored = self.searcher.stored_video(like)
            if stored is None:
                raise QueryError(f"no item '{like}' in {self.store.uri}; search, or list them, for their ids")
            return stored
        if image is not None and not isinstance(image, str | os.PathLike):
            return self.model.encode_video([[image]])
        if image is not None and os.path.exists(image) and not os.path.isfile(image):
            raise QueryError(f"{image} is not a file; name a picture")
        source = video if image is None else image
        if source is None:
            raise QueryError("name a video, or an item of the library")
        return self.model.encode_video([source])

    @property
    def default_candidates(self) -> int:
        """What the last audit recommends; 256 without one, or once the library has outgrown it."""
        note = self.store.get_notes().get(AUDIT_NOTE)
        if note is None:
            return DEFAULT_CANDIDATES
        audit = json.loads(note)
        candidates = int(audit["candidates"])
        is_outgrown = candidates < DEFAULT_CANDIDATES and len(self) > 2 * audit["num_items"]
        return DEFAULT_CANDIDATES if is_outgrown else candidates

    # --- contents -------------------------------------------------------------------------------------------

    def index(
        self,
        *folders: str | os.PathLike[str],
        options: IndexOptions | None = None,
        on_progress: Callable[[IndexProgress], None] = lambda progress: None,
    ) -> IndexReport:
        """Bring the library up to date with these folders, or with those it was made of."""
        roots = [os.path.expanduser(os.fspath(folder)) for folder in folders] or self.folders
        if not roots:
            raise LibraryError("name a folder to index; this library does not know of any yet")
        report = index_folders(self.store, self.model, roots, options=options, on_progress=on_progress)
        if report.did_something and not report.interrupted:
            self.store.maintain()
        return report

    @property
    def folders(self) -> list[str]:
        """What the library was made of."""
        return list(json.loads(self.store.get_notes().get("folders", "[]")))

    def items(self, where: Filter | str | None = None) -> Iterator[dict[str, Any]]:
        where = parse_filter(where) if isinstance(where, str) else where
        for batch in self.store.scan(where=where, columns=_ITEM_COLUMNS):
            yield from batch.to_pylist()

    def get(self, item: str) -> dict[str, Any] | None:
        rows: list[dict[str, Any]] = self.store.fetch([item], _ITEM_COLUMNS).to_pylist()
        return rows[0] if rows else None

    def delete(self, items: Sequence[str]) -> int:
        """Take items out of the library. Their files stay, and stay out of it until they change."""
        return self.store.delete(items)

    def failures(self) -> list[FileFailure]:
        """Files that could not be indexed."""
        rows = (row for batch in self.store.scan_files() for row in batch.to_pylist())
        return [FileFailure(r["path"], r["error_kind"], r["error"]) for r in rows if r["state"] == "failed"]

    def maintain(self, progress: Progress | None = None) -> Stats:
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
    """The store that is there; None where there is none. What is damaged says so."""
    try:
        return open_store(place, read_only=read_only)
    except MissingLibraryError:
        return None


def _load(model: GARE | str | os.PathLike[str], device: torch.device | str) -> tuple[str, GARE]:
    """A model and the name that loads it again."""
    if isinstance(model, GARE):
        return "(a model made in Python)", model.to(device).eval()
    name, folder = str(model), os.path.expanduser(model)
    if os.path.isdir(folder):
        name = os.path.realpath(folder)
    return name, GARE.from_pretrained(name).to(device).eval()

"""A library on a GPU: the same lists as without, whatever comes and goes, and a word where it cannot be.

The device is the CPU here, and the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import gare
from gare.errors import TimeLimitError
from gare.interaction import key_bounds_cuda, resident_table
from gare.interaction.resident_cards import card_bytes
from gare.library.library import usable_device
from gare.library.search import resident_items, resident_search
from gare.library.search.proven_search import ProvenSearch
from gare.library.search.resident_search import ResidentSearch, exact_search_on
from gare.library.search.search_request import SearchRequest
from gare.library.search.searcher import Searcher
from gare.library.store.read_deadline import Deadline
from gare.library.store.stored_frames import unpack_frames

CPU = torch.device("cpu")
QUERIES = ["a dog runs", "two cars", "rain on the sea ^2 - a dog", "x"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_model(scale: float = 1.0, **interaction: object) -> gare.GARE:
    torch.manual_seed(0)
    config = {
        "encoder": {"name": "tiny"},
        "temporal": {"num_layers": 0},
        "num_frames": 4,
        "interaction": {"name": "gare", **interaction},
    }
    model = gare.GARE(gare.GareConfig.load(config)).eval()
    with torch.no_grad():
        for parameter in model.interaction.parameters():
            parameter *= scale
    return model


def on_devices(*devices: torch.device):
    def make(searcher: Searcher) -> ResidentSearch:
        return ResidentSearch(
            searcher.store, searcher.model, searcher.scorer, searcher.damaged, None, devices
        )

    return make


def open_library(place: Path, model: gare.GARE, *devices: torch.device) -> gare.Library:
    library = gare.Library.open(place, model=model)
    library.search_exactly_with(on_devices(*(devices or (CPU,))))
    return library


def add(library: gare.Library, numbers: range, *, num_frames: range = range(1, 5)) -> None:
    """Items whose frames resemble each other, of different lengths."""
    vectors = []
    for number in numbers:
        rng = np.random.default_rng(number)
        count = num_frames[number % len(num_frames)]
        vectors.append(
            rng.normal(size=(1, library.model.dim)) + 0.2 * rng.normal(size=(count, library.model.dim))
        )
    folders = [("even", "odd")[number % 2] for number in numbers]
    paths = [f"/videos/{folder}/{number}.mp4" for folder, number in zip(folders, numbers, strict=True)]
    library.add([v.astype(np.float32) for v in vectors], paths=paths)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[gare.Library]:
    with open_library(tmp_path / "library", make_model(10.0)) as library:
        add(library, range(60))
        yield library


def true_list(library: gare.Library, query: str, where: str | None = None) -> list[tuple[str, float]]:
    """Every item by its score in float64, each scored alone."""
    model, terms = library.model, SearchRequest(words=query, where=where).all_terms
    text = model.encode_text([term.text for term in terms]).to(torch.float64)
    interaction = copy.deepcopy(model.interaction).double()
    weights_K = torch.tensor([term.weight for term in terms], dtype=torch.float64)
    found = []
    request = SearchRequest(words=query, where=where)
    for batch in library.store.scan(where=request.filter, columns=["id", "vectors"]):
        video = unpack_frames(batch.column("vectors"), model.dim, model.device).to(torch.float64)
        with torch.no_grad():
            scores = weights_K @ interaction.score_pairs(text, video).scores_TV
        found += zip(batch.column("id").to_pylist(), scores.tolist(), strict=True)
    return sorted(found, key=lambda pair: (-pair[1], pair[0]))


def check_lists(
    library: gare.Library, queries: list[str] = QUERIES, *, top: int = 5, where: str | None = None
) -> None:
    """As exhaustive float64 and as `ProvenSearch` have them, with a proof."""
    plain = Searcher(library.store, library.model)
    assert type(plain.proven) is ProvenSearch
    for query in queries:
        hits = library.search(query, top=top, exact=True, where=where)
        expected = true_list(library, query, where)
        assert [hit.id for hit in hits] == [item for item, _ in expected[:top]]
        assert [hit.score for hit in hits] == pytest.approx([s for _, s in expected[:top]], abs=1e-12)
        request = SearchRequest(words=query, top=top, exact=True, where=where)
        assert plain.search(request) == hits
        proof = hits.certificate
        assert proof is not None
        assert proof.num_items == len(expected)
        if proof.next_bound is not None:
            assert proof.next_bound <= hits[-1].score + 1e-6
    assert library.searcher.proven.is_resident


@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize(
    "interaction",
    [
        {},
        {"pooling": "text_conditioned", "num_heads": 2},
        {"corrected_side": "video", "gap_direction": "text_minus_video"},
        {"corrected_side": "video", "pooling": "text_conditioned"},
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_lists_are_those_of_float64_while_items_come_and_go(
    interaction: dict, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_table, "_SMALLEST_CHUNK", 16)
    model = make_model(scale, **interaction)
    with open_library(tmp_path / "library", model, CPU, torch.device("cpu:0")) as library:
        add(library, range(40))
        check_lists(library)
        best = library.search(QUERIES[0], top=3, exact=True)
        library.delete([hit.id for hit in best])
        check_lists(library, QUERIES[2:3])
        add(library, range(100, 130))
        library.delete([hit.id for hit in library.search(QUERIES[1], top=2, exact=True)])
        check_lists(library, QUERIES[1:3], where="folder:odd")
        add(library, range(200, 203))
        check_lists(library, QUERIES[:1], top=1000)


def test_without_masks_padding_takes_part_and_lists_are_the_same(tmp_path: Path) -> None:
    with open_library(tmp_path / "library", make_model(3.0, mask_frames=False)) as library:
        add(library, range(40), num_frames=range(4, 5))
        check_lists(library)


def test_a_library_masks_padding_so_that_a_short_video_has_a_card(tmp_path: Path) -> None:
    with open_library(tmp_path / "library", make_model(mask_frames=False)) as library:
        add(library, range(8))
        found = library.search("x", top=8, exact=True)
        assert found == library.search("x", top=8, exhaustive=True)
        assert (library.searcher.proven._resident._now.rows_V >= 0).all()


def test_more_atoms_than_the_kernel_takes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_items, "MOST_ATOMS", 7)
    with open_library(tmp_path / "library", make_model(num_heads=2)) as library:
        add(library, range(20))
        check_it_goes_on(library, "4 frames × 2 heads are more than the 7")


def test_it_is_filled_once_and_then_follows(library: gare.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    listed: list[int] = []
    listing = resident_items.list_items
    monkeypatch.setattr(resident_items, "list_items", lambda *asked: listed.append(1) or listing(*asked))
    monkeypatch.setattr(resident_items, "_ITEMS_AT_ONCE", 25)
    library.searcher.proven.on_progress = lambda done, total: told.append((done, total))
    for _ in range(3):
        library.search("x", exact=True)
    assert told == [(25, 60), (50, 60), (60, 60)]
    assert len(listed) == 1  # nobody wrote, so nobody looked
    add(library, range(60, 64))
    library.search("x", exact=True)
    assert told[3:] == [(4, 4)]
    library.delete([library.search("x", exact=True)[0].id])
    library.search("x", exact=True)
    assert len(told) == 4
    assert len(listed) == 3


def test_a_proof_spares_scores(library: gare.Library) -> None:
    proof = library.search("a dog runs", top=3, exact=True).certificate
    assert proof is not None
    assert proof.num_refined == 60
    assert library.searcher.proven.num_bytes > 0


def test_pictures_and_clips_do_without_the_table(library: gare.Library) -> None:
    like = next(iter(library.items()))["id"]
    assert library.search(like=like, exact=True) == library.search(like=like, exhaustive=True)


def test_searches_that_come_together_share_a_pass(
    library: gare.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is held up until all others wait; they are then one pass."""
    expected = {query: library.search(query, exact=True) for query in QUERIES}
    search, passes, found = (
        library.searcher.proven,
        list[int](),
        dict[str, gare.library.search.search_hit.Hits](),
    )
    others_wait = threading.Event()
    bounds = resident_items.ResidentItems.bounds

    def counted(self: resident_items.ResidentItems, text: gare.TextFeatures):
        if not passes:
            assert others_wait.wait(600)
        passes.append(len(text))
        return bounds(self, text)

    monkeypatch.setattr(resident_items.ResidentItems, "bounds", counted)
    names = [*QUERIES, *QUERIES]

    def ask(number: int) -> None:
        found[number] = library.searcher.search(SearchRequest(words=names[number], exact=True))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(names))]
    threads[0].start()
    while not search._turn.locked() and threads[0].is_alive():
        others_wait.wait(0.01)
    for thread in threads[1:]:
        thread.start()
    while len(search._waiting) < len(names) - 1 and threads[0].is_alive():
        others_wait.wait(0.01)
    others_wait.set()
    for thread in threads:
        thread.join(600)
    assert passes == [1, 9]  # one query has two terms
    assert all(found[number] == expected[names[number]] for number in range(len(names)))


# --- where it cannot be -------------------------------------------------------------------------------------


def check_it_goes_on(library: gare.Library, message: str) -> None:
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append  # type: ignore[method-assign]
    logging.getLogger("gare.library").addHandler(handler)
    try:
        with pytest.warns(RuntimeWarning, match=message):
            first = library.search("two cars", exact=True)
    finally:
        logging.getLogger("gare.library").removeHandler(handler)
    assert [re.search(message, record.fields["reason"]) is not None for record in told] == [True]
    again = library.search("two cars", exact=True)  # no second warning: that would be an error
    assert first == again == library.search("two cars", exhaustive=True)
    assert not library.searcher.proven.is_resident
    assert library.searcher.proven.num_bytes == 0


def test_a_kernel_that_fails_is_told_once(library: gare.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("out of resource: shared memory\nand much more")

    monkeypatch.setattr(key_bounds_cuda, "bounds_of", fail)
    check_it_goes_on(library, r"its kernel failed \(ValueError: out of resource: shared memory\)$")


def test_too_little_memory_is_told_before_anything_is_made(
    library: gare.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_items, "free_bytes", lambda device: 10_000)
    check_it_goes_on(library, r"60 items need 0\.5 GB more on the GPU, and 0\.0 GB are free\. Use a larger")


def test_keys_take_one_byte_where_two_do_not_fit(
    library: gare.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_items, "_SPARE_BYTES", 0)
    model = library.model
    besides = 4 * resident_items.MOST_TEXTS * (8 * 60 + 4 * 60)
    narrow, wide = (60 * card_bytes(4, 1, model.dim, wide_keys=wide) for wide in (False, True))
    monkeypatch.setattr(resident_items, "free_bytes", lambda device: besides + (narrow + wide) // 2)
    check_lists(library)
    assert not library.searcher.proven._resident._table.wide_keys


def test_memory_that_others_took_is_told(library: gare.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(resident_table, "make_resident", fail)
    check_it_goes_on(library, r"making cards failed \(OutOfMemoryError: CUDA out of memory\)$")


@pytest.mark.parametrize("settings", [{"context": "words"}, {"query": "text"}, {"normalise": True}], ids=str)
def test_an_interaction_without_such_bounds_is_told(settings: dict, tmp_path: Path) -> None:
    with open_library(tmp_path / "library", make_model(**settings)) as library:
        add(library, range(20))
        check_it_goes_on(library, "no bounds are known")


def test_without_triton_it_is_told(library: gare.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_search, "find_spec", lambda name: None)
    check_it_goes_on(library, "Triton is not installed")


def test_a_library_for_a_gpu_that_is_not_here_is_on_the_cpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        assert usable_device("cuda").type == "cuda"
        return
    with pytest.warns(RuntimeWarning, match="no GPU is here; the CPU is used"):
        library = gare.Library.open(tmp_path / "library", model=make_model(), device="cuda")
    with library:
        add(library, range(5))
        assert library.model.device == CPU
        assert library.search("x", exact=True) == library.search("x", exhaustive=True)


def test_a_library_on_a_gpu_is_held_by_all_of_them_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only which devices are chosen is looked at; nothing is put there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with gare.Library.open(tmp_path / "library", model=make_model()) as library:
        assert exact_search_on(CPU) is None
        for name, expected in (("cuda", ["cuda:0", "cuda:1", "cuda:2"]), ("cuda:1", ["cuda:1"])):
            make = exact_search_on(torch.device(name))
            assert make is not None
            search = make(library.searcher)
            assert isinstance(search, ResidentSearch)
            assert [str(device) for device in search._resident._devices] == expected


def test_whoever_waits_for_a_table_hears_how_long(
    library: gare.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = library.searcher.proven
    is_filling, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(resident_items, "_ITEMS_AT_ONCE", 20)

    def hold_up(done: int, total: int) -> None:
        is_filling.set()
        assert go_on.wait(60)

    search.on_progress = hold_up
    filling = threading.Thread(target=search.warm_up)
    filling.start()
    try:
        assert is_filling.wait(60)
        request = SearchRequest(words="x", exact=True)
        with Deadline(0.01).active(), pytest.raises(TimeLimitError, match="20 of 60 items; try again in"):
            search.find(library.searcher.encoder.encode(request), 3, None)
    finally:
        go_on.set()
        filling.join(60)
    assert not search._waiting
    check_lists(library)


def test_a_search_whose_time_is_up_leaves_what_it_made(
    library: gare.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, told = library.searcher.proven, list[int]()
    monkeypatch.setattr(resident_items, "_ITEMS_AT_ONCE", 20)
    query = library.searcher.encoder.encode(SearchRequest(words="x", exact=True))
    deadline = Deadline()

    def cancel(done: int, total: int) -> None:
        told.append(total)
        deadline.cancel()

    search.on_progress = cancel
    with deadline.active(), pytest.raises(TimeLimitError):
        search.find(query, 3, None)
    search.on_progress = lambda done, total: told.append(total)
    check_lists(library)
    assert told == [60, 40, 40]

"""`exact` finds what exhaustive scoring finds, on every store, and its certificate says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import gare
from gare.bench.synthetic_library import make_library
from gare.errors import QueryError
from gare.library.library import model_stamp
from gare.library.search import key_table, proven_search
from gare.library.search.bound_table import BoundTable
from gare.library.search.item_frames import list_items
from gare.library.search.key_table import KeyTable
from gare.library.search.search_request import SearchRequest
from gare.library.search.searcher import Searcher
from gare.library.search.stage1 import plain_vectors
from gare.library.store.stored_frames import unpack_frames
from stores import make_rows
from warm import run_gare as run

NUM_ITEMS = 300
QUERIES = ["a dog runs", "two cars", "rain on the sea ^2 - a dog", "x"]


def make_model(scale: float = 1.0, **interaction: object) -> gare.GARE:
    torch.manual_seed(0)
    config = {
        "encoder": {"name": "tiny"},
        "temporal": {"num_layers": 0},
        "num_frames": 4,
        "interaction": interaction,
    }
    model = gare.GARE(gare.GareConfig.load(config)).eval()
    with torch.no_grad():
        for parameter in model.interaction.parameters():
            parameter *= scale
    return model


def fill(library: gare.Library, count: int = NUM_ITEMS, first: int = 0) -> None:
    """Items whose frames resemble each other within a video, and videos that do not."""
    stamp = model_stamp(library.model, "x")
    paths = [
        f"/videos/{'even' if number % 2 == 0 else 'odd'}/{first + number}.mp4" for number in range(count)
    ]
    items, frames = make_rows(paths, seed=first, stamp=stamp)
    rng = np.random.default_rng(first)
    means = rng.normal(size=(count, 1, stamp.dim))
    vectors = (means + 0.2 * rng.normal(size=(count, stamp.num_frames, stamp.dim))).astype("<f2")
    put(library, items, frames, vectors)


def put(library: gare.Library, items: pa.Table, frames: pa.Table, vectors: np.ndarray) -> None:
    """Write the items, with these vectors of their frames."""
    number = frames.schema.get_field_index("vectors")
    column = pa.array([row.tobytes() for row in vectors], pa.large_binary())
    video = gare.VideoFeatures(
        torch.from_numpy(vectors).float(), torch.ones(vectors.shape[:2], dtype=torch.bool)
    )
    place = items.schema.get_field_index("vector")
    stage1 = pa.array(list(plain_vectors(video).numpy()), items.schema.field(place).type)
    library.store.upsert(
        items.set_column(place, items.schema.field(place), stage1),
        frames.set_column(number, frames.schema.field(number), column),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gare" / "bounds"


@pytest.fixture
def library(tmp_path: Path) -> gare.Library:
    library = gare.Library.open(tmp_path / "library", model=make_model())
    fill(library)
    return library


def in_double(library: gare.Library, query: str) -> list[tuple[str, float]]:
    """Every item by its score in float64, scored plainly."""
    model, terms = library.model, SearchRequest(words=query).all_terms
    text = model.encode_text([term.text for term in terms])
    text = gare.TextFeatures(text.text_TD.double(), text.words_TWD.double(), text.mask_TW)
    ids, parts = [], []
    for batch in library.store.scan(columns=["id", "vectors"]):
        ids += batch.column("id").to_pylist()
        parts.append(unpack_frames(batch.column("vectors"), model.dim, model.device))
    frames = gare.VideoFeatures.cat(parts)
    import copy

    interaction = copy.deepcopy(model.interaction).double()
    with torch.no_grad():
        scores_KV = interaction.score_pairs(
            text, gare.VideoFeatures(frames.frames_VFD.double(), frames.mask_VF)
        ).scores_TV
    weights_K = torch.tensor([term.weight for term in terms], dtype=torch.float64)
    scores = (weights_K @ scores_KV).tolist()
    return sorted(zip(ids, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("kind", ["folder", "s3", "postgres"])
def test_it_is_the_list_of_float64_on_every_store(kind: str, new_library: Callable[[str], str]) -> None:
    with gare.Library.open(new_library(kind), model=make_model()) as library:
        fill(library)
        for query in QUERIES:
            hits = library.search(query, top=10, exact=True)
            expected = in_double(library, query)[:10]
            assert [hit.id for hit in hits] == [item for item, _ in expected]
            assert [hit.score for hit in hits] == pytest.approx([score for _, score in expected], abs=1e-12)
            proof = hits.certificate
            assert proof is not None
            assert proof.num_items == NUM_ITEMS
            if proof.next_bound is not None:
                assert proof.next_bound <= hits[-1].score + 1e-9


@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize(
    "interaction",
    [
        {"name": "mean"},
        {"name": "text_conditioned"},
        {"name": "token_wise"},  # no bounds: every item is scored
        {"name": "gare", "pooling": "text_conditioned", "num_heads": 2},
        {"name": "gare", "corrected_side": "video"},
        {"name": "gare", "context": "words"},
        {"name": "gare", "normalise": True, "mask_frames": False},
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_whatever_the_interaction_and_however_large_its_weights(interaction, scale, tmp_path) -> None:
    with gare.Library.open(tmp_path / "library", model=make_model(scale, **interaction)) as library:
        fill(library)
        for query in QUERIES[:2]:
            hits = library.search(query, top=5, exact=True)
            assert [hit.id for hit in hits] == [item for item, _ in in_double(library, query)[:5]]
            assert [hit.id for hit in library.search(query, top=5, exhaustive=True)] == [
                hit.id for hit in hits
            ]


def test_the_proof_spares_scores(library: gare.Library) -> None:
    """A model whose increments are short, as trained ones are: most items are ruled out by their bounds."""
    with torch.no_grad():
        library.model.interaction.increment_net.output.weight *= 0.1
    hits = library.search("a dog runs", top=3, exact=True)
    assert hits.certificate is not None
    assert 3 <= hits.certificate.num_scored < NUM_ITEMS / 2


@pytest.mark.parametrize(
    "options",
    [
        {"where": "folder:odd"},
        {"unique": True},
        {"top": 50},
        {"top": 1000},
        {"min_score": 0.2},
        {"explain": True},
        {"like": True},
    ],
    ids=str,
)
def test_with_every_option_it_is_as_exhaustive(options: dict, library: gare.Library) -> None:
    options = dict(options)
    query = None if options.get("like") else "a dog runs"
    if query is None:
        options["like"] = next(iter(library.items()))["id"]
    exact = library.search(query, exact=True, **options)
    assert exact == library.search(query, exhaustive=True, **options)
    assert exact.certificate is not None


def parts(hit: gare.SearchHit) -> list[tuple[str, float, float]]:
    """A hit and its other moments: where they begin and end."""
    return [(moment.id, moment.start, moment.end) for moment in (hit, *hit.others)]


@pytest.mark.parametrize("by", ["file", "moment"])
def test_moments_of_films_are_those_of_exhaustive_scoring(by: str, tmp_path: Path) -> None:
    """Where they begin and end, and which others a file has, follows from more than the hits."""
    make_library(tmp_path / "films", model := make_model(3.0, context="words"), 60, str, hours=1)
    with gare.Library.open(tmp_path / "films", model=model) as films:
        for query in QUERIES:
            exact = films.search(query, top=8, by=by, exact=True)
            scored = films.search(query, top=8, by=by, exhaustive=True)
            assert exact.certificate is not None
            assert [hit.score for hit in exact] == pytest.approx([hit.score for hit in scored], abs=1e-12)
            assert list(map(parts, exact)) == list(map(parts, scored))


@pytest.mark.parametrize("name", ["gare", "mean"])
@pytest.mark.parametrize("top", [1, 8])
def test_other_windows_of_a_file_are_those_of_exhaustive_scoring(name: str, top: int, tmp_path: Path) -> None:
    """A hit may be the first window of its file, and another match less than items that are no hits."""
    with gare.Library.open(tmp_path / "library", model=make_model(0.1, name=name)) as library:
        fill_windows(library, "a dog runs", num_other=300)
        exact = library.search("a dog runs", top=top, exact=True)
        assert [exact[0].path, exact[0].start] == ["/videos/long.mp4", 0.0]
        assert [other.start for other in exact[0].others] == [10.0]
        assert exact == library.search("a dog runs", top=top, exhaustive=True)


def fill_windows(library: gare.Library, query: str, num_other: int) -> None:
    """Windows of one file: the best item, one that matches less than thirty files do, one that does not."""
    stamp = model_stamp(library.model, "x")
    likeness = [1.0, 0.8, 0.0, *[0.9] * 30, *[0.0] * (num_other - 30)]
    paths = [*["/videos/long.mp4"] * 3, *[f"/videos/{number}.mp4" for number in range(num_other)]]
    start = [0.0, 10.0, 20.0, *[0.0] * num_other]
    keys = [f"{number:x}/windows:10/{second:.3f}/f00" for number, second in enumerate(start)]
    items, frames = make_rows(
        paths, stamp=stamp, start=start, end=[second + 10 for second in start], frames_key=keys
    )
    text_D = library.model.encode_text([query]).text_TD[0].detach().numpy()
    rng = np.random.default_rng(0)
    unit_ND = rng.normal(size=(len(paths), stamp.dim))
    unit_ND -= np.outer(unit_ND @ text_D, text_D) / (text_D @ text_D)
    unit_ND /= np.linalg.norm(unit_ND, axis=1, keepdims=True)
    share_N1 = np.array(likeness)[:, None]
    means_ND = share_N1 * text_D / np.linalg.norm(text_D) + np.sqrt(1 - share_N1**2) * unit_ND
    vectors = np.repeat(means_ND[:, None], stamp.num_frames, axis=1).astype("<f2")
    put(library, items, frames, vectors)


def test_items_come_and_go(library: gare.Library) -> None:
    first = library.search("two cars", top=3, exact=True)
    library.delete([first[0].id])
    fill(library, count=40, first=1000)
    hits = library.search("two cars", top=3, exact=True)
    assert [hit.id for hit in hits] == [item for item, _ in in_double(library, "two cars")[:3]]
    assert hits.certificate is not None
    assert hits.certificate.num_items == NUM_ITEMS + 39


def test_bounds_are_kept_on_the_machine_and_a_broken_file_is_made_anew(
    library: gare.Library, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = library.search("two cars", top=3, exact=True)
    (file,) = cache.glob("*.safetensors")

    def count_made(searcher: Searcher) -> int:
        made: list[int] = []
        make = BoundTable._make
        monkeypatch.setattr(
            BoundTable,
            "_make",
            lambda self, missing, say: made.append(len(missing)) or make(self, missing, say),
        )
        assert searcher.search(SearchRequest(words="two cars", top=3, exact=True)) == expected
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
        return sum(made)

    assert count_made(Searcher(library.store, library.model)) == 0
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert count_made(Searcher(library.store, library.model)) == NUM_ITEMS
    assert count_made(Searcher(library.store, library.model)) == 0


# --- the second rung ----------------------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys for whatever the first rung leaves, in a library too small to need them."""
    monkeypatch.setattr(proven_search, "_FEW", 0)
    monkeypatch.setattr(proven_search, "_FIRST", 8)


@pytest.mark.parametrize("scale", [1.0, 10.0])
@pytest.mark.parametrize(
    "interaction",
    [
        {"pooling": "text_conditioned", "num_heads": 2},
        {"corrected_side": "video"},
        {"context": "words"},
        {"normalise": True, "mask_frames": False},
        {"pooling": "mean", "gap_direction": "text_minus_video"},
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
@pytest.mark.usefixtures("eager")
def test_with_keys_it_is_the_list_of_float64(interaction, scale, tmp_path) -> None:
    with gare.Library.open(
        tmp_path / "library", model=make_model(scale, name="gare", **interaction)
    ) as library:
        fill(library)
        refined = 0
        for query in QUERIES:
            hits = library.search(query, top=5, exact=True)
            expected = in_double(library, query)[:5]
            assert [hit.id for hit in hits] == [item for item, _ in expected]
            assert [hit.score for hit in hits] == pytest.approx([score for _, score in expected], abs=1e-12)
            assert hits.certificate is not None
            refined += hits.certificate.num_refined
        assert refined or scale == 1


@pytest.mark.usefixtures("eager")
def test_keys_spare_scores_where_increments_are_long(library: gare.Library) -> None:
    """Weights ten times as large: the second rung rules out most of what the first one leaves."""
    make_long(library)
    proof = library.search("a dog runs", top=3, exact=True).certificate
    assert proof is not None
    assert 2 * (proof.num_scored - 8) < proof.num_refined


def make_long(library: gare.Library) -> None:
    with torch.no_grad():
        for parameter in library.model.interaction.parameters():
            parameter *= 10


@pytest.mark.usefixtures("eager")
def test_keys_are_kept_and_a_broken_chunk_is_made_anew(
    library: gare.Library, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_long(library)
    request = SearchRequest(words="two cars", top=3, exact=True)
    expected = library.searcher.search(request)
    (chunk,) = cache.glob("*-keys/*.safetensors")
    made: list[int] = []
    make = KeyTable._make_part
    monkeypatch.setattr(
        KeyTable, "_make_part", lambda self, ids, table: made.append(len(ids)) or make(self, ids, table)
    )
    assert Searcher(library.store, library.model).search(request) == expected
    assert not made
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 1  # one bit of a number
    chunk.write_bytes(content)
    assert Searcher(library.store, library.model).search(request) == expected
    assert made


def test_keys_that_come_a_few_at_a_time_become_one_chunk(library: gare.Library) -> None:
    """And bounds of items from several chunks are those that they have in one."""
    store, model = library.store, library.model
    names = dict(zip(*reversed(list_items(store, None)), strict=True))
    few, once = (KeyTable(store, model, library.searcher.damaged, None) for _ in range(2))
    table = BoundTable(store, model, library.searcher.damaged, None)
    table.fill(list(names.values()), list(names), lambda done, total: None)
    once.make(names, table, lambda done, total: None)
    for start in range(0, len(names), 7):
        few.make(dict(list(names.items())[start : start + 7]), table, lambda done, total: None)
    assert len(few) == len(once) == len(names)
    wanted = list(names)[5::11]
    assert 1 == len(list(few.blocks(wanted))) < len(few.chunk_sizes) < 10
    text = model.encode_text(["a dog runs"])
    for (ours, rows, places), (theirs, all_rows, other) in zip(
        few.blocks(wanted), once.blocks(wanted), strict=True
    ):
        assert torch.equal(places, other)
        one, all_of_it = (
            model.interaction.key_bounds(text, cards.balls, cards.keys) for cards in (ours, theirs)
        )
        torch.testing.assert_close(one.upper_TV[:, rows], all_of_it.upper_TV[:, all_rows], atol=1e-9, rtol=0)


@pytest.mark.usefixtures("eager")
def test_what_memory_does_not_hold_is_scored(library: gare.Library, monkeypatch) -> None:
    make_long(library)
    monkeypatch.setattr(key_table, "_memory", lambda: 0)
    hits = library.search("two cars", top=3, exact=True)
    assert [hit.id for hit in hits] == [item for item, _ in in_double(library, "two cars")[:3]]
    assert hits.certificate is not None


# --- proven at no cost --------------------------------------------------------------------------------------


def test_bounds_that_are_there_prove_an_ordinary_search(library: gare.Library) -> None:
    with torch.no_grad():
        library.model.interaction.increment_net.output.weight *= 0.01
    assert library.search("two cars", top=3, candidates=200).certificate is None  # nobody made bounds yet
    exact = library.search("two cars", top=3, exact=True)
    found = library.search("two cars", top=3, candidates=200)
    assert found.certificate is not None
    assert found.certificate.num_scored == 200
    assert [hit.id for hit in found] == [hit.id for hit in exact]
    assert library.audit(["two cars", "a dog runs"]).proven_share == 1.0


def test_where_stage_1_is_the_score_a_scan_is_a_proof(tmp_path: Path) -> None:
    with gare.Library.open(tmp_path / "library", model=make_model(name="mean")) as library:
        fill(library)
        hits = library.search("two cars", top=3, candidates=20)
        assert hits.certificate is not None
        assert (hits.certificate.num_items, hits.certificate.num_scored) == (NUM_ITEMS, 20)
        assert [hit.id for hit in hits] == [
            hit.id for hit in library.search("two cars", top=3, exhaustive=True)
        ]


def test_scores_closer_than_float32_are_told_apart(tmp_path: Path) -> None:
    with gare.Library.open(tmp_path / "library", model=make_model(name="mean")) as library:
        stamp = model_stamp(library.model, "x")
        items, frames = make_rows([f"/videos/{number}.mp4" for number in range(200)], seed=0, stamp=stamp)
        rng = np.random.default_rng(0)
        near_VE = rng.normal(size=stamp.stage1_dim) + 1e-7 * rng.normal(size=(200, stamp.stage1_dim))
        near_VE = (near_VE / np.linalg.norm(near_VE, axis=1, keepdims=True)).astype(np.float32)
        place = items.schema.get_field_index("vector")
        column = pa.array(list(near_VE), items.schema.field(place).type)
        library.store.upsert(items.set_column(place, items.schema.field(place), column), frames)
        query_E = library.searcher.encoder.encode(SearchRequest(words="two cars")).stage1_E
        scores_V = near_VE.astype(np.float64) @ query_E.astype(np.float64)
        names = items.column("id").to_pylist()
        expected = [names[row] for row in sorted(range(200), key=lambda row: (-scores_V[row], names[row]))]
        for request in ({"exact": True}, {"exhaustive": True}):
            found = [hit.id for hit in library.search("two cars", top=200, **request)]
            assert found == expected


def test_an_ordinary_search_says_when_everything_was_scored(library: gare.Library) -> None:
    assert library.search("two cars", candidates=20).certificate is None
    proof = library.search("two cars", candidates=NUM_ITEMS + 1).certificate
    assert proof is not None
    assert (proof.num_items, proof.num_scored) == (NUM_ITEMS, NUM_ITEMS)


def test_candidates_and_a_proof_exclude_each_other() -> None:
    with pytest.raises(QueryError, match="leave out candidates"):
        SearchRequest(words="x", exact=True, candidates=5)


def test_an_empty_library_is_proven_empty(tmp_path: Path) -> None:
    with gare.Library.open(tmp_path / "library", model=make_model()) as library:
        hits = library.search("x", exact=True)
        assert not hits
        assert hits.certificate is not None
        assert hits.certificate.num_items == 0


def test_the_command_prints_the_proof(library: gare.Library, tmp_path: Path) -> None:
    library.model.save_pretrained(tmp_path / "model")
    place = ["--library", str(tmp_path / "library"), "--model", str(tmp_path / "model")]
    done = run("search", "two cars", "--exact", "--json", *place)
    assert done.returncode == 0, done.stderr
    assert "nothing better is there: " in done.stderr
    assert [hit["id"] for hit in json.loads(done.stdout)] == [
        hit.id for hit in library.search("two cars", exhaustive=True)
    ]

"""A library made of real files: searched in every way, against the evaluator and by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import gare
from clips import steady, write_video
from gare.data.loader import FrameSource
from gare.data.manifest import Header, Manifest, Row
from gare.errors import LibraryError, QueryError
from gare.evaluate.model_evaluation import score_split
from gare.library.index.index_run import IndexOptions
from gare.library.search.query_language import parse_query
from gare.library.search.search_request import SearchRequest
from gare.library.search.stage1 import STAGE1_SENTENCES, stage1_queries, stage1_vectors
from gare.library.search.stage1_audit import save_audit
from stores import make_rows
from warm import run_gare as run

NUM_VIDEOS = 24
QUERIES = ["a dog runs", "two cars", "rain on the sea", "x"]


@pytest.fixture(scope="module")
def model() -> gare.GARE:
    torch.manual_seed(0)
    config = {
        "encoder": {"name": "tiny"},
        "temporal": {"num_layers": 1},
        "interaction": {"pooling": "text_conditioned"},
    }
    return gare.GARE(gare.GareConfig.load(config)).eval()


@pytest.fixture(scope="module")
def model_folder(model: gare.GARE, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos whose frames all differ but for the first; every third in a folder of its own."""
    root = tmp_path_factory.mktemp("videos")
    for number in range(NUM_VIDEOS):
        folder = root / ("third" if number % 3 == 0 else "rest")
        folder.mkdir(exist_ok=True)
        write_video(folder / f"v{number:02d}.mp4", steady(1.5 + number / 3, fps=3 + number))
    return root


@pytest.fixture(scope="module")
def library(model_folder: Path, videos: Path, tmp_path_factory: pytest.TempPathFactory) -> gare.Library:
    library = gare.Library.open(tmp_path_factory.mktemp("place") / "library", model=model_folder)
    report = library.index(videos, options=IndexOptions(num_workers=2))
    assert (report.new, report.failed) == (NUM_VIDEOS, 0)
    return library


def names(hits: list[gare.SearchHit]) -> list[str]:
    return [Path(hit.path).name for hit in hits]


# --- text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"exhaustive": True}, {"candidates": NUM_VIDEOS}], ids=["scan", "all"])
def test_with_every_item_scored_the_ranking_is_the_evaluators(
    library: gare.Library, model: gare.GARE, videos: Path, options: dict
) -> None:
    """`score_split` is what `gare evaluate` ranks; it decodes the same files again."""
    files = sorted(videos.rglob("*.mp4"), key=lambda path: path.name)
    rows = [
        Row(file.stem, str(file), f"{QUERIES[number % len(QUERIES)]} {number}", "test")
        for number, file in enumerate(files)
    ]
    source = FrameSource(Manifest(Header("own", root="/"), tuple(rows)), model.config.num_frames)
    split = score_split(model, source, "test")
    for row, caption in enumerate(source.manifest.captions("test")):
        hits = library.search(caption, top=NUM_VIDEOS, **options)
        order = np.argsort(-split.scores_TV[row].numpy(), kind="stable")
        assert names(hits) == [files[place].name for place in order]
        expected = split.scores_TV[row][order.tolist()]
        torch.testing.assert_close(torch.tensor([hit.score for hit in hits]), expected, atol=2e-3, rtol=0)


def test_a_hit_tells_where_and_why(library: gare.Library) -> None:
    hit = library.search("a dog runs", top=1, explain=True)[0]
    assert Path(hit.path).is_file()
    assert hit.start == 0 < hit.end
    assert hit.moment == hit.frame_times[int(np.argmax(hit.frame_scores))]
    assert len(hit.frame_times) == len(hit.frame_scores) == len(hit.frame_weights) > 0
    assert sum(hit.frame_weights) == pytest.approx(1, abs=1e-5)
    explanation = hit.explanation
    assert explanation is not None
    assert (explanation.rank, 1 <= explanation.plain_rank <= NUM_VIDEOS) == (1, True)
    assert explanation.radius > 0


def test_weights_add_up(library: gare.Library) -> None:
    def scores(query: str) -> dict[str, float]:
        return {hit.id: hit.score for hit in library.search(query, top=NUM_VIDEOS, exhaustive=True)}

    dog, sea, both = scores("a dog"), scores("the sea"), scores("a dog ^2 - the sea")
    assert both == pytest.approx({item: 2 * dog[item] - 0.5 * sea[item] for item in dog}, abs=1e-5)


def test_min_score_top_and_filters(library: gare.Library) -> None:
    everything = library.search("rain", top=NUM_VIDEOS, exhaustive=True)
    cut = everything[5].score
    assert library.search("rain", top=NUM_VIDEOS, exhaustive=True, min_score=cut) == everything[:6]
    assert names(library.search("rain", top=3)) == names(everything[:3])
    third = library.search("rain", top=NUM_VIDEOS, where="folder:third")
    assert names(third) == [name for name in names(everything) if int(name[1:3]) % 3 == 0]
    long = library.search("rain", top=NUM_VIDEOS, where="duration:>5 not folder:third")
    assert {hit.id for hit in long} == {
        hit.id for hit in everything if hit.end - hit.start > 5 and "/third/" not in hit.path
    }
    assert library.search("rain", where="name:nothing*") == []


def test_a_page_is_a_part_of_the_whole_list(library: gare.Library) -> None:
    for unique in (False, True):
        whole = SearchRequest(words="rain", top=12, unique=unique, explain=True)
        page = dataclasses.replace(whole, top=5, offset=4)
        assert library.searcher.search(page) == library.searcher.search(whole)[4:9]


# --- pictures, clips, items ---------------------------------------------------------------------------------


def test_a_video_finds_itself_and_like_leaves_it_out(library: gare.Library, videos: Path) -> None:
    clip = videos / "third" / "v21.mp4"
    found = library.search(video=clip, top=3)
    assert found[0].path == str(clip)
    assert found[0].score == pytest.approx(1, abs=1e-3)
    alike = library.search(like=found[0].id, top=3)
    assert str(clip) not in [hit.path for hit in alike]
    assert names(alike)[:2] == names(found)[1:3]


def test_a_picture_is_a_query(library: gare.Library, videos: Path) -> None:
    from gare.data.video import read_frames

    image = read_frames(videos / "third" / "v03.mp4", 1)[0]
    hits = library.search(image=image, top=5)
    assert len(hits) == 5
    assert hits[0].score >= hits[-1].score


def test_copies_are_folded(library: gare.Library, model_folder: Path, videos: Path, tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        (tmp_path / name).write_bytes((videos / "rest" / "v10.mp4").read_bytes())
    (tmp_path / "other.mp4").write_bytes((videos / "third" / "v21.mp4").read_bytes())
    with gare.Library.open(tmp_path / "library", model=model_folder) as copies:
        copies.index(tmp_path, options=IndexOptions(num_workers=1))
        assert len(copies.search("a dog")) == 4
        folded = copies.search("a dog", unique=True)
        assert sorted(len(hit.duplicates) for hit in folded) in ([0, 2], [3])


def test_captions_for_a_video(library: gare.Library, model: gare.GARE, videos: Path) -> None:
    clip = videos / "rest" / "v01.mp4"
    ranked = library.describe(QUERIES, video=clip)
    scores = model.score(model.encode_text(QUERIES), model.encode_video([clip]))[:, 0]
    assert [caption for caption, _ in ranked] == [QUERIES[row] for row in scores.argsort(descending=True)]
    item = library.search(video=clip, top=1)[0].id
    assert [caption for caption, _ in library.describe(QUERIES, like=item)] == [c for c, _ in ranked]


def test_searching_for_nothing_or_two_things_is_refused(library: gare.Library) -> None:
    with pytest.raises(QueryError, match="one thing"):
        library.search()
    with pytest.raises(QueryError, match="one thing"):
        library.search("a dog", like="x")
    with pytest.raises(QueryError, match="no item 'x'"):
        library.search(like="x")
    with pytest.raises(QueryError, match="at least 1"):
        library.search("a dog", top=0)


def test_the_folder_of_videos_in_place_of_its_library_is_told_from_none(
    model: gare.GARE, tmp_path: Path
) -> None:
    inside = tmp_path / ".gare"
    gare.Library.open(inside, model=model).close()
    with pytest.raises(LibraryError, match=f"no library at {tmp_path}, but there is one at {inside}"):
        gare.Library.open(tmp_path, create=False)


# --- stage 1 and audit --------------------------------------------------------------------------------------


def test_stage_1_comes_nearer_to_the_score_than_the_mean_frame(
    library: gare.Library, model: gare.GARE
) -> None:
    """The average score over its own sentences is exact, whatever the model."""
    from gare.library.store.stored_frames import unpack_frames

    table = library.store.fetch([row["id"] for row in library.items()], ["vectors", "vector"])
    video = unpack_frames(table["vectors"], model.dim, model.device)
    text = model.encode_text(STAGE1_SENTENCES)
    approximate = stage1_queries(text.text_TD) @ stage1_vectors(model, video).mT
    exact = model.score(text, video)
    torch.testing.assert_close(approximate.mean(dim=0), exact.mean(dim=0), atol=1e-5, rtol=0)
    stored = torch.tensor(np.stack(table["vector"].to_numpy()))
    torch.testing.assert_close(stage1_vectors(model, video), stored, atol=5e-3, rtol=0)


def test_the_audit_counts_and_sets_the_default(library: gare.Library, tmp_path: Path) -> None:
    result = library.audit(QUERIES)
    assert result.num_items == NUM_VIDEOS
    assert (result.ks[-1], result.coverage[-1], result.plain_coverage[-1]) == (NUM_VIDEOS, 1.0, 1.0)
    assert list(result.coverage) == sorted(result.coverage)
    # Worked out again, query by query.
    everything = [library.search(query, top=NUM_VIDEOS, exhaustive=True) for query in QUERIES]
    found = [
        library.store.search(library.searcher.encoder.encode_terms(parse_query(q)).stage1_E[None], 20)[0]
        for q in QUERIES
    ]
    shares = [
        len({h.id for h in exact[:10]} & set(near.ids)) / 10
        for exact, near in zip(everything, found, strict=True)
    ]
    assert result.coverage[result.ks.index(20)] == pytest.approx(np.mean(shares))
    assert library.default_candidates == result.candidates
    save_audit(result, tmp_path)
    assert json.loads((tmp_path / "audit.json").read_text())["candidates"] == result.candidates
    assert f"**{result.candidates} candidates**" in (tmp_path / "audit.md").read_text()
    assert (tmp_path / "audit.png").stat().st_size > 10_000


def test_an_audit_that_cannot_be_noted_tells_what_it_measured(library: gare.Library) -> None:
    before = library.store.get_notes()
    with (
        gare.Library.open(library.home.address, model=library.model, read_only=True) as reader,
        pytest.warns(RuntimeWarning, match="cannot be noted: .* for reading only"),
    ):
        assert reader.audit(QUERIES).num_items == NUM_VIDEOS
    assert library.store.get_notes() == before


def test_filters_are_exact_however_few_pass(model: gare.GARE, tmp_path: Path) -> None:
    """1 % and 0.01 % of 20,000 items, with an index built."""
    with gare.Library.open(tmp_path / "library", model=model) as big:
        stamp = big.store.stamp
        count = 20_000
        paths = [
            f"/v/{'rare' if n in (7, 4242) else 'some' if n % 100 == 3 else 'most'}/{n}.mp4"
            for n in range(count)
        ]
        big.store.upsert(*make_rows(paths, stamp=dataclasses.replace(stamp)))
        big.maintain()
        everything = {row["id"]: row["path"] for row in big.items()}
        assert len(everything) == count
        for folder, expected in (("rare", 2), ("some", 200)):
            hits = big.search("a dog", top=300, where=f"folder:{folder}", candidates=300)
            exact = big.search("a dog", top=300, where=f"folder:{folder}", exhaustive=True)
            assert [hit.id for hit in hits] == [hit.id for hit in exact]
            assert len(hits) == expected


# --- opening ------------------------------------------------------------------------------------------------


def test_a_library_remembers_its_model_and_folders(library: gare.Library, videos: Path) -> None:
    with gare.Library.open(library.store.uri, read_only=True) as again:
        assert again.folders == [str(videos)]
        assert again.search("a dog", top=2) == library.search("a dog", top=2)


def test_another_model_is_refused(library: gare.Library, tmp_path: Path) -> None:
    torch.manual_seed(5)
    gare.GARE(gare.GareConfig.load({"encoder": {"name": "tiny"}})).save_pretrained(tmp_path)
    with pytest.raises(LibraryError, match="another --library"):
        gare.Library.open(library.store.uri, model=tmp_path)


def test_a_model_that_moved_is_explained(model: gare.GARE, videos: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "here")
    with gare.Library.open(tmp_path / "library", model=tmp_path / "here") as made:
        made.index(videos / "third", options=IndexOptions(num_workers=1))
    (tmp_path / "here").rename(tmp_path / "there")
    with (
        gare.Library.open(tmp_path / "library") as lost,
        pytest.raises(LibraryError, match="cannot be loaded"),
    ):
        lost.search("a dog")
    with gare.Library.open(tmp_path / "library", model=tmp_path / "there") as found:
        assert found.search("a dog")


def test_there_must_be_a_library(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="no library"):
        gare.Library.open(tmp_path / "nothing", create=False)


# --- command line -------------------------------------------------------------------------------------------


def test_search_from_the_command_line(library: gare.Library, videos: Path, tmp_path: Path) -> None:
    place = library.store.uri
    done = run("search", "a dog runs", "--library", place, "--top", "3", "--json")
    hits = json.loads(done.stdout)
    assert [hit["id"] for hit in hits] == [hit.id for hit in library.search("a dog runs", top=3)]
    done = run("search", "a dog runs", "--top", "3", "--paths", "--print0", GARE_LIBRARY=place)
    assert done.stdout.split("\0")[:-1] == [hit["path"] for hit in hits]
    done = run("search", "a dog runs", "--where", "colour:red", "--library", place)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    done = run("search", "a dog", "--where", "name:nothing", "--library", place)
    assert (done.returncode, done.stdout, "no item passes the filter" in done.stderr) == (1, "", True)
    done = run("search", "a dog", cwd=tmp_path)
    assert done.returncode == 1
    assert "gare index" in done.stderr


def test_audit_from_the_command_line(library: gare.Library, tmp_path: Path) -> None:
    done = run("audit", "--library", library.store.uri, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "| k |" in done.stdout
    assert (tmp_path / "audit.png").exists()

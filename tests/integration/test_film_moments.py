"""Moments of a film as a program sees them: the command line, the API, MCP tools, lists and clips."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from gare.library.index.index_run import IndexOptions
from gare.library.library import Library
from gare.library.search.search_request import SearchRequest
from gare.serve.mcp_tools import make_tool_server
from serve_library import SCENE_S, Served, write_colour
from serve_process import ServeProcess
from warm import run_gare

RED = [(36.0, 48.0), (0.0, 12.0)]
"""Where the film is red; a second of it is a frame."""


@pytest.fixture(scope="module")
def red(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("query") / "red.png"
    Image.new("RGB", (160, 90), "red").save(path)
    return path


def times(moments: list[dict]) -> list[tuple[float, float]]:
    return [(moment["start"], moment["end"]) for moment in moments]


# --- the command line --------------------------------------------------------------------------------------


def search(film: Served, *arguments: str) -> str:
    done = run_gare("search", "--library", str(film.library), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_film_is_one_hit_with_its_best_moment_and_the_others(film, red):
    hits = json.loads(search(film, "--image", str(red), "--json"))
    assert [Path(hit["path"]).name for hit in hits] == ["film.mp4", "upright.mp4", "still.mp4"]
    assert times([hits[0], *hits[0]["others"]]) == RED
    for moment in [hits[0], *hits[0]["others"]]:
        assert moment["start"] <= moment["moment"] < moment["end"]


def test_by_moment_every_moment_is_a_hit(film, red):
    hits = json.loads(search(film, "--image", str(red), "--json", "--by", "moment", "-n", "5"))
    assert times(hits[:2]) == RED
    assert [hit["others"] for hit in hits] == [[]] * 5
    film_hits = sorted(time for hit in hits if "film" in hit["path"] for time in (hit["start"], hit["end"]))
    assert all(end <= start for end, start in zip(film_hits[1::2], film_hits[2::2], strict=False))


def test_the_table_says_when_and_how_many_more(film, red):
    first = search(film, "--image", str(red)).splitlines()[1]
    assert "0:36-0:48" in first
    assert first.rstrip().endswith("film.mp4  (1 more moment)")


def test_another_word_after_by_is_a_mistake(film):
    done = run_gare("search", "--library", str(film.library), "red", "--by", "scene")
    assert done.returncode == 2
    assert "scene" in done.stderr


@pytest.mark.parametrize(("by", "expected"), [("file", RED[:1]), ("moment", RED)])
def test_a_list_has_the_best_moment_of_each_file_or_all(film, red, by, expected):
    listed = search(film, "--image", str(red), "--format", "csv", "--by", by)
    rows = [row for row in csv.DictReader(io.StringIO(listed)) if row["path"].endswith("film.mp4")]
    found = [(float(row["start"]), float(row["end"])) for row in rows]
    assert found[: len(expected)] == expected
    assert len(found) == 1 or by == "moment"


def test_a_film_that_fills_the_candidates_hides_no_other_file(film, red, monkeypatch):
    with Library.open(film.library, read_only=True) as library:
        searcher, read = library.searcher, []
        whole = searcher.damaged.read_vectors

        def noted(ids: list[str], *columns: object) -> object:
            read.append({Path(library.get(item)["path"]).name for item in ids})
            return whole(ids, *columns)

        monkeypatch.setattr(searcher.damaged, "read_vectors", noted)
        ranking = searcher.find(SearchRequest(image=red, top=3), default_candidates=1)
        (hits,) = searcher.show([ranking])
    assert [Path(hit.path).name for hit in hits] == ["film.mp4", "upright.mp4", "still.mp4"]
    assert read == [{"film.mp4"}, {"upright.mp4", "still.mp4"}]  # the rest of the film is not scored


def test_a_score_that_nothing_reaches_is_not_looked_for_further(film, red, monkeypatch):
    with Library.open(film.library, read_only=True) as library:
        searches = []
        search = library.store.search
        monkeypatch.setattr(library.store, "search", lambda *a, **k: searches.append(a[1]) or search(*a, **k))
        request = SearchRequest(image=red, top=3, min_score=0.9999)
        ranking = library.searcher.find(request, default_candidates=5)
    assert len(ranking.choices) <= 1
    assert searches == [5]


# --- the API -----------------------------------------------------------------------------------------------


def upload(server: ServeProcess, **fields: str) -> dict:
    buffer = io.BytesIO()
    Image.new("RGB", (160, 90), "red").save(buffer, "PNG")
    answer = server.upload(buffer.getvalue(), **fields)
    assert answer.status == 200, answer.content
    return answer.json()


def test_the_api_gives_moments_with_their_pictures(film_server):
    found = upload(film_server)
    hit = found["hits"][0]
    assert times([hit, *hit["others"]]) == RED
    for moment in [hit, *hit["others"]]:
        answer = film_server.get(moment["picture"])
        assert answer.headers["content-type"] == "image/jpeg"
        shown = Image.open(io.BytesIO(answer.content))
        assert shown.size == (160, 90)
        assert shown.getpixel((5, 80)) == pytest.approx((254, 0, 0), abs=12)
    by_moment = film_server.get(f"/api/v1/search?upload={found['upload']}&by=moment&limit=3").json()["hits"]
    assert times(by_moment[:2]) == RED
    assert upload(film_server, by="moment")["hits"][1]["name"] == "film.mp4"


def test_pages_of_moments_continue_each_other(film_server):
    pages = [film_server.get(f"/api/v1/search?q=x&by=moment&limit=2&offset={at}").json() for at in (0, 2)]
    whole = film_server.get("/api/v1/search?q=x&by=moment&limit=4").json()["hits"]
    ids = [hit["id"] for page in pages for hit in page["hits"]]
    assert ids == [hit["id"] for hit in whole]
    assert len(set(ids)) == 4


def test_a_picture_is_the_frame_at_its_second(film_server):
    item = upload(film_server)["hits"][0]["id"]
    first, later = (film_server.get(f"/api/v1/items/{item}/frame?time={at}").content for at in (36, 46))
    assert first != later  # the ball moved
    for moment in (0, 36.9):  # before what is stored with the item; the same frame
        assert film_server.get(f"/api/v1/items/{item}/frame?time={moment}").status == 200
    assert film_server.get(f"/api/v1/items/{item}/frame?time=36.9").content == first
    assert film_server.get(f"/api/v1/items/{item}/frame?time=-1").status == 422
    assert film_server.get("/api/v1/items/nothing/frame?time=0").status == 404


def test_an_upright_video_has_upright_pictures(film_server):
    hits = upload(film_server)["hits"]
    hit = next(hit for hit in hits if hit["name"] == "upright.mp4")
    assert Image.open(io.BytesIO(film_server.get(hit["picture"]).content)).size == (90, 160)


def test_the_heat_of_a_film_is_where_it_matches(film_server):
    found = upload(film_server)
    item = found["hits"][0]["id"]
    heat = film_server.get(f"/api/v1/items/{item}/heat?upload={found['upload']}&parts=8").json()
    assert heat["duration"] == pytest.approx(8 * SCENE_S, abs=0.5)
    assert heat["step"] == pytest.approx(heat["duration"] / 8)
    best = sorted(range(8), key=lambda part: -heat["scores"][part])
    assert sorted(best[:2]) == [0, 3]
    assert len(film_server.get(f"/api/v1/items/{item}/heat?q=x").json()["scores"]) == 200
    assert film_server.get(f"/api/v1/items/{item}/heat").status == 422
    assert film_server.get(f"/api/v1/items/{item}/heat?q=x&parts=100000").status == 422
    assert film_server.get("/api/v1/items/nothing/heat?q=x").status == 404


def test_what_is_like_a_film_is_another_file(film_server):
    item = upload(film_server)["hits"][0]["id"]
    alike = film_server.get(f"/api/v1/search?like={item}").json()["hits"]
    assert sorted(hit["name"] for hit in alike) == ["still.mp4", "upright.mp4"]


def test_exported_parts_are_those_of_the_moments(film_server):
    found = upload(film_server)
    answer = film_server.get(f"/api/v1/search/export?upload={found['upload']}&format=csv&by=moment&limit=2")
    rows = list(csv.DictReader(io.StringIO(answer.content.decode())))
    assert [(float(row["start"]), float(row["end"])) for row in rows] == RED


def test_a_file_is_taken_out_with_all_its_items(film, tmp_path):
    write_colour(tmp_path / "clip.mp4", 0.5, seconds=12)
    with Library.open(tmp_path / "library", model=film.model) as library:
        library.index(tmp_path / "clip.mp4", options=IndexOptions(split="window:5"))
        ids = [item["id"] for item in library.items()]
    assert len(ids) > 1
    with ServeProcess(tmp_path / "library") as server:
        assert server.ask("DELETE", f"/api/v1/items/{ids[0]}").status == 204
        assert server.get("/api/v1/items").json()["total"] == len(ids) - 1
        assert server.ask("DELETE", f"/api/v1/items/{ids[1]}?whole=true").status == 204
        assert server.get("/api/v1/items").json()["total"] == 0
        assert server.ask("DELETE", f"/api/v1/items/{ids[1]}?whole=true").status == 404


# --- MCP ---------------------------------------------------------------------------------------------------


def test_an_assistant_gets_the_moments(film):
    with Library.open(film.library, read_only=True) as library:
        server = make_tool_server(library)

        def call(**arguments: object) -> list[dict]:
            result = asyncio.run(server.call_tool("search_videos", {"query": "a red ball", **arguments}))
            return [json.loads(part.text) for part in result.content]

        expected = library.search("a red ball", top=5)
        hit = next(hit for hit in call() if hit["path"].endswith("film.mp4"))
        others = next(hit for hit in expected if hit.path.endswith("film.mp4")).others
        assert times(hit["others"]) == [(other.start, other.end) for other in others]
        assert others
        assert sum(hit["path"].endswith("film.mp4") for hit in call(by="moment")) > 1


# --- clips -------------------------------------------------------------------------------------------------


def test_words_cut_the_moment_out(film, tmp_path):
    done = run_gare(
        "clip", "a red ball", "--library", str(film.library), "--where", "name:film*", "--exact",
        "--out", str(tmp_path), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (made,) = json.loads(done.stdout)
    with Library.open(film.library, read_only=True) as library:
        (hit,) = library.search("a red ball", where="name:film*", top=1)
    assert made["asked"] == [hit.start, hit.end]
    assert (made["start"], made["end"]) == (
        pytest.approx(hit.start, abs=0.3),
        pytest.approx(hit.end, abs=0.3),
    )

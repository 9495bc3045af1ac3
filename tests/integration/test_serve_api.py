"""The REST API of a real server over a real library."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from gare import __version__
from gare.library.library import Library
from gare.library.store.stored_pictures import split_pictures
from serve_library import COLOURS, Served, make_served
from serve_process import ServeProcess
from servers import HANG_S, wait_until
from warm import run_gare


@pytest.fixture(scope="module")
def library(served: Served) -> Iterator[Library]:
    with Library.open(served.library, read_only=True) as opened:
        yield opened


def find_item(server: ServeProcess, name: str) -> dict:
    items = server.get("/api/v1/items?limit=500").json()["items"]
    return next(item for item in items if item["name"] == name)


def picture(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (200, 120), colour).save(buffer, "PNG")
    return buffer.getvalue()


# --- searching ---------------------------------------------------------------------------------------------


def test_search_gives_what_the_library_gives(server, library):
    answer = server.get("/api/v1/search?q=a+red+ball&limit=4&explain=true")
    expected = library.search("a red ball", top=4, explain=True)
    hits = answer.json()["hits"]
    assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
    assert hits[0]["score"] == pytest.approx(expected[0].score, abs=1e-5)
    assert hits[0]["moment"] == expected[0].moment
    assert [frame["weight"] for frame in hits[0]["frames"]] == pytest.approx(
        expected[0].frame_weights, abs=1e-5
    )
    assert hits[0]["explanation"]["plain_rank"] == expected[0].explanation.plain_rank
    assert answer.headers["x-gare-version"] == __version__


def test_an_exact_search_gives_the_list_of_exhaustive_scoring_and_its_proof(server, library):
    expected = library.search("a red ball", top=4, exhaustive=True)
    typed = server.get("/api/v1/search?q=a+red+ball&limit=4&exact=true").json()
    posted = server.post("/api/v1/search", {"query": "a red ball", "limit": 4, "exact": True}).json()
    for answer in (typed, posted):
        assert [hit["id"] for hit in answer["hits"]] == [hit.id for hit in expected]
        assert [hit["score"] for hit in answer["hits"]] == pytest.approx(
            [hit.score for hit in expected], abs=1e-9
        )
        assert answer["certificate"]["num_items"] == len(COLOURS)
    refused = server.get("/api/v1/search?q=a+red+ball&exact=true&candidates=5")
    assert (refused.status, refused.json()["error"]["code"]) == (422, "bad_query")


def test_weights_and_negatives_are_those_of_the_query_language(server, library):
    expected = [hit.id for hit in library.search("red ^2 + ball -snow", top=10)]
    terms = [{"text": "red", "weight": 2}, {"text": "ball"}, {"text": "snow", "weight": -0.5}]
    posted = server.post("/api/v1/search", {"terms": terms, "limit": 10}).json()["hits"]
    typed = server.get("/api/v1/search?q=red+%5E2+%2B+ball&unwanted=snow&limit=10").json()["hits"]
    assert [hit["id"] for hit in posted] == [hit["id"] for hit in typed] == expected


def test_unwanted_words_are_never_left_out_silently(server):
    item = find_item(server, "teal.mp4")
    refused = server.get(f"/api/v1/search?like={item['id']}&unwanted=snow")
    assert (refused.status, refused.json()["error"]["code"]) == (422, "bad_query")


def test_pages_join_to_one_list(server):
    whole = [hit["id"] for hit in server.get("/api/v1/search?q=green&limit=10").json()["hits"]]
    paged, offset = [], 0
    while offset is not None:
        page = server.get(f"/api/v1/search?q=green&limit=3&offset={offset}").json()
        paged += [hit["id"] for hit in page["hits"]]
        offset = page["next_offset"]
    assert paged == whole
    assert len(whole) == len(COLOURS)


def test_filters(server):
    def names(query: str) -> set[str]:
        answer = server.get(f"/api/v1/search?q=x&limit=50&{query}")
        assert answer.status == 200, answer.content
        return {hit["name"].removesuffix(".mp4") for hit in answer.json()["hits"]}

    assert names("folder=warm") == set(COLOURS[:5])
    assert names("shortest=5&longest=9") == {"yellow", "lime"}
    assert names("after=2028-01-01") == {"violet", "pink"}
    assert names("before=2020-12-31&folder=cold") == set()
    assert names("where=name:b*.mp4") == {"blue"}


def test_min_score_leaves_out_what_is_below(server):
    scores = [hit["score"] for hit in server.get("/api/v1/search?q=blue&limit=10").json()["hits"]]
    kept = server.get(f"/api/v1/search?q=blue&limit=10&min_score={scores[3] - 1e-6}").json()["hits"]
    assert len(kept) == 4


def test_like_finds_others_first_the_nearest(server, library):
    item = find_item(server, "red.mp4")
    hits = server.get(f"/api/v1/search?like={item['id']}&limit=5").json()["hits"]
    assert item["id"] not in [hit["id"] for hit in hits]
    assert [hit["id"] for hit in hits] == [hit.id for hit in library.search(like=item["id"], top=5)]


def test_a_clip_of_the_library_finds_itself(server, served):
    answer = server.upload((served.videos / "warm" / "lime.mp4").read_bytes(), "anything.txt")
    assert answer.json()["hits"][0]["name"] == "lime.mp4"
    assert answer.json()["hits"][0]["score"] == pytest.approx(1.0, abs=1e-2)


def test_a_picture_is_kept_for_the_next_page(server, served, library, tmp_path):
    first = server.upload(picture("red"), limit="2").json()
    (tmp_path / "red.png").write_bytes(picture("red"))
    expected = [hit.id for hit in library.search(image=tmp_path / "red.png", top=4)]
    again = server.get(f"/api/v1/search?upload={first['upload']}&limit=2&offset=2").json()
    assert [hit["id"] for hit in first["hits"] + again["hits"]] == expected
    assert server.get("/api/v1/search?upload=unknown").json()["error"]["code"] == "upload_gone"


def test_captions_both_ways(server, library):
    captions = ["a red ball", "deep blue sea", "green grass"]
    answer = server.post("/api/v1/captions/search", {"captions": captions, "top": 2}).json()
    assert [row["caption"] for row in answer] == captions
    assert [hit["id"] for hit in answer[1]["hits"]] == [hit.id for hit in library.search(captions[1], top=2)]
    item = find_item(server, "blue.mp4")
    ranked = server.post(f"/api/v1/items/{item['id']}/captions", {"captions": captions}).json()
    expected = library.describe(captions, like=item["id"])
    assert [row["caption"] for row in ranked] == [caption for caption, _ in expected]


# --- items and their bytes ---------------------------------------------------------------------------------


def test_items_are_listed_in_pages(server):
    whole = server.get("/api/v1/items?limit=500").json()
    assert whole["total"] == len(whole["items"]) == len(COLOURS)
    page = server.get("/api/v1/items?limit=4&offset=8").json()
    assert [item["id"] for item in page["items"]] == [item["id"] for item in whole["items"][8:]]
    assert page["next_offset"] is None


def test_video_bytes_in_ranges(server, served):
    content = (served.videos / "warm" / "red.mp4").read_bytes()
    address = find_item(server, "red.mp4")["links"]["video"]
    whole = server.get(address)
    assert (whole.status, whole.content, whole.headers["content-type"]) == (200, content, "video/mp4")
    size = len(content)
    for asked, first, last in (
        ("bytes=0-99", 0, 99),
        ("bytes=100-", 100, size - 1),
        ("bytes=-50", size - 50, size - 1),
        (f"bytes=10-{size + 1000}", 10, size - 1),
        (f"bytes=10-{'9' * 5000}", 10, size - 1),
    ):
        part = server.get(address, Range=asked)
        assert part.status == 206
        assert part.content == content[first : last + 1]
        assert part.headers["content-range"] == f"bytes {first}-{last}/{size}"
    beyond = server.get(address, Range=f"bytes={size}-")
    assert (beyond.status, beyond.headers["content-range"]) == (416, f"bytes */{size}")
    for whole_again in ("bytes=5-2", "bytes=0-1,4-5", "lines=1-2", "bytes=a-b"):
        assert server.get(address, Range=whole_again).content == content
    assert server.get(address, Range="bytes=0-9", If_Range='"other"').content == content
    tag = whole.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        assert server.get(address, If_None_Match=known).status == 304
    assert server.get(address, If_None_Match='"other"').status == 200
    head = server.ask("HEAD", address)
    assert (head.status, head.content, head.headers["content-length"]) == (200, b"", str(size))


def test_whatever_can_be_read_can_be_asked_about(server):
    item = find_item(server, "teal.mp4")
    for address in ("/", "/library", "/api/v1/health", "/static/gare.css", item["links"]["thumbnail"]):
        read, head = server.get(address), server.ask("HEAD", address)
        assert (head.status, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(read.content))
    assert server.ask("HEAD", "/nothing").status == 404
    assert server.ask("HEAD", "/api/v1/jobs/none/events").status == 405


def test_pictures_come_from_the_store(server, library):
    item = find_item(server, "teal.mp4")
    rows = library.store.fetch([item["id"]], ["thumbnail", "strip"])
    for column in ("thumbnail", "strip"):
        answer = server.get(item["links"][column])
        assert answer.content == split_pictures(rows[column][0].as_py())[0]
        assert answer.headers["content-type"] == "image/jpeg"


def test_a_file_that_changed_is_not_shown(tmp_path):
    served = make_served(tmp_path)
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(b"what nobody indexed")
    with ServeProcess(served.library, "--log-queries") as server:
        address = find_item(server, "red.mp4")["links"]["video"]
        path = served.videos / "warm" / "red.mp4"
        path.unlink()
        assert server.get(address).json()["error"]["code"] == "file_gone"
        path.symlink_to(secret)
        assert server.get(address).json()["error"]["code"] == "file_changed"
        path.unlink()
        path.mkdir()
        assert server.get(address).status == 410

        path = served.videos / "warm" / "orange.mp4"
        address, content, date = (
            find_item(server, path.name)["links"]["video"],
            path.read_bytes(),
            path.stat(),
        )
        for other, status in ((content[:-1] + b"x", 410), (content + b"x", 410), (content, 200)):
            path.unlink()
            path.write_bytes(other)
            os.utime(path, ns=(date.st_atime_ns, date.st_mtime_ns))  # of the same date; one, of the same size
            for _ in range(2):
                answer = server.get(address)
                assert answer.status == status
        assert answer.content == content

        item = find_item(server, "pink.mp4")
        assert server.ask("DELETE", f"/api/v1/items/{item['id']}").status == 204
        assert server.get(f"/api/v1/items/{item['id']}").status == 404
        assert server.ask("DELETE", f"/api/v1/items/{item['id']}").status == 404
        assert item["id"] not in {hit["id"] for hit in server.get("/api/v1/search?q=pink").json()["hits"]}
        assert (served.videos / "cold" / "pink.mp4").exists()
        # What is logged comes after the answer.
        wait_until(lambda: '"query": "q=pink"' in server.log.read_text(), "the log")
        assert server.interrupt() == 0


# --- the rest ----------------------------------------------------------------------------------------------


def test_errors_have_one_shape(server):
    for path, status, code in (
        ("/api/v1/nowhere", 404, "not_found"),
        ("/api/v1/items/0000", 404, "no_such_item"),
        ("/api/v1/search", 422, "bad_query"),
        ("/api/v1/search?q=%20", 422, "bad_query"),
        ("/api/v1/search?q=-dog", 422, "bad_query"),
        ("/api/v1/search?q=x&limit=0", 422, "invalid_request"),
        ("/api/v1/search?q=x&what=1", 422, "invalid_request"),
        ("/api/v1/search?q=x&where=colour:red", 422, "bad_request"),
        ("/api/v1/search?like=0000", 422, "bad_query"),
        ("/api/v1/jobs/0000", 404, "no_such_job"),
        ("/api/v1/audit", 404, "no_audit"),
    ):
        answer = server.get(path)
        error = answer.json()["error"]
        assert (answer.status, error["status"], error["code"]) == (status, status, code), path
        assert error["message"]
        assert error["request_id"] == answer.headers["x-request-id"]
    assert server.ask("PUT", "/api/v1/items").json()["error"]["code"] == "method_not_allowed"


def test_openapi_names_the_error_and_has_examples(server):
    schema = server.get("/api/v1/openapi.json").json()
    assert "Error" in schema["components"]["schemas"]
    assert schema["components"]["schemas"]["SearchBody"]["examples"]
    assert {"/api/v1/search", "/api/v1/items/{item_id}/video", "/api/v1/jobs/{job_id}/events"} <= schema[
        "paths"
    ].keys()


def test_info_health_and_metrics(server, served):
    assert server.get("/api/v1/health").json()["status"] == "ok"
    info = server.get("/api/v1/info").json()
    assert (info["num_items"], info["model"]) == (len(COLOURS), str(served.model))
    server.get("/api/v1/search?q=red")
    text = server.get("/metrics").content.decode()
    assert f"gare_library_items {len(COLOURS)}.0" in text
    assert 'gare_requests_total{method="GET",route="/api/v1/search",status="200"}' in text


def test_what_people_search_for_is_not_logged(server, served):
    def num_logged() -> int:
        whole, _, _ = server.log.read_text().rpartition("\n")
        lines = [line for line in whole.splitlines() if line.startswith("{")]  # decoders write there, too
        return sum(json.loads(line).get("route") == "/api/v1/search" for line in lines)

    before = num_logged()
    server.get("/api/v1/search?q=verysecretwish")
    wait_until(lambda: num_logged() > before, "the log")
    assert "verysecretwish" not in server.log.read_text()


def test_a_taken_port_is_named(server, served):
    result = run_gare("serve", "--library", served.library, "--port", server.port)
    assert result.returncode == 1
    assert f"port {server.port}" in result.stderr
    assert "Traceback" not in result.stderr


def test_importing_the_server_does_no_work():
    code = (
        "import gare.serve.app, gare.cli.serve_command, sys\n"
        "assert not {'av', 'lance', 'mcp'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S, cwd=Path(__file__).parent)

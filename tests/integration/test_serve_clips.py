"""Clips and lists of hits from a real server, and in a browser."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import time
from pathlib import Path
from urllib.parse import unquote

import av
import pytest

from browser import chromium
from clips import read_number, write_film
from gare.errors import TimeLimitError
from gare.library.editing.moments import Moment
from gare.library.library import Library
from gare.library.store.read_deadline import Deadline
from gare.serve.clips import Clips
from gare.serve.observability import Metrics
from gare.serve.problems import Problem
from gare.serve.serve_options import ServeOptions
from serve_library import save_tiny_model
from serve_process import PATIENT, ServeProcess
from servers import HANG_S, wait_until

FRAMES = 150
LISTS = {
    "m3u8": "#EXTM3U",
    "mpv": "# mpv EDL",
    "edl": "TITLE:",
    "fcpxml": "<?xml",
    "otio": "{",
    "csv": "rank,",
    "chapters": ";FFMETADATA1",
    "webvtt": "WEBVTT",
}


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of two films with sound."""
    folder = tmp_path_factory.mktemp("films")
    (folder / "videos").mkdir()
    write_film(folder / "videos" / "zwölf 'm\"en;.mp4", FRAMES)
    write_film(folder / "videos" / "other.mp4", FRAMES + 25)
    with Library.open(folder / "library", model=save_tiny_model(folder / "model")) as library:
        library.index(folder / "videos")
    return folder / "library"


@pytest.fixture(scope="module")
def server(films: Path):
    with ServeProcess(
        films, options={**PATIENT, "max_clips": 1, "clip_seconds": 5, "clip_bytes": 15_000}
    ) as up:
        yield up


@pytest.fixture(scope="module")
def item(server: ServeProcess) -> str:
    items = server.get("/api/v1/items").json()["items"]
    return next(item["id"] for item in items if item["name"] != "other.mp4")


def numbers(content: bytes) -> list[int]:
    with av.open(io.BytesIO(content)) as container:
        assert container.streams.audio[0].codec_context.layout.name == "stereo"
        return [read_number(frame.to_image()) for frame in container.decode(video=0)]


def test_a_clip_is_a_download_with_its_real_times(server, item):
    answer = server.get(f"/api/v1/items/{item}/clip?start=2.5&end=3.9")
    assert answer.status == 200, answer.content
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["x-clip-start"] == "1.920000"
    assert int(answer.headers["content-length"]) == len(answer.content)
    found = numbers(answer.content)
    assert (found[0], found[:50]) == (48, list(range(48, 98)))
    said = answer.headers["content-disposition"]
    assert said.startswith("attachment; ")
    assert unquote(said.partition("UTF-8''")[2]) == "zwölf _m_en_0-00-02.500_0-00-03.900.mp4"


def test_an_exact_clip(server, item):
    answer = server.get(f"/api/v1/items/{item}/clip?start=2.52&end=3.2&exact=true")
    assert answer.status == 200, answer.content
    assert numbers(answer.content) == list(range(63, 80))
    assert answer.headers["x-clip-start"] == "2.520000"


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("start=1", 422, "invalid_request"),
        ("start=3&end=2", 422, "cannot_cut"),
        ("start=-1&end=2", 422, "invalid_request"),
        ("start=nan&end=2", 422, "invalid_request"),
        ("start=0&end=5.5", 422, "too_long"),
        ("start=500&end=501", 422, "cannot_cut"),
        ("start=0&end=2&path=/etc/passwd", 422, "invalid_request"),
        ("start=0&end=5&exact=true", 413, "cannot_cut"),
    ],
)
def test_what_cannot_be_cut(server, item, query, status, code):
    answer = server.get(f"/api/v1/items/{item}/clip?{query}")
    assert (answer.status, answer.json()["error"]["code"]) == (status, code), answer.content
    assert "/videos/" not in answer.json()["error"]["message"]


def test_items_that_are_not_there(server):
    assert server.get("/api/v1/items/0123456789abcdef0123/clip").status == 404
    assert server.get("/api/v1/items/..%2F..%2Fetc%2Fpasswd/clip").status in (404, 422)


def opened(files: Path) -> list[str]:
    """What a process has open; some of it may be closed while this looks."""
    found = []
    for entry in files.iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return found


def test_nothing_is_left_behind(server, item):
    """A clip has no name while it is sent, and the folder goes with the server."""
    server.get(f"/api/v1/items/{item}/clip?start=0&end=1")
    files = Path(f"/proc/{server.process.pid}/fd")
    if not files.is_dir():
        pytest.skip("this system does not list open files")
    wait_until(lambda: not [path for path in opened(files) if "gare-clips-" in path], "the clip to be closed")


@pytest.mark.parametrize("name", LISTS)
def test_the_hits_as_a_list(server, name):
    answer = server.get(f"/api/v1/search/export?q=a+film&format={name}")
    assert answer.status == 200, answer.content
    assert answer.content.decode().startswith(LISTS[name])
    assert answer.headers["content-disposition"].startswith("attachment; filename=hits.")


def test_a_list_has_the_hits_of_the_search(server):
    hits = server.get("/api/v1/search?q=a+film&limit=2").json()["hits"]
    table = server.get("/api/v1/search/export?q=a+film&limit=2&format=csv&length=2").content.decode()
    rows = list(csv.DictReader(io.StringIO(table, newline="")))
    assert [row["id"] for row in rows] == [hit["id"] for hit in hits]
    assert all(float(row["end"]) - float(row["start"]) == pytest.approx(2) for row in rows)


def test_lists_that_cannot_be(server):
    assert server.get("/api/v1/search/export?q=a&format=avi").json()["error"]["code"] == "invalid_request"
    assert server.get("/api/v1/search/export?format=csv").status == 422
    answer = server.get("/api/v1/search/export?q=a&format=csv&where=duration:>9999")
    assert (answer.status, answer.json()["error"]["code"]) == (422, "cannot_export")


def test_only_so_many_clips_at_once():
    clips = Clips(ServeOptions(max_clips=1), Metrics())
    with clips.place(), pytest.raises(Problem) as refused, clips.place():
        pass
    assert (refused.value.status_code, refused.value.headers["Retry-After"]) == (503, "3")
    with clips.place():
        pass  # it is free again


def test_a_cut_ends_with_its_request(films, tmp_path):
    film = films.parent / "videos" / "other.mp4"
    clips = Clips(ServeOptions(), Metrics())
    with film.open("rb") as source, Deadline(seconds=0).active(), pytest.raises(TimeLimitError):
        clips.cut(source.fileno(), Moment(str(film), 0, 5), ".mp4", exact=True)
    assert list(clips._folder.iterdir()) == []
    clips.close()
    assert not clips._folder.exists()


def test_a_token_is_asked_for(films):
    with ServeProcess(films, options={**PATIENT, "token": "a-token-of-many-letters"}, ready=False) as server:
        assert server.get("/api/v1/search/export?q=a&format=csv").status == 401
        assert server.get("/api/v1/items/0123456789abcdef0123/clip").status == 401


def test_a_file_that_changed_is_not_cut(tmp_path):
    film = write_film(tmp_path / "film.mp4", 50)
    with Library.open(tmp_path / "library", model=save_tiny_model(tmp_path / "model")) as library:
        library.index(film)
    with ServeProcess(tmp_path / "library", options=PATIENT) as server:
        (item,) = server.get("/api/v1/items").json()["items"]
        assert server.get(f"/api/v1/items/{item['id']}/clip").status == 200
        os.utime(film, (1e9, 1e9))
        assert server.get(f"/api/v1/items/{item['id']}/clip").status == 410


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Playwright's own sockets
def test_the_button_gives_a_clip_that_chromium_plays(films, tmp_path):
    with ServeProcess(films, options=PATIENT) as server, chromium() as browser:
        item = server.get("/api/v1/items").json()["items"][0]
        page = browser.new_page()
        page.set_default_timeout(1000 * HANG_S)
        page.goto(f"{server.url}/watch/{item['id']}")
        with page.expect_download() as started:
            page.get_by_role("link", name="Cut out").click()
        started.value.save_as(tmp_path / "clip.mp4")
        assert numbers((tmp_path / "clip.mp4").read_bytes())[0] == 0
        page.evaluate(
            """address => {
                window.clip = document.createElement("video");
                clip.muted = true;
                clip.src = address;
                document.body.append(clip);
            }""",
            f"/api/v1/items/{item['id']}/clip?start=2.52&end=3.92&exact=true",
        )
        deadline = time.monotonic() + HANG_S
        while not page.evaluate("clip.readyState >= 2"):
            assert time.monotonic() < deadline
            assert page.evaluate("clip.error === null")
            page.wait_for_timeout(20)
        assert page.evaluate("clip.duration") == pytest.approx(1.4, abs=0.1)
        assert page.evaluate("[clip.videoWidth, clip.videoHeight]") == [64, 48]

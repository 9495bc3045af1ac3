"""A film on the page, in a real browser: one card, other moments, the line of heat, where playing stops."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from browser import serious_violations
from serve_process import ServeProcess
from servers import HANG_S, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Playwright's own sockets
ASSETS = Path(__file__).parents[1] / "assets" / "v0.1"
VIDEO = "document.querySelector('.watch video')"


@pytest.fixture(scope="module")
def red(film_server: ServeProcess) -> str:
    """The address of a search with a red picture; the film is red from 0:36 to 0:48 and until 0:12."""
    buffer = io.BytesIO()
    Image.new("RGB", (160, 90), "red").save(buffer, "PNG")
    return f"{film_server.url}/?upload={film_server.upload(buffer.getvalue()).json()['upload']}"


def until(page: Page, expression: str) -> None:
    wait_until(lambda: page.evaluate(expression), expression)


def open_film(page: Page, address: str) -> None:
    page.goto(address)
    page.locator(".shot").first.click()
    page.wait_for_selector("#player[open] video")
    until(page, f"{VIDEO}.played.length > 0")


def pixel(page: Page, image: str) -> list[int]:
    """The colour of an image of the page, low on its left, where no ball is."""
    return page.evaluate(f"""async () => {{
        const image = document.querySelector({image!r});
        await image.decode();
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        return [...context.getImageData(3, canvas.height - 5, 1, 1).data].slice(0, 3);
    }}""")


# --- cards -------------------------------------------------------------------------------------------------


def test_a_film_is_one_card_with_the_frame_that_matched(page, red):
    page.goto(red)
    assert page.locator(".card h3").all_inner_texts() == ["film.mp4", "upright.mp4", "still.mp4"]
    assert page.locator(".card .tag.moment").first.inner_text() == "0:36–0:48"
    assert page.locator(".card .tag.length").first.inner_text() == "1:36"
    assert pixel(page, ".card .shot img") == pytest.approx([254, 0, 0], abs=12)


def test_an_upright_frame_is_shown_whole(page, red):
    page.goto(red)
    assert [shot.get_attribute("class") for shot in page.locator(".shot").all()] == [
        "shot",
        "shot upright",
        "shot",
    ]
    fit = "getComputedStyle(document.querySelector('.upright img')).objectFit"
    assert page.evaluate(fit) == "contain"


def test_more_moments_open_and_play(page, red):
    page.goto(red)
    assert page.locator("details.others").count() == 1  # the others have one moment each
    page.get_by_text("1 more moment").click()
    other = page.locator(".others a")
    assert other.inner_text().splitlines() == ["Play from", "0:00–0:12", "1.00"]
    other.scroll_into_view_if_needed()
    assert pixel(page, ".others img") == pytest.approx([254, 0, 0], abs=12)
    assert serious_violations(page) == []
    other.click()
    page.wait_for_selector("#player[open] video")
    assert float(page.locator(".watch video").get_attribute("data-end")) == 12
    assert page.locator(".moments [aria-current]").inner_text().endswith("0:00–0:12")


def test_more_moments_open_with_the_keyboard(page, red):
    page.goto(red)
    page.locator(".others summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.others') !== null")
    page.keyboard.press("Enter")
    page.wait_for_selector("#player[open] video")


def test_counts_are_of_videos_and_time(page, red, film_server):
    page.goto(film_server.url)
    assert "3 videos, 2 min, searched on this machine" in page.inner_text(".hero")
    assert page.locator(".card").count() == 3  # a film was added once
    assert page.locator(".card:has-text('film.mp4') .tag.length").inner_text() == "1:36"
    page.goto(red.replace("/?", "/?q=&"))
    page.goto(f"{film_server.url}/?q=red")
    assert page.inner_text("#summary").startswith("Best of 3 videos, 2 min")
    page.goto(f"{film_server.url}/library")
    assert page.inner_text("#num-items") == "3 videos, 2 min"


def test_the_length_of_a_film_is_that_of_its_file(page, film_server):
    page.goto(f"{film_server.url}/?q=red&duration=60-600")
    assert page.locator(".card h3").all_inner_texts() == ["film.mp4"]


# --- the player --------------------------------------------------------------------------------------------


def test_a_moment_stops_at_its_end_unless_asked_to_play_on(page, red):
    open_film(page, red)
    page.evaluate(f"{VIDEO}.currentTime = 47.4")
    until(page, f"{VIDEO}.paused")
    assert page.evaluate(f"{VIDEO}.currentTime") == pytest.approx(48, abs=0.5)
    page.evaluate(f"{VIDEO}.play()")  # who plays it again sees what follows
    until(page, f"{VIDEO}.currentTime > 48.8 && !{VIDEO}.paused")

    page.check("#play-on")
    page.locator(".moments [data-go]").last.click()
    page.evaluate(f"{VIDEO}.currentTime = 47.4")
    until(page, f"{VIDEO}.currentTime > 48.8 && !{VIDEO}.paused")
    page.reload()  # it is remembered
    until(page, "document.querySelector('#play-on').checked")


def test_next_and_previous_moment(page, red):
    open_film(page, red)
    assert page.locator(".moments [data-go]").count() == 2
    before = page.url
    strip = page.locator(".strip img").get_attribute("src")
    page.keyboard.press("n")  # after the last comes the first
    until(page, f"{VIDEO}.currentTime < 12")
    assert page.locator(".moments [aria-current]").inner_text().endswith("0:00–0:12")
    until(page, f"document.querySelector('.strip img').getAttribute('src') !== {strip!r}")
    assert page.url != before
    assert "start=0.000" in page.locator("#cut").get_attribute("href")
    page.keyboard.press("p")
    until(page, f"{VIDEO}.currentTime >= 36")
    assert page.url == before
    page.get_by_role("button", name="Next moment").click()
    until(page, f"{VIDEO}.currentTime < 12")


def test_the_line_of_heat_shows_the_film_and_leads_there(page, red):
    open_film(page, red)
    levels = page.evaluate("""() => [...document.querySelectorAll('.film rect')].map((part) => [
        Number(part.getAttribute('x')), Number(part.getAttribute('width')), Number(part.className.baseVal[1]),
    ])""")
    whole = max(first + width for first, width, _ in levels)
    hot = [(96 * first / whole, 96 * (first + width) / whole) for first, width, level in levels if level == 9]
    assert all((first >= 0 and last <= 12.5) or (first >= 35.5 and last <= 48.5) for first, last in hot)
    assert {round(first // 36) for first, _ in hot} == {0, 1}
    box = page.locator(".film .heat").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2)
    until(page, f"Math.abs({VIDEO}.currentTime - 72) < 3")
    until(page, "Number(document.querySelector('.playhead').getAttribute('x1')) > 140")


def test_the_strip_keeps_the_shape_of_its_frames_and_shows_the_moment(page, red):
    page.set_viewport_size({"width": 400, "height": 860})  # a few frames fit
    open_film(page, red)
    shape = page.evaluate("""() => {
        const cell = document.querySelector('.cells button').getBoundingClientRect();
        return cell.width / cell.height;
    }""")
    assert shape == pytest.approx(16 / 9, abs=0.05)
    shown = page.evaluate("""() => {
        const frames = document.querySelector('.frames').getBoundingClientRect();
        const cell = document.querySelector('.cells [data-time="36.00"]').getBoundingClientRect();
        return cell.left >= frames.left && cell.right <= frames.right;
    }""")
    assert shown
    page.keyboard.press("Escape")
    page.locator(".shot").nth(1).click()
    page.wait_for_selector(".watch .name:has-text('upright.mp4')")
    cell = page.locator(".cells button").first.bounding_box()
    assert cell["width"] / cell["height"] == pytest.approx(9 / 16, abs=0.03)


def test_everyone_can_use_the_player(page, red):
    open_film(page, red)
    assert serious_violations(page) == []
    page.set_viewport_size({"width": 320, "height": 700})
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) == 0
    assert page.evaluate("document.querySelector('#player').scrollWidth") <= 320


def test_without_scripts_a_moment_is_a_page(browser, red):
    context = browser.new_context(java_script_enabled=False)
    context.set_default_timeout(1000 * HANG_S)
    page = context.new_page()
    page.goto(red)
    page.locator(".shot").first.click()
    assert page.locator("video").get_attribute("src").endswith("/video#t=36.00")
    page.locator(".moments [data-go]").first.click()
    page.wait_for_selector("video[data-start='0.00']")
    context.close()


def test_a_library_of_version_0_1_is_shown_as_it_is(page, tmp_path):
    shutil.copytree(ASSETS / "library", tmp_path / "library")
    with ServeProcess(tmp_path / "library", "--model", str(ASSETS / "models" / "gare")) as server:
        page.goto(f"{server.url}/?q=a+red+light")
        cards = page.locator(".card")
        assert cards.count() == 3
        for hit in server.get("/api/v1/search?q=a+red+light").json()["hits"]:
            assert server.get(hit["picture"]).content == server.get(hit["links"]["thumbnail"]).content
            heat = server.get(f"/api/v1/items/{hit['id']}/heat?q=a+red+light&parts=9").json()["scores"]
            assert max(heat) == pytest.approx(max(frame["score"] for frame in hit["frames"]), abs=1e-5)
        page.locator(".shot").first.click()
        page.wait_for_selector("#player[open] .film .heat")
        assert page.locator(".moments [data-go]").count() == 1


def test_a_still_and_an_item_without_a_search_are_shown(page, red, film_server):
    page.goto(red)
    page.locator(".shot").nth(2).click()
    page.wait_for_selector("#player[open] video")
    assert page.locator(".moments [data-go]").count() == 1
    assert page.locator("[data-step]").count() == 0
    page.goto(film_server.url)
    page.locator(".card:has-text('film.mp4') .shot").click()
    page.wait_for_selector("#player[open] video")
    assert page.locator(".moments").count() == 0
    assert page.locator(".watch video").get_attribute("data-start") == "0.00"

"""Pictures of every state of the page, for the docs: `python tests/take_screenshots.py [MODEL]`.

Wants chromium and, to look its best, the font Inter (Debian: fonts-inter).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page

from browser import chromium
from gare.library.library import DEFAULT_MODEL, Library
from gare.library.sample_videos import CLIPS, Clip, make_sample, photograph
from serve_process import ServeProcess

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDE = {"width": 1280, "height": 860}
_SCENES = ("grass", "coffee", "rain", "cat", "sunset", "stars", "coffee", "snow", "bricks", "cat", "rocket")
FILM = Clip("our year.mp4", tuple((scene, 10) for scene in _SCENES), 4)
PHONE = {"width": 390, "height": 844}


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gare") as folder, chromium() as browser:
        home = Path(folder) / "Videos"
        make_sample(home, [*CLIPS, FILM])
        add_broken(home)
        with Library.open(home / ".gare", model=model) as library:
            library.index(home)
        with ServeProcess(home / ".gare") as server:
            take_search(browser, server)
            take_other(browser, server)
            take_away(browser, server)
        take_empty(browser, Path(folder), home, model)


def add_broken(home: Path) -> None:
    whole = (home / "space" / "deep field.mp4").read_bytes()
    (home / "phone").mkdir(exist_ok=True)
    (home / "phone" / "VID_0417.mp4").write_bytes(whole[: len(whole) // 3])
    (home / "phone" / "VID_0418.mp4").write_bytes(b"")
    (home / "phone" / "voice memo.mp4").write_text("not a video")


def open_page(browser: Browser, address: str, *, size: dict[str, int] = WIDE, scheme: str = "light") -> Page:
    page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1.5)
    page.goto(address)
    page.wait_for_load_state("networkidle")
    return page


def shoot(page: Page, name: str, *, close: bool = True) -> None:
    page.wait_for_timeout(400)
    page.screenshot(path=IMAGES / f"{name}.jpg", type="jpeg", quality=82)
    if close:
        page.close()


def take_search(browser: Browser, server: ServeProcess) -> None:
    shoot(open_page(browser, server.url), "page-home")
    shoot(open_page(browser, server.url, scheme="dark"), "page-home-dark")
    page = open_page(browser, server.url)
    page.keyboard.type("a cup of coffee", delay=15)
    page.wait_for_selector(".card .heat")
    page.wait_for_timeout(800)
    shoot(page, "page-results", close=False)
    page.locator(".shot").first.hover()
    page.wait_for_selector(".shot video.shown")
    page.wait_for_timeout(600)
    shoot(page, "page-preview", close=False)
    page.mouse.move(2, 2)
    page.locator(".card:has-text('coffee.mp4') .shot").click()
    page.wait_for_selector("#player[open] video")
    page.wait_for_timeout(900)
    shoot(page, "page-player", close=False)
    page.keyboard.press("Escape")
    page.locator(".card:has-text('our year.mp4') .others summary").click()
    shoot(page, "page-moments", close=False)
    page.locator(".card:has-text('our year.mp4') .shot").click()
    page.wait_for_selector("#player[open] .moments [data-step]")
    page.wait_for_timeout(900)
    shoot(page, "page-film")
    page = open_page(browser, f"{server.url}/?q=green+grass&not=cat&folder=garden&duration=0-10")
    shoot(page, "page-filters")
    shoot(open_page(browser, f"{server.url}/?q=a+cat&after=2035-01-01"), "page-nothing")
    shoot(open_page(browser, f"{server.url}/?q=-dog"), "page-error")
    page = open_page(browser, server.url, scheme="dark")
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "my cat.jpg"
        photograph("cat").save(picture)
        page.set_input_files("#file", picture)
        page.wait_for_selector(".card .heat")
    shoot(page, "page-picture")
    shoot(open_page(browser, f"{server.url}/?q=a+smiling+woman", size=PHONE), "page-phone")
    page = open_page(browser, f"{server.url}/?q=a+smiling+woman", size=PHONE, scheme="dark")
    page.locator(".shot").first.click()
    page.wait_for_selector("#player[open] video")
    page.wait_for_timeout(900)
    shoot(page, "page-phone-player")


def take_other(browser: Browser, server: ServeProcess) -> None:
    shoot(open_page(browser, f"{server.url}/library"), "page-failed-files")
    shoot(open_page(browser, f"{server.url}/settings", scheme="dark"), "page-settings")


def take_away(browser: Browser, server: ServeProcess) -> None:
    page = open_page(browser, f"{server.url}/?q=a+red+ball")
    path = server.get("/api/v1/search?q=a+red+ball&limit=1").json()["hits"][0]["path"]
    shutil.move(path, path + ".away")
    page.locator(".shot").first.click()
    page.wait_for_selector(".unplayable:not([hidden])")
    shoot(page, "page-file-gone", close=False)
    shutil.move(path + ".away", path)
    page.keyboard.press("Escape")
    server.kill()
    page.fill("#q", "a red balloon")
    page.wait_for_selector("#connection:not([hidden])")
    shoot(page, "page-server-away")


def take_empty(browser: Browser, folder: Path, home: Path, model: str) -> None:
    Library.open(folder / "empty", model=model).close()
    with ServeProcess(folder / "empty", "--folder", str(home)) as server:
        page = open_page(browser, server.url)
        shoot(page, "page-empty", close=False)
        page.click("text=Index a folder")
        page.click("text=Bring everything up to date")
        page.wait_for_function(
            "() => Number(document.querySelector('#bar').getAttribute('aria-valuenow')) > 25"
        )
        shoot(page, "page-indexing")


if __name__ == "__main__":
    main()

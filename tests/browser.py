"""Debian's Chromium, driven by Playwright; tests are skipped only where it is absent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from servers import HANG_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=1000 * HANG_S)
        yield browser
        browser.close()


def serious_violations(page: Any) -> list[str]:
    """What axe-core finds on the page as it is now, with the elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response
    return [
        f"{violation['id']}: {node['html'][:160]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]

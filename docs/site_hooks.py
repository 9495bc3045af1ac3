"""Hooks of mkdocs: pages that live outside docs/ become part of the site, and links between them are mended.

On a code host README.md links to docs/library.md; on the site both are pages of one folder. A link to a file
that is no page (LICENSE, recipes/) is shown as its text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Where a file of the repository is on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "report-a-vulnerability.md",
    "experiments/LOG.md": "experiments-log.md",
    "experiments/decisive.md": "decisive-experiment.md",
}
_FROM = {page: source for source, page in OUTSIDE.items()}
_LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = page.file.src_uri
    source = _FROM.get(place, f"docs/{place}")

    def mend(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link.group()
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        on_site = OUTSIDE.get(there, there.removeprefix("docs/") if there.startswith("docs/") else None)
        if on_site is None and (ROOT / there).exists():
            return text
        shown = posixpath.relpath(on_site or there, posixpath.dirname(place) or ".")
        return f"[{text}]({shown}{hash_sign}{anchor})"

    in_code = False
    lines = []
    for line in markdown.splitlines(keepends=True):
        in_code ^= line.lstrip().startswith("```")
        lines.append(line if in_code else _LINK.sub(mend, line))
    return "".join(lines)

"""The threat model names, for each defence, a test that exists; and every kind of attacker has a section."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
WHO = ("A stranger on the network", "A web page in the user's browser", "Someone with the token",
       "A hostile video file", "A hostile model folder", "A hostile or damaged library",
       "Another user of this machine", "The supply chain")  # fmt: skip


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_is_named_exists():
    named = NAMED.findall(PAGE)
    assert len(named) > 40
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []
    assert len(re.findall(r"::test_", PAGE)) == len(named)


def test_every_defence_names_a_test():
    section = PAGE.partition("## Who, from where")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| (?!tries|---)", line)]
    assert len(rows) > 30
    assert [row for row in rows if not NAMED.search(row)] == []


def test_every_attacker_has_a_section():
    assert [who for who in WHO if f"\n### {who}" not in PAGE] == []
    for said in ("## What is not defended", "## How a query is ended", "## What the log holds"):
        assert said in PAGE


def test_the_policy_leads_to_the_model_and_names_nobody():
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "docs/security.md" in policy
    assert "@" not in policy
    assert "SECURITY.md" in (ROOT / "README.md").read_text(encoding="utf-8")

"""The commands that stand in the docs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)


def code_blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of these languages; "" is a fence without one."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [code for language, code in found if language in languages]


def commands(page: Path, *languages: str) -> list[str]:
    """The lines of its shell blocks, without prompts and comments, continued lines joined."""
    lines = []
    for block in code_blocks(page, *(languages or ("bash",))):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ")
            if line:
                lines.append(line)
    return lines

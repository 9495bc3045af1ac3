"""Writes docs/reference/ from the code: `python docs/generate_reference.py`. A test fails when stale."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

from gare import config
from gare.cli.main import app
from gare.settings import Range, Settings
from gare.train.config import DataConfig, OptimizerConfig, RunConfig
from gare.types import Interaction

REFERENCE = Path(__file__).parent / "reference"
HEADER = "<!-- Written by docs/generate_reference.py; change the code instead. -->\n\n"


def settings_page() -> str:
    """Every settings class: key, type, default, meaning."""
    classes = [
        config.GareConfig,
        config.ClipBackboneConfig,
        config.MiniBackboneConfig,
        config.TinyBackboneConfig,
        config.TemporalConfig,
        config.IncrementConfig,
        Interaction,
        config.TemperatureConfig,
        config.ObjectiveConfig,
        RunConfig,
        DataConfig,
        OptimizerConfig,
    ]
    return HEADER + "# Settings\n\n" + "\n".join(_settings_table(cls) for cls in classes)


def _settings_table(cls: type[Settings]) -> str:
    hints = typing.get_type_hints(cls, include_extras=True)
    meanings = _field_docstrings(cls)
    lines = [
        f"## {cls.__name__}\n",
        f"{inspect.getdoc(cls)}\n",
        "| key | type | default | |",
        "| --- | --- | --- | --- |",
    ]
    for field in dataclasses.fields(cls):
        shown = _default(field)
        cells = [f"`{field.name}`", _type_name(hints[field.name]), shown, meanings.get(field.name, "")]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    for name, values in cls.PRESETS.items():
        lines.append(
            f'\n`preset = "{name}"`: `{dict(values)}`' if values else f'\n`preset = "{name}"`: the defaults'
        )
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return "required"
    is_section = isinstance(field.default, Settings)
    return f"see {type(field.default).__name__}" if is_section else f"`{field.default!r}`"


def _type_name(hint: object) -> str:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        base, *bounds = typing.get_args(hint)
        limits = [
            f"{sign} {limit:g}"
            for bound in bounds
            if isinstance(bound, Range)
            for sign, limit in (("≥", bound.least), ("≤", bound.most), (">", bound.above), ("<", bound.below))
            if limit is not None
        ]
        return " ".join([base.__name__, ", ".join(limits)]).strip()
    if origin is typing.Literal:
        return " or ".join(f'`"{option}"`' for option in typing.get_args(hint))
    if origin is tuple:
        return f"list of {_type_name(typing.get_args(hint)[0])}"
    if origin is not None and typing.get_args(hint) and origin is not dict:
        return " or ".join(
            "none" if part is type(None) else _type_name(part) for part in typing.get_args(hint)
        )
    return "table" if origin is dict else getattr(hint, "__name__", str(hint))


def _field_docstrings(cls: type[Settings]) -> dict[str, str]:
    """The strings that follow fields in the source."""
    found = re.findall(r'\n    (\w+): [^\n]*\n    """(.*?)"""', inspect.getsource(cls), flags=re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


def commands_page() -> str:
    """The help of every command."""
    command = typer.main.get_command(app)
    return HEADER + "# Commands\n\n" + "\n".join(_help(command, ["gare"]))


def _help(command: typer.main.TyperGroup, path: list[str]) -> list[str]:
    environment = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    output = CliRunner().invoke(app, [*path[1:], "--help"], env=environment, terminal_width=100).output
    text = "\n".join(line.rstrip() for line in output.strip().splitlines())
    pages = [f"## {' '.join(path)}\n\n```text\n{text}\n```\n"]
    for name, child in sorted(getattr(command, "commands", {}).items()):
        pages += _help(child, [*path, name])
    return pages


PAGES = {"config.md": settings_page, "cli.md": commands_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")

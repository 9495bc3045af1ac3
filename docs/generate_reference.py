"""Writes docs/reference/ from the code: `python docs/generate_reference.py`. A test fails when stale."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import typer.main
from typer.testing import CliRunner

import gare
from gare.bench.capacity_plan import Machines, make_plan
from gare.bench.measured_constants import CONSTANTS
from gare.cli.main import app
from gare.cli.plan_command import demands, render
from gare.encoders import ENCODERS
from gare.interaction import INTERACTIONS
from gare.model.model_config import GareConfig, TemperatureConfig, TemporalConfig
from gare.objective import TERMS, ObjectiveConfig
from gare.settings import ByName, Range, Settings
from gare.train.run_config import FRAMES_CONFIGS, DataConfig, OptimizerConfig, RunConfig

REFERENCE = Path(__file__).parent / "reference"
RESULTS = Path(__file__).parents[1] / "experiments" / "results"
PLAN_BEGINS = "<!-- gare plan: written by docs/generate_reference.py -->"
PLAN_ENDS = "<!-- end of gare plan -->"
HEADER = "<!-- Written by docs/generate_reference.py; change the code instead. -->\n\n"


def settings_page() -> str:
    """Every settings class: key, type, default, meaning."""
    places: list[tuple[str, type[Settings]]] = [
        ("", RunConfig),
        ("data", DataConfig),
        *(("data.frames", config) for config in FRAMES_CONFIGS.values()),
        ("model", GareConfig),
        *(("model.encoder", ENCODERS[name].Config) for name in ENCODERS),
        ("model.temporal", TemporalConfig),
        *(("model.interaction", INTERACTIONS[name].Config) for name in INTERACTIONS),
        ("model.temperature", TemperatureConfig),
        ("objective", ObjectiveConfig),
        *((f"objective.terms.{name}", TERMS[name]) for name in TERMS),
        ("optimizer", OptimizerConfig),
    ]
    opening = (
        "A recipe is a `RunConfig`. `--set model.interaction.dropout=0` changes one value of it. The\n"
        "`config.json` of a saved model is a `GareConfig`.\n\n"
    )
    return HEADER + "# Settings\n\n" + opening + "\n".join(_settings_table(*place) for place in places)


def _settings_table(place: str, cls: type[Settings]) -> str:
    hints = typing.get_type_hints(cls, include_extras=True)
    meanings = _field_docstrings(cls)
    lines = [
        f"## {cls.__name__}\n",
        f"{inspect.getdoc(cls)}\n",
        f"In a recipe: {f'the table `[{place}]`' if place else 'the file itself'}.\n",
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
        for bound in bounds:
            if isinstance(bound, ByName):
                return " or ".join(f'`"{name}"`' for name in bound.table) + " and its settings"
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
    """The strings that follow fields in the source, inherited ones too."""
    owners = [owner for owner in reversed(cls.__mro__) if issubclass(owner, Settings)]
    sources = "".join(inspect.getsource(owner) for owner in owners)
    found = re.findall(r'\n    (\w+): [^\n]*\n    """(.*?)"""', sources, flags=re.DOTALL)
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


def python_page() -> str:
    """What `gare.__all__` promises; mkdocstrings fills in signatures and docstrings."""
    lines = [
        "# Python",
        "",
        "`import gare` gives these names, and only these are promised to stay from version to version.",
        "",
    ]
    for name in sorted(gare.__all__, key=lambda name: (name.islower(), name)):
        lines.append(f"::: gare.{name}")
        if inspect.ismodule(found := getattr(gare, name)):
            lines += ["    options:", f"      members: [{', '.join(_public(found))}]"]
        lines.append("")
    return HEADER + "\n".join(lines)


def _public(module: ModuleType) -> list[str]:
    """The names that a module offers."""
    return list(getattr(module, "__all__", ())) or [name for name in vars(module) if not name.startswith("_")]


def methods_page() -> str:
    """Every interaction: its terms, parameters and traps."""
    lines = [
        "| `interaction.name` | file | loss terms of its paper | parameters at D = 512 | exact fast scoring |"
    ]
    lines.append("| --- | --- | --- | ---: | --- |")
    traps = ["| `interaction.name` | setting | what it does |", "| --- | --- | --- |"]
    for name in INTERACTIONS:
        cls = INTERACTIONS[name]
        interaction = cls(cls.Config(), 512)
        number = sum(parameter.numel() for parameter in interaction.parameters())
        file = cls.__module__.removeprefix("gare.").replace(".", "/") + ".py"
        published = {"contrastive": {}, **cls.published_terms}
        terms = ", ".join(f"`{term}`" for term, values in published.items() if values.get("weight") != 0)
        lines.append(f"| `{name}` | `{file}` | {terms} | {number:,} | {interaction.fast_scoring} |")
        traps += [f"| `{name}` | `{trap}` | {says} |" for trap, says in cls.Config.TRAPS.items()]
    opening = (
        "Exact fast scoring: *vectors*, one product of two vectors; *products*, both sides are\n"
        "prepared once and a pair needs their products alone; *none*, every pair runs through the method.\n\n"
    )
    second = "\n\n## Traps\n\nSettings that follow a mistake of published code, all off by default.\n"
    second += "[What they do to recalls](../methods.md#what-the-traps-do-to-recalls) was measured.\n\n"
    return HEADER + "# Methods\n\n" + opening + "\n".join(lines) + second + "\n".join(traps) + "\n"


def results_page() -> str:
    """Every file below experiments/results/ with its hash, and the hashes that it holds itself."""
    opening = (
        "Each file below `experiments/results/`, with the hash of its bytes and what it says of its\n"
        "models, queries and code. *Not kept* means that it was made before tables held hashes.\n"
        "[Results](../results.md) has the commands and the text. `sha256sum FILE` begins with the hash.\n\n"
    )
    head = "| file | what | rows × seeds | sha256 | models | queries | gare |\n" + "| --- " * 7 + "|\n"
    files = sorted(path for path in RESULTS.rglob("*") if path.is_file())
    return HEADER + "# What was run here\n\n" + opening + head + "".join(map(_results_row, files))


def _results_row(path: Path) -> str:
    content = path.read_bytes()
    table = json.loads(content) if path.suffix == ".json" else None
    table = table if isinstance(table, dict) else {}
    rows = [row for row in table.get("rows", []) if isinstance(row, dict)]
    seeds = {len(row["seeds"]) for row in rows if "seeds" in row}
    weights = [each for row in rows for each in row.get("weights", [])]
    cells = [
        f"`{path.relative_to(RESULTS.parents[1]).as_posix()}`",
        str(table.get("title", "")),
        f"{len(rows)} × {min(seeds)}" if len(seeds) == 1 else str(len(rows) or ""),
        f"`{hashlib.sha256(content).hexdigest()[:12]}`",
        f"`{hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]}` of {len(weights)}"
        if weights
        else "",
        f"`{table['queries_hash']}`" if table.get("queries_hash") else "",
        str(table.get("gare_version", "")),
    ]
    if rows:
        cells[4:] = [cell or "not kept" for cell in cells[4:]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def scale_page() -> str:
    """docs/scale.md with what `gare plan` prints where nothing was measured."""
    page = (REFERENCE.parent / "scale.md").read_text(encoding="utf-8")
    before, _, rest = page.partition(PLAN_BEGINS)
    after = rest.partition(PLAN_ENDS)[2]
    machines = Machines()
    plans = [make_plan(demand, machines, CONSTANTS) for demand in demands(None, None, 100.0)]
    shown = "\n".join(line.rstrip() for line in render(plans, machines, CONSTANTS).splitlines())
    return f"{before}{PLAN_BEGINS}\n\n```console\n$ gare plan\n{shown}\n```\n\n{PLAN_ENDS}{after}"


PAGES = {
    "config.md": settings_page,
    "cli.md": commands_page,
    "python.md": python_page,
    "methods.md": methods_page,
    "results-index.md": results_page,
    "../scale.md": scale_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")

"""Strict, frozen settings made from plain values, TOML in and out.

Standard library only: pydantic would do this, but training has to import on GPU machines that lack it and
where nothing can be installed. An unknown key is refused with the known ones listed, a wrong value with what
would be right.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self

from gare.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Bounds of a number, as in `Annotated[float, Range(above=0)]`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def describe(self, value: float) -> str | None:
        """What is wrong with a value, or None."""
        if not math.isfinite(value):
            return "must be finite"
        if self.least is not None and not value >= self.least:
            return f"must be at least {self.least}"
        if self.most is not None and not value <= self.most:
            return f"must be at most {self.most}"
        if self.above is not None and not value > self.above:
            return f"must be greater than {self.above}"
        if self.below is not None and not value < self.below:
            return f"must be less than {self.below}"
        return None


@dataclass(frozen=True)
class NotEmpty:
    """A string or list that must hold something."""

    def describe(self, value: Sequence[Any]) -> str | None:
        return None if value else "must not be empty"


PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]


@dataclass(frozen=True)
class Settings:
    """Base of every settings class: a frozen dataclass whose values are checked against their annotations."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of values; the key `preset` of a file fills in what the file leaves out."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        problems: list[str] = []
        for field in dataclasses.fields(self):
            value = _check(getattr(self, field.name), hints[field.name], field.name, problems)
            object.__setattr__(self, field.name, value)
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def load(cls, source: Path | str | Mapping[str, Any], overrides: Sequence[str] = ()) -> Self:
        """Read from a TOML file or a mapping, then apply overrides such as `increment.dropout=0`."""
        values = json.loads(json.dumps(source)) if isinstance(source, Mapping) else read_toml(Path(source))
        for override in overrides:
            _apply_override(values, override)
        problems: list[str] = []
        settings: Self | None = _build(cls, values, "", problems)
        if settings is None:
            where = "" if isinstance(source, Mapping) else f"{source}: "
            raise ConfigError(where + "; ".join(problems))
        return settings

    def to_values(self) -> dict[str, Any]:
        """Plain values, as `load` takes them; None is left out."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}

    def changed_values(self) -> dict[str, Any]:
        """Those of `to_values` that are not the default: the same whatever settings a later version adds."""
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Settings):
                changed[field.name] = {"is": type(value).__name__, **value.changed_values()}
            elif value != field.default:
                changed[field.name] = _plain(value)
        return changed

    def to_toml(self) -> str:
        return "\n".join(_toml_lines(self.to_values())) + "\n"

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that change when any value does."""
        return hashlib.sha256(json.dumps(self.to_values(), sort_keys=True).encode()).hexdigest()[:12]


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None


# --- checking ----------------------------------------------------------------------------------------------


def _build(cls: type[Any], values: Any, where: str, problems: list[str]) -> Any:
    """An instance of a settings class from a mapping; problems are added to the list and give None."""
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        problems.append(f"{where or 'settings'}: must be a table of settings, not {values!r}")
        return None
    values = dict(values)
    if cls.PRESETS:
        preset = values.pop("preset", next(iter(cls.PRESETS)))
        if not isinstance(preset, str) or preset not in cls.PRESETS:
            problems.append(f"{_join(where, 'preset')}: must be {_either(cls.PRESETS)}, not {preset!r}")
            return None
        values = _merge(cls.PRESETS[preset], values)
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {field.name for field in dataclasses.fields(cls)}
    before = len(problems)
    problems += [
        f"unknown key '{_join(where, key)}'; known here: {', '.join(sorted(known))}"
        for key in values.keys() - known
    ]
    problems += [
        f"'{_join(where, field.name)}' is missing"
        for field in dataclasses.fields(cls)
        if field.name not in values and _is_required(field, hints[field.name])
    ]
    checked = {
        key: _check(values[key], hints[key], _join(where, key), problems) for key in values.keys() & known
    }
    if len(problems) > before:
        return None
    absent = {field.name: None for field in dataclasses.fields(cls) if _has_no_default(field)}
    try:
        return cls(**{**absent, **checked})
    except ConfigError as error:  # what a class checks beyond single values
        problems.append(f"{where}: {error}" if where else str(error))
        return None


def _check(value: Any, hint: Any, where: str, problems: list[str]) -> Any:
    """The value as its annotation wants it; what is wrong with it is added to the problems."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        base, *bounds = typing.get_args(hint)
        before = len(problems)
        value = _check(value, base, where, problems)
        if len(problems) == before:
            found = (bound.describe(value) for bound in bounds)
            problems += [f"{where}: {problem}, not {value!r}" for problem in found if problem]
        return value
    if origin in (UnionType, typing.Union):
        return _check_union(value, typing.get_args(hint), where, problems)
    if origin is Literal:
        if value not in typing.get_args(hint):
            problems.append(f"{where}: must be {_either(typing.get_args(hint))}, not {value!r}")
        return value
    kind = origin or hint
    parts = typing.get_args(hint)
    if kind is tuple and isinstance(value, list | tuple):
        return tuple(_check(item, parts[0], f"{where}[{i}]", problems) for i, item in enumerate(value))
    if kind is dict and parts and isinstance(value, Mapping):
        return {
            _check(key, parts[0], where, problems): _check(item, parts[1], _join(where, str(key)), problems)
            for key, item in value.items()
        }
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, where, problems)  # type: ignore[arg-type]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        problems.append(f"{where}: must be {_WORDS.get(kind, kind.__name__)}, not {value!r}")
    return value


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_required(field: dataclasses.Field[Any], hint: Any) -> bool:
    """None is not written to files, so a value that may be None may also be absent."""
    return _has_no_default(field) and NoneType not in typing.get_args(hint)


_WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "a table",
    tuple: "a list",
}


def _check_union(value: Any, options: Sequence[Any], where: str, problems: list[str]) -> Any:
    if value is None and NoneType in options:
        return None
    options = [option for option in options if option is not NoneType]
    if len(options) == 1:
        return _check(value, options[0], where, problems)
    # Several settings classes: the one whose `family` is named, each having a default of its own.
    families = {option.family: option for option in options}
    family = getattr(value, "family", None) or (value.get("family") if isinstance(value, Mapping) else None)
    if not isinstance(family, str) or family not in families:
        problems.append(f"{_join(where, 'family')}: must be {_either(families)}, not {family!r}")
        return value
    return _build(families[family], value, where, problems)


def _either(options: Iterator[Any] | Mapping[str, Any] | Sequence[Any]) -> str:
    return " or ".join(repr(option) for option in options)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _merge(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` over `defaults`, key by key all the way down."""
    merged = {**defaults, **values}
    for key in defaults.keys() & values.keys():
        if isinstance(defaults[key], Mapping) and isinstance(values[key], Mapping):
            merged[key] = _merge(defaults[key], values[key])
    return merged


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_values()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


# --- text --------------------------------------------------------------------------------------------------


def _apply_override(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path.strip():
        raise ConfigError(
            f"'{override}' is not an override; write section.key=value, as in increment.dropout=0"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: --set interaction.pooling=mean
    *sections, key = path.strip().split(".")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"'{override}': {section} is a value, not a section")
    table[key] = value


def _toml_lines(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Values first, then sections. JSON writes strings, numbers, booleans and lists as TOML does."""
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{json.dumps(key) if not key.isidentifier() else key} = {json.dumps(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = _join(path, key if key.isidentifier() else json.dumps(key))
            yield f"\n[{name}]"
            yield from _toml_lines(value, name)

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
from gare.registry import Registry


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
        """What is wrong with a value, or None."""
        return None if value else "must not be empty"


@dataclass(frozen=True)
class ByName:
    """Settings whose class is chosen by their key `name`, from a table that others may add to.

    As in `Annotated[EncoderConfig, ByName(ENCODERS)]`. An entry of the table is a class of settings, or has
    one as its `Config`.
    """

    table: Registry[Any] | Mapping[str, Any]
    default: str | None = None
    """The name to use where none is given."""

    def config_class(self, name: str) -> type[Settings]:
        """The settings class of a name."""
        entry = self.table[name]
        config: type[Settings] = getattr(entry, "Config", entry)
        return config


PositiveInt = Annotated[int, Range(least=1)]
Width = Annotated[int, Range(least=1, most=8192)]
"""Dimensions of an embedding; a matrix of the largest takes 256 MB."""
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
    def upgraded(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Values of a file that an earlier version wrote, in today's form.

        A class whose keys have changed overrides this. It runs before presets are filled in and keys are
        checked, and it gets a copy, which it may change. An old key wins over the new one beside it: the old
        one is then an override, as the file itself has been upgraded before. What is wrong with a value is
        raised as ConfigError.
        """
        return values

    @classmethod
    def load(cls, source: Path | str | Mapping[str, Any], overrides: Sequence[str] = ()) -> Self:
        """Read from a TOML file or a mapping, then apply overrides such as `interaction.dropout=0`."""
        values = json.loads(json.dumps(source)) if isinstance(source, Mapping) else read_toml(Path(source))
        for override in overrides:
            values = _upgrade(cls, values)  # so that an override finds today's keys, and the last one wins
            _apply_override(cls, values, override)
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
        """The settings as a TOML file that `load` reads."""
        return "\n".join(_toml_lines(self.to_values())) + "\n"

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that change when any value does."""
        return hashlib.sha256(json.dumps(self.to_values(), sort_keys=True).encode()).hexdigest()[:12]


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file; an error if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None


# --- checking ----------------------------------------------------------------------------------------------


def _upgrade(cls: Any, values: Any) -> Any:
    """Today's form of a table and of the tables in it; what cannot be translated stays for `_build`."""
    if not (isinstance(values, Mapping) and isinstance(cls, type) and issubclass(cls, Settings)):
        return values
    try:
        upgraded = cls.upgraded(dict(values))
    except ConfigError:
        return dict(values)
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in upgraded.keys() & hints.keys():
        kind, *bounds = typing.get_args(hints[key]) or (hints[key],)
        if bounds and isinstance(bounds[0], ByName) and isinstance(upgraded[key], Mapping):
            name = upgraded[key].get("name", bounds[0].default)
            kind = bounds[0].config_class(name) if name in bounds[0].table else None
        upgraded[key] = _upgrade(kind, upgraded[key])
    return upgraded


def _build(cls: type[Any], values: Any, where: str, problems: list[str]) -> Any:
    """An instance of a settings class from a mapping; problems are added to the list and give None."""
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        problems.append(f"{where or 'settings'}: must be a table of settings, not {values!r}")
        return None
    try:
        values = cls.upgraded(dict(values))
    except ConfigError as error:
        problems.append(f"{where}: {error}" if where else str(error))
        return None
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
        if isinstance(bounds[0], ByName):
            return _check_by_name(value, base, bounds[0], where, problems)
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
    raise TypeError(f"{where}: a setting has one type, or one type and None, not {options}")


def _check_by_name(value: Any, base: type, by_name: ByName, where: str, problems: list[str]) -> Any:
    if isinstance(value, base):
        return value
    if not isinstance(value, Mapping):
        problems.append(f"{where}: must be a table of settings, not {value!r}")
        return None
    name = value.get("name", by_name.default)
    if not isinstance(name, str) or name not in by_name.table:
        problems.append(f"{_join(where, 'name')}: must be {_either(list(by_name.table))}, not {name!r}")
        return value
    return _build(by_name.config_class(name), {**value, "name": name}, where, problems)


def _either(options: Iterator[Any] | Mapping[str, Any] | Sequence[Any]) -> str:
    return " or ".join(repr(option) for option in options)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _merge(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` over `defaults`, key by key all the way down; a table of another name replaces the whole."""
    merged = {**defaults, **values}
    for key in defaults.keys() & values.keys():
        if isinstance(defaults[key], Mapping) and isinstance(values[key], Mapping):
            own_name = values[key].get("name")
            if own_name is None or own_name == defaults[key].get("name", own_name):
                merged[key] = _merge(defaults[key], values[key])
    return merged


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_values()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


# --- text --------------------------------------------------------------------------------------------------


def _apply_override(cls: type[Settings], values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path.strip():
        raise ConfigError(
            f"'{override}' is not an override; write section.key=value, as in interaction.dropout=0"
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
    if key == "name":
        _forget_settings_of_another(_by_name(cls, sections), table, value)
    table[key] = value


def _by_name(cls: Any, sections: Sequence[str]) -> ByName | None:
    """How the table at this place chooses its class, if by its name."""
    found = None
    for section in sections:
        is_settings = isinstance(cls, type) and issubclass(cls, Settings)
        hint = typing.get_type_hints(cls, include_extras=True).get(section) if is_settings else None
        cls, *bounds = typing.get_args(hint) or (hint,)
        found = bounds[0] if bounds and isinstance(bounds[0], ByName) else None
    return found


def _forget_settings_of_another(by_name: ByName | None, table: dict[str, Any], name: Any) -> None:
    """Before a table changes its name: settings go that only the class before has."""
    before: Any = table.get("name", by_name.default if by_name else None)
    if by_name is None or name not in by_name.table or before not in by_name.table:
        return
    old, new = ({f.name for f in dataclasses.fields(by_name.config_class(x))} for x in (before, name))
    for key in table.keys() & (old - new):
        del table[key]


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

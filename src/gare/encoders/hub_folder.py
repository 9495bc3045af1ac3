"""The folder of a model that is named by a folder or a hub id; what is on the hub is downloaded.

Only what a model needs is fetched, and no pickle: reading one can run code of whoever wrote it. Downloads
show their progress, lie in `HF_HOME`, and do not happen with `HF_HUB_OFFLINE`; what is there is not fetched
again.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gare.errors import CheckpointError, GareError
from gare.extras import require

_SMALL = ["*.json", "*.txt", "*.model", "tokenizer/*"]
_WEIGHTS = ["model.safetensors", "model-*.safetensors", "*/model.safetensors", "*/model-*.safetensors"]
_OTHER_FORMATS = ["onnx/*", "openvino/*", "*/onnx/*", "*/openvino/*", "*.onnx*", "coreml/*", "tflite/*"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_CONVERTER = "SFconvertbot"
_POINTER = b"version https://git-lfs"


def is_hub_id(name: str) -> bool:
    """Whether a name is owner/name.

    >>> is_hub_id("openai/clip-vit-base-patch32"), is_hub_id("../models/clip"), is_hub_id("gare-mini")
    (True, False, False)
    """
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def find_folder(name: str | os.PathLike[str], **hub_options: Any) -> Path:
    """The folder of that name, or what the hub has under it.

    Raises:
        CheckpointError: there is neither; the message says what to do.
    """
    folder = os.path.expanduser(os.fspath(name))
    if os.path.isdir(folder):  # a name too long for a path is none
        return Path(folder)
    if not is_hub_id(str(name)):  # do not ask in vain
        raise CheckpointError(
            f"'{name}' is not a folder here, and a hub id is owner/name; gare models lists some. "
            "Give the folder written by save_pretrained, or a hub id while online. An encoder of your own is "
            "handed over from Python (model=…), or known by name once its package offers it (gare.models)."
        )
    return download(str(name), **hub_options)


def download(model_id: str, **hub_options: Any) -> Path:
    """What the hub has of a model, without pickles and other formats. What is here already is not fetched."""
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        folder = _fetch(model_id, _SMALL, **hub_options)
        require_tokenizer(folder, model_id)
        weights = ["open_clip*.safetensors"] if _is_open_clip_alone(folder) else _WEIGHTS
        folder = _fetch(model_id, _SMALL + weights, **hub_options)
        if not _has_safetensors(folder) and "revision" not in hub_options:
            converted = _find_conversion(model_id, folder, hub_options.get("token"))
            if converted:
                folder = _fetch(model_id, _SMALL + weights, **hub_options, revision=converted)
    except GareError:
        raise
    except GatedRepoError:
        raise CheckpointError(
            f"'{model_id}' is not a folder here, and the hub gives it to those who accepted its terms: "
            "accept them on its page there, and log in (hf auth login)"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"'{model_id}' is not a folder here, and the hub has no model of that name. If it is private, "
            "log in (hf auth login). Some names: gare models"
        ) from None
    except (HFValidationError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"'{model_id}' is not a folder here, and the hub did not give it either ({_reason(error)}) "
            "Give the folder written by save_pretrained, or a hub id while online."
        ) from None
    except Exception as error:  # no network, or one that broke off: the hub's client changes its errors
        raise CheckpointError(
            f"'{model_id}' is not a folder here, and the hub did not give it either ({_reason(error)}) "
            f"{_bring_along(model_id)}"
        ) from None
    if _has_safetensors(folder) or not (folder / "config.json").is_file():
        return folder
    if HF_HUB_OFFLINE and not _pickles_in(folder):
        raise CheckpointError(
            f"the weights of {model_id} are not on this machine: its download was cut off, or it has no "
            f"safetensors. HF_HUB_OFFLINE keeps gare from asking the hub. {_bring_along(model_id)}"
        )
    raise CheckpointError(
        f"the hub has no weights of {model_id} as safetensors, and gare reads no others: a pickle can "
        "run code of whoever wrote it. If you trust its source, convert it where there is a network:\n"
        f"  {_conversion(model_id, 'FOLDER')}\n"
        "and give FOLDER as the model"
    )


def _has_safetensors(folder: Path) -> bool:
    return any(folder.rglob("*.safetensors"))


def _bring_along(model_id: str) -> str:
    return (
        f"Download it where there is a network (hf download {model_id} --local-dir FOLDER), bring the "
        "folder along and give it as the model."
    )


def require_tokenizer(folder: Path, name: str) -> None:
    """Refuse a model whose tokeniser needs packages that are not installed, before its weights are fetched.

    Raises:
        MissingExtraError: the message says what to install.
    """
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads the tokeniser says so
        return
    if isinstance(settings, dict) and settings.get("tokenizer_class") == "SiglipTokenizer":
        require("siglip", f"the tokeniser of {name}")


def refuse_weights(folder: Path) -> None:
    """Refuse a folder whose weights are pickles alone, were never downloaded, are integers, or are not there.

    Raises:
        CheckpointError: the message says what to do.
    """
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    for path in files:
        refuse_pointer(path)
    if any(_has_integers(path) for path in files):
        raise CheckpointError(
            f"the weights in {folder} are integers (quantised); gare reads those in float32, bfloat16 or "
            "float16. Give the model it was made from"
        )
    if files:
        return
    if pickles := _pickles_in(folder):
        raise CheckpointError(
            f"the weights in {folder} are a pickle ({pickles[0]}), and reading one can run code of whoever "
            "wrote it; gare reads safetensors alone. If you trust its source, convert it once:\n"
            f"  {_conversion(str(folder), str(folder))}"
        )
    raise CheckpointError(f"{folder} has no weights: no file there ends in .safetensors")


def refuse_pointer(path: Path) -> None:
    """Refuse a file of weights for which git has left a note of where they are.

    Raises:
        CheckpointError: the message says how to fetch them.
    """
    with path.open("rb") as file:
        is_pointer = file.read(len(_POINTER)) == _POINTER
    if is_pointer:
        raise CheckpointError(
            f"{path} is no file of weights: git has fetched the name of one. Run 'git lfs pull' in "
            f"{path.parent}, or download the model with 'hf download'"
        )


def _has_integers(path: Path) -> bool:
    """Whether a matrix of weights has whole numbers of 8 bits. A damaged file is refused later."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            parts = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            return any(part.get_dtype() in ("I8", "U8") and len(part.get_shape()) > 1 for part in parts)
    except (SafetensorError, OSError):
        return False


def _pickles_in(folder: Path) -> list[str]:
    return sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))


def _conversion(source: str, target: str) -> str:
    return (
        f"python -c \"from transformers import AutoModel, AutoProcessor as P; s, t = '{source}', '{target}'; "
        'AutoModel.from_pretrained(s).save_pretrained(t); P.from_pretrained(s).save_pretrained(t)"'
    )


def _fetch(model_id: str, patterns: list[str], **hub_options: Any) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(model_id, allow_patterns=patterns, ignore_patterns=_OTHER_FORMATS, **hub_options)
    )


def _is_open_clip_alone(folder: Path) -> bool:
    return (folder / "open_clip_config.json").is_file() and not (folder / "config.json").is_file()


def _find_conversion(model_id: str, folder: Path, token: Any) -> str | None:
    """Where the hub's own converter has put safetensors of a model that has pickles alone, as transformers
    looks for them: an open pull request."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError

    if HF_HUB_OFFLINE:  # one that was downloaded before
        noted = folder.parents[1] / "refs"  # a file for each revision, named as that
        return next((str(path.relative_to(noted)) for path in sorted(noted.glob("refs/pr/*"))), None)
    try:
        for each in HfApi(token=token).get_repo_discussions(
            model_id, author=_CONVERTER, discussion_type="pull_request"
        ):
            if "safetensors" in each.title and each.status == "open" and each.author == _CONVERTER:
                return f"refs/pr/{each.num}"
    except HfHubHTTPError:  # its owners allow no discussions
        pass
    return None


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

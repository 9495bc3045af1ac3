"""The folder of a model that is named by a folder or a hub id; what is on the hub is downloaded.

Only what a model needs is fetched, and no pickle: reading one can run code of whoever wrote it. Downloads
show their progress, go on where they were cut off, lie in `HF_HOME`, and do not happen with `HF_HUB_OFFLINE`.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gare.errors import CheckpointError
from gare.extras import require

_SMALL = ["*.json", "*.txt", "*.model", "tokenizer/*"]
_WEIGHTS = ["model.safetensors", "model-*.safetensors", "*/model.safetensors", "*/model-*.safetensors"]
_OTHER_FORMATS = ["onnx/*", "openvino/*", "*/onnx/*", "*/openvino/*", "*.onnx*", "coreml/*", "tflite/*"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_CONVERTER = "SFconvertbot"


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
            f"'{name}' is not a folder here, and a hub id is owner/name. "
            "Give the folder written by save_pretrained, or a hub id while online. An encoder of your own is "
            "handed over from Python (model=…), or known by name once its package offers it (gare.models)."
        )
    return download(str(name), **hub_options)


def download(model_id: str, **hub_options: Any) -> Path:
    """What the hub has of a model, without pickles and other formats. What is here already is not fetched."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = _fetch(model_id, _SMALL, **hub_options)
        require_tokenizer(folder, model_id)
        weights = ["open_clip*.safetensors"] if _is_open_clip_alone(folder) else _WEIGHTS
        folder = _fetch(model_id, _SMALL + weights, **hub_options)
        if not any(folder.rglob("*.safetensors")) and "revision" not in hub_options:
            converted = _find_conversion(model_id, folder, hub_options.get("token"))
            if converted:
                folder = _fetch(model_id, _SMALL + weights, **hub_options, revision=converted)
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"'{model_id}' is not a folder here, and the hub did not give it either ({_reason(error)}) "
            f"Download it where there is a network (hf download {model_id} --local-dir FOLDER), bring the "
            "folder along and give it as the model."
        ) from None
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"'{model_id}' is not a folder here, and the hub did not give it either ({_reason(error)}) "
            "Give the folder written by save_pretrained, or a hub id while online."
        ) from None
    if not any(folder.rglob("*.safetensors")) and (folder / "config.json").is_file():
        raise CheckpointError(
            f"the hub has no weights of {model_id} as safetensors, and gare reads no others: a pickle can "
            "run code of whoever wrote it. If you trust its source, convert it where there is a network:\n"
            f"  {_conversion(model_id, 'FOLDER')}\n"
            "and give FOLDER as the model"
        )
    return folder


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


def refuse_pickles(folder: Path) -> None:
    """Refuse a folder whose weights are pickles alone, or which has none."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"the weights in {folder} are a pickle ({pickles[0]}), and reading one can run code of whoever "
            "wrote it; gare reads safetensors alone. If you trust its source, convert it once:\n"
            f"  {_conversion(str(folder), str(folder))}"
        )
    raise CheckpointError(f"{folder} has no weights: no file there ends in .safetensors")


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

"""Texts and videos in, one vector each out: what `GARE.encode` and `GARE.similarity` do.

A *plain vector* is the text vector, or the mean of a video's frames, at length one. The product of two is the
cosine without increments. The score of a pair needs more than two vectors: the increment net attends to every
frame. So what `encode` returns remembers the features it was made from, and `similarity` scores those.

Shapes: T texts, V videos, F frames, N either, D embedding.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from gare.types import TextFeatures, VideoFeatures, block_slices

if TYPE_CHECKING:
    from gare.model.gare import GARE

Kind = Literal["text", "video"]
Features = TextFeatures | VideoFeatures
_BATCH_SIZES: dict[Kind, int] = {"text": 256, "video": 8}


class PlainVectors(np.ndarray):
    """A NumPy array of plain vectors with the features they were made from.

    Rows that are taken from it (`vectors[3]`, `vectors[:5]`, `vectors[mask]`) remember theirs. What is
    computed from it is an ordinary array.
    """

    features: Features | None

    def __array_finalize__(self, source: Any) -> None:
        self.features = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else np.asarray(array)

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        if self.features is not None and isinstance(part, PlainVectors) and _is_rows(key, self):
            rows = np.atleast_1d(np.arange(len(self))[key])
            part.features = self.features[torch.from_numpy(rows.copy())]  # torch reads no row backwards
        return part


def encode(
    model: GARE,
    inputs: Any,
    *,
    kind: Kind | None,
    batch_size: int | None,
    num_frames: int | None,
    normalize: bool,
    as_tensor: bool,
    show_progress: bool,
    gradients: bool,
) -> PlainVectors | Tensor:
    """`GARE.encode`, which says what the arguments are."""
    if gradients and not as_tensor:
        raise ValueError("NumPy has no gradients: pass convert_to_tensor=True as well")
    if kind not in (None, *_BATCH_SIZES):
        raise ValueError(f"kind is 'text' or 'video' (a picture is a video of one frame), not {kind!r}")
    is_single = _is_single(inputs)
    many = [inputs] if is_single else _as_list(inputs)
    if not many:
        return _remember(torch.zeros(0, model.dim), None, as_tensor=as_tensor)
    kind = kind or _kind_of(many)
    size = batch_size or _BATCH_SIZES[kind]
    texts: list[TextFeatures] = []
    videos: list[VideoFeatures] = []
    with _ready(model, gradients):
        for rows in _shown(list(block_slices(len(many), size)), show_progress):
            if kind == "text":
                texts.append(_text_features(model, many[rows]))
            else:
                videos.append(model.frame_features([as_clip(video) for video in many[rows]], num_frames))
        features = TextFeatures.cat(texts) if texts else VideoFeatures.cat(videos)
        vectors_ND = plain_vectors(features, normalize=normalize)
    return _remember(vectors_ND[0] if is_single else vectors_ND, features, as_tensor=as_tensor)


def similarity(model: GARE, first: Any, second: Any) -> Tensor:
    """`GARE.similarity`, which says what the arguments are."""
    a, b = _features_of(model, first), _features_of(model, second)
    numbers = [len(_tensor_of(each)) for each in (a, b)]
    if 0 in numbers:
        return torch.zeros(numbers, device=model.device)
    asked = any(_tensor_of(each).requires_grad for each in (a, b))
    with _ready(model, asked):
        if isinstance(a, TextFeatures) and isinstance(b, VideoFeatures):
            return model.score(a, b)
        if isinstance(a, VideoFeatures) and isinstance(b, TextFeatures):
            return model.score(b, a).mT
        if (isinstance(a, Tensor) or isinstance(b, Tensor)) and not model.interaction.stage1_is_exact:
            raise ValueError(
                "these are plain vectors, and this model's score is more than their product. Pass what "
                "encode returned, rows of it, features, or the texts and videos themselves. The cosine "
                "without increments is first @ second.T"
            )
        unit_ND, unit_MD = (
            F.normalize(each, dim=-1) if isinstance(each, Tensor) else plain_vectors(each) for each in (a, b)
        )
        return unit_ND @ unit_MD.mT


def plain_vectors(features: Features, *, normalize: bool = True) -> Tensor:
    """The text vector, or the mean frame, of each row [N, D]."""
    vectors_ND = features.text_TD if isinstance(features, TextFeatures) else features.mean()
    return F.normalize(vectors_ND, dim=-1) if normalize else vectors_ND


# --- what was given -----------------------------------------------------------------------------------------


def names_a_file(text: str) -> bool:
    """Whether a string ends as the name of a video or a picture does; any other string is a text.

    >>> names_a_file("holiday/dog.MP4"), names_a_file("a dog. It runs")
    (True, False)
    """
    from gare.data.containers import VIDEO_SUFFIXES
    from gare.data.packed_members import IMAGE_SUFFIXES

    return os.path.splitext(text)[1].lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES


def as_clip(video: Any) -> str | os.PathLike[str] | list[Image.Image]:
    """A video as `GARE.frame_features` takes it: a path, or its frames as pictures."""
    if isinstance(video, str | os.PathLike):
        return os.path.expanduser(video)
    if isinstance(video, Image.Image):
        return [video]
    if isinstance(video, np.ndarray | Tensor):
        return _frames_of(video.cpu().numpy() if isinstance(video, Tensor) else video)
    if isinstance(video, Sequence) and len(video):
        frames = [frame for each in video for frame in _pictures_of(each)]
        return frames
    raise ValueError(
        "a video is a path, a picture, a list of pictures, or an array of bytes [frames, height, width, 3]; "
        f"got {type(video).__name__}"
    )


def _pictures_of(frame: Any) -> list[Image.Image]:
    if isinstance(frame, Image.Image):
        return [frame]
    if isinstance(frame, np.ndarray) and frame.ndim == 3:
        return _frames_of(frame)
    raise ValueError(f"a frame is a PIL image or an array [height, width, 3], got {type(frame).__name__}")


def _frames_of(array: np.ndarray) -> list[Image.Image]:
    """An array [H, W, 3] or [F, H, W, 3] of bytes as pictures."""
    if array.ndim not in (3, 4) or array.shape[-1] != 3 or array.dtype != np.uint8 or not array.size:
        raise ValueError(
            "an array of frames must be bytes (uint8) in the order [frames, height, width, 3], got "
            f"{array.dtype} {list(array.shape)}"
        )
    frames = array[None] if array.ndim == 3 else array
    return [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames]


def _is_single(inputs: Any) -> bool:
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "UTO":  # a column of texts
        return False
    return isinstance(inputs, str | os.PathLike | Image.Image | np.ndarray | Tensor)


def _as_list(inputs: Any) -> list[Any]:
    is_many = isinstance(inputs, Iterable) and not isinstance(inputs, bytes | Mapping)
    if not is_many or getattr(inputs, "ndim", 1) == 0:
        raise ValueError(
            "give a text, a path, a picture, an array of frames, or a list of texts or of videos; got "
            f"{type(inputs).__name__}"
        )
    return list(inputs)


def _kind_of(many: Sequence[Any]) -> Kind:
    is_text = [isinstance(each, str) and not names_a_file(each) for each in many]
    if any(is_text) and not all(is_text):
        text, other = many[is_text.index(True)], many[is_text.index(False)]
        raise ValueError(
            f"{text!r} is a text and {other!r} a video: encode them one after the other, or say what they "
            "all are with kind='text' or kind='video'"
        )
    return "text" if is_text[0] else "video"


def _text_features(model: GARE, texts: Sequence[Any]) -> TextFeatures:
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a text must be a string")
    token_ids_TW, mask_TW = model.encoder.tokenize(texts)
    return model.text_features(token_ids_TW.to(model.device), mask_TW.to(model.device))


def _features_of(model: GARE, given: Any) -> Features | Tensor:
    """Features where there are any; plain vectors [N, D] otherwise."""
    if isinstance(given, TextFeatures | VideoFeatures):
        return given
    remembered: Features | None = getattr(given, "features", None)
    if remembered is not None:
        return remembered
    if isinstance(given, np.ndarray | Tensor) and given.ndim <= 2:
        vectors_ND = torch.atleast_2d(torch.as_tensor(np.asarray(given) if _is_array(given) else given))
        if vectors_ND.shape[1] != model.dim:
            raise ValueError(f"vectors of {vectors_ND.shape[1]} dimensions; this model has {model.dim}")
        given_ND: Tensor = vectors_ND.to(model.device).float()
        return given_ND
    encoded: Any = model.encode(given, convert_to_tensor=True)
    found: Features | None = encoded.features
    return encoded if found is None else found  # of nothing there are no features


def _is_array(given: Any) -> bool:
    return isinstance(given, np.ndarray)


def _tensor_of(given: Features | Tensor) -> Tensor:
    if isinstance(given, Tensor):
        return given
    return given.text_TD if isinstance(given, TextFeatures) else given.frames_VFD


def _is_rows(key: Any, vectors: np.ndarray) -> bool:
    """Whether an index takes rows of a matrix, and not single numbers or columns."""
    is_one_axis = isinstance(key, int | np.integer | list | np.ndarray) and np.ndim(key) <= 1
    return vectors.ndim == 2 and (isinstance(key, slice) or is_one_axis)


# --- how it is given back -----------------------------------------------------------------------------------


def _remember(vectors: Tensor, features: Features | None, *, as_tensor: bool) -> PlainVectors | Tensor:
    if as_tensor:
        tensor: Any = vectors
        tensor.features = features  # an attribute of this tensor alone: what is computed from it has none
        return vectors
    array = vectors.cpu().float().numpy().view(PlainVectors)
    array.features = features
    return array


@contextmanager
def _ready(model: GARE, gradients: bool) -> Iterator[None]:
    """Without gradients and dropout, unless gradients are asked for: then the model stays as it is."""
    was_training = model.training
    if not gradients:
        model.eval()
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        model.train(was_training)


def _shown(blocks: list[slice], show: bool) -> Iterable[slice]:
    if not show:
        return blocks
    from rich.console import Console
    from rich.progress import track

    return track(blocks, "encoding", console=Console(stderr=True), transient=True)

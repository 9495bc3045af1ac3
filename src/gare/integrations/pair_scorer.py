"""Scores of single pairs of a text and a video, by the calls of sentence-transformers' `CrossEncoder`.

Needs nothing of that library. Shapes: N pairs, T texts, V videos.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gare.model.named_models import ModelLike, load_named
from gare.model.plain_encoding import names_a_file
from gare.types import TextFeatures, VideoFeatures, block_slices


class PairScorer:
    """A model that scores pairs, increments included.

    Args:
        model: what `GARE.from_pretrained` takes, or a loaded model.
        num_frames: frames that are read of a file; default: as many as the model was trained with.

    Examples:
        scorer = PairScorer("gare-mini")
        scorer.predict([("a dog catches a ball", "dog.mp4"), ("rain", "dog.mp4")])
        scorer.rank("a dog catches a ball", ["dog.mp4", "rain.mp4"], top_k=1)
    """

    def __init__(self, model: ModelLike, *, num_frames: int | None = None) -> None:
        self.name, self.model = load_named(model)
        self._num_frames = num_frames

    def predict(
        self,
        inputs: Sequence[Any],
        *,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
        convert_to_tensor: bool = False,
    ) -> Any:
        """The score of each pair, [N]; of a single pair, a number. Each text and video is encoded once.

        Args:
            inputs: pairs of a text and a video, in either order. A video is what `GARE.encode` takes.
            batch_size: pairs that are scored, and videos that are encoded, at a time.
            show_progress_bar: show how far encoding is.
            activation_fn: what is done to the scores, which are cosines.
            convert_to_tensor: a tensor instead of a NumPy array.
        """
        is_single = (
            isinstance(inputs, tuple) and len(inputs) == 2 and _is_text(inputs[0]) != _is_text(inputs[1])
        )
        pairs = [_ordered(pair) for pair in ([inputs] if is_single else inputs)]
        scores_N = self._score(pairs, batch_size, show_progress_bar) if pairs else torch.zeros(0)
        scores_N = scores_N if activation_fn is None else activation_fn(scores_N)
        given: Any = scores_N if convert_to_tensor else scores_N.cpu().numpy()
        return given[0] if is_single else given

    def rank(
        self,
        query: Any,
        documents: Sequence[Any],
        *,
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int = 32,
        show_progress_bar: bool = False,
    ) -> list[dict[str, Any]]:
        """Documents for a query, best first: `corpus_id`, `score` and, if asked for, the document as `text`.

        The query is a text and the documents are videos, or the other way round.
        """
        pairs = [(query, document) for document in documents]
        scores_N = self.predict(pairs, batch_size=batch_size, show_progress_bar=show_progress_bar)
        order = np.argsort(-scores_N, kind="stable")[:top_k]
        return [
            {"corpus_id": int(place), "score": float(scores_N[place])}
            | ({"text": documents[place]} if return_documents else {})
            for place in order
        ]

    def _score(self, pairs: list[tuple[str, Any]], batch_size: int, show: bool) -> Tensor:
        text_of, texts = _distinct([text for text, _ in pairs])
        video_of, videos = _distinct([video for _, video in pairs])
        options: dict[str, Any] = {"convert_to_tensor": True, "show_progress_bar": show}
        text: TextFeatures = self._features(texts, kind="text", **options)
        video: VideoFeatures = self._features(
            videos, kind="video", batch_size=batch_size, num_frames=self._num_frames, **options
        )
        scores = []
        for block in block_slices(len(pairs), batch_size):
            rows, row_of = text_of[block].unique(return_inverse=True)
            columns, column_of = video_of[block].unique(return_inverse=True)
            scores.append(self.model.similarity(text[rows], video[columns])[row_of, column_of])
        return torch.cat(scores).float()

    def _features(self, inputs: list[Any], **options: Any) -> Any:
        encoded: Any = self.model.encode(inputs, **options)
        return encoded.features


def _is_text(given: Any) -> bool:
    return isinstance(given, str) and not names_a_file(given)


def _ordered(pair: Any) -> tuple[str, Any]:
    """The text of a pair, then its video."""
    if isinstance(pair, tuple | list) and len(pair) == 2 and _is_text(pair[0]) != _is_text(pair[1]):
        return (pair[0], pair[1]) if _is_text(pair[0]) else (pair[1], pair[0])
    raise ValueError(
        "a pair is a text and a video, such as ('a dog runs', 'dog.mp4'); a string that ends like the name "
        "of a video or a picture is one, any other string is a text"
    )


def _distinct(given: list[Any]) -> tuple[Tensor, list[Any]]:
    """The place of each among those that differ, and those. Paths are compared as text, others as objects."""
    places: dict[Hashable, int] = {}
    for each in given:
        places.setdefault(_key(each), len(places))
    kept = list({_key(each): each for each in reversed(given)}.items())
    kept.sort(key=lambda item: places[item[0]])
    return torch.tensor([places[_key(each)] for each in given]), [each for _, each in kept]


def _key(given: Any) -> Hashable:
    return os.fspath(given) if isinstance(given, str | os.PathLike) else id(given)

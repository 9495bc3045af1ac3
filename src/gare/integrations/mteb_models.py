"""GARE, and any encoder that `--model` takes, as models of MTEB.

| class | MTEB's protocol | scores |
| --- | --- | --- |
| `MtebSearch` | `SearchProtocol` | those of the model, increments included: every pair is scored |
| `MtebEncoder` | `EncoderProtocol` | products of two vectors: stage 1 |

Texts are queries or documents, and so are pictures and videos. A picture is a video of one frame. Videos are
decoded here, whatever MTEB would use: a column `video` is read as its bytes or its path.

Shapes: Q queries, N documents, D embedding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gare.errors import EvaluationError
from gare.extras import require
from gare.integrations.media_columns import undecoded, videos_of_cells
from gare.library.search.stage1 import stage1_queries, stage1_vectors
from gare.model.named_models import UNNAMED, ModelLike, load_named
from gare.model.plain_encoding import Features, plain_vectors
from gare.types import TextFeatures, VideoFeatures, block_slices

_READABLE = ("text", "image", "video")
_QUERIES_AT_ONCE = 1024  # Q × N numbers are kept for so many
_BATCH_SIZE = 32


class _MtebModel:
    """What both have: a model, and what MTEB wants to know of it."""

    kind = "dense"

    def __init__(self, model: ModelLike, *, device: str | None = None, num_frames: int | None = None) -> None:
        require("mteb", type(self).__name__)
        self.name, self.model = load_named(model)
        if device is not None:
            self.model.to(device)
        self._num_frames = num_frames
        self._meta: Any = None

    @property
    def mteb_model_meta(self) -> Any:
        """Name, fingerprint as the revision, size and modalities, as MTEB's `ModelMeta`."""
        if self._meta is None:
            from mteb.models import ModelMeta

            values = {
                "name": _name_for_mteb(self.name),
                "revision": self.model.fingerprint(),
                "n_parameters": sum(weight.numel() for weight in self.model.parameters()),
                "embed_dim": self.model.dim,
                "framework": ["PyTorch"],
                "modalities": list(_READABLE),
                "model_type": [self.kind],
                "similarity_fn_name": "dot",
            }
            self._meta = ModelMeta.create_empty(values)
        return self._meta

    @torch.no_grad()
    def _encode_texts(self, texts: list[str]) -> TextFeatures:
        return self.model.encode_text(texts)

    @torch.no_grad()
    def _encode_shown(self, rows: Any, column: str, batch_size: int) -> VideoFeatures:
        """Features of a column of pictures or videos of a `datasets.Dataset`."""
        cells = undecoded(rows, column)
        parts = []
        for batch in block_slices(len(cells), batch_size):
            with videos_of_cells(cells[batch][column], column) as videos:
                parts.append(self.model.frame_features(videos, self._num_frames))
        return VideoFeatures.cat(parts)


class MtebSearch(_MtebModel):
    """A model that MTEB searches with: every query with every document, by the model's own scores.

    Args:
        model: what `GARE.from_pretrained` takes, or a loaded model.
        device: where it runs.
        num_frames: frames that are read of a video; default: as many as the model was trained with.

    Examples:
        mteb.evaluate(MtebSearch("gare-mini"), task)
    """

    kind = "late-interaction"

    def __init__(self, model: ModelLike, *, device: str | None = None, num_frames: int | None = None) -> None:
        super().__init__(model, device=device, num_frames=num_frames)
        self._ids: list[str] = []
        self._documents: Features | None = None

    def index(self, corpus: Any, *, task_metadata: Any, encode_kwargs: Any = None, **_: Any) -> None:
        """Encode the documents of a task, a `datasets.Dataset`."""
        self._ids = list(corpus["id"])
        self._documents = self._features(corpus, task_metadata, "document", encode_kwargs)

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        top_k: int,
        encode_kwargs: Any = None,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """The best `top_k` documents of each query with their scores; of those in `top_ranked`, if given."""
        if self._documents is None:
            raise ValueError("nothing is indexed: call index before search")
        found: dict[str, dict[str, float]] = {}
        asked = self._features(queries, task_metadata, "query", encode_kwargs)
        ids = list(queries["id"])
        for rows in block_slices(len(ids), _QUERIES_AT_ONCE):
            scores_QN = self.model.similarity(asked[rows], self._documents).float().cpu()
            if not torch.isfinite(scores_QN).all():
                raise EvaluationError(
                    f"{self.name} gives scores that are not numbers; its weights are damaged"
                )
            for query, scores_N in zip(ids[rows], scores_QN, strict=True):
                allowed = None if top_ranked is None else top_ranked.get(query, ())
                found[query] = self._best(scores_N, top_k, allowed)
        return found

    def _best(self, scores_N: Tensor, top_k: int, allowed: Iterable[str] | None) -> dict[str, float]:
        ids = self._ids
        if allowed is not None:
            place = {document: number for number, document in enumerate(self._ids)}
            ids = [document for document in allowed if document in place]
            scores_N = scores_N[[place[document] for document in ids]]
        values, order = scores_N.topk(min(top_k, len(ids)))
        return {ids[number]: value for number, value in zip(order.tolist(), values.tolist(), strict=True)}

    def _features(self, rows: Any, task_metadata: Any, role: str, encode_kwargs: Any) -> Features:
        modality = _modality(task_metadata, role)
        if modality == "text":
            return self._encode_texts(list(_texts_of(rows, role)))
        size = (encode_kwargs or {}).get("batch_size", _BATCH_SIZE)
        return self._encode_shown(rows, modality, size)


class MtebEncoder(_MtebModel):
    """A model that MTEB gets vectors from.

    For a task with texts on one side and pictures or videos on the other, they are stage-1 vectors,
    [N, D + 1]: their product is nearly the model's score, and equal to it for a plain encoder. For all other
    tasks they are plain vectors at length one, [N, D].

    Args:
        model: what `GARE.from_pretrained` takes, or a loaded model.
        device: where it runs.
        num_frames: frames that are read of a video; default: as many as the model was trained with.
    """

    def encode(
        self, inputs: Any, *, task_metadata: Any, prompt_type: Any = None, **encode_kwargs: Any
    ) -> Any:
        """Vectors of the inputs of a loader, NumPy."""
        modality = _modality(task_metadata, prompt_type and str(prompt_type.value))
        if modality == "text":
            features: Features = self._encode_texts([text for batch in inputs for text in batch["text"]])
        else:
            size = encode_kwargs.get("batch_size", _BATCH_SIZE)
            features = self._encode_shown(inputs.dataset, modality, size)
        return self._vectors(features, crosses=_crosses(task_metadata)).float().cpu().numpy()

    def _vectors(self, features: Features, *, crosses: bool) -> Tensor:
        if not crosses:
            return plain_vectors(features)
        if isinstance(features, TextFeatures):
            return stage1_queries(features.text_TD)
        return stage1_vectors(self.model, features)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """The product of each of the first with each of the second."""
        return torch.as_tensor(embeddings1) @ torch.as_tensor(embeddings2).mT

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """The product of each of the first with its partner in the second."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(dim=-1)


def _modality(task_metadata: Any, role: str | None) -> str:
    """What the inputs of one side of a task are."""
    found = _modalities(task_metadata, role)
    if len(found) != 1 or found[0] not in _READABLE:
        raise EvaluationError(
            f"the MTEB task {task_metadata.name} has {' and '.join(found)} in one input; gare reads texts, "
            "pictures or videos, one at a time"
        )
    return found[0]


def _modalities(task_metadata: Any, role: str | None) -> list[str]:
    from mteb.types import PromptType

    return sorted(task_metadata.get_modalities(None if role is None else PromptType(role)))


def _crosses(task_metadata: Any) -> bool:
    """Whether a task compares texts with pictures or videos."""
    return (_modalities(task_metadata, "query") == ["text"]) != (
        _modalities(task_metadata, "document") == ["text"]
    )


def _texts_of(rows: Any, role: str) -> Iterator[str]:
    """The texts as MTEB hands them to encoders: a title before a document, an instruction after a query."""
    before, after = ("title", None) if role == "document" else (None, "instruction")
    for row in rows:
        if not isinstance(row["text"], str):
            raise EvaluationError("a query of this MTEB task is a conversation; gare reads single texts")
        parts = (row.get(before or ""), row["text"], row.get(after or ""))
        yield " ".join(part for part in parts if part).strip()


def _name_for_mteb(name: str) -> str:
    """MTEB wants `organisation/name`; a folder is known by its last part.

    >>> _name_for_mteb("gare-mini"), _name_for_mteb("/home/me/run 1/best"), _name_for_mteb("a/b")
    ('gare/gare-mini', 'gare/best', 'a/b')
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    last = "unnamed" if name == UNNAMED else name.rstrip("/").rsplit("/", 1)[-1]
    return f"gare/{re.sub(r'[^A-Za-z0-9_.-]+', '-', last)}"

"""A request as vectors: words through the text tower, pictures and clips through the video tower.

Shapes: K terms, V videos, F frames, H height, W width, C = 3, D embedding, E = D + 1.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gare.errors import QueryError
from gare.library.search.damaged_items import DamagedItems
from gare.library.search.query_language import Term
from gare.library.search.search_request import SearchRequest, StaleFeaturesError
from gare.library.search.stage1 import stage1_queries, unit_means
from gare.library.store import Store
from gare.library.store.stored_frames import unpack_frames
from gare.model import GARE
from gare.types import TextFeatures, VideoFeatures

if TYPE_CHECKING:
    from PIL.Image import Image

_CACHED_TEXTS = 1024
_SPECIAL_TOKENS = 2  # where a text begins and ends


@dataclass(frozen=True)
class EncodedQuery:
    """A query ready to be compared with stored videos."""

    stage1_E: np.ndarray
    """What the store multiplies with the stage-1 vectors of its items."""
    text: TextFeatures | None
    """The terms; None when the query is a picture or a clip, which is compared without increments."""
    weights_K: Tensor
    like_D: Tensor | None = None
    """The mean frame of a picture or a clip, at length one."""

    def to(self, device: torch.device | str) -> EncodedQuery:
        """The same query there."""
        return replace(
            self,
            text=None if self.text is None else self.text.to(device),
            weights_K=self.weights_K.to(device),
            like_D=None if self.like_D is None else self.like_D.to(device),
        )

    @property
    def wanted_K(self) -> Tensor:
        """The share of each wanted term; they add up to one."""
        wanted_K = self.weights_K.clamp_min(0)
        return wanted_K / wanted_K.sum()


class TextCache:
    """The last texts that were encoded. Threads share it, and one at a time encodes."""

    def __init__(self, model: GARE) -> None:
        self._model = model
        self._known: dict[str, TextFeatures] = {}
        self.encoding = threading.RLock()
        """Held by whoever uses a tower of the model; who holds it may ask for texts."""

    def get(
        self,
        texts: Iterable[str],
        *,
        ahead: Callable[[], Iterable[str]] = tuple,
        at_once: int = 0,
    ) -> dict[str, TextFeatures]:
        """The features of each text.

        Args:
            ahead: what will be asked next. It is encoded in the same call, if there is a call at all.
            at_once: how many texts a call may have because of `ahead`.
        """
        wanted = list(dict.fromkeys(texts))
        found = {text: known for text in wanted if (known := self._known.get(text)) is not None}
        if len(found) == len(wanted):
            return found  # without waiting for whoever has the encoder, with a clip maybe
        with self.encoding:
            missing = [text for text in wanted if text not in self._known]
            if missing:
                more = [text for text in dict.fromkeys(ahead()) if text not in self._known]
                room = max(0, at_once - len(missing))
                missing += [text for text in more if text not in wanted][:room]
                features = self._model.encode_text(missing)
                self._known |= {text: _text_row(features, row) for row, text in enumerate(missing)}
            num_over = max(0, len(self._known) - _CACHED_TEXTS)
            for text in [text for text in self._known if text not in wanted][:num_over]:
                del self._known[text]
            return {text: self._known[text] for text in wanted}

    def num_pieces(self, texts: Iterable[str]) -> list[int]:
        """Into how many tokens each text was taken apart; 0 for one that was not encoded lately."""
        known = (self._known.get(text) for text in texts)
        return [0 if found is None else int(found.mask_TW.sum()) - _SPECIAL_TOKENS for found in known]

    def is_cut(self, text: str) -> bool:
        """Whether the tokeniser leaves out more than the last word of a text that was encoded lately."""
        encoder, known = self._model.encoder, self._known.get(text)
        if known is None or int(known.mask_TW.sum()) < encoder.max_words:
            return False
        with self.encoding:
            shorter = encoder.tokenize([text.rpartition(" ")[0], "a"])[1].sum(dim=1).tolist()
        # An encoder that fills every text up to its limit says nothing about this one.
        return bool(shorter[0] >= encoder.max_words > shorter[1])


class QueryEncoder:
    """Turns requests into vectors, with the model that made the vectors of the store."""

    def __init__(self, store: Store, model: GARE, damaged: DamagedItems) -> None:
        self._store, self._model, self._damaged = store, model, damaged
        self.texts = TextCache(model)

    def encode(self, request: SearchRequest, texts: Mapping[str, TextFeatures] | None = None) -> EncodedQuery:
        """The vectors of a request; `texts` are the features of its terms, where they are known already."""
        if request.all_terms:
            return self.encode_terms(request.all_terms, texts)
        if request.features is not None:
            if request.made_by not in (None, self._store.stamp.fingerprint):
                raise StaleFeaturesError("the model was changed since this picture or clip was encoded")
            return self.encode_features(request.features)
        return self.encode_features(self.features(request.image, request.video, request.like))

    @torch.no_grad()
    def encode_terms(
        self, terms: Sequence[Term], texts: Mapping[str, TextFeatures] | None = None
    ) -> EncodedQuery:
        """Words as the query."""
        known = self.texts.get(term.text for term in terms) if texts is None else texts
        text = TextFeatures.cat([known[term.text] for term in terms])
        weights_K = torch.tensor([term.weight for term in terms], device=self._model.device)
        # The stage-1 score is linear in the text, so a weighted sum of queries is one query.
        stage1_E = weights_K @ stage1_queries(text.text_TD)
        return EncodedQuery(stage1_E.float().cpu().numpy(), text, weights_K)

    @torch.no_grad()
    def encode_features(self, video: VideoFeatures) -> EncodedQuery:
        """A picture or clip as the query: what looks alike."""
        like_D = unit_means(video)[0]
        stage1_E = torch.cat([like_D, like_D.new_zeros(1)])
        return EncodedQuery(stage1_E.float().cpu().numpy(), None, like_D.new_ones(1), like_D)

    def features(
        self,
        image: str | os.PathLike[str] | Image | None = None,
        video: str | os.PathLike[str] | None = None,
        like: str | None = None,
    ) -> VideoFeatures:
        """Frame vectors of a picture, of a clip, or of an item as it is stored."""
        if like is not None:
            table = self._damaged.read_vectors([like])
            if not len(table) and len(self._store.fetch([like], ["id"])):
                raise self._damaged.error(like)
            if not len(table):
                raise QueryError(f"there is no item '{like}' in {self._store.uri}; run a search to find ids")
            return unpack_frames(table["vectors"], self._model.dim, self._model.device)
        if image is not None and not isinstance(image, str | os.PathLike):
            return self._model.encode_video([[image]])
        if image is not None and os.path.exists(image) and not os.path.isfile(image):
            raise QueryError(f"{image} is not a file; name a picture")
        source = video if image is None else image
        if source is None:
            raise QueryError("name a video, or an item of the library")
        return self._model.encode_video([source])


def _text_row(features: TextFeatures, row: int) -> TextFeatures:
    """One text without the padding that its batch mates made necessary."""
    length = int(features.mask_TW[row].nonzero().max()) + 1
    return TextFeatures(
        features.text_TD[row : row + 1].clone(),
        features.words_TWD[row : row + 1, :length].clone(),
        features.mask_TW[row : row + 1, :length].clone(),
    )

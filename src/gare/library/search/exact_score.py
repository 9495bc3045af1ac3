"""The exact score of stored videos for a query, by the interaction of the model that made them.

Shapes: K terms, V videos, F frames, D embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gare.interaction import Interaction
from gare.library.search.query_vectors import EncodedQuery
from gare.library.search.stage1 import unit_means
from gare.model import GARE
from gare.types import VideoFeatures


class ExactScorer:
    """Scores frames with the model that made them: GARE for words, likeness for pictures and clips."""

    def __init__(self, model: GARE) -> None:
        self._model = model
        self._interaction = model.interaction.for_search()
        self._plain = model.interaction.without_increments()
        self._double: Interaction | None = None

    def score(self, query: EncodedQuery, video: VideoFeatures) -> Tensor:
        """The score of every video, [V]."""
        if query.text is None:
            assert query.like_D is not None
            return unit_means(video) @ query.like_D
        return query.weights_K @ self._interaction.score(query.text, video)

    def score_double(self, query: EncodedQuery, video: VideoFeatures) -> Tensor:
        """The same in float64, [V]: what a list is ordered by where a proof or every item was asked for."""
        video = video.to(torch.float64)
        if query.text is None:
            assert query.like_D is not None
            return unit_means(video) @ query.like_D.double()
        if self._double is None:
            self._double = copy.deepcopy(self._model.interaction).double().for_search()
        return query.weights_K.double() @ self._double.score(query.text.to(torch.float64), video)

    def plain_score(self, query: EncodedQuery, video: VideoFeatures) -> Tensor:
        """The score of every video without increments, [V]."""
        if query.text is None:
            return self.score(query, video)
        return query.weights_K @ self._plain.score(query.text, video)

    def radii(self, query: EncodedQuery, video: VideoFeatures) -> list[float | None]:
        """The length of each video's increment, averaged over the wanted terms; None without increments."""
        if query.text is None or not self._interaction.has_increments:
            return [None] * len(video)
        radii: list[float | None] = (query.wanted_K @ self._interaction.radii(query.text, video)).tolist()
        return radii

    def frames(self, query: EncodedQuery, video: VideoFeatures) -> tuple[Tensor, Tensor]:
        """The cosine of the query with each frame, and the weight of each frame in the score; both [V, F]."""
        cosine_VF = self.cosines(query, video)
        if query.text is None:
            mean_VF = video.mask_VF.to(cosine_VF.dtype)
            return cosine_VF, mean_VF / mean_VF.sum(dim=1, keepdim=True)
        # An increment has no say in how frames are pooled, and its cards would cost more than the search.
        weights = self._plain.frame_weights(query.text, video)
        return cosine_VF, (query.wanted_K[:, None, None] * weights.pool_TVF).sum(dim=0)

    def cosines(self, query: EncodedQuery, video: VideoFeatures) -> Tensor:
        """The cosine of the query with each frame, [V, F]."""
        unit_VFD = F.normalize(video.frames_VFD, dim=-1)
        if query.text is None:
            assert query.like_D is not None
            return unit_VFD @ query.like_D
        return unit_VFD @ F.normalize(query.text.text_TD, dim=-1).mT @ query.weights_K

    @torch.no_grad()
    def rank_captions(self, video: VideoFeatures, captions: Sequence[str]) -> list[tuple[str, float]]:
        """Captions for a video, best first."""
        text = self._model.encode_text(captions)
        scores_T = self._model.score(text, video)[:, 0]
        order = scores_T.argsort(descending=True, stable=True)
        return [(captions[row], float(scores_T[row])) for row in order.tolist()]

"""Which pairs of a search were scored, the best of them, and when no other can be among these.

Bounds stay on the device. The scores of a few thousand pairs go to the host, which sorts them sooner than it
would have asked a GPU to.

Shapes: T texts, U picked videos, P pairs, N of a list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MOST_LEFT = 2**16  # pairs: where bounds leave more, the likeliest are scored first
_ROUNDING = 1e-6  # of a threshold in float32


@dataclass(frozen=True)
class ProvenList:
    """The best videos of one text, and why no other belongs among them."""

    rows: list[int]
    scores: list[float]
    """In float64, best first; equal ones by row."""
    num_scored: int
    next_bound: float
    """The most that any video can score that was not scored; −1 where all were."""


class ProvenPairs:
    """Which pairs were scored, and the best of them.

    Args:
        upper_TU: the most that a text can score with each picked video.
        rows_U: of these videos, in rising order.
        others_T: the most that it can score with any other.
    """

    def __init__(self, upper_TU: Tensor, rows_U: Tensor, others_T: Tensor, top: int) -> None:
        self._upper_TU, self._rows_U, self._others_T, self._top = upper_TU, rows_U, others_T, top
        self._num_scored_T = np.zeros(len(upper_TU), dtype=int)
        # The best pairs so far, by text, then score, then row.
        self._text_N, self._row_N, self._score_N = np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.zeros(0)

    def left(self, least_T: Tensor) -> tuple[Tensor, bool]:
        """Pairs that can still be hits, [P, 2] by text and place, and whether these are all."""
        least_T1 = reached(least_T)
        pair_P2 = (self._upper_TU >= least_T1).nonzero()
        if len(pair_P2) <= _MOST_LEFT:
            return pair_P2, True
        num_texts, num_videos = self._upper_TU.shape
        size = min(num_videos, max(2 * self._top, _MOST_LEFT // num_texts))
        value_TN, place_TN = self._upper_TU.topk(size, dim=1)
        is_left_TN = value_TN >= least_T1
        text_TN = torch.arange(num_texts, device=place_TN.device)[:, None].expand_as(place_TN)
        return torch.stack([text_TN[is_left_TN], place_TN[is_left_TN]], dim=1), False

    def add(self, pair_P2: Tensor, score_P: Tensor) -> None:
        """These were scored."""
        text_P, place_P = pair_P2.unbind(dim=1)
        self._upper_TU[text_P, place_P] = -torch.inf
        # All at once: each copy waits for the device. A row of a table is a whole number in float64.
        found_3P = torch.stack([text_P.double(), self._rows_U[place_P].double(), score_P]).cpu().numpy()
        self._num_scored_T += np.bincount(found_3P[0].astype(int), minlength=len(self._num_scored_T))
        text_N = np.concatenate([self._text_N, found_3P[0].astype(int)])
        row_N = np.concatenate([self._row_N, found_3P[1].astype(int)])
        score_N = np.concatenate([self._score_N, found_3P[2]])
        order_N = np.lexsort((row_N, -score_N, text_N))
        rank_N = np.arange(len(order_N)) - np.searchsorted(text_N[order_N], text_N[order_N])
        best_N = order_N[rank_N < self._top]
        self._text_N, self._row_N, self._score_N = text_N[best_N], row_N[best_N], score_N[best_N]

    def last(self) -> Tensor:
        """The last score that is wanted of each text; −∞ while there are fewer."""
        last_T = np.full(len(self._num_scored_T), -np.inf)
        begin_T, end_T = self._ends()
        has_all_T = end_T - begin_T == self._top
        last_T[has_all_T] = self._score_N[end_T[has_all_T] - 1]
        return torch.from_numpy(last_T).to(self._upper_TU.device)

    def lists(self) -> list[ProvenList]:
        rest_T = self._others_T
        if self._upper_TU.shape[1]:
            rest_T = torch.maximum(rest_T, self._upper_TU.amax(dim=1).double())
        return [
            ProvenList(self._row_N[begin:end].tolist(), self._score_N[begin:end].tolist(), int(scored), rest)
            for begin, end, scored, rest in zip(
                *self._ends(), self._num_scored_T, rest_T.clamp_min(-1).tolist(), strict=True
            )
        ]

    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the best pairs of each text begin and end."""
        texts = np.arange(len(self._num_scored_T))
        return np.searchsorted(self._text_N, texts), np.searchsorted(self._text_N, texts, side="right")


def reached(least_T: Tensor) -> Tensor:
    """What an upper bound must be at least, [T, 1] in float32; what is gone or scored has −∞."""
    return (least_T - _ROUNDING).clamp_min(-2)[:, None].float()

"""Which pairs of a search were scored, the best of them, and when no other can be among these.

Shapes: T texts, U picked videos, P pairs, N of a list.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        num_texts, device = len(upper_TU), upper_TU.device
        self._score_TN = torch.full((num_texts, top), -torch.inf, dtype=torch.float64, device=device)
        self._row_TN = torch.zeros(num_texts, top, dtype=torch.long, device=device)
        self._scored_T = torch.zeros(num_texts, dtype=torch.long, device=device)
        self._text_T = torch.arange(num_texts, device=device)

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
        text_TN = self._text_T[:, None].expand_as(place_TN)
        return torch.stack([text_TN[is_left_TN], place_TN[is_left_TN]], dim=1), False

    def add(self, pair_P2: Tensor, score_P: Tensor) -> None:
        """These were scored."""
        text_P, place_P = pair_P2.unbind(dim=1)
        self._upper_TU[text_P, place_P] = -torch.inf
        self._scored_T.index_add_(0, text_P, torch.ones_like(text_P))
        text_N = torch.cat([self._text_T.repeat_interleave(self._top), text_P])
        row_N = torch.cat([self._row_TN.flatten(), self._rows_U[place_P]])
        score_N = torch.cat([self._score_TN.flatten(), score_P])
        # By text, then score, then row.
        order_N = row_N.argsort(stable=True)
        order_N = order_N[score_N[order_N].argsort(descending=True, stable=True)]
        order_N = order_N[text_N[order_N].argsort(stable=True)]
        text_N = text_N[order_N]
        begin_T = torch.searchsorted(text_N, self._text_T)
        best_TN = order_N[begin_T[:, None] + torch.arange(self._top, device=text_N.device)]
        self._score_TN, self._row_TN = score_N[best_TN], row_N[best_TN]

    def last(self) -> Tensor:
        """The last score that is wanted of each text; −∞ while there are fewer."""
        return self._score_TN[:, -1]

    def lists(self) -> list[ProvenList]:
        rest_T = self._others_T
        if self._upper_TU.shape[1]:
            rest_T = torch.maximum(rest_T, self._upper_TU.amax(dim=1).double())
        numbers = [self._scored_T.double()[:, None], rest_T.clamp_min(-1)[:, None]]
        found = torch.cat([*numbers, self._row_TN.double(), self._score_TN], dim=1).tolist()
        lists = []
        for num_scored, rest, *both in found:
            rows, scores = both[: self._top], both[self._top :]
            kept = sum(score > -torch.inf for score in scores)
            lists.append(ProvenList([int(row) for row in rows[:kept]], scores[:kept], int(num_scored), rest))
        return lists


def reached(least_T: Tensor) -> Tensor:
    """What an upper bound must be at least, [T, 1] in float32; what is gone or scored has −∞."""
    return (least_T - _ROUNDING).clamp_min(-2)[:, None].float()

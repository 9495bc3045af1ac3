"""Videos that are close to a text without belonging to it.

What the increment does to them, and which of them look like matches that nobody annotated.
Shapes: T texts, V videos, K neighbours; text i belongs to video i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gare.analysis.pairs import unit

NEIGHBOURS = 5


@dataclass(frozen=True)
class HardNegatives:
    """Scores of each text with its own video and the closest others, before and after the increment."""

    neighbour_TK: Tensor
    """Videos whose captions are closest to the text's, closest first."""
    own_before_T: Tensor
    own_after_T: Tensor
    near_before_TK: Tensor
    near_after_TK: Tensor

    @property
    def margin_before_T(self) -> Tensor:
        """By how much the own video is ahead of the best of the close ones."""
        return self.own_before_T - self.near_before_TK.max(dim=1).values

    @property
    def margin_after_T(self) -> Tensor:
        return self.own_after_T - self.near_after_TK.max(dim=1).values


def hard_negatives(
    before_TV: Tensor, after_TV: Tensor, text_TD: Tensor, *, num_neighbours: int = NEIGHBOURS
) -> HardNegatives:
    """Close means: their captions are, so the choice depends on neither score."""
    likeness_TT = (unit(text_TD) @ unit(text_TD).mT).fill_diagonal_(-torch.inf)
    neighbour_TK = likeness_TT.topk(min(num_neighbours, len(text_TD) - 1), dim=1).indices
    return HardNegatives(
        neighbour_TK,
        before_TV.diagonal(),
        after_TV.diagonal(),
        before_TV.gather(1, neighbour_TK),
        after_TV.gather(1, neighbour_TK),
    )


def examples(found: HardNegatives) -> dict[str, int]:
    """Three texts that show the range: where the margin grew most, the median one, where it shrank most.

    Margins are compared relative to their spread, since scores before and after have different scales.
    """
    change_T = found.margin_after_T / _scale(found.margin_after_T) - found.margin_before_T / _scale(
        found.margin_before_T
    )
    order = change_T.argsort(descending=True)
    return {"most helped": int(order[0]), "median": int(order[len(order) // 2]), "most hurt": int(order[-1])}


@dataclass(frozen=True)
class Suspects:
    """Pairs of different videos that may describe the same thing, most likely first."""

    first: list[int]
    second: list[int]
    evidence: list[float]
    """Mean of the three likenesses below, each in standard deviations from its mean over all pairs."""
    score: list[float]
    """Text of one with video of the other, mean of both ways."""
    caption_likeness: list[float]
    video_likeness: list[float]
    confused: list[bool]
    """Whether the model ranks the other video above (or level with) the own one for either text."""

    def __len__(self) -> int:
        return len(self.first)


def false_negatives(scores_TV: Tensor, text_TD: Tensor, video_VD: Tensor, *, most: int = 50) -> Suspects:
    """Rank pairs by three signs at once: text against video, caption against caption, video against video.

    No single sign is enough: captions can agree by chance ("a man is talking"), and frames can look alike
    while the captions differ. Only pairs above average in all three are listed.
    """
    caption_TT, video_VV = unit(text_TD) @ unit(text_TD).mT, unit(video_VD) @ unit(video_VD).mT
    cross_TV = (scores_TV + scores_TV.mT) / 2
    rows, columns = torch.triu_indices(len(scores_TV), len(scores_TV), offset=1)
    signs = [matrix[rows, columns].double() for matrix in (cross_TV, caption_TT, video_VV)]
    standard_3P = torch.stack([(sign - sign.mean()) / _scale(sign) for sign in signs])
    evidence_P = standard_3P.mean(dim=0).where((standard_3P > 0).all(dim=0), -torch.inf)
    order = evidence_P.argsort(descending=True)[:most]
    order = order[evidence_P[order].isfinite()]
    rows, columns = rows[order], columns[order]
    own_T = scores_TV.diagonal()
    confused = (scores_TV[rows, columns] >= own_T[rows]) | (scores_TV[columns, rows] >= own_T[columns])
    return Suspects(
        rows.tolist(),
        columns.tolist(),
        evidence_P[order].tolist(),
        signs[0][order].tolist(),
        signs[1][order].tolist(),
        signs[2][order].tolist(),
        confused.tolist(),
    )


def forgiven_recall(scores_TV: Tensor, suspects: Suspects) -> tuple[float, float]:
    """R@1 of texts, and R@1 if the listed pairs counted as matches too: how much they can matter."""
    best_T = scores_TV.argmax(dim=1)
    index_T = torch.arange(len(scores_TV))
    right_T = best_T == index_T
    allowed = set(zip(suspects.first, suspects.second, strict=True))
    allowed |= {(second, first) for first, second in allowed}
    forgiven = [(text, video) in allowed for text, video in enumerate(best_T.tolist())]
    return float(right_T.double().mean()), float((right_T | torch.tensor(forgiven)).double().mean())


def _scale(values: Tensor) -> Tensor:
    return values.std(correction=0).clamp_min(1e-12)

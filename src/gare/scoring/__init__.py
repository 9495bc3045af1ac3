"""Every text with every video: `dense` is the reference, `factored` the same without increments."""

from gare.scoring import dense, factored
from gare.scoring.cards import ScoreCards, score_cards

__all__ = ["ScoreCards", "dense", "factored", "score_cards"]

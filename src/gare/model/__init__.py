"""The GARE model: towers, temporal transformer, increment net, and its files."""

from gare.model.gare import GARE
from gare.model.increment import IncrementNet
from gare.model.released import load_released

__all__ = ["GARE", "IncrementNet", "load_released"]

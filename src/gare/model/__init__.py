"""The GARE model: encoder, temporal transformer, interaction, and its files."""

from gare.model.gare import GARE
from gare.model.model_config import GareConfig
from gare.model.released import load_released

__all__ = ["GARE", "GareConfig", "load_released"]

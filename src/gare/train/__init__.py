"""Training: plain torch, one process or torchrun."""

from gare.train.config import DataConfig, OptimizerConfig, RunConfig
from gare.train.loop import train

__all__ = ["DataConfig", "OptimizerConfig", "RunConfig", "train"]

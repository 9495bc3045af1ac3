"""Training: plain torch, one process or torchrun."""

from gare.train.run_config import DataConfig, OptimizerConfig, RunConfig
from gare.train.training_run import Observer, TrainingRun, train

__all__ = ["DataConfig", "Observer", "OptimizerConfig", "RunConfig", "TrainingRun", "train"]

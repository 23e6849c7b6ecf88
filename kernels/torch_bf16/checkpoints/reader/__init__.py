"""Read checkpoints of any training, a piece at a time and without running their code."""

from .open import open_checkpoint
from .saved import OptimizerStates, Saved, SavedTensor
from .torch_file import read_optimizer

__all__ = ["OptimizerStates", "Saved", "SavedTensor", "open_checkpoint", "read_optimizer"]

"""What checkpoints of any training hold, read a piece at a time and without running their code."""

from .open import open_checkpoint
from .saved import OptimizerStates, Saved, SavedTensor

__all__ = ["OptimizerStates", "Saved", "SavedTensor", "open_checkpoint"]

"""Optimizers with ``torch.optim``'s signatures, and the conversion of torch's own into them."""

from .accumulation import GradientAccumulation, accumulate_gradients
from .adam import Adam, AdamW
from .clipping import total_norm
from .convert import CONVERTIBLE, convert
from .optimizer import BF16Optimizer
from .release import GradientRelease, release_gradients
from .sgd import SGD

__all__ = [
    "CONVERTIBLE",
    "SGD",
    "Adam",
    "AdamW",
    "BF16Optimizer",
    "GradientAccumulation",
    "GradientRelease",
    "accumulate_gradients",
    "convert",
    "release_gradients",
    "total_norm",
]

"""How a parameter group's weight decay shrinks a weight in one step.

There are three kinds:

    L2 penalty          g = g + weight_decay * w           (torch's Adam, SGD, RMSprop ...)
    decoupled           w = w * (1 - lr * weight_decay)    (AdamW, Lion, Muon ...)
    fully decoupled     w = w * (1 - lr / lr_max * weight_decay)

The last is equation 12 of Loshchilov & Hutter, 2019: the schedule scales the decay but the learning
rate does not, so tuning ``lr`` leaves the decay alone. The group's option
``fully_decoupled_weight_decay`` is then ``lr_max``.
"""

from __future__ import annotations

__all__ = ["decay_per_lr", "either_decay"]


def decay_per_lr(group):
    """The factor of ``lr`` in a decoupled decay."""
    lr_max = group.get("fully_decoupled_weight_decay")
    return group["weight_decay"] / lr_max if lr_max else group["weight_decay"]


def either_decay(group):
    """``(decoupled, L2)`` for a rule that supports both kinds of decay; one of them is zero."""
    if group["decoupled_weight_decay"]:
        return decay_per_lr(group), 0.0
    return 0.0, group["weight_decay"]

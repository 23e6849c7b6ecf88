"""What a parameter group's weight decay takes off a weight in one step.

Three kinds, by what happens to a weight beside the update:

    L2 penalty          g = g + weight_decay * w           (torch's Adam, SGD, RMSprop ...)
    decoupled           w = w * (1 - lr * weight_decay)    (AdamW, Lion, Muon ...)
    fully decoupled     w = w * (1 - lr / lr_max * weight_decay)

The last is the one of Loshchilov & Hutter, 2019, equation 12, where the schedule acts on the decay
and the learning rate does not: tuning ``lr`` leaves it alone. The group's option
``fully_decoupled_weight_decay`` is then ``lr_max``.
"""

from __future__ import annotations

__all__ = ["decay_per_lr", "either_decay"]


def decay_per_lr(group):
    """What ``lr`` is multiplied by in a decoupled decay."""
    lr_max = group.get("fully_decoupled_weight_decay")
    return group["weight_decay"] / lr_max if lr_max else group["weight_decay"]


def either_decay(group):
    """``(decoupled, L2)`` of a rule that knows both, one of which is zero."""
    if group["decoupled_weight_decay"]:
        return decay_per_lr(group), 0.0
    return 0.0, group["weight_decay"]

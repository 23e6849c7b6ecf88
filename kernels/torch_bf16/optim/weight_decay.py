"""The option of fully decoupled weight decay, per parameter group."""

from __future__ import annotations

from numbers import Real
from typing import Any

__all__ = ["FULLY_DECOUPLED", "resolve_peak_lr"]

FULLY_DECOUPLED = "fully_decoupled_weight_decay"


def resolve_peak_lr(group: dict[str, Any], number: int, decouples: bool) -> None:
    """Make a learning rate of the group's option: that at which decay is ``weight_decay`` a step.

    Args:
        group: a parameter group; True is replaced by the learning rate it has now.
        number: the group's number, for messages.
        decouples: whether the group's rule has a decoupled decay.

    Raises:
        ValueError: the option is no learning rate, or the rule's decay is an L2 penalty.
    """
    wanted = group.get(FULLY_DECOUPLED)
    if not wanted:
        return
    if not decouples:
        raise ValueError(
            f"{FULLY_DECOUPLED}={wanted} in parameter group {number}: this optimizer adds weight "
            "decay to the gradient. Use decoupled_weight_decay=True where it has that option, or "
            "AdamW or Lion"
        )
    peak: Any = float(group["lr"]) if wanted is True else wanted
    if not isinstance(peak, Real) or not 0.0 < float(peak) < float("inf"):
        raise ValueError(
            f"{FULLY_DECOUPLED}={wanted} in parameter group {number} with lr={group['lr']}: it "
            "must be the highest learning rate of the schedule, a positive number, or True where "
            "lr already is that"
        )
    group[FULLY_DECOUPLED] = float(peak)

"""The local optimizer of torch's ``ZeroRedundancyOptimizer``, and what it must know of the whole.

Each rank steps for some of the parameters, in an order that follows from their sizes, and sends
them to the others. Noise must not depend on that, so its keys are asked of the optimizer around it.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Whole", "is_zero", "whole_of_the_made"]


def _kind() -> Any:
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return None if module is None else module.ZeroRedundancyOptimizer


def is_zero(optimizer: Any) -> bool:
    """Whether it is a ``ZeroRedundancyOptimizer``; does not import what defines those."""
    kind = _kind()
    return kind is not None and isinstance(optimizer, kind)


class Whole:
    """The parameters of all ranks.

    Args:
        zero: the ``ZeroRedundancyOptimizer`` that has them, and will have the local optimizer.
    """

    def __init__(self, zero: torch.optim.Optimizer) -> None:
        self._zero = ref(zero)
        self._names = WeakIdKeyDictionary()
        # Its load_state_dict writes into the local optimizer's state, past ours.
        zero.register_load_state_dict_post_hook(_invalidate)

    def name(self, parameter: Tensor) -> str | None:
        """What keys a parameter's noise: as if one optimizer had all of them."""
        zero = self._zero()
        if parameter not in self._names and zero is not None:
            place = 0
            for group in zero.param_groups:
                names = group.get("param_names") or ()
                for position, each in enumerate(group["params"]):
                    self._names[each] = names[position] if names else f"#{place}"
                    place += 1
        return self._names.get(parameter)


def whole_of_the_made() -> Whole | None:
    """Of the ``ZeroRedundancyOptimizer`` that is making its local optimizer right now, if any.

    It gives that one its share of the groups and no more, so that only the caller's frame knows.
    """
    kind = _kind()
    frame = None if kind is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code is kind._init_local_optimizer.__code__:  # pyright: ignore[reportOptionalMemberAccess]
            return Whole(frame.f_locals["self"])
        frame = frame.f_back
    return None


def _invalidate(zero: Any) -> None:
    zero.optim._invalidate()

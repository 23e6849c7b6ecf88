"""What names the parameters of the local optimizer in torch's ``ZeroRedundancyOptimizer``.

Each rank steps for some of the parameters, in an order that follows from their sizes, and sends
them to the others. Noise must not depend on that, so the optimizer around it says what keys it.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["ZeroNames", "is_zero"]


def is_zero(optimizer: Any) -> bool:
    """Whether it is a ``ZeroRedundancyOptimizer``; does not import what defines those."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


class ZeroNames:
    """What keys the noise of the parameters of all ranks.

    Args:
        zero: the ``ZeroRedundancyOptimizer`` that has them.
    """

    def __init__(self, zero: torch.optim.Optimizer) -> None:
        self._zero = ref(zero)
        self._names = WeakIdKeyDictionary()
        # Its load_state_dict writes into the local optimizer's state, past ours.
        zero.register_load_state_dict_post_hook(lambda zero: zero.optim._engine.invalidate())  # pyright: ignore[reportAttributeAccessIssue]

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

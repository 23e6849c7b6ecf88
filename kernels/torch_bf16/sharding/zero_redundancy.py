"""Names for the parameters of the local optimizer in torch's ``ZeroRedundancyOptimizer``.

Each rank steps some of the parameters, in an order that follows from their sizes, and sends them to
the other ranks. Noise must not depend on that, so the outer optimizer determines the names.
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
    """Whether this is a ``ZeroRedundancyOptimizer``; does not import the module that defines it."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


class ZeroNames:
    """The names that key the noise of the parameters of all ranks.

    While there are such names, a step drops the states that ``consolidate_state_dict`` gathered:
    their remainders do not belong to the weights after it.

    Args:
        zero: the ``ZeroRedundancyOptimizer`` of the parameters.
    """

    def __init__(self, zero: torch.optim.Optimizer) -> None:
        self._zero = ref(zero)
        self._names = WeakIdKeyDictionary()
        zero.register_step_post_hook(_forget_gathered)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that this rank or another one steps."""
        groups = getattr(self._zero(), "param_groups", ())
        return [each for group in groups for each in group["params"]]

    def name(self, parameter: Tensor) -> str | None:
        """The name that keys a parameter's noise, as if one optimizer had all parameters."""
        zero = self._zero()
        if parameter not in self._names and zero is not None:
            place = 0
            for group in zero.param_groups:
                names = group.get("param_names") or ()
                for position, each in enumerate(group["params"]):
                    self._names[each] = names[position] if names else f"#{place}"
                    place += 1
        return self._names.get(parameter)


def _forget_gathered(zero: Any, _args: Any, _kwargs: Any) -> None:
    """Let ``zero.state_dict()`` say that states must be consolidated again."""
    zero._all_state_dicts = []

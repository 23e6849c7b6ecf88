"""torchao's optimizer with states in host memory, wrapped so that the benchmark can step it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TorchaoOffload"]


class TorchaoOffload:
    """``torchao.optim.CPUOffloadOptimizer`` over torch's fused AdamW, which steps on the CPU.

    Its hooks send gradients to the host during a backward pass; here each step calls them, so that
    the time measured is that of a step without a backward pass to hide transfers in.

    Args:
        parameters: parameters on a GPU, each with a gradient.
        options: options of AdamW.
    """

    def __init__(self, parameters: Sequence[Tensor], **options: Any) -> None:
        offload = importlib.import_module("torchao.optim").CPUOffloadOptimizer
        self._optimizer = offload(parameters, torch.optim.AdamW, fused=True, **options)
        self.param_groups = [{"params": list(parameters)}]
        # Its moments are in host memory, and it does not expose them.
        self.state: dict[Tensor, Any] = {}

    def step(self) -> None:
        """Send the gradients, step on the CPU, and get the weights."""
        for parameter in reversed(self.param_groups[0]["params"]):
            hooks: Any = parameter._post_accumulate_grad_hooks or {}
            for hook in hooks.values():
                hook(parameter)
        self._optimizer.step()

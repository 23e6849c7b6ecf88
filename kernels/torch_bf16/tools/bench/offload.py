"""torchao's optimizer with states in host memory, as the benchmark takes its steps."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TorchaoOffload"]


class TorchaoOffload:
    """``torchao.optim.CPUOffloadOptimizer`` over torch's fused AdamW, which steps on the CPU.

    Its hooks send gradients over as a backward pass makes them; here they are called by each step,
    so that its time is that of a step without a backward pass to hide in.

    Args:
        parameters: on a GPU, each with a gradient.
        options: of AdamW.
    """

    def __init__(self, parameters: Sequence[Tensor], **options: Any) -> None:
        made = importlib.import_module("torchao.optim").CPUOffloadOptimizer
        self._made = made(parameters, torch.optim.AdamW, fused=True, **options)
        self.param_groups = [{"params": list(parameters)}]
        # It has moments in host memory, and none that it shows.
        self.state: dict[Tensor, Any] = {}

    def step(self) -> None:
        """Send the gradients, step on the CPU, and get the weights."""
        for parameter in reversed(self.param_groups[0]["params"]):
            hooks: Any = parameter._post_accumulate_grad_hooks or {}
            for hook in hooks.values():
                hook(parameter)
        self._made.step()

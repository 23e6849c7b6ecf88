"""What the next step is told, and what CUDA graph capture asks of it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends import StepInputs
from torch_bf16.sharding import all_same, gradients_of, version_of, versions_of

__all__ = ["Pending", "check_capturable", "clip_coefficient"]


_OF_SCALER = "grad_scale", "found_inf"


class _Clipped:
    """The gradients that a clip was of, as they were then; it keeps none of them alive."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._references = [*map(weakref.ref, gradients)]
        self._versions = versions_of(gradients)

    def is_stale(self, gradients: Sequence[Tensor]) -> bool:
        """Whether none of them is among these any more, or one that is was written since."""
        known: list[Any] = [reference() for reference in self._references]
        if all_same(gradients, known):
            return versions_of(gradients) != self._versions
        for each in known:
            # A tensor that C++ alone has kept must learn that Python has a hold of it again.
            if each is not None:
                each._fix_weakref()
        present = {id(each) for each in gradients}
        pairs = zip(known, self._versions, strict=True)
        left = [(each, version) for each, version in pairs if id(each) in present]
        return not left or any(version_of(each) != version for each, version in left)


class Pending:
    """What the next step was told, and how many were skipped."""

    def __init__(self) -> None:
        self.coefficient: float | Tensor = 1.0
        self._clipped: _Clipped | None = None
        self._found_inf: Tensor | None = None
        self._skipped: dict[torch.device, Tensor] = {}

    def reset(self) -> None:
        """Forget what was told."""
        self.coefficient, self._found_inf, self._clipped = 1.0, None, None

    def scale(self, coefficient: float | Tensor) -> None:
        """Multiply every gradient by ``coefficient``.

        Raises:
            ValueError: it is neither a finite number nor a tensor with one element.
        """
        if isinstance(coefficient, Tensor):
            known = coefficient.numel() == 1
        else:
            known = isinstance(coefficient, Real) and isfinite(coefficient)
        if not known:
            raise ValueError(
                f"coefficient={coefficient!r} must be a finite number or a tensor with one "
                "element, by which the next step multiplies every gradient"
            )
        self.coefficient = coefficient

    def only_for(self, gradients: Iterable[Tensor]) -> None:
        """Keep what was told as long as these gradients are what they are now."""
        self._clipped = _Clipped([*gradients])

    def expect_written(self, gradients: Iterable[Tensor]) -> None:
        """Keep what was told of these gradients, which a clip has written in place since."""
        if self._clipped is not None:
            self.only_for(gradients)

    def is_stale(self, parameters: Iterable[Tensor]) -> bool:
        """Whether what was told is of other gradients than these parameters have now."""
        if self._clipped is None:
            return False
        return self._clipped.is_stale([g for g in gradients_of(parameters) if g is not None])

    def drop_if_stale(self, parameters: Iterable[Tensor]) -> None:
        """Forget what was told of other gradients than these parameters have, and say so."""
        if self.is_stale(parameters):
            self.reset()
            warnings.warn(
                "gradients were clipped and then replaced or written before a step read them, for "
                "example by model.zero_grad(), p.grad = None or another backward(): this step "
                "scales nothing and skips nothing. Clip after the last backward() before the step",
                stacklevel=4,
            )

    def skip_where(self, found_inf: Tensor) -> None:
        """Leave everything as it is where ``found_inf`` is not 0.

        Raises:
            ValueError: it is not a tensor with one element.
        """
        if not isinstance(found_inf, Tensor) or found_inf.numel() != 1:
            raise ValueError(
                f"found_inf={found_inf!r} must be a tensor with one element, such as "
                "torch.tensor(float(skip)): where it is not 0, the next step leaves all as it is"
            )
        self._found_inf = found_inf.reshape(()).float()

    def inputs(self, optimizer: Any, parameters: Iterable[Tensor]) -> StepInputs:
        """What was told, here and by ``torch.amp.GradScaler`` in the optimizer's attributes.

        Args:
            optimizer: whose step it is.
            parameters: all that may have a gradient.
        """
        self.drop_if_stale(parameters)
        grad_scale, found_inf = (getattr(optimizer, name, None) for name in _OF_SCALER)
        mine = self._found_inf
        if mine is not None and found_inf is not None:
            mine = mine + found_inf.to(mine.device, non_blocking=True)
        return StepInputs(self.coefficient, grad_scale, found_inf if mine is None else mine)

    def get_ready(self, devices: Iterable[torch.device]) -> None:
        """Make the counters of skipped steps; a graph could not replay their making."""
        for device in devices:
            if device not in self._skipped:
                self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, inputs: StepInputs) -> None:
        """Count a step that was skipped, without asking the device whether it was."""
        found = inputs.found_inf
        if found is None:
            return
        found = found if isinstance(found, Tensor) else torch.tensor(found, device="cpu")
        self.get_ready([found.device])
        self._skipped[found.device].add_(found.reshape(()) != 0)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; waits for the device."""
        return sum(int(each) for each in self._skipped.values())


def check_capturable(optimizer: torch.optim.Optimizer, planned: bool, obstacle: str | None) -> None:
    """Refuse a capture whose replays would not be steps.

    Args:
        optimizer: its groups say whether they are capturable; those without the option are.
        planned: whether the plan of the last step serves this one.
        obstacle: what else stands in the way.

    Raises:
        RuntimeError: the step cannot be captured; nothing was recorded by it.
    """
    name = type(optimizer).__name__
    if not all(group.get("capturable", True) for group in optimizer.param_groups):
        raise RuntimeError(
            f"a step of {name} is being captured in a CUDA graph, and a parameter group has "
            "capturable=False: its hyperparameters need not be fit for replays. Make the optimizer "
            "with capturable=True and give it lr as a tensor on the device, or step outside of the "
            "capture"
        )
    if not planned:
        obstacle = (
            "other parameters take part than in its last step, or it has taken none: take a step "
            "with the same parameters before the capture, so that states and tables exist"
        )
    if obstacle is not None:
        raise RuntimeError(f"a step of {name} cannot be captured in a CUDA graph: {obstacle}")


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What torch multiplies gradients of that norm by, at most 1; 0-d, where ``norm`` is."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)

"""Requests to scale or skip the next step, and the check of steps under CUDA graph capture."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends import StepInputs
from torch_bf16.errors import warn
from torch_bf16.sharding import all_same, gradients_of, local, version_of, versions_of

__all__ = ["TOO_LATE_TO_SKIP", "Pending", "check_capturable", "scale_in_place"]

TOO_LATE_TO_SKIP = "cannot be skipped after it; remove() the release to decide about steps"

_OF_SCALER = "grad_scale", "found_inf"


class _Clipped:
    """The gradients that were clipped, with their versions then; keeps none of them alive."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._references = [*map(weakref.ref, gradients)]
        self._versions = versions_of(gradients)

    def left(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of them that are among these; none if all are gone, or one has been written."""
        known: list[Any] = [reference() for reference in self._references]
        if all_same(gradients, known):
            return gradients if versions_of(gradients) == self._versions else []
        for each in known:
            # A tensor that only C++ has kept alive must learn that Python refers to it again.
            if each is not None:
                each._fix_weakref()
        present = {id(each) for each in gradients}
        pairs = zip(known, self._versions, strict=True)
        left = [(each, version) for each, version in pairs if id(each) in present]
        written = any(version_of(each) != version for each, version in left)
        return [] if written else [each for each, _ in left]


class Pending:
    """Requests to the next step, and the number of steps that were skipped.

    Those of clips are for the gradients that were clipped, and lapse with them. A further step on
    the same gradients scales them, too, as if they had been clipped in place.
    """

    def __init__(self) -> None:
        self.coefficient: float | Tensor = 1.0
        self._clipped: _Clipped | None = None
        self._nonfinite: Tensor | None = None  # whether a clip found no finite norm
        self._found_inf: Tensor | None = None  # the user's own request
        # What the last step read: the first three of these.
        self._read: tuple[float | Tensor, Tensor | None, _Clipped] | None = None
        self._skipped: dict[torch.device, Tensor] = {}

    def reset(self) -> None:
        """Cancel all requests."""
        self._found_inf = None
        self.lapse()

    def lapse(self) -> None:
        """Cancel what clips have requested, for gradients that are gone."""
        self.coefficient, self._nonfinite, self._clipped = 1.0, None, None
        self._read = None

    def note_step(self) -> None:
        """Cancel all requests; those of a clip count for a further step on the same gradients."""
        clipped = self._clipped
        read = None if clipped is None else (self.coefficient, self._nonfinite, clipped)
        self.reset()
        self._read = read

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
        self.coefficient, self._read = coefficient, None

    def forget_coefficient(self) -> None:
        """Scale nothing: gradients are scaled. A request to skip stays, whatever is written."""
        self.coefficient, self._clipped = 1.0, None

    def only_for(self, gradients: Iterable[Tensor]) -> None:
        """Make the requests valid only for these gradients, and until these are written."""
        self._clipped = _Clipped([*gradients])

    def expect_written(self, gradients: Iterable[Tensor]) -> None:
        """Keep the requests valid after a clip that has itself written these gradients."""
        if self._clipped is not None:
            self.only_for(gradients)

    def settle(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the requests are for gradients that these parameters still have, unwritten.

        If there are others beside those that were clipped, these are scaled in place: the step
        scales what it reads, and the others were not clipped.
        """
        if self._clipped is None:
            return True
        gradients = [each for each in gradients_of(parameters) if each is not None]
        left = self._clipped.left(gradients)
        if left and len(left) < len(gradients):
            scale_in_place(left, self.coefficient)
            self.forget_coefficient()
        return bool(left)

    def scaled(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of the parameters whose gradients are to be scaled; nothing is written."""
        if self._clipped is None:
            return parameters
        pairs = zip(gradients_of(parameters), parameters, strict=True)
        owners = {id(each): (each, p) for each, p in pairs if each is not None}
        left = self._clipped.left([each for each, _ in owners.values()])
        return [owners[id(each)][1] for each in left]

    def skip_nonfinite(self, norm: Tensor) -> None:
        """Skip the step if the norm of a clip is not finite, or that of an earlier one was not."""
        nonfinite = ~norm.isfinite()
        if self._nonfinite is not None:
            nonfinite = nonfinite | self._nonfinite.to(norm.device, non_blocking=True)
        self._nonfinite = nonfinite

    def skip_where(self, found_inf: Tensor) -> None:
        """Skip the step if ``found_inf`` is not 0; replaces an earlier request.

        Raises:
            ValueError: it is not a tensor with one element.
        """
        if not isinstance(found_inf, Tensor) or found_inf.numel() != 1:
            raise ValueError(
                f"found_inf={found_inf!r} must be a tensor with one element, such as "
                "torch.tensor(float(skip)): where it is not 0, the next step leaves all as it is"
            )
        # As it is: it may be written until the step.
        self._found_inf = found_inf.detach().reshape(())

    def inputs(self, optimizer: Any, parameters: Iterable[Tensor]) -> StepInputs:
        """The inputs of the next step: these requests, and those of ``torch.amp.GradScaler``.

        Args:
            optimizer: the optimizer that steps; ``GradScaler`` sets attributes of it.
            parameters: all that may have a gradient.
        """
        were_read = self._take_up()
        if not self.settle(parameters):
            self.lapse()
            if not were_read:
                warn(
                    "gradients were clipped and then replaced or written before a step read them, "
                    "for example by model.zero_grad(), p.grad = None or another backward(): this "
                    "step scales nothing, and their norm skips nothing. Clip after the last "
                    "backward() before the step, and call torch_bf16.scale_gradients(optimizer) "
                    "before you write them yourself",
                )
        grad_scale, found_inf = (getattr(optimizer, name, None) for name in _OF_SCALER)
        requests = [each for each in (self._nonfinite, self._found_inf) if each is not None]
        if requests:
            requests += [] if found_inf is None else [found_inf]
            found_inf = _any(requests)
        return StepInputs(self.coefficient, grad_scale, found_inf)

    def _take_up(self) -> bool:
        """Scale, or skip, as the last step did, unless there is a newer request."""
        read, self._read = self._read, None
        if read is None or self._clipped is not None:
            return False
        self.coefficient, self._nonfinite, self._clipped = read
        return True

    def forget_skipped(self) -> None:
        """Count skipped steps from 0."""
        self._skipped = {}

    def get_ready(self, devices: Iterable[torch.device]) -> None:
        """Allocate the counters of skipped steps now; a CUDA graph must not record this."""
        for device in devices:
            if device not in self._skipped:
                self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, inputs: StepInputs) -> None:
        """Count the step if it was skipped, without waiting for the device to know."""
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


def _any(requests: Sequence[Tensor]) -> Tensor:
    """1 if any of these is not 0, as fp32 on the first one's device; one in fp32 as it is."""
    first, *others = (each.detach().reshape(()) for each in requests)
    if not others and first.dtype == torch.float32:
        return first
    # Not their sum, as a user's number may be negative, nor rounded: one too small for fp32 counts.
    found = first != 0
    for each in others:
        found = found | (each.to(first.device, non_blocking=True) != 0)
    return found.float()


@torch.no_grad()
def scale_in_place(gradients: Iterable[Tensor], coefficient: float | Tensor) -> None:
    """Multiply gradients by a number, in one pass for each device."""
    if not isinstance(coefficient, Tensor) and coefficient == 1.0:
        return
    on_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in map(local, gradients):
        # torch writes no lists of lazy conjugates; a real factor acts on both numbers alike.
        on_device[gradient.device].append(gradient.conj() if gradient.is_conj() else gradient)
    for device, each in on_device.items():
        tensor = isinstance(coefficient, Tensor)
        factor = coefficient.to(device).reshape(()) if tensor else float(coefficient)
        torch._foreach_mul_(each, factor)  # pyright: ignore[reportPrivateImportUsage]


def check_capturable(optimizer: torch.optim.Optimizer, planned: bool, obstacle: str | None) -> None:
    """Refuse a capture whose replays would not be valid steps.

    Args:
        optimizer: its groups say whether they are capturable; those without the option are.
        planned: whether the plan of the last step is valid for this one.
        obstacle: any other reason against a capture.

    Raises:
        RuntimeError: the step cannot be captured; it has recorded nothing.
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
            "other parameters have gradients than in its last step, or it has taken none: take a "
            "step with the same parameters before the capture, so that states and tables exist"
        )
    if obstacle is not None:
        raise RuntimeError(f"a step of {name} cannot be captured in a CUDA graph: {obstacle}")

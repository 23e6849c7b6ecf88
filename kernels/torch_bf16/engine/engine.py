"""What an optimizer of ours keeps between two steps, beside its states: one private attribute."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .member import Member, Snapshot
from .names import ParameterNames
from .pending import Pending
from .plan import Plan
from .setting import Setting

__all__ = ["Engine", "Observer", "engine_of"]


class Observer(Protocol):
    """Something that is told of each update, for example :class:`torch_bf16.UpdateMonitor`."""

    def before_update(self, members: Sequence[Member], scale: float | Tensor) -> None:
        """Gradients are there, to be multiplied by ``scale``; nothing is updated yet."""

    def after_update(self) -> None:
        """Everything is updated."""


class Accumulation(Protocol):
    """How gradients are summed; see :mod:`torch_bf16.gradients.accumulation`."""

    format: str

    def hook_parameters(self) -> None: ...
    def remove(self) -> None: ...


class Release(Protocol):
    """Steps inside the backward pass; see :mod:`torch_bf16.gradients.release`."""

    by_last_step: bool

    def finish(self, left: list[Tensor]) -> None: ...
    def hook_parameters(self, *, anew: bool = False) -> None: ...
    def remove(self) -> None: ...
    def steps_next(self, parameter: Tensor) -> bool: ...


class Engine:
    """What one optimizer keeps between steps; copies and pickles keep names, and what was asked.

    An object, because the wrappers of Lightning and Fabric run our methods on themselves: they read
    the optimizer's attributes, but what they set stays with them.

    Attributes:
        names: of the parameters.
        pending: what the next step was told.
        plan: that of the last step.
        setting: what that follows from.
        snapshots: what parameters were when the last step had updated them.
        captured: plans that CUDA graphs refer to as long as they live.
        accumulation: how gradients are summed, where not by torch.
        release: of gradients inside the backward pass.
        asked_release: the constructor's argument, which copies follow.
        last_norm: fp32 norm of the gradients of the last step, 0-d, where released ones are clipped
            by it.
        reduces: whether gradients are reduced as the recipe asks, or somebody was told how.
        host: who takes a step by several calls, each with some of the groups; None for nobody.
        data_writes_named: whether the user was told what a write through ``.data`` loses.
    """

    def __init__(self, names: ParameterNames | None = None) -> None:
        self.names = ParameterNames() if names is None else names
        self.captured: list[Plan] = []
        self.accumulation: Accumulation | None = None
        self.release: Release | None = None
        self.asked_release: bool | Mapping[str, Any] = False
        self.last_norm: Tensor | None = None
        self.reduces = False
        self.host: str | None = None
        self.data_writes_named = False
        self.invalidate()

    def told(self, too_late: str) -> Pending:
        """What the next step is told.

        Args:
            too_late: ends the error where gradients are released, and says what works instead.

        Raises:
            NotImplementedError: gradients are released, and the step was taken within backward(),
                or a host takes it by several calls.
        """
        self.check_host()
        if self.release is not None:
            raise NotImplementedError(
                f"gradients are released, so that the step runs inside backward() and {too_late}"
            )
        return self.pending

    def check_host(self) -> None:
        """Refuse to tell the next step anything where that is not one step of ours.

        Raises:
            NotImplementedError: a host takes it by several calls.
        """
        if self.host is not None:
            raise NotImplementedError(
                f"{self.host} steps by several calls and clips by itself, so that its step cannot "
                "be told anything here: set gradient_clipping in its configuration"
            )

    def hook_parameters(self) -> None:
        """Let what sums and releases gradients know of parameters that are new."""
        for each in (self.accumulation, self.release):
            if each is not None:
                each.hook_parameters()

    def load_norm(self, norm: float | None, *, begun: bool) -> None:
        """Clip the next released step by a norm that was saved.

        Args:
            norm: None where the state dict has none.
            begun: whether it is of a run that has taken steps.
        """
        known = norm is not None
        self.last_norm = torch.tensor(norm, dtype=torch.float32, device="cpu") if known else None
        if begun and norm is None and self.release is not None and self.release.by_last_step:
            warnings.warn(
                "the state dict has no norm of the step before, which this optimizer clips by: the "
                "next step clips each gradient by its own norm. get_optimizer_state_dict drops the "
                "entry 'torch_bf16', which has it: keep that of optimizer.state_dict(), too",
                stacklevel=2,
            )

    def invalidate(self) -> None:
        """Drop what was derived from the tensors of the last step."""
        self.pending = Pending()
        self.plan: Plan | None = None
        self.setting: Setting | None = None
        self.snapshots: dict[Tensor, Snapshot] = {}
        self._shown: tuple[int, ...] = ()
        self._others: dict[tuple[int, ...], tuple[Setting | None, Plan | None]] = {}

    def select(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take up the plan of the parameters that a host shows now, and keep that of the last."""
        shown = tuple(id(each) for group in groups for each in group["params"])
        if shown != self._shown:
            self._others[self._shown] = self.setting, self.plan
            self.setting, self.plan = self._others.pop(shown, (None, None))
            self._shown = shown

    def __getstate__(self) -> dict[str, Any]:
        kept = "names", "asked_release", "last_norm"
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["names"])
        self.asked_release, self.last_norm = state["asked_release"], state["last_norm"]


def engine_of(optimizer: torch.optim.Optimizer) -> Engine | None:
    """What an optimizer of ours keeps between steps; None for any other."""
    return getattr(optimizer, "_engine", None)

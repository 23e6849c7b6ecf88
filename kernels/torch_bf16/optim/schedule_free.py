"""Schedule-free AdamW and SGD, with the signatures of the package ``schedulefree``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_bf16 import rules
from torch_bf16.argument_checks import check_ranges
from torch_bf16.backends import StepInputs, cuda_graphs, fetch
from torch_bf16.backends.subnormals import subnormals_kept
from torch_bf16.errors import UNTOUCHED, Label, prefix_errors, suffix_errors
from torch_bf16.formats import Format
from torch_bf16.recipe import Recipe
from torch_bf16.rules import ITERATE, State
from torch_bf16.rules.schedule_free import average_weight, interpolation
from torch_bf16.sharding import Shard, as_real, local, reshard, shard_of
from torch_bf16.states.completion import complete_state
from torch_bf16.states.home import Home
from torch_bf16.states.recoding import Changes

from . import exact_weights
from .exact_weights import Write
from .optimizer import BF16Optimizer
from .overview import Place

__all__ = ["AdamWScheduleFree", "SGDScheduleFree"]

# Counters of a parameter group: the average's weights depend on all learning rates so far.
_COUNTS = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0, "train_mode": True}
_NOT_NEGATIVE = (
    *("lr", "betas", "momentum", "eps", "weight_decay"),
    *("warmup_steps", "r", "weight_lr_power"),
)
_ASIDE = State("y", ITERATE, optional=True)


class _ScheduleFree(BF16Optimizer):
    """Weights are ``y`` in train mode and the average ``x`` in eval mode."""

    def _construct_counting(self, arguments: dict[str, Any]) -> None:
        check_ranges(**{name: arguments[name] for name in _NOT_NEGATIVE if name in arguments})
        _check_average(arguments)
        self._construct({**arguments, **_COUNTS}, defaults=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch, in the mode that the others are in."""
        if self.param_groups:
            mode = self.param_groups[0]["train_mode"]
            param_group = {"train_mode": mode, **param_group}
        super().add_param_group(param_group)

    def train(self, mode: bool = True) -> None:
        """Set the weights to ``y``, at which gradients are taken; no effect in train mode.

        Weights that :meth:`eval` set aside come back to the bit. Numbers that were written since,
        by a checkpoint, say, are taken for the average, as in the package.

        Args:
            mode: False for :meth:`eval`.
        """
        with suffix_errors("Nothing was changed"):
            for number, group in enumerate(self.param_groups):
                self._check_options(group, number)
            self._check_shares()
        with torch.no_grad():
            for number, group in enumerate(self.param_groups):
                if group["train_mode"] != mode:
                    reshard(group["params"])
                    self._swap_all(number, group, mode)
                    group["train_mode"] = mode

    def eval(self) -> None:
        """Set the weights to the average ``x``, rounded once, for validation, export and use.

        Until :meth:`train`, ``y`` is kept as a state: in the weights' format, or in fp32 if they
        have a master. State dicts contain it.
        """
        self.train(False)

    @subnormals_kept()
    def _swap_all(self, number: int, group: Mapping[str, Any], mode: bool) -> None:
        beta1, swapped = interpolation(group), []
        try:
            for position, parameter in enumerate(group["params"]):
                state = dict.get(self.state, parameter, {})
                # Before the first step, which copies the weight to z, z is zero.
                if "z" in state and int(state["step"]):
                    self._swap(Place(number, position), parameter, beta1, mode)
                    swapped.append((position, parameter))
        except BaseException:
            # A group has a single mode: the next call would swap these parameters again.
            for position, parameter in swapped:
                self._swap(Place(number, position), parameter, beta1, not mode)
            raise

    def _swap(self, place: Place, parameter: Tensor, beta1: float, mode: bool) -> None:
        shard, state = shard_of(parameter), dict.get(self.state, parameter, {})
        format_ = self.recipe.format_of("weights", shard.shape, parameter.dtype)
        now = as_real(local(self.exact_weight(parameter))).contiguous()
        z = fetch([as_real(local(state["z"]))], now.device)[0].float()
        value = now + (z - now) * (1.0 - beta1 if mode else 1.0 - 1.0 / beta1)
        aside = state.get("y")
        if mode and aside is not None:
            y = as_real(local(aside)).to(now.device).float()
            average = y + (z - y) * (1.0 - 1.0 / beta1)
            # After an interrupt, some weights may be y already.
            unwritten = _stands_for(now, average, shard.memory.dtype, format_) | (now == y)
            value = torch.where(unwritten, y, value)
        if not mode:
            kept = self.recipe.format_of(ITERATE, shard.shape, parameter.dtype)
            aside = Home.of(shard, self.recipe).put(now.to(kept.planes[0].dtype, copy=True))
            aside = shard.place(aside)
        if len(format_.planes) > 1:
            exact_weights.write(self, [Write(place, parameter, shard.place(value))])
        else:
            shard.memory.copy_(value)
        # Only now, because the write may fail. It may also have replaced the dict of the state.
        state = dict.get(self.state, parameter, {})
        if mode:
            state.pop("y", None)
        else:
            state["y"] = aside

    def _complete(
        self, state: Mapping[str, Any], shard: Shard, group: Any, label: Label, changes: Changes
    ) -> dict[str, Any]:
        rule = self.rule_of_group(group)
        if not group["train_mode"] and state.get("y") is not None:
            rule = replace(rule, states=(*rule.states, _ASIDE))
        if state.get("z") is not None and state.get("step") is None:
            # The package schedulefree counts steps only in the group.
            state = {**state, "step": float(group["k"])}
        return complete_state(state, shard, rule, self.recipe, label, changes)

    def _check_options(self, group: Mapping[str, Any], number: int) -> None:
        super()._check_options(group, number)
        with prefix_errors(lambda: f"parameter group {number}:"):
            _check_average(group)

    def _check_shares(self) -> None:
        """Refuse a share of the average that differs from that of the last step, if it is known."""
        shares = self._engine.shares
        for number, group in enumerate(self.param_groups):
            last = shares[number] if number < len(shares) else None
            # Loading a state dict replaces the groups.
            if last is not None and last[0] is group and last[1] != interpolation(group):
                raise ValueError(
                    f"{_share_name(group)}={interpolation(group)} in parameter group {number} was "
                    f"{last[1]} in the step before: weights lie between z and the average at that "
                    "share, and another one would misread them. Do not change it; OneCycleLR and "
                    "CyclicLR leave it alone with cycle_momentum=False"
                )

    def _check_step(self) -> None:
        super()._check_step()
        with suffix_errors(UNTOUCHED):
            self._check_shares()
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                f"{type(self).__name__} is in eval mode: the weights are the average, which is for "
                "validation, and gradients must be taken at those of train mode. Call "
                "optimizer.train() before the forward pass. Nothing was updated"
            )
        firsts = (p for group in self.param_groups for p in group["params"][:1])
        if cuda_graphs.capturing(p.device for p in firsts):
            raise RuntimeError(
                f"a step of {type(self).__name__} cannot be captured in a CUDA graph of your own: "
                "its parameter groups count on the host, and replays would repeat this step's "
                "share of the average. Use optimizer.graphed(), which counts"
            )

    def _count(self, inputs: StepInputs) -> None:
        super()._count(inputs)
        if inputs.is_skipped:
            return
        for group in self.param_groups:
            lr, highest, weight = average_weight(group)
            group["scheduled_lr"], group["lr_max"] = lr, highest
            group["weight_sum"] += weight
            group["k"] += 1
        self._engine.shares = [(group, interpolation(group)) for group in self.param_groups]


def _stands_for(now: Tensor, x: Tensor, dtype: torch.dtype, format_: Format) -> Tensor:
    """A mask of the weights that encoding ``x`` can give: either neighbour, if it draws."""
    if len(format_.planes) == 1:
        x = x.to(dtype).float()
    kept_bits = 8 * sum(plane.dtype.itemsize for plane in format_.planes)
    unit = 1 << max(0, 32 - kept_bits)
    distance = now.view(torch.int32) - x.view(torch.int32)
    return ((distance < unit) & (distance > -unit)) | (now.isnan() & x.isnan())


def _share_name(group: Mapping[str, Any]) -> str:
    return "betas[0]" if "betas" in group else "momentum"


def _check_average(options: Mapping[str, Any]) -> None:
    """Refuse options that give no average: of a group, or for all groups."""
    beta1 = interpolation(options)
    if not 0.0 < beta1 < 1.0:
        raise ValueError(
            f"{_share_name(options)}={beta1} must lie between 0 and 1: it is the share of the "
            "average in the weights at which gradients are taken"
        )
    for name in ("r", "weight_lr_power"):
        check_ranges(**{name: options[name]})
        if options[name] == math.inf:
            raise ValueError(f"{name}={options[name]} must be finite: no average has such weights")


class AdamWScheduleFree(_ScheduleFree):
    """Schedule-free AdamW (Defazio et al., 2024), which needs no schedule and no number of steps.

    Gradients are taken at a point between an iterate and its running average, and the average is
    used afterwards. See :mod:`torch_bf16.rules.schedule_free` for the equations. It keeps the
    iterate ``z`` in place of a first moment, in the format of the weights, or in fp32 if these have
    a master, so that it takes as many bytes as AdamW in both named recipes.

    Call ``optimizer.eval()`` before you validate, save or use the weights, and
    ``optimizer.train()`` before training goes on; both plugins do so. :func:`torch_bf16.follow`
    makes ``model.eval()`` and ``model.train()`` do it.

    Differs from the package ``schedulefree``: it starts in train mode; ``train()`` restores the
    bits that ``eval()`` found, so that validation does not change a run; the bias is corrected by
    the number of steps that each parameter took; ``lr`` as a tensor is read on the host, and so is
    ``found_inf`` of ``GradScaler``; there is no argument ``foreach``. In fp32 the results differ by
    rounding: torch adds products with one rounding, and a kernel here rounds each.

    Args:
        params: as for :class:`AdamW`, as are errors and all arguments not listed here.
        lr: learning rate, 1 to 10 times that of AdamW with a schedule; constant.
        betas: share of the average where gradients are taken, and decay rate of the second moment.
        weight_decay: decoupled decay, at the point where gradients are taken.
        warmup_steps: number of steps over which the learning rate rises to ``lr``.
        r: exponent of the step's number in the weights of the average.
        weight_lr_power: exponent of the highest learning rate so far in the weights of the average.

    Raises:
        ValueError: ``betas[0]`` is not between 0 and 1.

    Example:
        >>> optimizer = torch_bf16.AdamWScheduleFree(model.parameters(), lr=2.5e-3, warmup_steps=2)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.eval()
        >>> prediction = model(torch.ones(1, 4))
        >>> optimizer.train()
    """

    _rule = rules.SCHEDULE_FREE_ADAMW

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.0025,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        *,
        maximize: bool = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct_counting(locals())


class SGDScheduleFree(_ScheduleFree):
    """Schedule-free SGD (Defazio et al., 2024); for the rest, see :class:`AdamWScheduleFree`.

    Args:
        params: as for :class:`AdamWScheduleFree`, as are errors and all arguments not listed here.
        lr: learning rate, 10 to 50 times that of SGD with momentum and a schedule.
        momentum: share of the average where gradients are taken.
        weight_decay: multiplied by the weight and added to the gradient.

    Example:
        >>> optimizer = torch_bf16.SGDScheduleFree(model.parameters(), lr=1.0, momentum=0.9)
    """

    _rule = rules.SCHEDULE_FREE_SGD

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        *,
        maximize: bool = False,
        recipe: str | Recipe = "bf16-stochastic",
        backend: str | None = None,
        release: bool | Mapping[str, Any] = False,
    ) -> None:
        self._construct_counting(locals())

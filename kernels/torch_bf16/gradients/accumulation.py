"""Summing the gradients of several micro-batches without losing the small ones.

torch sums them in ``p.grad``, in bf16 and rounded to nearest: added to a sum of 0.5, a gradient of
0.001 changes nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.engine import Engine
from torch_bf16.engine.wrappers import optimizer_for
from torch_bf16.errors import warn_once
from torch_bf16.parameters import parameters_of
from torch_bf16.recipe import ACCUMULATIONS, Recipe
from torch_bf16.sharding import (
    Unit,
    any_flattened,
    before_backward_of,
    local,
    shard_of,
    units,
)

from .backward import Passes
from .ddp_sums import Fp32Reduction
from .hooked_parameters import HookedParameters, remove_with, summed, weakly
from .stochastic_sums import StochasticSums
from .summed_pass import SummedPass
from .sums import addable
from .zero_gradients import let_torch_set_zeros

__all__ = ["GradientAccumulation", "accumulate_as", "accumulate_gradients"]

_ADDED_BY_OTHERS = (
    "something adds to p.grad itself after torch.autograd.grad(), as the zero-bubble schedules of "
    "torch.distributed.pipelining do: these sums are rounded to nearest, not stochastically. "
    "Accumulate in 'fp32', or use another schedule, such as Schedule1F1B"
)


def accumulate_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, format: str | None = None
) -> GradientAccumulation:
    """Sum the gradients of micro-batches in a format of their own.

    ``backward`` adds to ``p.grad``, ``zero_grad`` resets it, and clipping and the step see the sum,
    as in torch. Formats:

    - ``"bf16_nearest"``: torch's own, 2 bytes per parameter. Gradients below 2^-9 of the sum are
      lost.
    - ``"bf16_stochastic"``: 2 bytes. A sum is rounded up or down with the right probabilities, in
      place. The noise is a pure function of seed, step, micro-batch, parameter and element, with no
      state to be saved. From the second micro-batch on, gradients wait for each other, 32 MiB of
      them for one kernel call: ``p.grad`` is the sum when ``backward`` returns. If something may
      read it earlier, each gradient is added as it arrives: a hook on the parameter, one that its
      ``AccumulateGrad`` node had before the first sum, or a DDP module that reduces in this pass.
    - ``"fp32"``: 4 bytes. ``p.grad`` is fp32 beside the bf16 parameter; torch 2.10 or newer.

    Under DDP the sum is kept per rank and reduced by the backward pass that is outside of
    ``no_sync``, in bf16 for the first two formats and in fp32 for the last. Under FSDP2 the sharded
    gradients are summed; with ``set_requires_gradient_sync(False)``, FSDP2 itself sums whole ones,
    in its ``reduce_dtype``. Without a wrapper, a recipe's ``accumulate`` is enough. A parameter
    that is frozen now, and trained later, takes part after its first step; until then torch sums.
    Of several optimizers that have a parameter, the one sums that was made, has loaded states or
    has stepped last; beside a living one with ``"fp32"`` gradients are fp32 for all of them.

    Args:
        model: the module as it is called: after DDP or ``fully_shard`` wrapped it.
        optimizer: an optimizer of this package or a converted one, also in a host's wrapper; its
            parameters get hooks.
        format: see above; replaces an earlier one. None takes the recipe's ``accumulate``.

    Returns:
        A handle; ``remove()`` gives gradients back to torch.

    Raises:
        ValueError: the format is unknown, the optimizer is not one of ours, or the wrapper of the
            model has an option that would undo the format.
        NotImplementedError: FSDP1, or a host, sums the gradients itself.

    Example:
        >>> handle = torch_bf16.accumulate_gradients(model, optimizer, "bf16_stochastic")
        >>> for micro_batch in torch.randn(3, 8, 4).unbind():
        ...     (model(micro_batch).square().mean() / 3).backward()
        >>> optimizer.step()
        >>> handle.remove()
    """
    ours = optimizer_for("accumulate_gradients", optimizer)
    check_module("accumulate_gradients", model)
    format = ours.recipe.accumulate if format is None else format
    if format not in ACCUMULATIONS:
        raise ValueError(
            f"accumulation format {format!r} is unknown; use one of {', '.join(ACCUMULATIONS)}"
        )
    if (host := ours._engine.host) is not None:
        raise NotImplementedError(
            f"the parameters cannot be accumulated in {format!r}: {host} adds micro-batches "
            "up itself, in bf16. Use larger ones"
        )
    return GradientAccumulation(ours, format, model)


def accumulate_as(recipe: Recipe, optimizer: Any) -> None:
    """Follow a recipe's ``accumulate``, as far as that needs no module."""
    # Also torch's own, where an optimizer of an earlier training may still live and round sums.
    sums = recipe.accumulate != "bf16_nearest"
    if sums or any(id(p) in summed for p in parameters_of(optimizer)):
        GradientAccumulation(optimizer, recipe.accumulate)


class GradientAccumulation:
    """A handle on how an optimizer's gradients are summed; see :func:`accumulate_gradients`.

    Attributes:
        format: ``"bf16_nearest"``, ``"bf16_stochastic"`` or ``"fp32"``.
    """

    def __init__(self, optimizer: Any, format: str, model: nn.Module | None = None) -> None:
        parameters = parameters_of(optimizer)
        if format != "bf16_nearest" and any_flattened(parameters):
            raise NotImplementedError(
                f"gradients cannot be accumulated in {format!r}: FSDP1 sums them itself, in bf16 "
                "beside bf16 parameters, and shows a parameter only the sum. Shard with "
                "torch.distributed.fsdp.fully_shard (FSDP2), or accumulate in 'bf16_nearest'"
            )
        sharded = [] if model is None or format == "bf16_nearest" else [*units(model)]
        _check_dtypes(sharded, format)
        self._reduction: Fp32Reduction | None = None
        if format == "fp32":
            _check_torch()
            let_torch_set_zeros()
            if model is not None:
                self._reduction = Fp32Reduction.of(model)
        engine: Engine = optimizer._engine
        # Only now: a call that is refused leaves an earlier accumulation as it is.
        if engine.accumulation is not None:
            engine.accumulation.remove()
        self.format = format
        # Not its engine, which holds all states: whoever keeps this handle does not keep those.
        self._optimizer = weakref.ref(optimizer)
        self._hooks: list[Any] = []
        remove_with(self, self._hooks)
        # A conversion would lose the dtype of fp32 sums.
        in_fp32 = format == "fp32"
        self._hooked = HookedParameters(
            optimizer,
            self,
            summed,
            convertible=not in_fp32,
            restore=_leave_to_torch if in_fp32 else None,
        )
        self._passes = Passes(SummedPass, self._finish)
        # Versions of the sums that a pass without gradients has put back, by id of the parameter,
        # which its hooks keep alive.
        self._returned: dict[int, int] = {}
        self._stochastic: StochasticSums | None = None
        try:
            if format == "bf16_stochastic":
                self._stochastic = StochasticSums(optimizer, model)
                self._hooks += self._stochastic.hooks
            for unit in sharded:
                take = functools.partial(weakly(self._take_all), [*map(id, unit.parameters)])
                self._hooks.append(before_backward_of(unit, take))
            self.hook_parameters()
        except BaseException:
            self.remove()
            raise
        self._hooks += [
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_step),
        ]
        engine.accumulation = self
        if engine.release is not None:
            # Released steps need the sums, so their hooks must come after these.
            engine.release.hook_parameters(anew=True)

    def remove(self) -> None:
        """Leave sums to torch again; existing gradients are cast to the parameters' dtype."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hooked.drop(self._hooked.by_id)
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._engine.accumulation is self:
            optimizer._engine.accumulation = None

    def hook_parameters(self) -> None:
        """Hook the parameters that are new, or no longer frozen."""
        if self._stochastic is not None:
            self._stochastic.find_names()
        self._hooked.update()

    def make_groups(self) -> None:
        """Forget which gradients are added together."""
        if self._stochastic is not None:
            self._stochastic.make_groups()

    def hook(self, parameter: Any) -> list[Any]:
        """Sum a parameter's gradients here from now on; returns the hooks' handles."""
        if parameter.is_complex() or self.format == "bf16_nearest":
            # torch's own sums, which are in fp32 for complex numbers.
            return []
        sharded, hooks = shard_of(parameter).replaces_parameter, []
        if self.format == "fp32":
            # FSDP2 sets bf16 gradients before the hooks run; autograd casts those that it sets.
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = None if sharded else torch.float32
            if gradient is not None:
                parameter.grad = gradient.float()
            hooks = [] if self._reduction is None else self._reduction.hook(parameter)
            if not sharded:
                return hooks
        # FSDP2's sharded parameters never call their tensor hook, hence the hooks on units.
        key, take_all = id(parameter), weakly(self._take_all)
        return [
            *hooks,
            parameter.register_hook(lambda _: take_all([key])),
            parameter.register_post_accumulate_grad_hook(weakly(self._merge)),
        ]

    def _take_all(self, keys: list[int]) -> None:
        """Take sums, by id, out of ``p.grad``: autograd must not add the next gradient to them."""
        for key in keys:
            # FSDP2's units also hold other optimizers' parameters, and a graph may outlive a hook.
            parameter = self._hooked.by_id.get(key)
            if parameter is None or parameter.grad is None or not self._sums_now(key):
                self._returned.pop(key, None)
                continue
            version = parameter.grad._version
            written = self._returned.pop(key, version) != version
            if parameter.dtype == torch.bfloat16:
                running = self._passes.current()
                if running is not None:
                    running.aside[key] = parameter, parameter.grad
                    parameter.grad = None
                    if written:
                        running.written.add(key)

    def _sums_now(self, key: int) -> bool:
        """Whether no other optimizer has the parameter now, whose steps number the noise."""
        return summed.get(key) is self._hooked

    def _merge(self, parameter: Any) -> None:
        """Add the gradient that has just arrived to the sum, which goes back into ``p.grad``."""
        if not self._sums_now(id(parameter)):
            return
        running = self._passes.current()
        total = None
        if running is not None:
            running.merged = True
            _, total = running.aside.pop(id(parameter), (None, None))
        if parameter.dtype != torch.bfloat16:
            return
        if self._optimizer() is None:
            self.remove()
        new = parameter.grad
        if total is None or running is None:
            if self._stochastic is not None:
                self._stochastic.begin(parameter)
            else:
                parameter.grad = new.float()
            return
        if self._stochastic is None:
            total = total.float()
        in_fp32 = total.dtype == torch.float32
        by_torch = not self._hooked.by_id or not addable(new, total, parameter)
        if by_torch or (in_fp32 and new.requires_grad):
            parameter.grad = total + new
            return
        parameter.grad = total
        if self._stochastic is not None and not in_fp32:
            self._stochastic.add(running, parameter, total, new)
            return
        with torch.no_grad():
            local(total).add_(local(new))

    def _finish(self, running: SummedPass) -> None:
        """Add the waiting gradients, and put back the sums for which no gradient has arrived.

        The latter happens under ``torch.autograd.grad``.
        """
        if self._stochastic is not None:
            self._stochastic.finish(running)
        returned = running.put_back()
        # Where gradients arrive, they are added here: it was zero_grad, say, that wrote the sum.
        if not running.written.isdisjoint(returned):
            warn_once(_ADDED_BY_OTHERS)
        self._returned.update(returned)

    def _after_step(self, *_: Any) -> None:
        optimizer: Any = self._optimizer()
        if optimizer.state:
            self._hooked.claim()
        if self._stochastic is not None:
            self._stochastic.after_step(optimizer.state)
        self._returned.clear()
        self.hook_parameters()


def _leave_to_torch(parameter: Any) -> None:
    """Let a parameter's gradient have the parameter's dtype again, after sums in fp32."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = parameter.dtype
    if gradient is not None:
        parameter.grad = gradient.to(parameter.dtype)


def _check_torch() -> None:
    if not hasattr(Tensor, "grad_dtype"):
        raise ValueError(
            "accumulating gradients in fp32 beside bf16 parameters needs torch 2.10 or newer, and "
            f"this is {torch.__version__}; use 'bf16_stochastic'"
        )


def _check_dtypes(sharded: Iterable[Unit], format: str) -> None:
    """Raise for a unit of FSDP2 that reduces gradients in bf16, which would undo the format."""
    for unit in sharded:
        low = unit.reduce_dtype != torch.float32
        if low and any(p.dtype == torch.bfloat16 for p in unit.parameters):
            raise ValueError(
                f"gradients cannot be accumulated in {format!r} for {unit.name!r}: fully_shard "
                f"reduces its gradients in {unit.reduce_dtype or 'bf16'}, and also sums them so "
                "without gradient synchronisation. Use fully_shard(module, "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )

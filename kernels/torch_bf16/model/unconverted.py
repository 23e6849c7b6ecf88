"""Warns of optimizers that step bf16 weights of ours without having been converted."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.wrappers import held_optimizers
from torch_bf16.errors import warn, warn_once
from torch_bf16.locks import fork_safe_lock
from torch_bf16.parameters import parameters_in, parameters_of

from .copied_weights import forget_sources, source_of, sources

__all__ = ["FOR_OTHERS", "warn_unconverted"]

FOR_OTHERS = "_bf16_for_others"
"""Marks a hook on all optimizers that does nothing at steps of our optimizers."""

_lock = fork_safe_lock()
_hooks: list[RemovableHandle] = []
_watched: OrderedDict[int, _Watched] = OrderedDict()
_ADVICE_FOR_LBFGS = (
    "LBFGS cannot be converted. Take the fp32 weights before its first step: exact = torch_bf16."
    "fp32_state_dict(model, optimizer), with the optimizer that has trained so far, and then "
    "model.float().load_state_dict(exact)"
)
# A part may be watched, and the model around it.
_named: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def warn_unconverted(model: nn.Module, advice: str) -> RemovableHandle:
    """Warn if an optimizer that was not converted steps bf16 weights of a model; once for each.

    Such an optimizer rounds every update to the nearest bf16 number, and nothing else would show
    it. Every optimizer of the process is checked, at its first step only. One that steps a deep
    copy of the model is named once per process, because programs make many: a client's, or that of
    an inner loop. :func:`cast_model` calls this; a later call for the same model takes the place of
    an earlier one.

    Args:
        model: a model that was cast, and may be sharded later; not kept alive.
        advice: what to do instead; ends the warning.

    Returns:
        A handle whose ``remove()`` ends the checks.

    Example:
        >>> model = torch_bf16.cast_model(torch.nn.Linear(4, 4))
        >>> handle = plugin_api.warn_unconverted(model, "Call torch_bf16.convert(optimizer).")
    """
    check_module("warn_unconverted", model)
    handle = RemovableHandle(_watched)
    with _lock:
        if not _hooks:
            # Once and for good: torch iterates over these hooks in the steps of other threads.
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
        models = {key: live for key, each in _watched.items() if (live := each.model()) is not None}
        is_known = any(live is model for live in models.values())  # its copies are no one else's
        if not is_known and (numbers := sources() & {*map(id, parameters_in(model))}):
            # Not those that it shares with models cast before, as a learner does with its encoder.
            others = {id(p) for each in models.values() for p in parameters_in(each)}
            forget_sources(numbers - others)
        for key in [key for key in _watched if models.get(key, model) is model]:
            del _watched[key]
        _watched[handle.id] = _Watched(model, advice)
    return handle


class _Watched:
    """A cast model, and the optimizers that have stepped since then."""

    def __init__(self, model: nn.Module, advice: str) -> None:
        self.model = weakref.ref(model)
        self._advice = advice
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if an optimizer steps weights of the model or of a copy, at its first step."""
        if optimizer in self._seen or (live := self.model()) is None:
            return
        self._seen.add(optimizer)
        # It is one of ours, or leaves the step to one that it holds, as SAM and Lookahead do.
        if optimizer in _named or held_optimizers(optimizer):
            return
        cast = {*filter(_is_bf16, parameters_in(live))}
        if any(p in cast for p in parameters_of(optimizer)):
            _named.add(optimizer)
            # What the advice names would refuse it.
            of_lbfgs = isinstance(optimizer, torch.optim.LBFGS)
            warn(
                f"{type(optimizer).__name__} steps over bfloat16 weights of "
                f"{type(live).__name__} and was not converted: it rounds every update to nearest, "
                f"and small ones are lost. {_ADVICE_FOR_LBFGS if of_lbfgs else self._advice}",
            )
            return
        sources = {id(p) for p in cast}
        if any(
            p.requires_grad and _is_bf16(p) and source_of(p) in sources
            for p in parameters_of(optimizer)
        ):
            _named.add(optimizer)
            warn_once(
                f"{type(optimizer).__name__} steps over bfloat16 weights of a copy of a cast "
                f"{type(live).__name__} and was not converted: it rounds every update to nearest, "
                "and small ones are lost. Convert it, by torch_bf16.convert(optimizer, recipe, "
                "model=copy), before its first step; or call float() on the copy, which then "
                "trains in fp32, as the outer model of DiLoCo should",
                key="unconverted copy",
            )


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # No such steps are compiled, nor this check into them.
    if torch.compiler.is_compiling():
        return
    # One call into C makes the list: no other thread adds to the models meanwhile.
    for each in [*_watched.values()]:
        each.check(optimizer)


setattr(_before_step, FOR_OTHERS, True)


def _is_bf16(parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16

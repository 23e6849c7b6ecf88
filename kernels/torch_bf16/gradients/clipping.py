"""Clipping by the norm of all gradients, computed without rounding to bf16 on the way.

It reads the gradients once, in an order that is the same in every run on a device, and waits for
nothing. The next step uses the norm on the device: it reads the gradients a second time and scales
as it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_bf16.engine.engine import engine_of
from torch_bf16.engine.pending import TOO_LATE_TO_SKIP, Pending, scale_in_place
from torch_bf16.engine.wrappers import held_optimizers
from torch_bf16.errors import with_article
from torch_bf16.parameters import parameters_of
from torch_bf16.sharding import gradients_of

from .hooked_parameters import released
from .norm import clip_coefficient, norm_over_ranks, norms_of

__all__ = [
    "clip_grad_norm_",
    "clip_next_step",
    "refuse_released",
    "scale_gradients",
    "total_norm",
]


_NO_PARAMETER = (
    "gradients of {} were asked for; give parameters, for example model.parameters(). "
    "clip_next_step(optimizer, max_norm) clips those of an optimizer"
)
_ADVICE = (
    "Clip with release_gradients(model, optimizer, max_norm=..., norm='parameter' or 'last_step')"
)
_NO_OPTIMIZER = (
    "clip_next_step was given {} for an optimizer; give those that take the step, and what they "
    "clip as parameters="
)
_NO_CLIPPED = "{} was given {{}} for an optimizer; give those whose gradients were clipped"


def total_norm(
    parameters: Tensor | Iterable[Tensor], *, optimizers: Optimizer | Iterable[Optimizer] = ()
) -> Tensor:
    """The 2-norm of all gradients together.

    torch computes it in the gradients' dtype, which for bf16 is wrong by up to 0.4 %. Here squares
    are summed in fp64 on CPUs; on GPUs in fp32 over pieces of 65,536 elements, scaled where they
    would exceed its range, and in fp64 over pieces. On other devices and for other dtypes, torch
    sums each tensor in fp32, whose range ends at norms of 1.8e19. For sharded parameters every rank
    sums its own part, and the sums are added up over the ranks that hold other parts: call it on
    all of them. The result is the same on every rank and in every run on a device; its last bits
    depend on how tensors are cut.

    Args:
        parameters: parameters without a gradient are skipped; gradients are only read.
        optimizers: what a clip or ``scale_next_step`` has left to their next steps counts as done;
            also in a host's wrapper, and those of other libraries have nothing left to do.

    Returns:
        The norm: 0-d fp32 tensor on the gradients' device, not waited for; 0 without gradients.

    Raises:
        ValueError: a gradient is sparse, or one of ``optimizers`` is not an optimizer.
        NotImplementedError: gradients were released, and clipping would do nothing.

    Example:
        >>> norm = total_norm(model.parameters())
    """
    given = _as_list(optimizers, Optimizer, _NO_CLIPPED.format("total_norm"))
    coefficients = [
        (pending.scaled(owned), pending.coefficient) for owned, pending in _pending_in(given)
    ]
    return _norm_as_scaled({id(p): p for p in _as_list(parameters)}, coefficients)


def _norm(parameters: Sequence[Tensor]) -> Tensor:
    """See :func:`total_norm`; each parameter once."""
    norms = norms_of(parameters)
    if norms:
        return norm_over_ranks(norms)
    refuse_released(parameters)
    return torch.zeros((), dtype=torch.float32, device="cpu")


def refuse_released(parameters: Tensor | Iterable[Tensor], advice: str = _ADVICE) -> None:
    """Refuse to clip gradients that were released: it would do nothing, without an error.

    :func:`total_norm` and what clips by it call this themselves.

    Args:
        parameters: parameters whose gradients are to be clipped, in any way.
        advice: what clips them instead; ends the message. A host's plugin names its own options.

    Raises:
        NotImplementedError: none of them has a gradient any more, and some were released.

    Example:
        >>> plugin_api.refuse_released(model.parameters())
    """
    parameters = _as_list(parameters)
    if any(id(p) in released for p in parameters) and all(p.grad is None for p in parameters):
        raise NotImplementedError(
            "the gradients were released inside backward(), so that nothing is left to clip. "
            f"{advice}"
        )


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place to a 2-norm of at most ``max_norm``, all of them together.

    ``torch.nn.utils.clip_grad_norm_``, with its signature and the norm of :func:`total_norm`. If an
    optimizer of this package takes the step, :func:`clip_next_step` saves the pass that writes.

    Args:
        parameters: parameters without a gradient are skipped.
        max_norm: the largest norm that is left alone.
        norm_type: 2; others are refused.
        error_if_nonfinite: raise if the norm is not finite; that waits for the device.
        foreach: without effect, as all gradients of a device are scaled together.

    Returns:
        The norm before clipping: 0-d fp32 tensor on the gradients' device.

    Raises:
        ValueError: a gradient is sparse, an optimizer was passed, or ``norm_type`` is not 2.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; nothing was clipped.
        NotImplementedError: gradients were released, and clipping would do nothing.

    Example:
        >>> norm = torch_bf16.clip_grad_norm_(model.parameters(), 1.0)
    """
    _check_clip_norm(max_norm)
    if norm_type != 2:
        raise ValueError(
            f"norm_type={norm_type!r} was asked for, and clip_grad_norm_ computes the 2-norm only; "
            "torch.nn.utils.clip_grad_norm_ computes others, in the gradients' dtype"
        )
    parameters = _as_list(parameters)
    norm = _norm(parameters)
    _scale(parameters, _coefficient(norm, max_norm, error_if_nonfinite))
    return norm


def clip_next_step(
    optimizers: Optimizer | Iterable[Optimizer],
    max_norm: float,
    *,
    parameters: Tensor | Iterable[Tensor] | None = None,
    error_if_nonfinite: bool = False,
    skip_nonfinite: bool = False,
) -> Tensor:
    """Let the next steps see gradients whose common 2-norm is at most ``max_norm``.

    If the parameters include all that have gradients in one of our optimizers, its next step
    multiplies gradients as it reads them, and so does a further step on the same ones; ``.grad``
    stays as it is. If ``.grad`` is replaced or written before the step, the step warns and scales
    nothing. Other gradients are scaled in place: those of only some of an optimizer's parameters,
    of parameters that several optimizers own, and of another library's optimizers. So are those
    that were clipped if others come before the step. Scaling that ``scale_next_step`` or an earlier
    clip since the last backward pass has requested counts as done.

    Writes that torch does not count, by ``.data`` or a replayed CUDA graph, are not seen: a program
    that clips only some of its steps calls ``optimizer.scale_next_step(1.0)`` before the others.

    Args:
        optimizers: one or several.
        max_norm: the largest norm that is left alone.
        parameters: parameters whose common norm is clipped; None for all that the optimizers own.
        error_if_nonfinite: raise if the norm is not finite; that waits for the device.
        skip_nonfinite: if the norm is not finite, the next steps on these parameters leave weights,
            states and step counts as they are and add 1 to ``optimizer.skipped_steps``; so does a
            further step on the same gradients.

    Returns:
        The norm before clipping: 0-d fp32 tensor on the gradients' device.

    Raises:
        ValueError: a gradient is sparse, or ``skip_nonfinite`` was set for an optimizer
            of another library.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; nothing was clipped.
        NotImplementedError: gradients were released, and clipping would do nothing.

    Example:
        >>> norm = torch_bf16.clip_next_step(optimizer, 1.0)
        >>> optimizer.step()
    """
    _check_clip_norm(max_norm)
    owned = {each: parameters_of(each) for each in _as_list(optimizers, Optimizer, _NO_OPTIMIZER)}
    pending_of_each: dict[Any, Pending] = {}
    for each in owned:
        if (engine := engine_of(each)) is not None:
            engine.check_host()
            pending_of_each[each] = engine.pending
    foreign = [type(each).__name__ for each in owned if each not in pending_of_each]
    if skip_nonfinite and foreign:
        raise ValueError(
            f"clip_next_step: skip_nonfinite=True cannot skip a step of {foreign[0]}, which is no "
            "optimizer of torch_bf16; torch_bf16.convert() it, or leave skip_nonfinite out"
        )
    every = [*chain.from_iterable(owned.values())]
    owners = Counter(map(id, every)) if len(owned) > 1 else Counter()
    shared = {key for key, count in owners.items() if count > 1}
    clipped = {id(p): p for p in (every if parameters is None else _as_list(parameters))}
    gradients = {each: _gradients_of(owned[each]) for each in pending_of_each}
    for optimizer, pending in pending_of_each.items():
        # An earlier clip was for older gradients, such as those before another backward().
        if not pending.settle(owned[optimizer]):
            pending.lapse()
    coefficients = [(owned[each], pending.coefficient) for each, pending in pending_of_each.items()]
    norm = _norm_as_scaled(clipped, coefficients)
    coefficient = _coefficient(norm, max_norm, error_if_nonfinite)
    for optimizer, pending in pending_of_each.items():
        own_gradients = gradients[optimizer]
        if own_gradients.keys().isdisjoint(clipped):
            continue
        alone = own_gradients.keys() <= clipped.keys() and shared.isdisjoint(own_gradients)
        if alone:
            optimizer.scale_next_step(coefficient * pending.coefficient)
            for key in own_gradients:
                del clipped[key]
        if skip_nonfinite:
            engine: Any = engine_of(optimizer)
            engine.requests_for_next_step(TOO_LATE_TO_SKIP).skip_nonfinite(norm)
        if alone or skip_nonfinite:
            pending.only_for(own_gradients.values())
    if clipped:
        _scale(clipped.values(), coefficient)
        for optimizer, pending in pending_of_each.items():
            # The line above wrote to gradients for which scaling may be pending: that stays valid.
            pending.expect_written(gradients[optimizer].values())
    return norm


def scale_gradients(optimizers: Optimizer | Iterable[Optimizer]) -> None:
    """Scale gradients in place now, by what a clip or ``scale_next_step`` has left to the step.

    For programs that read or write gradients between clipping and the step: to clip them by value,
    too, or to add noise. The step then scales no more; a request to skip it stays until the step
    or ``zero_grad``.

    Args:
        optimizers: one or several, also in a host's wrapper; those of other libraries have nothing
            left to do.

    Raises:
        ValueError: one is not an optimizer.

    Example:
        >>> norm = torch_bf16.clip_next_step(optimizer, 1.0)
        >>> torch_bf16.scale_gradients(optimizer)
        >>> torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        >>> optimizer.step()
    """
    given = _as_list(optimizers, Optimizer, _NO_CLIPPED.format("scale_gradients"))
    for parameters, pending in _pending_in(given):
        # Of gradients that are gone, the step warns.
        if not pending.settle(parameters):
            continue
        _scale(parameters, pending.coefficient)
        pending.forget_coefficient()


def _pending_in(optimizers: Iterable[Optimizer]) -> Iterator[tuple[list[Tensor], Pending]]:
    """The parameters of each of our optimizers in these, and what is pending for its next step."""
    for each in chain.from_iterable(map(held_optimizers, optimizers)):
        yield parameters_of(each), each._engine.pending


def _norm_as_scaled(
    parameters: Mapping[int, Tensor],
    coefficients: Sequence[tuple[Sequence[Tensor], float | Tensor]],
) -> Tensor:
    """The norm of the gradients, times the coefficients pending for their owners' next steps."""
    if all(not isinstance(each, Tensor) and each == 1.0 for _, each in coefficients):
        return _norm([*parameters.values()])
    left, norms = dict(parameters), []
    for owned, coefficient in coefficients:
        clipped = [p for p in owned if left.pop(id(p), None) is not None]
        if clipped:
            norms.append(_norm(clipped) * abs(coefficient))
    if left or not norms:
        norms.append(_norm([*left.values()]))
    return norm_over_ranks({(): norms})


def _gradients_of(parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """The existing gradients of parameters, by the parameters' ids."""
    pairs = zip(map(id, parameters), gradients_of(parameters), strict=True)
    return {key: gradient for key, gradient in pairs if gradient is not None}


def _scale(parameters: Iterable[Tensor], coefficient: float | Tensor) -> None:
    scale_in_place((p.grad for p in parameters if p.grad is not None), coefficient)


def _coefficient(norm: Tensor, max_norm: float, error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so they cannot be clipped to "
            f"{max_norm}; pass error_if_nonfinite=False to go on with them"
        )
    return clip_coefficient(norm, max_norm)


def _check_clip_norm(max_norm: Any) -> None:
    if isinstance(max_norm, Tensor):
        fits = max_norm.numel() == 1
    else:
        fits = isinstance(max_norm, Real) and not isinstance(max_norm, bool) and max_norm >= 0  # pyright: ignore[reportOperatorIssue]
    if not fits:
        raise ValueError(
            f"max_norm={max_norm!r} must be a number of at least 0, or a tensor with one element"
        )


def _as_list(argument: Any, kind: type = Tensor, message: str = _NO_PARAMETER) -> list[Any]:
    """One object of a kind, or several, as a list; raises for an object of another kind."""
    alone = isinstance(argument, kind) or not isinstance(argument, Iterable)
    # An object that is passed twice counts once.
    several = [argument] if alone else [*{id(each): each for each in argument}.values()]
    if wrong := [each for each in several if not isinstance(each, kind)]:
        raise ValueError(message.format(with_article(wrong[0])))
    return several

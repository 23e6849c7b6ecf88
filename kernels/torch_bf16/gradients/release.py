"""Gradient release: the step runs inside the backward pass, and frees the gradients it has used.

After "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (Lv et al.,
2023, https://arxiv.org/abs/2306.09782).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.wrappers import optimizer_for
from torch_bf16.errors import warn_once
from torch_bf16.parameters import parameters_of
from torch_bf16.rules import STORE
from torch_bf16.sharding import any_flattened

from .hooked_parameters import released
from .release_options import ReleaseOptions
from .released_steps import ReleasedSteps

__all__ = ["release_as", "release_gradients"]


def release_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    norm: str = "parameter",
    accumulation_steps: int = 1,
) -> ReleasedSteps:
    """Take each parameter's step inside ``backward()``, and free its gradient right after it.

    Gradients wait until 32 MiB of them can share one kernel call; larger ones are taken alone. So
    they need the memory of the largest one plus 32 MiB (up to 64 in a pass in which they arrive in
    another order than before), instead of 2 bytes per parameter. Weights and states are, bit for
    bit, those of ``optimizer.step()`` after the whole backward pass, except in one case of
    checkpointing, below. ``optimizer.step()`` still counts the step, for LR schedulers too, and
    takes it for parameters that still have a gradient, which it frees; so learning rates must be
    set before ``backward()``.

    - FSDP2: gradients are released as groups of them are reduced, and the norm of a sharded
      parameter takes one small all-reduce.
    - DDP: a bucket's steps run when its reduction is over, alongside that of the next bucket. DDP's
      buckets stay, 2 bytes per parameter; ``gradient_as_bucket_view=True`` keeps it from holding
      gradients twice. If DDP finds unused parameters, has a static graph or somebody else's
      communication hook, ``optimizer.step()`` takes all steps.
    - Accumulation: in the last of ``accumulation_steps`` backward passes a sum is used as soon as
      it is complete. The sum is exactly that of ordinary steps, in the recipe's ``accumulate``,
      and so takes 2 or 4 bytes per parameter until then. Passes that reduce nothing, in
      ``no_sync`` of DDP or with ``set_requires_gradient_sync(False)`` of FSDP2, take no step, and
      FSDP2's do not count. After fewer passes ``optimizer.step()`` takes the steps; passes whose
      gradients are zeroed before their step do not count.

    What cannot be noticed: a weight that a region under activation checkpointing also uses without
    a gradient (``w.detach()``, or under ``no_grad``). Its step may come before the region is
    computed again, which then sees the new weight. Leave such a region out of checkpointing: torch
    raises where a backward pass needs a saved weight that was stepped since.

    What cannot work: clipping by the global norm of this step, ``total_norm`` and
    ``scale_next_step``, because the step runs before all gradients exist, and ``GradScaler``; bf16
    has fp32's range and needs no loss scaling. These are refused, but torch's own functions cannot
    be: ``torch.nn.utils.clip_grad_norm_`` just finds no gradient to clip.

    Args:
        model: the module as it is called: after DDP or ``fully_shard`` wrapped it.
        optimizer: an optimizer of this package or a converted one; its parameters get hooks.
            ``release=True`` in its constructor does the same if no ranks reduce gradients, or if
            ``fully_shard`` does.
        max_norm: bound of the norm that ``norm`` names; None clips nothing.
        norm: ``"parameter"`` clips each gradient by its own norm; ``"last_step"`` multiplies all by
            the coefficient that follows from the global norm of the previous step, and clips as
            ``"parameter"`` in the first step. The norm is in ``optimizer.state_dict()``.
        accumulation_steps: how many backward passes make one step.

    Returns:
        A handle; ``remove()`` returns to ordinary steps.

    Raises:
        ValueError: an argument is out of range or of the wrong type.
        NotImplementedError: the combination is one of those above, or FSDP1 reduces gradients.

    Example:
        >>> handle = torch_bf16.release_gradients(model, optimizer, max_norm=1.0)
        >>> model(torch.randn(8, 4)).square().mean().backward()  # updates the weights
        >>> optimizer.step()
        >>> handle.remove()
    """
    ours = optimizer_for("release_gradients", optimizer)
    check_module("release_gradients", model)
    options = ReleaseOptions(max_norm, norm, accumulation_steps)
    _check(ours)
    return ReleasedSteps(model, ours, options)


def release_as(release: bool | Mapping[str, Any], optimizer: Any) -> None:
    """Follow a constructor's ``release``, as far as that needs no module.

    Raises:
        ValueError: it is neither a bool nor options of :func:`release_gradients`.
        NotImplementedError: the gradients cannot be released.
    """
    if release is False:
        return
    names = [each.name for each in dataclasses.fields(ReleaseOptions)]
    if release is not True and not (isinstance(release, Mapping) and release.keys() <= {*names}):
        raise ValueError(
            f"release={release!r} must be True, False or a dict of options of release_gradients: "
            f"{', '.join(names)}"
        )
    arguments: dict[str, Any] = {} if release is True else {**release}
    options = ReleaseOptions(**arguments)
    _check(optimizer)
    ReleasedSteps(None, optimizer, options)
    optimizer._engine.release_options = release if release is True else arguments
    if "max_norm" not in arguments:
        warn_once(
            "release=True: steps run inside backward(), so that torch.nn.utils.clip_grad_norm_ and "
            "a trainer's max_grad_norm find no gradient and clip nothing. Clip with "
            "release={'max_norm': 1.0, 'norm': 'last_step'} or 'parameter' in place of 'last_"
            "step', or say that nothing is clipped with release={'max_norm': None}",
        )


def _check(optimizer: Any) -> None:
    engine = optimizer._engine
    parameters = parameters_of(optimizer)
    why = None
    if any(optimizer.rule_of_group(group) is STORE for group in optimizer.param_groups):
        why = (
            f"{type(optimizer).__name__} has no fused rule, and its own step may combine all "
            "parameters. Use an optimizer of torch_bf16, or step after the backward pass"
        )
    elif engine.release is None and _released_by_another(parameters):
        why = (
            "another optimizer has released those of the same parameters. Call remove() on what "
            "release_gradients returned for it, or with Accelerate accelerator.free_memory(), first"
        )
    elif any_flattened(parameters):
        why = (
            "FSDP1 reduces them together, into the gradient of a flat parameter. Shard the model "
            "with fully_shard, whose gradients can be released, or step after the backward pass"
        )
    elif engine.host is not None:
        why = f"{engine.host} reduces them, and takes the step. Leave that to it"
    elif optimizer.observers:
        why = "an UpdateMonitor watches the optimizer, which looks at whole steps. Remove it first"
    if why:
        raise NotImplementedError(f"gradients cannot be released: {why}")


def _released_by_another(parameters: list[Any]) -> bool:
    """Whether another live optimizer releases any of these; releases of dead ones are removed."""
    handles = {hooks.owner for p in parameters if (hooks := released.get(id(p))) is not None}
    abandoned = {handle for handle in handles if handle.abandoned}
    for handle in abandoned:
        handle.remove()
    return handles != abandoned

"""The set-up of gradients after a model was wrapped: sums, reduction and release."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torch_bf16.engine.wrappers import held_optimizers, optimizer_for
from torch_bf16.living import LivingSet

from .accumulation import accumulate_gradients
from .release import release_gradients
from .release_options import ReleaseOptions
from .released_steps import ReleasedSteps
from .wire import reduce_gradients

__all__ = ["end_releases", "setup_gradients"]

_begun: LivingSet[ReleasedSteps] = LivingSet()
"""Releases that hosts have begun, and end; users end their own."""


def setup_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, release: ReleaseOptions | None = None
) -> ReleasedSteps | None:
    """Sum and reduce gradients as an optimizer's recipe says, and release them on request.

    A host's plugin calls this once the host has wrapped the model; Lightning's and Accelerate's do.
    It calls :func:`accumulate_gradients` unless the recipe leaves sums to torch,
    :func:`reduce_gradients` unless it leaves the reduction to the wrapper, and
    :func:`release_gradients` if ``release`` is set, in this order.

    Args:
        model: the module as it is called: after DDP, FSDP1 or ``fully_shard`` wrapped it; how it
            reduces gradients may be replaced.
        optimizer: an optimizer of this package or a converted one, also in a host's wrapper; its
            parameters get hooks. One that holds several, or ZeRO's part of one, is left alone if
            none of the three is asked for.
        release: the result of :func:`release_options`; None begins none.

    Returns:
        The handle of the release, whose ``remove()`` ends it, as :func:`end_releases` does; None
        without a release.

    Raises:
        ValueError, NotImplementedError: one of these three functions raises it.

    Example:
        >>> torch_bf16.setup_gradients(model, optimizer)
    """
    recipes = [each.recipe for each in held_optimizers(optimizer)]
    sums = any(each.accumulate != "bf16_nearest" for each in recipes)
    reduces = any(each.reduce != "wrapper" for each in recipes)
    if recipes and not (sums or reduces or release):
        return None
    ours = optimizer_for("setup_gradients", optimizer)
    if sums:
        accumulate_gradients(model, ours)
    if reduces:
        reduce_gradients(model, ours)
    if release is None:
        return None
    handle = release_gradients(model, ours, **vars(release))
    _begun.add(handle)
    return handle


def end_releases(parameters: Iterable[Tensor], keep: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Return to ordinary steps where :func:`setup_gradients` has begun to release gradients.

    A host's plugin calls this before other optimizers train the same parameters, and at the end.

    Args:
        parameters: the parameters; a release that concerns any of them ends.
        keep: optimizers whose releases go on.

    Example:
        >>> plugin_api.end_releases(model.parameters())
    """
    kept = {ours._engine.release for each in keep for ours in held_optimizers(each)}
    keys = {*map(id, parameters)}
    for each in {*_begun} - kept:
        if each.abandoned or each.trains(keys):
            each.remove()

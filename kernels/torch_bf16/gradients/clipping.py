"""Clipping by the norm of all gradients, in fp32 and without rewriting them.

The norm is torch's multi-tensor reduction with fp32 results: it reads bf16 once, sums squares in
fp32 in an order that is the same at every run on a device, and waits for nothing. What it gives is
consumed on the device by the step, which reads the gradients a second time and scales as it reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.engine.pending import clip_coefficient
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.sharding.dtensor import cut_over, is_dtensor, local, local_gradient
from torch_bf16.sharding.fsdp1 import is_flattened, shard_group

from .backward import released

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["clip_grad_norm_", "total_norm"]


def total_norm(parameters: Tensor | Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients together.

    torch computes it in the gradients' dtype, which for bf16 is wrong by up to 0.4 %; here squares
    are summed in fp32. Of DTensors (FSDP2, tensor parallelism, both; meshes may differ) and of what
    FSDP1 has flattened every rank sums its own part, and the sums are added up over the ranks that
    hold other parts: call it on all of them. The result is the same on every rank; its last bits
    depend on how tensors are cut.

    Args:
        parameters: those without a gradient are passed over; the gradients are only read.

    Returns:
        0-d fp32 tensor on the gradients' device; 0 where there is no gradient. Nothing waits for
        the device.

    Raises:
        ValueError: a gradient is sparse or complex.
        NotImplementedError: gradients were released, and clipping would do nothing.

    Example:
        >>> norm = total_norm(model.parameters())
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else _listed(parameters, Tensor)
    # Of one dtype each: torch reads a mixed list tensor by tensor.
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    # FSDP1's groups of ranks; one that holds nothing of any parameter takes part in the sum.
    flat: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        group = shard_group(parameter) if is_flattened(parameter) else None
        if group is not None:
            none = torch.zeros((), device=parameter.device)
            flat.setdefault(group, [none])
        if parameter.grad is not None:
            if parameter.grad.layout != torch.strided or parameter.grad.is_complex():
                raise ValueError(
                    f"total_norm: a parameter of shape {tuple(parameter.shape)} has a gradient of "
                    f"{parameter.grad.layout} and {parameter.grad.dtype}; dense real gradients can "
                    "be clipped. Leave this parameter out"
                )
            gradient, placed = parameter.grad, None
            if is_dtensor(parameter):
                gradient, placed = local_gradient(parameter, gradient), cut_over(parameter)
            alike[gradient.device, gradient.dtype, placed, group].append(gradient)
    if not alike and not flat:
        if any(parameter in released for parameter in parameters):
            raise NotImplementedError(
                "total_norm: the gradients were released inside backward(), so that nothing is "
                "left to clip. Clip with release_gradients(model, optimizer, max_norm=..., "
                "norm='parameter' or 'last_step')"
            )
        return torch.zeros(())
    norms = []
    for (_, _, placed, group), gradients in alike.items():
        each = torch._foreach_norm(gradients, 2, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        norm = torch.linalg.vector_norm(torch.stack(each))
        if group is None:
            norms.append(norm if placed is None else _over_ranks(norm, _groups_of(*placed)))
        else:
            flat[group].append(norm.to(flat[group][0].device))
    for group, some in flat.items():
        norms.append(_over_ranks(torch.linalg.vector_norm(torch.stack(some)), [group]))
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


_SCALED = (Tensor, torch.optim.Optimizer)


def _listed(what: Any, kinds: Any) -> list[Any]:
    """What clipping was given, one by one; a module or anything else is an error that says so."""
    given = list(what) if isinstance(what, Iterable) else [what]
    if wrong := [each for each in given if not isinstance(each, kinds)]:
        raise ValueError(
            f"gradients of a {type(wrong[0]).__name__} were asked for; give parameters, for "
            "example model.parameters(), or to clip_grad_norm_ an optimizer"
        )
    return given


def _groups_of(mesh: DeviceMesh, dims: tuple[int, ...]) -> list[dist.ProcessGroup]:
    return [mesh.get_group(dim) for dim in dims]


def _over_ranks(norm: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """The norm of tensors from that of this rank's part; replicas of it do not count."""
    # In fp64, where squares cannot overflow.
    squared = norm.double().square()
    for group in groups:
        dist.all_reduce(squared, group=group)
    return squared.sqrt().float()


def _owned(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def clip_grad_norm_(
    what: BF16Optimizer | Tensor | Iterable[Any],
    max_norm: float,
    *,
    error_if_nonfinite: bool = False,
    skip_nonfinite: bool = False,
) -> Tensor:
    """Clip gradients to a 2-norm of at most ``max_norm``, all of them together, in fp32.

    Given optimizers, no gradient is written: their next step multiplies by the coefficient as it
    reads, and nothing waits for the device. What ``scale_next_step`` was told counts as done; where
    all gradients are replaced before that step, it warns and scales nothing. Given parameters, as
    ``torch.nn.utils.clip_grad_norm_`` is, their gradients are scaled in place.

    Args:
        what: one of our optimizers, several of them, or parameters.
        max_norm: the largest norm that is left alone.
        error_if_nonfinite: raise where the norm is not finite; that waits for the device.
        skip_nonfinite: where the norm is not finite, the next step leaves weights, states and step
            counts as they are and adds 1 to ``optimizer.skipped_steps``; for optimizers only.

    Returns:
        The norm before clipping: 0-d fp32 tensor on the gradients' device.

    Raises:
        ValueError: a gradient is sparse or complex, or ``skip_nonfinite`` was asked of parameters.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; nothing was clipped.
        NotImplementedError: gradients were released, and clipping would do nothing.

    Example:
        >>> norm = torch_bf16.clip_grad_norm_(optimizer, 1.0)
        >>> optimizer.step()
    """
    one: Any = what
    given: list[Any] = [one] if isinstance(one, _SCALED) else _listed(one, _SCALED)
    if not isinstance(max_norm, (Real, Tensor)):
        raise ValueError(f"clip_grad_norm_: max_norm={max_norm!r} must be a number")
    optimizers: list[Any] = [each for each in given if isinstance(each, torch.optim.Optimizer)]
    if foreign := [each for each in optimizers if not isinstance(each, BF16Optimizer)]:
        raise ValueError(
            f"clip_grad_norm_: {type(foreign[0]).__name__} cannot be told to scale as it reads; "
            "give its parameters, or convert() it first"
        )
    if optimizers and len(optimizers) < len(given):
        raise ValueError("clip_grad_norm_: give optimizers or parameters, not both")
    if skip_nonfinite and not optimizers:
        raise ValueError(
            "clip_grad_norm_: skip_nonfinite=True needs the optimizers, whose step is to be "
            "skipped, and was given parameters"
        )
    parameters = [p for each in optimizers for p in _owned(each)]
    parameters = parameters if optimizers else given
    told = [each._next.coefficient for each in optimizers]
    if any(isinstance(each, Tensor) or each != 1.0 for each in told):
        # What the next step is told already counts, as if the gradients were scaled by now.
        each_norm = [total_norm(_owned(o)) * c for o, c in zip(optimizers, told, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack([n.to(each_norm[0].device) for n in each_norm]))
    else:
        norm = total_norm(parameters)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so they cannot be clipped to "
            f"{max_norm}; pass error_if_nonfinite=False to go on with them"
        )
    coefficient = clip_coefficient(norm, max_norm)
    for each, before in zip(optimizers, told, strict=True):
        each.scale_next_step(coefficient * before)
        each._next.only_for(p.grad for p in _owned(each) if p.grad is not None)
        if skip_nonfinite:
            each.skip_next_step_where(~norm.isfinite())
    if not optimizers:
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                gradient.mul_(coefficient.to(gradient.device))
    return norm

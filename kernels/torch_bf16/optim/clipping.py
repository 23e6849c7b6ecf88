"""The gradient norm that clipping needs, in fp32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_bf16.sharding import cut_over, is_dtensor, local_gradient

from .backward import released

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["total_norm"]


def total_norm(parameters: Tensor | Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients together.

    torch computes it in the gradients' dtype, which for bf16 is wrong by up to 0.4 %; here squares
    are summed in fp32. Of DTensors (FSDP2, tensor parallelism, both; meshes may differ) every rank
    sums its own part, and the sums are added up over the ranks that hold other parts: call it on
    all of them. The result is the same on every rank; its last bits depend on how tensors are cut.

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
        >>> optimizer.scale_next_step((1.0 / (norm + 1e-6)).clamp(max=1.0))
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
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
            alike[gradient.device, placed].append(gradient)
    if not alike:
        if any(parameter in released for parameter in parameters):
            raise NotImplementedError(
                "total_norm: the gradients were released inside backward(), so that nothing is "
                "left to clip. Clip with release_gradients(model, optimizer, max_norm=..., "
                "norm='parameter' or 'last_step')"
            )
        return torch.zeros(())
    norms = []
    for (_, placed), gradients in alike.items():
        each = torch._foreach_norm(gradients, 2, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        norms.append(_over_ranks(torch.linalg.vector_norm(torch.stack(each)), placed))
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _over_ranks(norm: Tensor, placed: tuple[DeviceMesh, tuple[int, ...]] | None) -> Tensor:
    """The norm of tensors from that of this rank's part; replicas of it do not count."""
    if placed is None:
        return norm
    mesh, dims = placed
    # In fp64, where squares cannot overflow.
    squared = norm.double().square()
    for dim in dims:
        dist.all_reduce(squared, group=mesh.get_group(dim))
    return squared.sqrt().float()

"""Sums over ranks: sent in bf16, added up in fp32, in the order of the ranks.

A ring in bf16 rounds at every hop, and what it rounds depends on the number of ranks; in fp32 it
sends twice the bytes. Here each rank receives its share of all ranks' gradients in bf16, by an
all-to-all, and adds them up in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ReduceScatter", "all_reduce_mean", "check_all_to_all", "sum_of_ranks"]


def sum_of_ranks(received: Tensor, ranks: int, total: Tensor | None = None) -> Tensor:
    """The fp32 sum of the numbers that ranks have sent, starting with rank 0's.

    Args:
        received: bf16 ``[ranks * n]``, one rank's numbers after another's.
        ranks: the number of ranks.
        total: fp32 ``[n]``, overwritten with the sum; None for a new tensor.

    Returns:
        ``total``.

    Example:
        >>> sum_of_ranks(torch.tensor([1.0, 2.0, 2.0**-9, 4.0]).bfloat16(), ranks=2)
        tensor([1.0020, 6.0000])
    """
    first, *others = received.view(ranks, -1)
    total = first.float() if total is None else total.copy_(first)
    for each in others:
        total += each
    return total


class ReduceScatter:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter`` and for FSDP1's hook.

    The result is the fp32 sum, scaled as the wrapper requests; if the wrapper reduces in bf16, the
    sum is rounded to nearest, once, which otherwise the wrapper does.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory, as FSDP2's own class does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce on the current stream.

        Args:
            output_tensor: fp32 or bf16 ``[n]``, overwritten.
            input_tensor: ``[ranks * n]``; fp32 numbers that bf16 cannot represent, which occur only
                in sums over micro-batches without synchronisation, are rounded to nearest.
            group: the process group.
            op: ``AVG``, ``SUM`` or ``PREMUL_SUM``.
            async_op: never set by FSDP2.
        """
        ranks = dist.get_world_size(group)
        sent = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        exact = output_tensor.dtype == torch.float32
        total = sum_of_ranks(received, ranks, output_tensor if exact else None)
        if op == dist.ReduceOp.AVG:
            total /= ranks
        elif op == dist.ReduceOp.PREMUL_SUM:
            # Only pickling reveals the factor.
            total *= op.__getstate__()[1]
        elif op != dist.ReduceOp.SUM:
            raise NotImplementedError(
                f"gradients cannot be reduced by {op} with bf16 on the wire; use a sum or a mean"
            )
        if not exact:
            output_tensor.copy_(total)


def all_reduce_mean(buffer: Tensor, group: Any) -> Any:
    """DDP's own reduction: a future of the mean over ranks, in the dtype of ``buffer``."""
    # Multiplied, as DDP does: with three ranks, a quotient may have other bits.
    buffer.mul_(1.0 / dist.get_world_size(group))
    future = dist.all_reduce(buffer, group=group, async_op=True).get_future()  # pyright: ignore
    return future.then(lambda done: done.value()[0])


def check_all_to_all(group: Any, device: torch.device | str) -> None:
    """Raise if a group's backend has no all-to-all, by trying a small one; all ranks call this.

    Raises:
        NotImplementedError: it has none.
    """
    ones = torch.ones(dist.get_world_size(group), dtype=torch.bfloat16, device=device)
    try:
        dist.all_to_all_single(torch.empty_like(ones), ones, group=group)
    except (RuntimeError, ValueError) as error:
        raise NotImplementedError(
            f"gradients cannot be reduced with bf16 on the wire: the backend "
            f"{dist.get_backend(group)!r} has no all-to-all on {device} ({error}). Use NCCL or "
            "gloo, or leave reduce='bf16_wire' out"
        ) from error

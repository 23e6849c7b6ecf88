"""bf16 on the wire, fp32 in the sum: for DDP, FSDP2 and FSDP1."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.wrappers import optimizer_for
from torch_bf16.sharding import Unit, fsdp1_roots, reduce_by, units, world_size

from .ddp_hook import ddp_modules
from .reduce_scatter import ReduceScatter, check_all_to_all
from .wire_ddp import BucketReduction

__all__ = ["reduce_gradients"]


def reduce_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Send bf16 gradients over the wire as they are, and sum them in fp32 in the order of ranks.

    Half the bytes of a reduction in fp32, and no rounding of partial sums, which a ring in bf16
    does at every hop: each rank receives its share of all gradients by an all-to-all, and adds them
    up. The result depends neither on timing nor on how parameters are put together.

    - DDP: a communication hook. Each rank owns a share of a bucket, divides its sum, rounds it to
      bf16 once, stochastically, and sends it to all others, so that replicas have the same bits.
      The noise is a pure function of seed, step, parameter, element and the number of earlier
      reductions for this step. It sends as many bytes as DDP's own reduction, which sums in bf16.
    - FSDP2, and FSDP1 if it shards over all ranks: in place of their reduce-scatter. In every other
      respect the result is theirs: rounded to nearest into a bf16 ``p.grad``. Gradients that FSDP2
      has summed in fp32 without synchronisation are rounded to nearest before they are sent. HSDP's
      sum over the replicas of a shard stays FSDP2's own, in fp32.

    fp32 parameters are reduced as before. In a recipe this is ``reduce="bf16_wire"``, which both
    plugins follow.

    Args:
        model: wrapped already, before its first forward pass; all ranks call this.
        optimizer: an optimizer of this package or a converted one. If several step one model, call
            this for each.

    Raises:
        ValueError: the optimizer is not one of ours, nothing in the model reduces gradients
            although there are several ranks, a DDP module has a communication hook, or FSDP2 would
            sum replicas in bf16.
        NotImplementedError: the backend has no all-to-all, torch is too old for FSDP2's extension,
            or the wrapper accepts no other reduction.

    Example:
        >>> model = torch.nn.parallel.DistributedDataParallel(module)  # doctest: +SKIP
        >>> torch_bf16.reduce_gradients(model, optimizer)  # doctest: +SKIP
    """
    ours = optimizer_for("reduce_gradients", optimizer)
    engine = ours._engine
    check_module("reduce_gradients", model)
    if engine.host is not None:
        raise NotImplementedError(
            f"gradients cannot be reduced with bf16 on the wire: {engine.host} reduces them itself"
        )
    modules = ddp_modules(model)
    all_units = [*units(model)]
    sharded = [u for u in all_units if any(p.dtype == torch.bfloat16 for p in u.parameters)]
    flattened = fsdp1_roots(model, _reduce_fsdp1)
    # All before any is changed: nobody can take a hook back from a DDP module.
    for module in modules:
        BucketReduction.check(module)
    for unit in sharded:
        _check_fsdp2(unit)
    for unit in flattened:
        check_all_to_all(unit.process_group, unit.compute_device)
    for module in modules:
        BucketReduction.follow(module, ours)
    for unit in sharded:
        unit.module.set_custom_reduce_scatter(ReduceScatter())
    for unit in flattened:
        reduce_by(unit, _reduce_fsdp1)
    if not (modules or all_units or flattened) and world_size() > 1:
        raise ValueError(
            f"reduce_gradients found nothing in {type(model).__name__} that reduces gradients over "
            f"the {world_size()} ranks: give it the model as DistributedDataParallel, "
            "fully_shard or FullyShardedDataParallel have wrapped it"
        )
    engine.reduction_checked = True


def _check_fsdp2(unit: Unit) -> None:
    why = None
    if not hasattr(unit.module, "set_custom_reduce_scatter"):
        why = f"fully_shard accepts no other reduction in torch {torch.__version__}, newer ones do"
    elif unit.group is None:
        why = "its parameters are replicated, and torch lets nobody replace that all-reduce"
    if why:
        raise NotImplementedError(
            f"gradients of {unit.name!r} cannot be reduced with bf16 on the wire: {why}. Use "
            "DistributedDataParallel, or leave reduce='bf16_wire' out"
        )
    if unit.replicates and unit.reduce_dtype != torch.float32:
        raise ValueError(
            f"gradients of {unit.name!r} cannot be summed in fp32: fully_shard sums replicas in "
            f"{unit.reduce_dtype or 'bf16'}. Use fully_shard(module, "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
        )
    check_all_to_all(unit.group, unit.parameters[0].device_mesh.device_type)


def _reduce_fsdp1(group: Any, gradient: torch.Tensor, shard: torch.Tensor) -> None:
    ReduceScatter()(shard, gradient, group, dist.ReduceOp.AVG)

"""A rank's part of a parameter: the only package that knows how other libraries shard."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType

from torch import Tensor, nn

from .complex import ComplexShard
from .deepspeed import (
    FlatShard,
    PartitionedShard,
    alias_masters,
    any_partitioned,
    is_flat,
    is_partitioned,
    register_flats,
)
from .deepspeed_engine import check_engine, deepspeed_config
from .deepspeed_files import watch_files
from .dtensor import DTensorShard, is_incomplete
from .exchange import Like, all_gather, exchange, world_size
from .exit import settle_at_exit
from .fsdp1 import Fsdp1Shard, any_flattened, fsdp1_roots, is_part, reduce_by, register, unit_of
from .fsdp2 import Unit, before_backward_of, has_run, places, reshard, units
from .local import (
    as_real,
    is_dtensor,
    local,
    place_like,
    same_memory,
    shown_like,
    version_of,
    versions_of,
    whole,
)
from .many import Parameters, all_same, gradients_of, no_torch_function, unlike_memory
from .names import WRAPPERS, bare_name, saved_names, unwrap_compiled, without_wrappers
from .shard import Shard
from .span import Span
from .wrapped import PLAIN, missing_memory

__all__ = [
    "WRAPPERS",
    "Like",
    "Parameters",
    "Shard",
    "Span",
    "Unit",
    "alias_masters",
    "all_gather",
    "all_same",
    "all_whole",
    "any_flattened",
    "as_real",
    "bare_name",
    "before_backward_of",
    "check_engine",
    "deepspeed_config",
    "exchange",
    "fsdp1_roots",
    "gradients_of",
    "has_run",
    "is_dtensor",
    "is_flat",
    "is_incomplete",
    "is_whole",
    "local",
    "missing_memory",
    "no_torch_function",
    "place_like",
    "places",
    "reduce_by",
    "register",
    "register_flats",
    "reshard",
    "same_memory",
    "saved_names",
    "settle_at_exit",
    "shard_of",
    "shown_like",
    "unit_of",
    "units",
    "unlike_memory",
    "unwrap_compiled",
    "version_of",
    "versions_of",
    "watch_files",
    "whole",
    "without_wrappers",
    "world_size",
]


def is_whole(parameter: Tensor) -> bool:
    """Whether a parameter, and its gradient if it has one, are plain tensors and not sharded."""
    return (
        type(parameter) in PLAIN
        and (parameter.grad is None or type(parameter.grad) is Tensor)
        and not is_part(parameter)
        and not is_flat(parameter)
        and not is_partitioned(parameter)
    )


def all_whole(parameters: Sequence[Tensor]) -> bool:
    """Whether :func:`is_whole` holds for all parameters; in rare cases False although it does."""
    return (
        {*map(type, parameters)} <= {nn.Parameter}
        and {*map(type, gradients_of(parameters))} <= {Tensor, NoneType}
        and not any_flattened(parameters)
        and not any_partitioned(parameters)
    )


def shard_of(parameter: Tensor, name: str = "") -> Shard:
    """This rank's part of a parameter, whichever library has sharded it.

    Args:
        parameter: a plain parameter, a DTensor, the part that FSDP1 or ZeRO-3 has left of one, or
            a flat tensor of DeepSpeed.
        name: the name that keys its noise.
    """
    kinds = (
        (is_dtensor, DTensorShard),
        (is_part, Fsdp1Shard),
        (is_flat, FlatShard),
        (is_partitioned, PartitionedShard),
    )
    for applies, kind in kinds:
        if applies(parameter):
            settle_at_exit()
            return kind(parameter, name)
    return (ComplexShard if parameter.is_complex() else Shard)(parameter, name)

"""Parameters of ``FullyShardedDataParallel`` (FSDP1) with ``use_orig_params=True``.

FSDP1 lays the parameters of a unit end to end and cuts the row into equal shards. A parameter stays
the same object and becomes, outside of forward and backward passes, a view of its elements in this
rank's shard: of one dimension, often without elements. It knows neither its whole shape, on which
formats depend, nor its elements' indices, on which noise depends. FSDP1's handles do; this is the
only file that names their private parts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from math import prod
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.living import instances_of

from .exchange import exchange
from .shard import Shard
from .span import Span

__all__ = [
    "Fsdp1Shard",
    "any_flattened",
    "fsdp1_roots",
    "is_part",
    "reduce_by",
    "register",
    "unit_of",
]

_handles: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The handle that has flattened a parameter, as a weak reference: handles hold the parameters."""


class Fsdp1Shard(Shard):
    """The part of a parameter that FSDP1 has left on this rank."""

    sharded = True
    can_gather = False
    in_row = True
    offload_obstacle = (
        "belongs to FullyShardedDataParallel (FSDP1), which gathers states on the device: "
        "offload='states' is not for it. Shard with fully_shard (FSDP2), or leave offload out"
    )

    @cached_property
    def _handle(self) -> Any:
        """The handle of the parameter.

        Raises:
            LookupError: no handle is known; the message says what helps.
        """
        handle = _known(self.parameter)
        if handle is None:
            # A parameter does not know its handle. Once per model: this checks all live objects.
            private: Any = sys.modules.get("torch.distributed.fsdp._flat_param")
            for each in instances_of(private.FlatParamHandle) if private else ():
                _note(each)
            handle = _known(self.parameter)
        if handle is None:
            raise LookupError(
                "belongs to FullyShardedDataParallel (FSDP1), and the module that wrapped it "
                "cannot be found. Make the optimizer by torch_bf16.convert(torch.optim.AdamW(...), "
                "recipe, model=model) with the wrapped model"
            )
        return handle

    @cached_property
    def _number(self) -> int:
        """The number of the parameter in its unit."""
        parameters = self._handle.flat_param._params
        return next(n for n, each in enumerate(parameters) if each is self.parameter)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._handle.flat_param._shapes[self._number])

    @property
    def span(self) -> Span:
        info = self._handle.flat_param._shard_param_infos[self._number]
        numel = info.numel_in_shard or 0
        if (self.parameter.ndim, self.parameter.numel()) != (1, numel):
            raise ValueError(
                f"parameter {self.name!r} has shape {tuple(self.parameter.shape)} now and {numel} "
                "elements in this rank's shard: FSDP1 has gathered it. Step, and read and write "
                "exact weights, outside of summon_full_params, after a backward pass"
            )
        run, offset = max(numel, 1), info.intra_param_start_idx or 0
        return Span(self.name, self.shape, 0, numel, offset, run, run)

    def obstacle(self) -> str | None:
        try:
            handle = self._handle
        except LookupError as error:
            return str(error)
        if not handle._use_orig_params:
            return (
                "is a flat parameter, which FullyShardedDataParallel (FSDP1) makes of all "
                "parameters of a unit, and formats follow from the shape of each. Wrap with "
                "FullyShardedDataParallel(..., use_orig_params=True), or shard with "
                "torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        flat, number = handle.flat_param, self._number
        if flat._param_extensions[number] is not None:
            return (
                f"is {flat._fqns[number]!r}, which tensor parallelism had cut before FSDP1 "
                "flattened it. Shard with torch.distributed.fsdp.fully_shard (FSDP2), which goes "
                "with tensor parallelism"
            )
        if not flat._contiguities[number]:
            return (
                f"is {flat._fqns[number]!r}, which was not contiguous when FSDP1 flattened it: its "
                "elements lie in another order than their indices, which the noise follows, and "
                "without sharding its gradient has yet another. Make it contiguous before wrapping "
                "(p.data = p.data.contiguous())"
            )
        return None

    def check_blocks(self, block: int) -> None:
        if block > 1:
            raise NotImplementedError(
                f"int8 moments of a parameter of shape {self.shape} cannot be kept: they are "
                f"encoded in blocks of {block} numbers, and FSDP1 cuts tensors anywhere. Shard "
                "with torch.distributed.fsdp.fully_shard (FSDP2), which cuts between rows, or "
                "choose a format without blocks"
            )

    def take(self, saved: Tensor) -> Tensor:
        saved = super().take(saved)
        if saved.shape == self.parameter.shape or tuple(saved.shape) != self.shape:
            return saved
        span = self.span
        # A copy, because a view would keep the whole tensor.
        return saved.reshape(-1)[span.offset : span.offset + span.numel].clone()

    def holders(self) -> Mapping[int, Span]:
        handle = self._handle
        flat, group = handle.flat_param, handle.process_group
        rows = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        first = [start for (start, _), padding in rows if not padding][self._number]
        size = flat._sharded_size.numel()
        spans = {}
        for place, rank in enumerate(dist.get_process_group_ranks(group)):
            begin = max(first, place * size)
            run = min(first + self.numel, (place + 1) * size) - begin
            if run > 0:
                spans[rank] = Span(self.name, self.shape, 0, run, begin - first, run, run)
        return spans

    def unexpand(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        if part.shape != self.memory.shape:
            return super().unexpand(part, shape)
        result = part.new_full((prod(shape),), torch.nan)
        result[self.span.places(shape, part.device)] = part
        own_rank = dist.get_rank()
        others = [rank for rank in self.holders() if rank != own_rank]
        like = result.numel(), result.dtype
        received = exchange(
            {rank: [result] for rank in others},
            {rank: [like] for rank in others},
            *(self.exchange_group(), result.device),
        )
        for (theirs,) in received.values():
            result = torch.where(result.isnan(), theirs, result)
        return result.view(*shape)

    def groups(self) -> list[Any]:
        return [self._handle.process_group]


def is_part(parameter: Tensor) -> bool:
    """Whether FSDP1 has left only a part of the parameter, or has made it of several.

    Without sharding (``NO_SHARD``, one rank) and with ``use_orig_params=True`` parameters do not
    change. But of one that was not contiguous FSDP1 then gives the gradient in another order, so
    that it counts as a part, which is refused.
    """
    if not any_flattened([parameter]):
        return False
    shard = Fsdp1Shard(parameter)
    try:
        handle = shard._handle
    except LookupError:
        return True
    if handle.uses_sharded_strategy or not handle._use_orig_params:
        return True
    return not handle.flat_param._contiguities[shard._number]


def unit_of(parameter: Tensor) -> dict[Tensor, tuple[int, ...]]:
    """The parameters that FSDP1 has flattened together with one, each with its whole shape.

    FSDP1 gathers their states together.
    """
    flat = Fsdp1Shard(parameter)._handle.flat_param
    return dict(zip(flat._params, map(tuple, flat._shapes), strict=True))


def fsdp1_roots(model: nn.Module, hook: Callable[[Any, Tensor, Tensor], None]) -> list[Any]:
    """The outermost units whose gradients a hook can reduce, by :func:`reduce_by`.

    Args:
        model: the model, before its first forward pass.
        hook: which they may have already.

    Returns:
        Those that FSDP1 shards over several ranks; each has a ``process_group`` and a
        ``compute_device``.

    Raises:
        NotImplementedError: FSDP1 accepts no hook there, or has one already.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    found = []
    for root in fsdp.FullyShardedDataParallel.fsdp_modules(model, root_only=True) if fsdp else ():
        if root.process_group.size() == 1:
            continue
        units = fsdp.FullyShardedDataParallel.fsdp_modules(root)
        whole = (fsdp.ShardingStrategy.FULL_SHARD, fsdp.ShardingStrategy.SHARD_GRAD_OP)
        why = None
        if other := [each for each in units if each.sharding_strategy not in whole]:
            why = f"FSDP1 takes no hook with {other[0].sharding_strategy.name}"
        elif any(each.process_group != root.process_group for each in units):
            why = "its units are sharded over several process groups, and share one hook"
        elif any(
            each._handle and each._handle.flat_param.dtype != torch.bfloat16 for each in units
        ):
            why = "some of its units are in fp32, and FSDP1 has one hook for all"
        elif root._comm_hook not in (None, hook):
            why = "it has a communication hook already"
        if why:
            raise NotImplementedError(
                "gradients of FullyShardedDataParallel (FSDP1) cannot be reduced with bf16 on the "
                f"wire: {why}. Shard with torch.distributed.fsdp.fully_shard (FSDP2), use "
                "FULL_SHARD or SHARD_GRAD_OP with all units in bf16, or leave reduce='bf16_wire' "
                "out"
            )
        found.append(root)
    return found


def reduce_by(unit: Any, hook: Callable[[Any, Tensor, Tensor], None]) -> None:
    """Let a hook reduce the gradients of an outermost unit; idempotent.

    Args:
        unit: one of :func:`fsdp1_roots`.
        hook: called with a process group, a unit's gradient and the shard of it to be written.
    """
    if unit._comm_hook is None:
        unit.register_comm_hook(unit.process_group, hook)


def register(module: nn.Module) -> None:
    """Remember FSDP1's handles in a module, which saves a search for them."""
    for sub in module.modules():
        if type(sub).__name__ == "FullyShardedDataParallel":
            handle = sub.__dict__.get("_handle")
            if handle is not None:
                _note(handle)


def any_flattened(parameters: Iterable[Tensor]) -> bool:
    """Whether FSDP1 has flattened one of the parameters, or one is a flat parameter."""
    return any(map(getattr, parameters, repeat("_fsdp_flattened"), repeat(False)))


def _known(parameter: Tensor) -> Any:
    reference = _handles.get(parameter)
    return None if reference is None else reference()


def _note(handle: Any) -> None:
    flat = handle.flat_param
    for each in (flat, *(flat._params or ())):
        _handles[each] = ref(handle)

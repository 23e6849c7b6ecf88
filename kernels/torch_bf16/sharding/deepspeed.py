"""DeepSpeed's ZeRO 1, 2 and 3: flat tensors, each of which holds parts of many parameters.

DeepSpeed lays the parameters of a group (ZeRO-3: of a sub-group) end to end, cuts the row between
ranks (ZeRO-3: each parameter by itself), and hands the optimizer one tensor, this rank's part. The
layout is read from the tables of DeepSpeed's own optimizer and not from its ``_hp_mapping``, which
is wrong with round-robin gradients. Private parts of DeepSpeed are named here and in
``deepspeed_engine.py`` alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_bf16.living import instances_of
from torch_bf16.parameters import parameters_of

from .names import bare_name
from .shard import Shard
from .span import Span

__all__ = [
    "FlatShard",
    "PartitionedShard",
    "alias_masters",
    "is_flat",
    "is_partitioned",
    "register_flats",
]

_ATTACH = (
    "is one of DeepSpeed's flat tensors, and it is not known which parameters it is made of: its "
    "formats and its noise depend on these. Call torch_bf16.attach(engine) after "
    "deepspeed.initialize, before the first step and before a checkpoint is loaded; or, without "
    "ZeRO, delete the section bf16 of DeepSpeed's configuration"
)


@dataclass(frozen=True)
class _Layout:
    """The parameters that a flat tensor is made of.

    Attributes:
        names: names of all parameters of its group; the same on every rank.
        shapes: shapes of these parameters.
        spans: the elements that this rank holds, without padding.
        group: the process group among whose ranks it is cut.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]
    group: Any

    @classmethod
    def of(cls, spans: Sequence[Span], group: Any) -> _Layout:
        """The layout of one span for each parameter, some of them empty."""
        held = tuple(each for each in spans if each.numel)
        names, shapes = tuple(each.name for each in spans), tuple(each.shape for each in spans)
        return cls(names, shapes, held, group)


_layout_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The layout of each flat tensor of attached engines."""


class FlatShard(Shard):
    """A flat tensor of DeepSpeed."""

    sharded = True
    can_gather = False
    in_row = True
    loads_states_first = True

    @cached_property
    def _layout(self) -> _Layout:
        return _layout_of[self.parameter]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0] if self.parameter in _layout_of else tuple(self.parameter.shape)

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        return self._layout.shapes

    @property
    def spans(self) -> Sequence[Span]:
        return self._layout.spans

    @property
    def mixed(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        layout = self._layout
        pairs = zip(layout.names, layout.shapes, strict=True)
        vectors = [name for name, shape in pairs if len(shape) < 2]
        return (
            f"holds {len(vectors)} parameters of one dimension ({vectors[0]!r}) beside "
            f"{len(layout.names) - len(vectors)} matrices: DeepSpeed lays a parameter group into "
            "one tensor, which has one format, and the recipe keeps the former exactly. Put them "
            "into groups of their own: torch_bf16.separate_vectors(optimizer) before "
            "deepspeed.initialize. Or treat them like matrices: recipe option "
            "vectors='like_matrices'"
        )

    def obstacle(self) -> str | None:
        return None if self.parameter in _layout_of else _ATTACH

    def check_blocks(self, block: int) -> None:
        if block > 1:
            raise NotImplementedError(
                f"int8 moments cannot be kept under DeepSpeed: they are encoded in blocks of "
                f"{block} numbers, and ZeRO cuts tensors anywhere. Choose exp_avg and exp_avg_sq "
                "in bf16, or shard with torch.distributed.fsdp.fully_shard (FSDP2)"
            )

    def holders(self) -> Mapping[int, Span]:
        raise NotImplementedError(
            "is sharded by DeepSpeed, and this optimizer looks at whole tensors, which ZeRO cuts "
            "anywhere and lays into one tensor. Shard with torch.distributed.fsdp.fully_shard "
            "(FSDP2), train with DDP, or choose plain AdamW or Lion"
        )

    def groups(self) -> list[Any]:
        return [self._layout.group]


class PartitionedShard(Shard):
    """A parameter that ZeRO-3 has cut; its own memory is empty outside of its module's calls."""

    sharded = True
    can_gather = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        whole: Any = self.parameter
        return tuple(whole.ds_shape)

    check_blocks = FlatShard.check_blocks
    holders = FlatShard.holders


def is_partitioned(parameter: Any) -> bool:
    """Whether ``deepspeed.zero.Init`` or ZeRO-3 has cut a parameter of a module."""
    return "deepspeed" in sys.modules and hasattr(parameter, "ds_shape")


def any_partitioned(parameters: Iterable[Any]) -> bool:
    """Whether :func:`is_partitioned` holds for any of the parameters."""
    return "deepspeed" in sys.modules and any(map(is_partitioned, parameters))


def is_flat(parameter: Tensor) -> bool:
    """Whether a parameter is a flat tensor of DeepSpeed, attached or not."""
    if type(parameter) is not Tensor or parameter.ndim != 1:
        return False
    if parameter in _layout_of:
        return True
    base: Any = sys.modules.get("deepspeed.runtime.base_optimizer")
    # Flat tensors are trained; copies of weights, as averages are made of, are not.
    if base is None or not parameter.requires_grad:
        return False
    # The tensor does not know its optimizer. This slow search is rarely needed but for an error.
    return any(
        parameter is each
        for zero in instances_of(base.DeepSpeedOptimizer)
        for each in parameters_of(zero.optimizer)
    )


def register_flats(zero: Any) -> list[Tensor]:
    """Remember the layouts of the flat tensors of DeepSpeed's optimizer, and return the tensors.

    Args:
        zero: DeepSpeed's ``DeepSpeedZeroOptimizer`` or ``DeepSpeedZeroOptimizer_Stage3``.
    """
    layouts = {flat: layout for flat, _, layout in _flats(zero)}
    _layout_of.update(layouts)
    return [*layouts]


def alias_masters(zero: Any) -> None:
    """Replace the memory of each flat tensor, a mere copy, by that of this rank's weights."""
    for flat, weights, _ in _flats(zero):
        flat.data = weights.data
    if not _is_stage3(zero):
        zero._link_all_hp_params()


def _is_stage3(zero: Any) -> bool:
    return hasattr(zero, "fp16_partitioned_groups_flat")


def _flats(zero: Any) -> Iterator[tuple[Tensor, Tensor, _Layout]]:
    """Each flat tensor, the memory of its weights, and its layout."""
    return _stage3(zero) if _is_stage3(zero) else _stage12(zero)


def _stage12(zero: Any) -> Iterator[tuple[Tensor, Tensor, _Layout]]:
    """One for each parameter group."""
    rows = zip(zero.single_partition_of_fp32_groups, zero.round_robin_bit16_groups, strict=True)
    for number, (flat, parameters) in enumerate(rows):
        group = zero.real_dp_process_group[number]
        rank, size = dist.get_rank(group), int(zero.partition_size[number])
        sizes = [each.numel() for each in parameters]
        # Releases before parameter_alignment have no such table.
        starts = getattr(zero, "round_robin_bit16_offsets", None)
        starts = starts[number] if starts else [0, *accumulate(sizes)][:-1]
        first, spans = rank * size, []
        for parameter, numel, start in zip(parameters, sizes, starts, strict=True):
            begin, end = max(start, first), min(start + numel, first + size)
            name, shape = bare_name(zero.param_names[parameter]), tuple(parameter.shape)
            spans.append(_span(name, shape, begin - first, end - begin, begin - start))
        weights = zero.parallel_partitioned_bit16_groups[number][rank]
        yield flat, weights, _Layout.of(spans, group)


def _stage3(zero: Any) -> Iterator[tuple[Tensor, Tensor, _Layout]]:
    """One for each sub-group."""
    rows = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
    for number, (flat, parameters) in enumerate(rows):
        group = getattr(parameters[0], "ds_process_group", zero.dp_process_group)
        rank, start, spans = dist.get_rank(group), 0, []
        for parameter in parameters:
            size = int(parameter.partition_numel())
            numel = min(size, prod(parameter.ds_shape) - rank * size)
            name, shape = bare_name(zero.param_names[parameter]), tuple(parameter.ds_shape)
            spans.append(_span(name, shape, start, numel, rank * size))
            start += size
        yield flat, zero.fp16_partitioned_groups_flat[number], _Layout.of(spans, group)


def _span(name: str, shape: tuple[int, ...], start: int, numel: int, offset: int) -> Span:
    run = max(numel, 1)
    return Span(name, shape, start, max(numel, 0), offset, run, run)

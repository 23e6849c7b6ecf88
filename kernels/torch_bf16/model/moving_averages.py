"""Averages that move towards values: which can, and one kernel call for all of a kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_bf16.engine.batch import Batch, Task, alike
from torch_bf16.formats import BF16_STOCHASTIC, FP32
from torch_bf16.memory import TransposedOrder, as_it_lies
from torch_bf16.rules import AVERAGE
from torch_bf16.sharding import (
    Span,
    is_dtensor,
    local,
    missing_memory,
    shard_of,
    without_wrappers,
)

__all__ = ["FORMAT_BY_DTYPE", "MovingAverages", "by_name", "check_place", "refuse_unaveraged"]

FORMAT_BY_DTYPE = {each.planes[0].dtype: each for each in (FP32, BF16_STOCHASTIC)}
"""The formats that averages can have."""


class MovingAverages:
    """Moves averages towards values, with one kernel call for all tensors of a kind.

    Its batches are reused as long as the averages stay where they are, and are not copied with it.
    """

    def __init__(self, seed: int, backend: str | None) -> None:
        self._seed, self._backend = seed, backend
        self._made_for: list[Any] = []
        # Each with names of averages, and the spans of them that its tasks move.
        self._batches: list[tuple[Batch, Sequence[tuple[str, Span]]]] = []

    def __reduce__(self) -> Any:
        return MovingAverages, (self._seed, self._backend)

    def move(
        self, averages: Mapping[str, Tensor], values: Mapping[str, Tensor], rate: float, step: int
    ) -> None:
        """``average = average + (value - average) * rate``, in place.

        Args:
            averages: tensors by name; mutated. Names and ``step`` key the noise. Integer tensors,
                such as a counter, are set to the value.
            values: tensors of the same shapes, by the same names.
            rate: share of the value in the new average.
            step: number of the update, from 1.
        """
        copies, orders = {}, {}
        for name, average in averages.items():
            memory, value = local(average), local(values[name])
            if {memory.dtype, value.dtype} <= FORMAT_BY_DTYPE.keys():
                # Kernels write through addresses.
                orders[name] = None if memory.is_contiguous() else shard_of(average).order
                copies[name] = as_it_lies(memory.detach(), orders[name]).contiguous()
            elif not (memory.is_floating_point() or memory.is_complex()):
                memory.copy_(value)
            else:
                memory.lerp_(value.to(memory), rate)
        made_for = [
            (name, each.data_ptr(), each.dtype, values[name].dtype, orders[name])
            for name, each in copies.items()
        ]
        if made_for != self._made_for:
            self._make(averages, copies, values, orders)
            self._made_for = made_for
        for batch, parts in self._batches:
            device = batch.variant.device
            of = {}
            for name, _ in parts:
                value = local(values[name]).detach().to(device).resolve_neg()
                of[name] = as_it_lies(value, orders[name]).contiguous()
            inputs = [span.of(of[name]) for name, span in parts]
            batch.run_alike(inputs, step, (rate,))
        for name, copy in copies.items():
            memory = as_it_lies(local(averages[name]), orders[name])
            if copy.data_ptr() != memory.data_ptr():
                memory.copy_(copy)

    def _make(
        self,
        averages: Mapping[str, Tensor],
        copies: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        orders: Mapping[str, TransposedOrder | None],
    ) -> None:
        """Make the batches for what this rank holds of these averages."""
        parts = [
            (name, span)
            for name in copies
            for each in shard_of(averages[name], f"average of {name}").spans
            for span in each.split()
        ]
        tasks = [
            Task(
                span,
                AVERAGE,
                (FORMAT_BY_DTYPE[copies[name].dtype],),
                ((span.of(copies[name]),),),
                values[name].dtype,
                order=orders[name],
            )
            for name, span in parts
        ]
        self._batches = []
        for pairs in alike(zip(parts, tasks, strict=True), lambda pair: pair[1].variant):
            batched_parts, batched = zip(*pairs, strict=True)
            self._batches.append((Batch(batched, self._seed, self._backend), batched_parts))


def refuse_unaveraged(tensors: Iterable[Tensor]) -> None:
    """Refuse tensors of which no average can be kept.

    Raises:
        NotImplementedError: FSDP1 or ZeRO-3 has sharded one, or it wraps the memory of a weight.
    """
    for each in tensors:
        placed = is_dtensor(each)
        if not placed and shard_of(each).sharded:
            raise NotImplementedError(
                "an average of weights that FSDP1 or ZeRO-3 has sharded cannot be kept: a rank has "
                "a stretch of them in a row of many. Shard with torch.distributed.fsdp."
                "fully_shard (FSDP2), whose averages are sharded like the weights. Nothing was "
                "averaged"
            )
        if missing_memory(each) or not (placed or local(each) is each):
            kind = type(each)
            raise NotImplementedError(
                f"an average of a {kind.__module__}.{kind.__qualname__}, which wraps the memory of "
                "a weight, cannot be kept. Make the EMA before the model is converted, and update "
                "it with a plain copy that load_state_dict() gave these weights. Nothing was "
                "averaged"
            )


def by_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by names that wrappers, such as one for checkpointing, do not change."""
    return {without_wrappers(name): tensor for name, tensor in tensors}


def _place(tensor: Any) -> Any:
    """How a tensor lies on ranks; None if each has all of it."""
    return (tuple(tensor.placements), tensor.device_mesh) if is_dtensor(tensor) else None


def check_place(method: str, name: str, value: Tensor, average: Tensor) -> None:
    """Refuse a value of which this rank holds other elements than of its average.

    Raises:
        ValueError: it is placed in another way, or has another shape.
    """
    there, here = _place(value), _place(average)
    if (there, value.shape) == (here, average.shape):
        return
    if there is here is None:
        raise ValueError(
            f"{method}: {name!r} has shape {tuple(value.shape)}, and its average has shape "
            f"{tuple(average.shape)}; pass the model that the average was made of. Nothing was "
            "averaged"
        )
    shown = [
        f"whole on each rank, of shape {tuple(each.shape)}"
        if place is None
        else f"placed as {place[0]} on {place[1]}, of shape {tuple(each.shape)}"
        for place, each in ((there, value), (here, average))
    ]
    raise ValueError(
        f"{method}: {name!r} is {shown[0]}, and its average is {shown[1]}; make the average after "
        "the model is sharded, and pass that model. Nothing was averaged"
    )

"""The contents of a checkpoint: tensors by name, read in pieces when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_bf16.errors import CheckpointError
from torch_bf16.states.schema import HEADER, readable

__all__ = ["Box", "OptimizerStates", "Saved", "SavedTensor", "boxes", "is_scalar", "read_numbers"]

Box = tuple[tuple[int, ...], int, int]
"""Indices of the leading dimensions, and a range of the next; of those after it, all."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a file; a complex one is described as ``torch.view_as_real`` shows it.

    Attributes:
        shape: the shape of the whole tensor.
        dtype: the dtype that it was saved in.
        read: ``read(start, stop)``: those of its elements in row-major order, flat, in memory of
            their own, on the CPU.
        tied: equal for tensors that were one when they were saved; None if that is unknown.
        is_complex: whether it was saved as complex numbers.
        mapped: the whole tensor, if its file is mapped into memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    tied: Any = None
    is_complex: bool = False
    mapped: Tensor | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    def whole(self) -> Tensor:
        """The tensor as it was saved, with complex numbers if it had such."""
        tensor = self.read(0, self.numel).view(self.shape) if self.mapped is None else self.mapped
        return torch.view_as_complex(tensor) if self.is_complex else tensor


@dataclass(frozen=True)
class OptimizerStates:
    """An optimizer's state dict with its tensors on disk.

    Attributes:
        state: what ``optimizer.state`` held, by the parameter's number or its name.
        groups: hyperparameters and the keys of their parameters, under ``"params"``.
        header: the header that our optimizers save; empty for others.
    """

    state: Mapping[Any, Mapping[str, Any]]
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    header: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> OptimizerStates:
        """What ``optimizer.state_dict()`` returned, or what a file holds of it.

        Raises:
            CheckpointError: it is not built as torch builds it.
        """
        whole = readable(state_dict)
        return cls(whole["state"], [*whole["param_groups"]], whole.get(HEADER) or {})

    def names(self) -> dict[Any, str]:
        """The names of parameters by their keys in ``state``, as far as they are known."""
        bare = self.header.get("names") or [None] * len(self.groups)
        # The header's are bare, and one may stand for several.
        names = [
            each.get("param_names") or of_group
            for each, of_group in zip(self.groups, bare, strict=False)
        ]
        found = {
            key: name
            for of_group, group in zip(names, self.groups, strict=False)
            for name, key in zip(of_group or (), group.get("params") or (), strict=False)
            if isinstance(name, str) and key in self.state
        }
        # torch.distributed.checkpoint and FSDP put names in place of numbers.
        return found | {key: key for key in self.state if isinstance(key, str)}


@dataclass
class Saved:
    """A checkpoint.

    Attributes:
        path: the path that the user gave.
        tensors: the model's parameters and buffers, by name.
        optimizers: the states of each optimizer of which there are any.
        step: how many steps were taken; None if that is unknown.
        notes: what was left out, and why.
        left_out: names of tensors of the model that were, because they cannot be read here.
        ordered: whether names are in the order of the module that was saved.
        further: files or folders of further optimizers, which were not read.
        hidden: whether one of these may hold more bits of the weights.
    """

    path: Path
    tensors: dict[str, SavedTensor]
    optimizers: list[OptimizerStates] = field(default_factory=list)
    step: int | None = None
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    ordered: bool = True
    further: list[Path] = field(default_factory=list)
    hidden: bool = False

    def untied(self) -> dict[str, SavedTensor]:
        """The tensors, each under its first name only."""
        first: dict[Any, str] = {}
        for name, each in self.tensors.items():
            first.setdefault(each.tied or name, name)
        return {name: self.tensors[name] for name in first.values()}


def read_numbers(path: Path, at: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Elements ``start`` to ``stop`` of those that begin at byte ``at`` of a file."""
    count = (stop - start) * dtype.itemsize
    buffer = bytearray(count)
    with path.open("rb", buffering=0) as file:
        file.seek(at + start * dtype.itemsize)
        # One call reads at most 2 GiB, whatever is asked for.
        left = memoryview(buffer)
        while left:
            if not (got := file.readinto(left)):
                raise CheckpointError(f"{path} was cut short while it was read")
            left = left[got:]
    if not count:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements ``start`` to ``stop`` fill, in their order; few, and nothing beside.

    Args:
        shape: the shape of the whole tensor, of at least one dimension.
        start: the first element, in row-major order.
        stop: the one after the last.

    Example:
        >>> list(boxes((4, 5), 3, 16))
        [((0,), 3, 5), ((), 1, 3), ((3,), 0, 1)]
    """
    row = prod(shape[1:])
    if start >= stop:
        return
    first, last = -(-start // row), stop // row
    if first > last:
        parts = [(last, start - last * row, stop - last * row)]
    else:
        parts = [(first - 1, start - first * row + row, row), (last, 0, stop - last * row)]
    for number, (at, begin, end) in enumerate(parts):
        if number == 1 and first < last:
            yield (), first, last
        for index, a, b in boxes(shape[1:], begin, end):
            yield (at, *index), a, b


def is_scalar(name: Any, shape: Sequence[int]) -> bool:
    """Whether a tensor in an optimizer's state is a number; some count steps in shape (1,)."""
    return not shape or (name == "step" and prod(shape) == 1)

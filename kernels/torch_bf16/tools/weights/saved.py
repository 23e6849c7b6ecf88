"""What a checkpoint holds: tensors by name, of which pieces are read when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["OptimizerStates", "Saved", "SavedTensor"]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a file.

    Attributes:
        shape: of the whole tensor.
        dtype: as it was saved.
        read: ``read(start, stop)``: so many of its elements in row-major order, flat, in memory of
            their own, on the CPU.
        tied: equal for tensors that were one when they were saved; None where that is not known.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    tied: Any = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class OptimizerStates:
    """An optimizer's state dict with its tensors on disk.

    Attributes:
        state: by the parameter's number, or by its name, what ``optimizer.state`` held.
        groups: hyperparameters and the keys of their parameters, under ``"params"``.
        header: what our optimizers say of themselves; empty for others.
    """

    state: Mapping[Any, Mapping[str, Any]]
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    header: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Saved:
    """A checkpoint.

    Attributes:
        path: as it was given.
        tensors: of the model, parameters and buffers, by name.
        optimizer: what the optimizers kept, as that of one, where there are any.
        step: how many steps were taken, where that is told.
        notes: what was left out, and why.
        ordered: whether names are in the order of the module that was saved.
    """

    path: Path
    tensors: dict[str, SavedTensor]
    optimizer: OptimizerStates | None = None
    step: int | None = None
    notes: list[str] = field(default_factory=list)
    ordered: bool = True

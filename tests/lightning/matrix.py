"""What every rank does in a cell of the matrix: one call for each of the claims about it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from matrix_cells import STEPS, Cell, adafactor, muon, train
from torch import Tensor
from torchrun_variables import as_torchrun_says

import torch_bf16

Numbers = dict[str, Tensor]


@as_torchrun_says()
def fit(cell: Cell, same_data: bool = False) -> Numbers:
    """What training ends with."""
    run = train(cell, dist.get_rank(), same_data=same_data)
    assert isinstance(run.optimizer, torch_bf16.BF16Optimizer)
    assert {p.dtype for p in run.module.parameters()} == {torch.bfloat16}
    return run.numbers()


@as_torchrun_says()
def look_at_matrices(cell: Cell, name: str) -> Numbers:
    """What Muon or Adafactor ends with, on data that are the same on every rank."""
    make = {"Muon": muon, "Adafactor": adafactor}[name]
    run = train(cell, dist.get_rank(), same_data=True, make=make)
    optimizer = run.optimizer
    assert isinstance(optimizer, getattr(torch_bf16, name))
    assert optimizer.recipe == torch_bf16.get_recipe(cell.mode)
    return run.numbers()


@as_torchrun_says()
def clip(cell: Cell) -> tuple[Numbers, int, list[tuple[float, float]]]:
    """What it ends with where it clips and accumulates, the number of steps, and the norms."""
    run = train(cell, dist.get_rank(), together=True)
    return run.numbers(), run.steps, run.norms


@as_torchrun_says()
def stop_and_go_on(cell: Cell, path: Path) -> Numbers:
    """The same from a checkpoint of half of it."""
    half = train(cell, dist.get_rank(), together=True, epochs=1)
    assert half.steps == STEPS
    half.save(path)
    return train(cell, dist.get_rank(), together=True, checkpoint=path).numbers()


@as_torchrun_says()
def stop(cell: Cell, path: Path) -> None:
    """Save half of a training on data that are the same on every rank."""
    train(cell, dist.get_rank(), epochs=1, same_data=True).save(path)


@as_torchrun_says()
def go_on(cell: Cell, path: Path) -> Numbers:
    """What it ends with, on any number of ranks."""
    return train(cell, dist.get_rank(), same_data=True, checkpoint=path).numbers()

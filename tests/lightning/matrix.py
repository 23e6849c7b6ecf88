"""Trains every cell of the matrix, in processes forked from one that has imported everything.

Usage: matrix.py FOLDER. Two processes come first, then four, then two that go on from what four
saved. Each adds a line for each cell in which everything held to the file ``RANK of WORLD``.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_models import FABRICS, MODES, TRAINERS, host, network
from matrix_cells import CELLS, LIMIT, RESHARDED, STEPS, Cell, in_fp32, train
from sharded_training import assert_same

import torch_bf16

# How far the way of the weights may be from that in fp32: gradients in bf16 are small sums of
# larger terms, and weights that are rounded stochastically at each step have the noise of that. A
# missing sum, mean or clipping is at least 0.5, here or in the norm of the gradients.
WITHIN = {"bf16-fp32-master": 0.06, "bf16-stochastic": 0.12}
NORM_WITHIN = 0.01


def near_fp32(cell, numbers, together):
    """Compares the way that the weights went; returns the norms of the gradients in fp32."""
    expected, norms = in_fp32(cell, together)
    torch.manual_seed(3)
    first = [p.detach() for p in network().parameters()]
    ended = [tensor for name, tensor in numbers.items() if "/" not in name]
    went = torch.cat([(w.double() - f).flatten() for w, f in zip(ended, first, strict=True)])
    should = torch.cat([(e.double() - f).flatten() for e, f in zip(expected, first, strict=True)])
    error = ((went - should).norm() / should.norm()).item()
    assert error < WITHIN[cell.mode], (cell.id, together, error)
    return norms


def walk(cell: Cell, folder: Path, same: dict) -> None:
    """Train in this cell in every way."""
    rank = dist.get_rank()
    fit = train(cell, rank)
    assert isinstance(fit.optimizer, torch_bf16.BF16Optimizer)
    numbers = fit.numbers()
    assert {p.dtype for p in fit.module.parameters()} == {torch.bfloat16}
    near_fp32(cell, numbers, together=False)
    # Trainer and Fabric of both packages train the same bits.
    assert_same(same.setdefault((cell.strategy, cell.mode), numbers), numbers, cell.id)

    together = train(cell, rank, together=True)
    numbers = together.numbers()
    norms = near_fp32(cell, numbers, together=True)
    assert len(together.norms) == together.steps == len(norms)
    for (exact, clipped_by), fp32 in zip(together.norms, norms, strict=True):
        assert exact > 2 * LIMIT
        assert abs(clipped_by / exact - 1) < 1e-5, (cell.id, exact, clipped_by)
        assert abs(exact / fp32 - 1) < NORM_WITHIN, (cell.id, exact, fp32)

    half = train(cell, rank, together=True, epochs=1)
    assert half.steps == STEPS
    path = folder / f"{cell.id}.ckpt"
    half.save(path)
    resumed = train(cell, rank, together=True, checkpoint=path)
    assert_same(numbers, resumed.numbers(), cell.id)


def reshard(world: int, folder: Path) -> list[str]:
    """FSDP that goes on with what another number of ranks saved; all ranks see the same data."""
    held = []
    for strategy, package in RESHARDED:
        for mode in MODES:
            cell = Cell(strategy, (world, 1), package, mode)
            name = f"{strategy}-{package}-{mode}"
            known = folder / f"whole-{name}.pt"
            mine = folder / f"half-{name}-{world}.ckpt"
            theirs = folder / f"half-{name}-{6 - world}.ckpt"
            if theirs.exists():
                resumed = train(cell, dist.get_rank(), same_data=True, checkpoint=theirs)
                expected = torch.load(known, weights_only=True)
                assert_same(expected, resumed.numbers(), (cell.id, "from", theirs.name))
                held.append(f"{cell.id} resharded")
            else:
                numbers = train(cell, dist.get_rank(), same_data=True).numbers()
                if dist.get_rank() == 0:
                    torch.save(numbers, known)
            if not mine.exists():
                train(cell, dist.get_rank(), epochs=1, same_data=True).save(mine)
    return held


def process(rank: int, world: int, folder: Path, cells: list[Cell]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    store = folder / f"store-{world}-{len(cells)}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    same: dict = {}
    with (folder / f"{rank} of {world}").open("a") as notes:
        for cell in cells:
            walk(cell, folder, same)
            notes.write(f"{cell.id} held\n")
        notes.writelines(f"{line}\n" for line in reshard(world, folder))
    dist.barrier()
    dist.destroy_process_group()


def forked(world: int, folder: Path, cells: list[Cell]) -> None:
    """All of them end well, or none is left and this process ends badly."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                process(rank, world, folder, cells)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    for _ in children:
        _, status = os.wait()
        if status:
            raise SystemExit(1)  # the group is ended by the one who started it


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for name in (*TRAINERS, *FABRICS):
        host(name)
    os.environ.update(GROUP_RANK="0", TORCHELASTIC_RUN_ID="matrix")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # never used: the group is made
    for world, cells in ((2, True), (4, True), (2, False)):
        forked(world, folder, [cell for cell in CELLS if cells and cell.world == world])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A sharded run that saves after every step, and whose rank 1 is killed: ``RANK STORE FOLDER``.

The name of the folder says when: ``step``, while the optimizer steps, or ``save``, while its part
of a distributed checkpoint is being written.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_training import Case, cast_and_sharded, train_on_given_gradients
from torch.distributed.checkpoint.state_dict import get_state_dict

import torch_bf16

WORLD, LAST, TIMEOUT = 2, 3, 15
CASE, RECIPE = Case("fsdp2", (WORLD,)), "bf16-fp32-master"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Dying:
    """Kills the process when its optimizer is about to update."""

    def before_update(self, members, scale):
        die()

    def after_update(self):
        pass


class DyingWriter(dcp.FileSystemWriter):
    """Kills the process in the middle of its file."""

    def write_data(self, plan, planner):
        Path(self.path, "__1_0.distcp").write_bytes(b"half of it")
        die()


def save(model, optimizer, folder, step, writer=dcp.FileSystemWriter):
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(content, storage_writer=writer(f"{folder}/{step}"))


def main(rank, store, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    model, optimizer = cast_and_sharded(CASE, RECIPE)
    for step in range(LAST):
        train_on_given_gradients(model, optimizer, range(step, step + 1))
        save(model, optimizer, folder, step)
    dies_in_save = Path(folder).name.startswith("save")
    print("dying", time.time(), flush=True)
    if rank == 1 and not dies_in_save:
        optimizer.observers.append(Dying())
    train_on_given_gradients(model, optimizer, range(LAST, LAST + 1))
    torch_bf16.total_norm(model.parameters()).item()
    writer = DyingWriter if rank == 1 and dies_in_save else dcp.FileSystemWriter
    save(model, optimizer, folder, LAST, writer)
    print("went on", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

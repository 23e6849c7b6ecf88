"""A sharded run that saves after every step, and whose rank 1 is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_models import Case
from sharded_training import Run

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


def run(folder, when):
    """Rank 1 dies in a ``step`` of the optimizer, or in a ``save``, while it writes its part."""
    going = Run(CASE, RECIPE)
    for step in range(LAST):
        going.train([step]).save(folder / str(step))
    writer = dcp.FileSystemWriter
    if dist.get_rank() == 1 and when == "save":
        writer = DyingWriter
    elif dist.get_rank() == 1:
        going.optimizer.observers.append(Dying())
    going.train([LAST])
    torch_bf16.total_norm(going.model.parameters()).item()
    dcp.save(going.state_dicts(), storage_writer=writer(folder / str(LAST)))

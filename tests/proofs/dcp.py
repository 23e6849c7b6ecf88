"""Bytes on disk and peak memory of a distributed checkpoint of a large state.

    python tests/proofs/dcp.py --parameters 1e9 --folder /some/disk

Saves and loads model and optimizer through torch.distributed.checkpoint in one process, and exits
with 1 where the files take more than 1.2 times the state's bytes, or memory grows by more than
one copy of the largest tensor and 16 MiB. torch's own reader takes two, see docs/checkpoints.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import torch_bf16

WIDTH = 4096


class OneAtATime(dcp.FileSystemReader):
    """Reads as torch does, and lets go of each tensor before the next."""

    def read_data(self, plan, planner):
        for item in plan.items[1:]:
            super().read_data(dataclasses.replace(plan, items=[item]), planner)
        return super().read_data(dataclasses.replace(plan, items=plan.items[:1]), planner)


def make_run(count: int):
    layers = max(1, count // WIDTH**2)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers))
    )
    optimizer = torch_bf16.AdamW(model.named_parameters(), lr=1e-3)
    for parameter in model.parameters():
        # The states alone, without a gradient for each parameter.
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape, dtype=torch.bfloat16),
            "exp_avg_sq": torch.rand(parameter.shape, dtype=torch.bfloat16),
        }
    return model, optimizer


def memory(which: str) -> int:
    """``VmRSS``, what is resident now, or ``VmHWM``, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def start() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, optimizer = make_run(int(options.parameters))
    tensors = [p.detach() for p in model.parameters()]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    total, largest = sum(t.nbytes for t in tensors), max(t.nbytes for t in tensors)
    checks = [int(t.view(torch.int16).sum(dtype=torch.int64)) for t in tensors if t.itemsize == 2]
    content = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        before = start()
        dcp.save(content, checkpoint_id=folder)
        saved = memory("VmHWM") - before
        on_disk = sum(each.stat().st_size for each in Path(folder).rglob("*"))
        os.sync()
        grown = []
        for reader in (dcp.FileSystemReader(folder), OneAtATime(folder)):
            for tensor in tensors:
                tensor.zero_()
            before = start()
            dcp.load(content, storage_reader=reader)
            set_optimizer_state_dict(model, optimizer, content["optimizer"])
            grown.append(memory("VmHWM") - before)
        theirs, loaded = grown
    again = [p.detach() for p in model.parameters()]
    again += [t for state in optimizer.state.values() for t in state.values()]
    same = checks == [
        int(t.view(torch.int16).sum(dtype=torch.int64)) for t in again if t.itemsize == 2
    ]
    print(
        f"{total / 1e9:.2f} GB of state, {on_disk / total:.4f} of that on disk; memory grew by "
        f"{saved / 2**20:.0f} MiB to save and {loaded / 2**20:.0f} MiB to load (by torch's own "
        f"reader {theirs / 2**20:.0f}), the largest tensor has {largest / 2**20:.0f} MiB; "
        f"{'the same bits' if same else 'OTHER BITS'}"
    )
    bound = largest + 16 * 2**20
    return int(not same or on_disk > 1.2 * total or saved > bound or loaded > bound)


if __name__ == "__main__":
    sys.exit(main())

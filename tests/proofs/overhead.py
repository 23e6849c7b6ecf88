"""What a step costs more where its tensors are sharded: planning, and unwrapping DTensors.

    python tests/proofs/overhead.py --ranks 2

Two optimizers step in turn, one over DTensors (FSDP2's placement), one over plain tensors with the
shapes of their shards and the same backend; both are so small that their kernel takes next to no
time. Gradients are new objects in every step. Counted is the CPU time of this process, all threads,
within ``step()``, in the least disturbed of many blocks of 20 steps, without the first. Exits with
1 where the difference is more than the limit on any rank. The limit is for gradients as FSDP2
and tensor parallelism make them, with their parameter's spec; for others the time is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_bf16

BLOCKS, STEPS = 60, 20


def make_run(count: int, mesh, shared_spec: bool):
    """An optimizer, and a function that gives its parameters gradients that they never had."""
    torch.manual_seed(0)
    locals_ = [torch.randn(4, 4, dtype=torch.bfloat16) for _ in range(count)]
    placed = [each if mesh is None else _placed(each, mesh) for each in locals_]
    parameters = [nn.Parameter(each) for each in placed]
    names = [f"layer.{number}.weight" for number in range(count)]
    optimizer = torch_bf16.AdamW(list(zip(names, parameters, strict=True)), lr=1e-3)

    def give_gradients() -> None:
        for parameter in parameters:
            memory = torch.ones(4, 4, dtype=torch.bfloat16)
            if mesh is None:
                parameter.grad = memory
            elif shared_spec:
                parameter.grad = DTensor(memory, parameter._spec, requires_grad=False)
            else:
                parameter.grad = _placed(memory, mesh)

    return optimizer, give_gradients


def _placed(memory, mesh):
    return DTensor.from_local(memory, mesh, [Shard(0)], run_check=False)


def step_seconds(optimizer, give_gradients) -> float:
    total = 0.0
    for _ in range(STEPS):
        give_gradients()
        start = time.process_time()
        optimizer.step()
        total += time.process_time() - start
    return total / STEPS


def measure(rank: int, options, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    mesh = init_device_mesh("cpu", (options.ranks,))
    runs = {
        "plain tensors": make_run(options.tensors, None, True),
        "DTensors, gradients with the parameter's spec": make_run(options.tensors, mesh, True),
        "DTensors, gradients with specs of their own": make_run(options.tensors, mesh, False),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(BLOCKS + 1):
        for name, run in runs.items():
            seconds = step_seconds(*run)
            if block:
                times[name].append(seconds)
    least = {name: 1e3 * min(each) for name, each in times.items()}
    plain = least.pop("plain tensors")
    found = [None] * options.ranks
    dist.all_gather_object(found, (plain, least))
    worst = 0.0
    for number, (plain, least) in enumerate(found):
        for name, sharded in least.items():
            if "the parameter's spec" in name:
                worst = max(worst, sharded - plain)
            if rank == 0:
                print(
                    f"rank {number}, {options.tensors} tensors, torch {torch.__version__}: plain "
                    f"{plain:.3f} ms, {name} {sharded:.3f} ms, overhead {sharded - plain:.3f} ms"
                )
    dist.destroy_process_group()
    if rank == 0 and worst > options.limit:
        raise SystemExit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--limit", type=float, default=0.3, help="ms per step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(measure, (options, f"{folder}/store"), options.ranks)
        except mp.ProcessExitedException as error:
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The test that ``accelerate test`` launches if the configuration names one of our modes.

Accelerate's own test compares fp32 weights under SGD bit for bit, which training in bf16 cannot
pass by design. This test checks, in the processes that the configuration describes, that the mode
has reached them and that it keeps its promises. It can be launched by hand::

    accelerate launch --config_file config.yaml -m accelerate_bf16.selftest
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from contextlib import nullcontext
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import torch_bf16
from accelerate_bf16.modes import MODES, canonical

__all__ = ["main"]

_STEPS = 100
_BATCH = 16


def main() -> None:
    """Train a small model next to fp32, compare the replicas, save, load and train again.

    Raises:
        RuntimeError: the mode has not arrived, or one of its promises does not hold.
    """
    # Save on each node, because nodes need not share a file system.
    accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=True))
    mode = accelerator.mixed_precision
    if canonical(mode) is None:
        raise RuntimeError(
            f"mixed_precision={mode!r} has reached this process; this test is for "
            f"{', '.join(MODES)}"
        )

    def check(holds: bool, claim: str) -> None:
        if not holds:
            raise RuntimeError(f"mixed_precision={mode!r}: not true: {claim}")
        accelerator.print(f"{mode}: {claim}")

    steps = accelerator.gradient_accumulation_steps
    data = _data(_STEPS * steps, accelerator.num_processes)
    # Without an Accelerator, on the batches of all processes together.
    whole = (each.flatten(1, 2) for each in data)
    reference = _train(*_model_and_optimizer(), *whole, accumulation_steps=steps)
    inputs, targets = (each[:, accelerator.process_index].to(accelerator.device) for each in data)
    bare, optimizer = _model_and_optimizer()
    model, optimizer = accelerator.prepare(bare, optimizer)
    inner = optimizer.optimizer
    check(
        isinstance(inner, torch_bf16.BF16Optimizer) and bare[0].weight.dtype == torch.bfloat16,
        f"weights are bfloat16 and {type(inner).__name__} keeps them by its recipe",
    )
    ended = _train(model, optimizer, inputs, targets, accelerator=accelerator)
    loss = fmean(gather_object([ended]))
    check(
        loss < 1.25 * reference + 1e-3,
        f"the loss ends at {loss:.4f}, that of fp32 at {reference:.4f}",
    )
    digests = gather_object([_digest(model, inner)])
    if isinstance(model, nn.parallel.DistributedDataParallel):
        check(len(set(digests)) == 1, f"{len(digests)} replicas are bit-identical")

    made = tempfile.mkdtemp(prefix="bf16-selftest-") if accelerator.is_main_process else ""
    folder = str(broadcast_object_list([made])[0])
    try:
        ten = inputs[: 10 * steps], targets[: 10 * steps]
        accelerator.save_state(folder)
        _train(model, optimizer, *ten, accelerator=accelerator)
        expected = _digest(model, inner)
        accelerator.load_state(folder)
        _train(model, optimizer, *ten, accelerator=accelerator)
    finally:
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process:
            shutil.rmtree(folder, ignore_errors=True)
    check(_digest(model, inner) == expected, "a resumed run repeats itself bit for bit")
    accelerator.free_memory()
    accelerator.end_training()


def _model_and_optimizer() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _data(batches: int, processes: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, indexed by batch and process."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(batches, processes, _BATCH, 8, generator=generator)
    return inputs, (inputs[..., :1] * inputs[..., 1:2] + inputs[..., 2:3]).tanh()


def _train(
    model: nn.Module,
    optimizer: Any,
    inputs: Tensor,
    targets: Tensor,
    accumulation_steps: int = 1,
    accelerator: Accelerator | None = None,
) -> float:
    """Take a step for every ``accumulation_steps`` batches; return the mean of the last 20 losses.

    Args:
        model, optimizer: as ``prepare`` returned them, if there is an ``accelerator``.
        inputs, targets: one entry for each batch.
        accumulation_steps: used only without an ``accelerator``, which counts by itself.
    """
    losses = []
    for number, (x, y) in enumerate(zip(inputs, targets, strict=True), 1):
        with accelerator.accumulate(model) if accelerator else nullcontext():
            loss = mse_loss(model(x), y)
            losses.append(loss.item())
            if accelerator is not None:
                accelerator.backward(loss)
            else:
                (loss / accumulation_steps).backward()
                if number % accumulation_steps:
                    continue
            optimizer.step()
            optimizer.zero_grad()
    return fmean(losses[-20:])


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        tensors: list[Any] = [parameter.detach(), *optimizer.state[parameter].values()]
        for value in tensors:
            local = value.to_local() if hasattr(value, "to_local") else value
            digest.update(local.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()

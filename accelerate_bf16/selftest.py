"""What ``accelerate test`` launches where the configuration names one of our modes.

Accelerate's own test compares fp32 weights under SGD, bit for bit with themselves, which training
in bf16 cannot pass by design. This one checks, on the processes that the configuration describes,
that the mode has reached them and that it does what it promises. It can be launched by hand::

    accelerate launch --config_file config.yaml -m accelerate_bf16.selftest
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile

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
    # On each node, because they need not share a file system.
    accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=True))
    mode = canonical(accelerator.mixed_precision)
    if mode is None:
        raise RuntimeError(
            f"mixed_precision={accelerator.mixed_precision!r} has reached this process; this test "
            f"is for {', '.join(MODES)}"
        )
    inputs, targets = _data(accelerator.num_processes)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bare = model
    model, optimizer = accelerator.prepare(model, optimizer)
    own = optimizer.optimizer
    _check(
        isinstance(own, torch_bf16.BF16Optimizer) and bare[0].weight.dtype == torch.bfloat16,
        f"weights are bfloat16 and {type(own).__name__} keeps them by its recipe",
        accelerator,
    )

    reference = _reference(inputs, targets)
    loss = _train(accelerator, model, optimizer, inputs, targets, range(_STEPS))
    loss = torch.stack(gather_object([loss])).mean().item()
    _check(
        loss < 1.25 * reference + 1e-3,
        f"the loss ends at {loss:.4f}, that of fp32 at {reference:.4f}",
        accelerator,
    )
    _check_replicas(accelerator, model, own)

    made = tempfile.mkdtemp(prefix="bf16-selftest-") if accelerator.is_main_process else ""
    folder = str(broadcast_object_list([made])[0])
    try:
        accelerator.save_state(folder)
        _train(accelerator, model, optimizer, inputs, targets, range(10))
        expected = _digest(model, own)
        accelerator.load_state(folder)
        _train(accelerator, model, optimizer, inputs, targets, range(10))
    finally:
        accelerator.wait_for_everyone()
        if accelerator.is_local_main_process:
            shutil.rmtree(folder, ignore_errors=True)
    same = _digest(model, own) == expected
    _check(same, "a resumed run repeats itself bit for bit", accelerator)
    accelerator.free_memory()
    accelerator.end_training()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1))


def _data(processes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_STEPS, processes, _BATCH, 8, generator=generator)
    return inputs, (inputs[..., :1] * inputs[..., 1:2] + inputs[..., 2:3]).tanh()


def _reference(inputs: Tensor, targets: Tensor) -> float:
    """The mean loss of the last steps in fp32, on the batches of all processes together."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        loss = mse_loss(model(x.flatten(0, 1)), y.flatten(0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def _train(accelerator, model, optimizer, inputs, targets, steps) -> Tensor:
    losses = []
    for step in steps:
        x = inputs[step, accelerator.process_index].to(accelerator.device)
        y = targets[step, accelerator.process_index].to(accelerator.device)
        with accelerator.accumulate(model):
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses[-20:]).mean().cpu()


def _check_replicas(accelerator: Accelerator, model: nn.Module, optimizer) -> None:
    digests = gather_object([_digest(model, optimizer)])
    if isinstance(model, nn.parallel.DistributedDataParallel):
        same = f"{len(digests)} replicas are bit-identical"
        _check(len(set(digests)) == 1, same, accelerator)


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for value in (parameter.detach(), *optimizer.state[parameter].values()):
            to_local = getattr(value, "to_local", None)
            local = value if to_local is None else to_local()
            digest.update(local.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _check(holds: bool, claim: str, accelerator: Accelerator) -> None:
    if not holds:
        raise RuntimeError(f"mixed_precision={accelerator.mixed_precision!r}: not true: {claim}")
    accelerator.print(f"{accelerator.mixed_precision}: {claim}")


if __name__ == "__main__":
    main()

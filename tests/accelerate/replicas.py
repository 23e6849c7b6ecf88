"""Trains on two ranks with different seeds: digests of all that each rank ends with."""

import hashlib
import io
import os
from contextlib import redirect_stderr
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torchrun_variables import as_torchrun_says

from torch_bf16.numerics.rounding import join16


def trained(variables):
    """What this rank ends with, where torchrun and the launcher say the rest."""
    variables = {"ACCELERATE_USE_CPU": "true", **variables}
    with as_torchrun_says(), mock.patch.dict(os.environ, variables):
        try:
            with redirect_stderr(io.StringIO()) as printed:
                return {**_trained(), "printed": printed.getvalue()}
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def _trained():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(8), torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 1)
    )
    bias = model[1].bias
    initial = bias.tolist()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)

    exact = None
    while (step := optimizer.state.get(bias, {}).get("step", 0)) < 50:
        if step == 1 and exact is None:
            # The first step, at a rate of 0, made the masters and left them as they were seeded.
            exact = join16(bias.detach(), optimizer.state[bias]["remainder16"]).tolist()
            optimizer.param_groups[0]["lr"] = 1e-3
        x = torch.randn(16, 8)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), x[:, :1].tanh())
            accelerator.backward(loss)
            dtypes = {str(p.grad.dtype) for p in model.parameters()}
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    bare = accelerator.unwrap_model(model)
    tensors = {f"weight {name}": p.detach() for name, p in bare.named_parameters()}
    for name, parameter in bare.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key} {name}"] = value
    return {
        "mode": str(accelerator.mixed_precision),
        "gradients": sorted(dtypes),
        "digests": {
            name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy()).hexdigest()
            for name, value in tensors.items()
            if value.ndim
        },
        "steps": [int(optimizer.state[p]["step"]) for p in bare.parameters()],
        "initial": initial,
        "exact": exact,
    }

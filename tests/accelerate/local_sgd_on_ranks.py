"""Local SGD at a small learning rate, as every rank does it."""

from __future__ import annotations

import torch
from accelerate.local_sgd import LocalSGD
from sharded_llama import accelerator, on_ranks


@on_ranks()
def trained(mode):
    """How far the mean of each parameter has moved, and the sum of each, exactly.

    One without an optimizer becomes the mean of the ranks' numbers.
    """
    torch.manual_seed(0)
    made = accelerator(mode, fsdp=False)
    model = torch.nn.Linear(64, 32)
    model.scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=1e-5)
    bare = model
    model, optimizer = made.prepare(model, optimizer)
    bare.scale.data.fill_(made.process_index)
    x = torch.ones(4, 64) * (1 + made.process_index)
    with LocalSGD(accelerator=made, model=model, local_sgd_steps=8) as local_sgd:
        for _ in range(64):
            made.backward(-model(x).sum() / 4)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    pairs = zip(bare.parameters(), start, strict=True)
    moved = [(p.detach().float() - old).mean().item() for p, old in pairs]
    exact = getattr(optimizer.optimizer, "exact_weight", torch.Tensor.detach)
    return moved, [exact(p).double().sum().item() for p in bare.parameters()]

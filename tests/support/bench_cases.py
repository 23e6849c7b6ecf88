"""Entries that fail in every way a library can, beside some that work, and entries' first step."""

import time
import warnings

import torch

from torch_bf16.tools.bench.entries import Entry
from torch_bf16.tools.bench.peers import PEERS
from torch_bf16.tools.redirection import quiet

SHAPES = [(6, 64), (64,), (10, 64)]
PARAMETERS = 17 * 64
(TORCH, _) = PEERS["torch"].entries


class Nested:
    """A state that is neither a tensor nor a container."""

    def __init__(self, like):
        self.codes = torch.zeros_like(like, dtype=torch.int8)
        self.bits = 8


class Signs(torch.optim.Optimizer):
    """Moves weights against the sign of the gradient; has the same states as some libraries."""

    log: list = []  # noqa: RUF012

    def __init__(
        self, params, lr, betas, eps, weight_decay, *, label="signs", fail_at=0, fault=None
    ):
        super().__init__(params, {"lr": lr})
        self.label, self.fail_at, self.fault = label, fail_at, fault
        self.steps = 0
        if fault == "constructor":
            raise NotImplementedError("nothing works here.\nAt all.")

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        self.log.append(self.label)
        warnings.warn("every step", stacklevel=2)
        print("tuning", flush=True)
        if self.steps == self.fail_at:
            error = torch.OutOfMemoryError if self.fault == "memory" else RuntimeError
            raise error(f"step {self.steps} is too much")
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p] = {"step": 0, "deep": {0: [Nested(p)]}, "shared": p.grad}
                if self.fault != "idle":
                    p.sub_(p.grad.sign(), alpha=0.1)
                if self.fault == "takes gradients":
                    p.grad = None
        if self.fault == "slow":
            time.sleep(20)


def entry(name="signs", *, estimate=1.0, **options):
    """A fake that calls itself ``name``."""
    options.setdefault("label", name)
    return Entry(
        name, "bf16 signs", "bench_cases:Signs", estimate, options, scratch=0, dtype=torch.bfloat16
    )


def stepped(each, shapes):
    """An entry's optimizer on the CPU, after a step."""
    optimizer = each.make(shapes, torch.device("cpu"))
    with quiet():
        optimizer.step()
    return optimizer

"""Trainings, and what is none: factories in one file, and a script."""

import json

from torch_bf16.tools import cli

FACTORIES = """
import torch
from torch import nn

class Squared(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 64), nn.LayerNorm(64), nn.Linear(64, 1))

    def forward(self, x, scale=1.0):
        return (scale * self.net(x) - x.sum(1, keepdim=True)).square().mean()

def batches(n=8, width=32):
    torch.manual_seed(1)
    return [torch.randn(16, width) for _ in range(n)]

def made(lr):
    torch.manual_seed(0)
    model = Squared()
    return model, batches(), torch.optim.AdamW(model.parameters(), lr=lr)

def fast(): return made(3e-2)
def slow(): return made(1e-5)
def plain(): return Squared(), batches()
def keywords(): return Squared(), [{"x": x, "scale": 2.0} for x in batches()]
def arguments(): return Squared(), [(x, 2.0) for x in batches()]
def scheduled():
    model, data, optimizer = made(1e-2)
    optimizer.scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=500)
    optimizer.register_step_post_hook(lambda *_: optimizer.scheduler.step())
    return model, data, optimizer
def in_bf16():
    model, data, _ = made(1e-3)
    model = model.bfloat16()
    return model, [x.bfloat16() for x in data], torch.optim.AdamW(model.parameters(), lr=1e-3)

def scripted():
    model, data, _ = made(1e-3)
    model.net[1] = torch.jit.script(model.net[1])
    return model, data, torch.optim.AdamW(model.parameters(), lr=1e-3)

def by_its_own_step():
    model, data, _ = in_bf16()
    return model, data, torch.optim.Adamax(model.parameters(), lr=1e-3)

# What is none.
number = 3
def nothing(): return None
def four(): return 1, 2, 3, 4
def raises(): raise RuntimeError("no data here")
def exits(): raise SystemExit("usage")
def no_model(): return "model", batches()
def no_batches(): return Squared(), 7
def no_optimizer(): return Squared(), batches(), 7
def empty(): return made(1e-3)[0], []
def iterator(): return Squared(), iter(batches(3))
def frozen(): return Squared().requires_grad_(False), batches()
def others():
    return Squared(), batches(), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
def mismatched(): return Squared(), batches(width=31)
def no_loss(): return nn.Linear(32, 2), batches()
def not_finite(): return Squared(), [x * float("nan") for x in batches()]
def closure():
    model = Squared()
    return model, batches(), torch.optim.LBFGS(model.parameters())
def with_an_empty_parameter():
    model, data, _ = made(1e-3)
    model.none = nn.Parameter(torch.empty(0, 4))
    inner = model.forward
    model.forward = lambda x: inner(x) + model.none.sum()
    return model, data, torch.optim.AdamW(model.parameters(), lr=1e-3)
def still(): return made(0.0)
def released():
    import torch_bf16
    model, data, optimizer = made(1e-3)
    torch_bf16.prepare(model, optimizer)
    torch_bf16.release_gradients(model, optimizer)
    return Autocast(model), data, optimizer
class Autocast(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()
def cast():
    import torch_bf16
    model, data, optimizer = made(1e-5)
    torch_bf16.prepare(model, optimizer)
    return Autocast(model), data, optimizer
def kept():
    import torch_bf16
    model, data, optimizer = made(1e-5)
    recipe = torch_bf16.get_recipe("bf16-stochastic", keep_fp32=("net.0",))
    torch_bf16.prepare(model, optimizer, recipe)
    return Autocast(model), data, optimizer
def declared():
    model, data, optimizer = made(1e-5)
    model._keep_in_fp32_modules_strict = ["net.0"]
    return model, data, optimizer
def in_groups():
    model, data, _ = made(1e-3)
    first, *others = model.parameters()
    groups = [{"params": [first], "momentum": 0.9}, {"params": others}]
    return model, data, torch.optim.SGD(groups, lr=1e-3)
def two():
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    model = Two(first, second)
    return model, batches(), Both(first, second)
class Two(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return sum((part(x) - 1).square().mean() for part in self.parts)
class Both(torch.optim.Optimizer):
    "Steps an optimizer for each part, as wrappers do."
    def __init__(self, first, second):
        super().__init__([*first.parameters(), *second.parameters()], {"lr": 1e-3})
        self.own = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (first, second)]

    def step(self, closure=None):
        for each in self.own:
            each.step()
def half():
    model = Squared().half()
    return model, [x.half() for x in batches()], torch.optim.SGD(model.parameters(), lr=1e-3)
def refused():
    class Closed(torch.optim.LBFGS):
        def step(self, closure=None):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p -= 1e-3 * p.grad
    model = Squared()
    return model, batches(), Closed(model.parameters())
def unseen():
    class Apart(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.defaults, self.state = {}, {}
            self.param_groups = [{"params": [*parameters], "lr": 1e-3}]

        def zero_grad(self):
            pass

        def step(self):
            pass
    model = Squared()
    return model, batches(), Apart(model.parameters())
def lost_gradients():
    class Skips(torch.optim.SGD):
        def step(self, closure=None):
            pass
    model = Squared()
    for p in model.parameters():
        p.register_hook(lambda g: g * float("inf"))
    return model, batches(), Skips(model.parameters(), lr=1e-3)
"""
SCRIPT = """
import sys, torch
from torch import nn

def main():
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
    try:
        for step in range(100):
            loss = (model(torch.randn(8, 32)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    except Exception as error:
        print("swallowed", error)
    torch.save(model.state_dict(), "after_training.pt")

print("prints", sys.argv[1:])
main()
"""


def recommend(capsys, *arguments):
    """Exit status, the record from standard output, and what was said beside it."""
    script = arguments[arguments.index("--") :] if "--" in arguments else ()
    own = arguments[: len(arguments) - len(script)]
    status = cli.main(["recommend", *own, "--json", "-", *script])
    out, err = capsys.readouterr()
    assert status == 0 or out == ""
    return status, json.loads(out) if status == 0 else None, err

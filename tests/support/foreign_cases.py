"""Optimizers whose classes torch_bf16 does not know, those it must refuse, and a small run."""

import torch

import torch_bf16
from torch_bf16 import convert


def unknown(kind, **options):
    """A subclass, which has no fused rule even where its base has one."""
    own = type(f"Own{kind.__name__}", (kind,), {"__module__": __name__})
    globals()[own.__name__] = own
    return lambda parameters: own(parameters, **options)


OWN = {
    "adadelta": unknown(torch.optim.Adadelta, lr=0.5),
    "adamax": unknown(torch.optim.Adamax, lr=0.01),
    "asgd": unknown(torch.optim.ASGD, lr=0.01),
    "rprop": unknown(torch.optim.Rprop, lr=0.01),
    "rmsprop": unknown(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "nadam": unknown(torch.optim.NAdam, lr=0.01, foreach=True),
    "adagrad": unknown(torch.optim.Adagrad, lr=0.01),
}
ADAMW_WITH_AMSGRAD = unknown(torch.optim.AdamW, lr=0.01, amsgrad=True)


class Normed(torch.optim.Optimizer):
    """Descent by the gradient over the norm of all gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad / norm, alpha=-group["lr"])


class Summing(torch.optim.Optimizer):
    """Descent whose rate depends on a sum over the group of the steps before."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "total": 0.0})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] / (1 + group["total"]))
            group["total"] += sum(float(p.grad.square().sum()) for p in group["params"])


class Counter(torch.optim.Optimizer):
    """Descent with a count of calls in an attribute, and momentum in the gradient's memory."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(self.calls)
                p.data.add_(p.grad, alpha=-group["lr"])


class CountsInState(torch.optim.Optimizer):
    """Descent at a growing rate, counted under a key of ``state`` that is no parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = torch.tensor([1.0])
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * self.state["k"].item())
        self.state["k"] += 1


class KeepsTensorsByName(torch.optim.SGD):
    """Tensors of parameters under such a key."""

    def step(self, closure=None):
        weights = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.state["start"] = weights


class KeepsTensors(torch.optim.SGD):
    """Momentum outside ``state``."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.buffers = {}

    def step(self, closure=None):
        self.buffers = {**self.buffers, "last": torch.ones(3)}


class NeedsClosure(torch.optim.SGD):
    """Evaluates the model itself."""

    def step(self, closure):
        closure()


class CallsClosure(torch.optim.SGD):
    """As above, and says so at run time only."""

    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("a closure is needed")


class Wraps(torch.optim.Optimizer):
    """Around another optimizer."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups)

    def step(self, closure=None):
        self.base.step()


class Holds(torch.optim.SGD):
    """Keeps the parameters themselves in a list of its own."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, lr=0.1)
        self.mine = [params]


class Swaps(torch.optim.SGD):
    """Has weights for training and others for evaluation."""

    def train(self):
        """Swap in the first kind."""

    def eval(self):
        """Swap in the second kind."""


COUPLED = {"norm": Normed, "sum": Summing, "counter": Counter, "state": CountsInState}
REFUSED = {
    "tensors outside state": (KeepsTensors, "keeps tensors in its attribute buffers, outside"),
    "tensors in state": (KeepsTensorsByName, "keeps tensors under the key 'start' of its state"),
    "closure": (NeedsClosure, "its step needs a closure"),
    "closure at run time": (CallsClosure, "fails .* RuntimeError: a closure is needed"),
    "wrapper": (Wraps, "wraps another optimizer, SGD, in its attribute base: convert that one"),
    "parameters": (Holds, "keeps the model's own tensors in its attribute mine"),
    "train and eval": (Swaps, r"its train\(\) and eval\(\) rewrite the weights"),
    "lbfgs": (torch.optim.LBFGS, "closure several times per step"),
    "sparse": (torch.optim.SparseAdam, "sparse gradients"),
}


def make_run(make, recipe, seed=0, **options):
    """A small model and its optimizer, converted unless ``recipe`` is None."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 5),
        torch.nn.LayerNorm(5),
        torch.nn.Conv2d(3, 2, 3),
        torch.nn.Linear(5, 3),
    )
    if recipe is None:
        return model, make(model.parameters())
    torch_bf16.cast_model(model, recipe)
    return model, convert(make(model.parameters()), recipe, model=model, **options)


def train(model, optimizer, seeds):
    """Steps on gradients that are bf16 numbers, the same for any recipe."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def exact_weights(model, optimizer):
    """fp32 weights, in the order of ``model.parameters()``."""
    weights = torch_bf16.fp32_state_dict(model, optimizer)
    return [weights[name] for name, _ in model.named_parameters()]

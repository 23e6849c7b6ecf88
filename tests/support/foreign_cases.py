"""Optimizers whose classes torch_bf16 does not know, those it must refuse, and a small run."""

import copy
from collections import deque

import torch
from torch import nn

import torch_bf16
from torch_bf16 import convert


def sparse_and_dense():
    """A network; SparseAdam, which is not convertible, for its embedding, AdamW for the rest."""
    net = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
    sparse, dense = torch.optim.SparseAdam([net[0].weight]), torch.optim.AdamW(net[1].parameters())
    return net, (sparse, dense)


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


class Descent(torch.optim.Optimizer):
    """A class of its own, whose only option is its rate."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})


class Normed(Descent):
    """Descent by the gradient over the norm of all gradients."""

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


class CountsInState(Descent):
    """Descent at a growing rate, counted under a key of ``state`` that is not a parameter."""

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


@torch.no_grad()
def momentum_step(optimizer, speed_of):
    """A step whose momentum is in the buffers that ``speed_of(group, p)`` returns."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.add_(speed_of(group, p).mul_(0.9).add_(p.grad), alpha=-group["lr"])


class KeepsByParameter(torch.optim.SGD):
    """Momentum outside ``state``, in a dict that is there before the first step."""

    def __init__(self, params, key=lambda p: p):
        super().__init__(params, lr=0.1)
        self.key, self.speeds = key, {}

    def step(self, closure=None):
        momentum_step(
            self, lambda group, p: self.speeds.setdefault(self.key(p), torch.zeros_like(p))
        )


class KeepsInGroups(torch.optim.SGD):
    """The same, in the groups' options, as GrokAdamW keeps its states."""

    def step(self, closure=None):
        momentum_step(
            self,
            lambda group, p: group.setdefault("speeds", {}).setdefault(p, torch.zeros_like(p)),
        )


class Momentum(Descent):
    """Keeps a momentum in its state, and steps by it."""

    def step(self, closure=None):
        momentum_step(
            self,
            lambda group, p: self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)),
        )


class LoadsByItself(Momentum):
    """Wraps states in its state dicts, and loads without torch's hooks, as bitsandbytes does."""

    def state_dict(self):
        content = super().state_dict()
        for key, state in content["state"].items():
            wrapped = {"momentum_buffer": state["momentum_buffer"]}
            rest = {k: each for k, each in state.items() if k not in wrapped}
            content["state"][key] = {**rest, "wrapped": wrapped}
        return content

    def load_state_dict(self, state_dict):
        content = copy.deepcopy(state_dict)
        groups, state = content["param_groups"], {}
        for group, saved in zip(self.param_groups, groups, strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                state[p] = content["state"][key]
                state[p] |= {k: v.to(p.dtype) for k, v in state[p].pop("wrapped").items()}
            saved["params"] = group["params"]
        self.__setstate__({"state": state, "param_groups": groups})


class InDeque(torch.optim.SGD):
    """The parameters once more, in a collection that is no list."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.last = deque(p for group in self.param_groups for p in group["params"])


class RefersToItself(torch.optim.SGD):
    """A reference to the instance."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.owner = self


class RatesById(torch.optim.SGD):
    """A learning rate for each parameter, looked up by its id."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.rates = {id(p): 0.1 for group in self.param_groups for p in group["params"]}


class NeedsClosure(torch.optim.SGD):
    """Evaluates the model itself, before it writes weights."""

    def step(self, closure):
        closure()
        return super().step()


class CallsTwice(torch.optim.SGD):
    """Evaluates it again."""

    def step(self, closure):
        closure()
        closure()


class CallsAfterwards(torch.optim.SGD):
    """Evaluates it with weights of its own, as SAM does."""

    def step(self, closure):
        super().step()
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


class Ascends(Wraps):
    """Climbs to a worse place first, as SAM does."""

    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad)


class WrapsBesideTheModel(Wraps):
    """The same, with the parameters in an attribute, too, as WSAM keeps its model."""

    def __init__(self, params):
        params = list(params)
        self.model = torch.nn.ParameterList(params)
        super().__init__(params)


class Holds(torch.optim.SGD):
    """Keeps the parameters themselves in a list of its own."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, lr=0.1)
        self.mine = [params]


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: weights for training between an average and what descends."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def _swap(self, training, weight):
        for group in self.param_groups:
            if group["training"] is not training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["training"] = training

    def train(self):
        """Swap in the weights that are trained."""
        self._swap(True, lambda beta: 1 - beta)

    def eval(self):
        """Swap in the average."""
        self._swap(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):
        if not all(group["training"] for group in self.param_groups):
            raise RuntimeError("call train() before step()")
        for group in self.param_groups:
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.detach().clone()
                p.lerp_(self.state[p]["z"], share)
                p.sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - share)))
                self.state[p]["z"].sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class Marks(torch.optim.SGD):
    """Marks each parameter in the constructor, as APOLLO does with a seed."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            self.state[p]["seed"] = number

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / (1 + self.state[p]["seed"]))


class LayerWiseDummyOptimizer(torch.optim.SGD):
    """What transformers' Trainer gets for galore_adamw_layerwise."""


class DummyOptimizer(torch.optim.SGD):
    """What LLaMA-Factory's trainers get for galore_layerwise and apollo_layerwise."""

    def __init__(self, params):
        params = list(params)
        super().__init__([torch.randn(1, 1)])
        self.optimizer_dict = {each: torch.optim.SGD([each], lr=0.1) for each in params}


COUPLED = {"norm": Normed, "sum": Summing, "counter": Counter, "state": CountsInState}
REFUSED = {
    "in a deque": (InDeque, "keeps the model's own tensors in its attribute last"),
    "itself": (RefersToItself, "its attribute owner refers to itself"),
    "layer-wise": (LayerWiseDummyOptimizer, "its step does nothing"),
    "layer-wise by parameter": (DummyOptimizer, "its step does nothing"),
    "wrapper": (Wraps, r"wraps another optimizer, SGD, .*convert\(optimizer.base, recipe"),
    "wrapper that ascends": (Ascends, r"left as it is; but what its first_step .*exact_weights"),
    "wrapper beside the model": (WrapsBesideTheModel, r"optimizer, SGD, .*convert\(optimizer.base"),
    "parameters": (Holds, "keeps the model's own tensors in its attribute mine"),
    "rates by id": (RatesById, r"looks up parameters, or their id\(\), in its attribute rates"),
    "lbfgs": (torch.optim.LBFGS, "closure several times per step.* in float32, or in these modes"),
    "sparse": (torch.optim.SparseAdam, "sparse gradients .*sparse=False and give it to Adam"),
}
REFUSED_AT_STEP = {
    "tensors outside state": (KeepsTensors, "keeps tensors in its attribute buffers, outside"),
    "tensors in state": (KeepsTensorsByName, "keeps tensors under the key 'start' of its state"),
    "tensors by parameter": (KeepsByParameter, "looks up parameters, .* in its attribute speeds"),
    "tensors by id": (unknown(KeepsByParameter, key=id), r"or their id\(\), in its attribute spe"),
    "tensors in groups": (KeepsInGroups, "in the option speeds of its groups, and each step would"),
    "closure twice": (CallsTwice, "evaluates the closure with other weights, or several times"),
    "closure afterwards": (CallsAfterwards, "evaluates the closure with other weights"),
    "closure at run time": (CallsClosure, "a closure is needed"),
}


def make_run(make, recipe, seed=0, *, convert_it=True, **options):
    """A small model and its optimizer, cast and converted unless ``recipe`` is None."""
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
    if not convert_it:
        return model, make(model.named_parameters())
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

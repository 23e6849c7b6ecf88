"""Optimizers whose step cannot run on copies are refused before anything is changed."""

import functools
from types import SimpleNamespace

import pytest
import torch
from foreign_cases import OWN

from torch_bf16 import convert, prepare


class KeepsOnParameters(torch.optim.SGD):
    """As timm's Adahessian keeps the traces of its Hessian."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                p.trace = 0.0

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.trace += float(p.grad.square().sum())
        return super().step(closure)


@pytest.mark.parametrize("options", [{}, {"trace": False}], ids=["no option", "same option"])
def test_an_optimizer_that_keeps_attributes_on_parameters_is_refused(options):
    model = torch.nn.Linear(4, 4)
    optimizer = KeepsOnParameters(model.parameters(), 0.1)
    optimizer.param_groups[0].update(options)
    with pytest.raises(NotImplementedError, match="it keeps trace as an attribute of parameters"):
        prepare(model, optimizer, "bf16-stochastic")
    assert model.weight.dtype == torch.float32
    model.weight.tagged = True  # by another library, and read by no optimizer
    prepare(model, OWN["adadelta"](model.parameters()), "bf16-stochastic")


class OfVisible(torch.optim.Adam):
    """As gsplat's SelectiveAdam, which steps the Gaussians that were seen."""

    def step(self, visibility, closure=None, *, scale=1.0):
        return super().step(closure)


def test_an_optimizer_whose_step_requires_more_than_a_closure_is_refused():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match="its step requires visibility, and a converted"):
        prepare(model, OfVisible(model.parameters()), "bf16-stochastic")
    assert model.weight.dtype == torch.float32


def take_gradient(parameter):
    parameter.summed, parameter.grad = parameter.grad, None


class Hooked(torch.optim.SGD):
    """As ai-toolkit's Adafactor sums gradients, and its Automagic2 steps, in backward()."""

    def __init__(self, params, lr=0.1, *, how="function"):
        super().__init__(params, lr)
        hooks = {
            "function": take_gradient,
            "method": self.update,
            "closure": lambda p: self.update(p),
            "partial": functools.partial(Hooked.update, self),
        }
        for group in self.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(hooks[how])

    def update(self, parameter):
        parameter.data -= parameter.grad
        parameter.grad = None

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("how", ["function", "method", "closure", "partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_steps_or_sums_in_hooks_on_parameters_is_refused(how, dtype):
    model = torch.nn.Linear(4, 4, dtype=dtype)
    optimizer = Hooked(model.parameters(), how=how)
    with pytest.raises(NotImplementedError, match="constructor has put the hook "):
        prepare(model, optimizer, "bf16-stochastic")
    assert model.weight.dtype == dtype
    assert type(optimizer) is Hooked


def test_hooks_that_others_put_on_parameters_are_left_to_them():
    model, seen = torch.nn.Linear(4, 4), []
    optimizer = OWN["adadelta"](model.parameters())
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    prepare(model, optimizer, "bf16-stochastic")
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    assert seen == [torch.bfloat16]


def test_wrapper_of_one_optimizer_for_each_parameter_is_told_to_convert_each():
    model = torch.nn.Linear(4, 4)
    wrapper = type("Wrapper", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    wrapper.inner = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    with pytest.raises(NotImplementedError, match=r"convert\(each, recipe, .* holds there"):
        prepare(model, wrapper, "bf16-stochastic")
    prepare(model, wrapper.inner, "bf16-stochastic")


@pytest.mark.parametrize("function", [prepare, lambda m, o, r: convert(o, r, model=m)])
def test_class_whose_constructor_is_not_torchs_is_told_to_convert_what_it_holds(function):
    class Composite(torch.optim.Optimizer):
        """fairseq's CompositeOptimizer, whose values are no torch.optim.Optimizers."""

        def __init__(self, optimizers):
            self.wrappers = {key: SimpleNamespace(optimizer=o) for key, o in optimizers.items()}

        def step(self, closure=None):
            for each in self.wrappers.values():
                each.optimizer.step()

    model = torch.nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters())
    with pytest.raises(NotImplementedError, match=r"no param_groups\. .*convert\(each, recipe"):
        function(model, Composite({"all": inner}), "bf16-stochastic")
    assert model.weight.dtype == torch.float32
    prepare(model, [inner], "bf16-stochastic")


@pytest.mark.parametrize("function", [prepare, lambda m, o, r: convert(o, r, model=m)])
def test_class_that_sets_up_all_but_the_hooks_of_torchs_constructor_is_refused(function):
    class Plain(torch.optim.SGD):
        """Steps in stock torch, which adds hooks to step() in the constructor."""

        def __init__(self, parameters):
            self.defaults, self.state = {"lr": 0.1}, {}
            self.param_groups = [{"params": [*parameters], "lr": 0.1}]

        @torch.no_grad()
        def step(self, closure=None):
            for each in self.param_groups[0]["params"]:
                each.sub_(each.grad, alpha=0.1)

    model = torch.nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match=r"constructor does not call .* no hooks\. "):
        function(model, Plain(model.parameters()), "bf16-stochastic")
    assert model.weight.dtype == torch.float32


def test_class_that_takes_bf16_weights_only_is_refused_with_what_to_use(monkeypatch):
    kind = type("AdamWBF16", (torch.optim.SGD,), {})
    module = "simpletuner.helpers.training.optimizers.adamw_bfloat16"
    monkeypatch.setattr(kind, "__module__", module)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match=r"are bfloat16.*--optimizer torch-adamw"):
        prepare(model, kind(model.parameters(), lr=0.1), "bf16-stochastic")
    assert model.weight.dtype == torch.float32

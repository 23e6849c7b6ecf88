"""Modules that bring autocast along, without a host."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from carried_parts import BodyAndHead, X
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_bf16
from torch_bf16 import plugin_api


class Net(BodyAndHead):
    """Returns a dict of a tuple, and computes a part of itself again in the backward pass."""

    def forward(self, x, *, again=False):
        x = checkpoint(self._parts, x, use_reentrant=False) if again else self.body(x)
        return {"out": (self.head(x), 3)}

    def _parts(self, x):
        for part in self.body:
            x = part(x)
        return x


def carried(**options) -> Any:
    return torch_bf16.carry_autocast(torch_bf16.cast_model(Net()), **options)


def test_a_model_and_its_parts_take_and_return_fp32():
    net = carried()
    with torch.autocast("cpu", torch.bfloat16):
        expected = net.head(net.body(X)).float()
    assert torch.equal(net(X)["out"][0], expected)
    assert net(X)["out"][1] == 3
    assert {net(X)["out"][0].dtype, net.body(X).dtype, net.body[0](X).dtype} == {torch.float32}
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("compute", ["autocast", "bf16", "fp32"])
def test_without_a_word_about_it_a_model_computes_as_before(compute):
    recipe = torch_bf16.get_recipe("bf16-stochastic", compute=compute)
    whole: Any = torch_bf16.carry_autocast(torch_bf16.cast_model(Net(), recipe))
    assert torch.equal(whole(X)["out"][0], carried(compute=compute)(X)["out"][0])
    part = torch_bf16.carry_autocast(nn.Sequential(torch_bf16.cast_model(Net().head, recipe)))
    head: Any = torch_bf16.carry_autocast(torch_bf16.cast_model(Net().head), compute=compute)
    x = torch.randn(3, 16)
    assert torch.equal(part(x), head(x))
    torch_bf16.carry_autocast(whole, compute="autocast")
    assert torch.equal(whole(X)["out"][0], carried()(X)["out"][0])


@pytest.mark.parametrize(
    "options",
    [{}, {"compute": "bf16"}, {"compute": "fp32"}, {"enabled": False}],
    ids=["autocast", "bf16", "fp32", "off"],
)
def test_what_a_backward_pass_computes_again_is_what_the_forward_computed(options):
    gradients = []
    for again in (False, True):
        net = carried(**options)
        x = X.bfloat16() if "enabled" in options else X
        net(x, again=again)["out"][0].sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compute", ["autocast", "bf16", "fp32"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_model_computes_again_what_the_model_computed(compute, use_reentrant):
    gradients = []
    for again in (False, True):
        net, x, calls = carried(compute=compute), X.clone().requires_grad_(), []
        net.body[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        call = lambda x, net=net: net(x)["out"][0]  # noqa: E731
        y = checkpoint(call, x, use_reentrant=use_reentrant) if again else call(x)
        y.sum().backward()
        gradients.append([x.grad, *(p.grad for p in net.parameters())])
        assert len(calls) == 1 + again
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_a_part_that_a_checkpoint_called_alone_is_computed_again_inside_of_a_model_too():
    gradients = []
    for alone in (False, True):
        net = carried(enabled=False)
        if alone:
            torch_bf16.carry_autocast(net)
            checkpoint(net.body[0], X, use_reentrant=False)
            torch_bf16.carry_autocast(net, enabled=False)
        net(X.bfloat16(), again=True)["out"][0].sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


class Adjoint(torch.autograd.Function):
    """Calls a module in its backward pass, as solvers of adjoint differential equations do."""

    @staticmethod
    def forward(ctx, net, x, *parameters):
        ctx.net = net
        ctx.save_for_backward(x)
        with torch.no_grad():
            return net(x)["out"][0].float()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.net(x)["out"][0].float()
        return None, None, *torch.autograd.grad(y, [*ctx.net.parameters()], gradient)


@pytest.mark.parametrize("compute", ["autocast", "bf16", "fp32"])
def test_what_a_backward_pass_calls_by_itself_works_as_outside_of_one(compute):
    plain, adjoint = carried(compute=compute), carried(compute=compute)
    plain(X)["out"][0].sum().backward()
    Adjoint.apply(adjoint, X, *adjoint.parameters()).sum().backward()
    for one, other in zip(plain.parameters(), adjoint.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_settings_of_autocast_are_the_users_and_can_be_changed():
    net = carried(enabled=False)
    with pytest.raises(RuntimeError, match="same dtype"):
        net(X)
    torch_bf16.carry_autocast(net)
    assert net(X)["out"][0].dtype == torch.float32


def test_inside_a_step_what_is_around_a_part_counts():
    net = carried()
    with plugin_api.inside_step():
        assert net.body[0](X.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="same dtype"):
            net.body[0](X)
    assert net.body[0](X).dtype == torch.float32


def test_copies_and_pickles_keep_it_and_those_of_an_fp32_model_do_without():
    net = carried()
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(again(X)["out"][0], net(X)["out"][0])
        assert again.forward.__self__ is again
        assert again.float()(X)["out"][0].dtype == torch.float32
        assert type(pickle.loads(pickle.dumps(again)).forward) is MethodType


def through_functional_call(net, average):
    return torch.func.functional_call(net, average, (X,))


def through_data(net, average):
    weights = {name: p.data for name, p in net.named_parameters()}
    for name, p in net.named_parameters():
        p.data = average[name]
    outputs = net(X)
    for name, p in net.named_parameters():
        p.data = weights[name]
    return outputs


@pytest.mark.parametrize("compute", ["autocast", "fp32", "bf16"])
@pytest.mark.parametrize("evaluate", [through_functional_call, through_data])
def test_it_rests_while_an_fp32_average_is_in_the_model(evaluate, compute):
    net = carried(compute=compute)
    before = net(X)["out"][0]
    average = {name: p.detach().float() for name, p in net.named_parameters()}
    expected = copy.deepcopy(net).float()(X)["out"][0]
    assert torch.equal(evaluate(net, average)["out"][0], expected)
    assert torch.equal(net(X)["out"][0], before)


def test_after_float_the_dtype_under_autocast_is_that_of_any_model():
    net = carried().float()
    with torch.autocast("cpu", torch.bfloat16):
        assert net(X)["out"][0].dtype == torch.bfloat16


class StatesApart(Net):
    """Makes its copies itself, but of their states apart, as PyroModule does."""

    def __reduce__(self):
        return StatesApart, (), self.__dict__


def test_the_forward_of_a_copy_knows_its_module_where_states_come_apart():
    net = torch_bf16.carry_autocast(torch_bf16.cast_model(StatesApart()))
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert again.forward.__self__ is again
        again.forward = lambda x, own=again.forward: own(x)
        assert torch.equal(again(X)["out"][0], net(X)["out"][0])


class ReducesItself(Net):
    """As StyleGAN's persistence makes it of each class: it is made from its state."""

    def __reduce__(self):
        return _from_state, (super().__reduce__()[2],)


def _from_state(state):
    net = ReducesItself.__new__(ReducesItself)
    net.__setstate__(state)
    return net


def test_copies_of_a_class_that_is_made_from_its_state_keep_it():
    net: Any = torch_bf16.carry_autocast(torch_bf16.cast_model(ReducesItself()))
    inside = torch_bf16.carry_autocast(nn.Sequential(net, nn.Identity()))
    for copied in (copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))):
        for again in (copied(net), copied(copied(net)), copied(inside)[0]):
            with pytest.raises(RuntimeError, match=r"Call the copy itself, model\(x\)"):
                again.forward(X)
            assert torch.equal(again(X)["out"][0], net(X)["out"][0])
            assert again.forward.__self__ is again
        again = torch_bf16.carry_autocast(copied(net))
        assert torch.equal(again.forward(X)["out"][0], net(X)["out"][0])
        outer = copied(inside)
        assert torch.equal(outer(X)["out"][0], net(X)["out"][0])
        assert outer[0].forward.__self__ is outer[0]


@pytest.mark.parametrize("compute", ["autocast", "fp32"])
def test_what_has_no_parameters_any_more_runs_as_it_is(compute):
    net = carried(compute=compute).float()
    for each in net.modules():  # as a conversion to int8 does
        for name, p in [*each.named_parameters(recurse=False)]:
            delattr(each, name)
            each.register_buffer(name, p.detach())
    assert net(X)["out"][0].dtype == torch.float32


@pytest.mark.parametrize("compute", ["autocast", "fp32"])
def test_a_part_whose_class_has_no_forward_that_can_be_called_is_left_alone(compute):
    class Manifold(nn.Module):  # as geoopt's
        forward: Any = NotImplemented

        def __init__(self):
            super().__init__()
            self.curvature = nn.Parameter(torch.ones(()))

    net: Any = torch_bf16.cast_model(nn.Sequential(nn.Linear(4, 4)))
    net[0].manifold = torch_bf16.cast_model(Manifold())
    torch_bf16.carry_autocast(net, compute=compute)
    assert net(torch.ones(2, 4)).dtype == torch.float32
    assert "forward" not in vars(net[0].manifold)


def test_an_own_forward_of_an_instance_is_kept_and_described_as_it_is():
    net: Any = torch_bf16.cast_model(Net())
    net.head.forward = lambda x, scale=2.0: scale * nn.functional.linear(x, net.head.weight)
    torch_bf16.carry_autocast(net)
    assert list(inspect.signature(net.forward).parameters) == ["x", "again"]
    assert list(inspect.signature(net.head.forward).parameters) == ["x", "scale"]
    expected = 2 * nn.functional.linear(net.body(X).bfloat16(), net.head.weight).float()
    assert torch.allclose(net.head(net.body(X)), expected, atol=0.05)


@pytest.mark.parametrize("compute", ["autocast", "fp32"])
def test_the_transforms_of_torch_func_differentiate_a_carried_model(compute):
    net = carried(compute=compute)
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(net, weights, (x,))["out"][0].square().sum()

    loss(dict(net.named_parameters()), X).backward()
    for name, gradient in torch.func.grad(loss)(weights, X).items():
        assert torch.equal(gradient, net.get_parameter(name).grad)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, X[:, None])
    assert torch.allclose(each["head.bias"].float().sum(0), net.head.bias.grad.float(), rtol=0.02)


class Broken(Net):
    """In two graphs."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_compiled_model_whose_graph_breaks_computes_the_same():
    net = torch_bf16.carry_autocast(torch_bf16.cast_model(Broken()))
    compiled: Any = torch.compile(net, backend="eager")
    with torch.no_grad():  # torch.compile's own warnings about gradients are errors here
        expected = net(X)["out"][0]
        assert torch.equal(compiled(X)["out"][0], expected)
    assert expected.dtype == torch.float32


def test_a_compiled_model_that_computes_in_bf16_casts_its_inputs_outside_of_steps_alone():
    net = carried(compute="bf16")
    compiled: Any = torch.compile(net, backend="eager", fullgraph=True)
    with torch.no_grad():  # torch.compile's own warnings about gradients are errors here
        for x, inside in (X, False), (X.bfloat16(), True), (X, False):
            with plugin_api.inside_step() if inside else contextlib.nullcontext():
                expected, found = net(x)["out"][0], compiled(x)["out"][0]
            assert torch.equal(found, expected)
            assert found.dtype == (torch.bfloat16 if inside else torch.float32)


@pytest.mark.parametrize("compute", ["autocast", "bf16", "fp32"])
def test_after_float_a_model_is_compiled_and_exported_in_fp32(compute):
    expected = carried().float()(X)["out"][0]
    with torch.no_grad():
        compiled: Any = torch.compile(carried(compute=compute).float(), backend="eager")
        assert torch.equal(compiled(X)["out"][0], expected)
        exported = torch.export.export(carried(compute=compute).float(), (X,), strict=False)
        assert torch.equal(exported.module()(X)["out"][0], expected)


def test_an_export_of_bf16_weights_that_compute_in_fp32_is_refused():
    with pytest.raises(RuntimeError, match=r"cannot be exported .*deepcopy\(model\).float\(\)"):
        torch.export.export(carried(compute="fp32"), (X,), strict=False)


@pytest.mark.filterwarnings("ignore:`?torch.jit.*deprecated")
def test_a_scripted_model_or_part_takes_and_returns_fp32():
    whole: Any = torch.jit.script(Net().body)
    parts: Any = nn.Sequential(torch.jit.script(Net().body), Net().head)
    for each in (whole, parts):
        torch_bf16.carry_autocast(torch_bf16.cast_model(each))
    expected = carried().body(X)
    for scripted in (whole, parts[0]):  # TorchScript rounds at other points
        assert scripted(X).dtype == torch.float32
        assert torch.allclose(scripted(X), expected, atol=0.02)
        assert next(scripted.children())(X).dtype == torch.float32
    parts(X).sum().backward()
    assert {p.grad.dtype for p in parts.parameters()} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:`?torch.jit.*deprecated")
def test_a_scripted_part_of_a_model_that_computes_in_fp32_is_refused():
    parts: Any = nn.Sequential(torch.jit.script(Net().body), Net().head)
    with pytest.raises(
        NotImplementedError, match=r"not reach into '0', a ScriptModule: .*autocast"
    ):
        torch_bf16.cast_model(parts, torch_bf16.get_recipe("bf16-stochastic", compute="fp32"))
    assert {p.dtype for p in parts.parameters()} == {torch.float32}
    with pytest.raises(NotImplementedError, match="not reach into 'the model', a ScriptModule"):
        torch_bf16.carry_autocast(torch_bf16.cast_model(parts[0]), compute="fp32")


def test_what_is_no_model_or_no_way_to_compute_is_refused():
    with pytest.raises(ValueError, match=r"given a list and takes a torch.nn.Module"):
        torch_bf16.carry_autocast([])  # pyright: ignore
    with pytest.raises(ValueError, match=r"compute='fp16' is unknown; use one of autocast, "):
        torch_bf16.carry_autocast(Net(), compute="fp16")

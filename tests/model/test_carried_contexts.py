"""Modules that carry autocast inside of autocast to fp16 and of torch.compile, without a host."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from carried_parts import BodyAndHead, X
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_bf16


class Net(BodyAndHead):
    """Computes a part of itself again in the backward pass, if asked to."""

    def forward(self, x, *, again=False):
        return self.head(checkpoint(self.body, x, use_reentrant=False) if again else self.body(x))


def carried(net: nn.Module, **options: Any) -> Any:
    return torch_bf16.carry_autocast(torch_bf16.cast_model(net), **options)


@pytest.mark.parametrize("again", [None, "part", "whole"])
@pytest.mark.parametrize("compute", ["autocast", "fp32"])
def test_under_autocast_to_fp16_a_model_computes_in_its_own_and_small_gradients_arrive(
    compute, again
):
    """As under ``torch.autocast("cuda")``, which names no dtype, in nnU-Net and others."""
    outputs, gradients = [], []
    for around in (contextlib.nullcontext(), torch.autocast("cpu", torch.float16)):
        net = carried(Net(), compute=compute)
        with around:
            if again == "whole":
                out = checkpoint(net, X, use_reentrant=False)
            else:
                out = net(X, again=again == "part")
            loss = (out * 1e-8).mean()
        loss.backward()
        outputs.append(out)
        gradients.append(net.body[0].weight.grad)
    assert outputs[1].dtype == torch.float32
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)
    assert gradients[1].count_nonzero()


@pytest.mark.parametrize("around", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["autocast", "fp32"])
def test_a_model_that_was_compiled_before_the_cast_carries_autocast(compute, around):
    """As in nnU-Net, which compiles its network before a subclass can prepare it."""
    expected = carried(Net(), compute=compute)(X)
    torch._dynamo.reset()  # pyright: ignore[reportPrivateImportUsage]
    compiled = carried(torch.compile(Net(), backend="eager"), compute=compute)  # pyright: ignore
    context = contextlib.nullcontext() if around is None else torch.autocast("cpu", around)
    with torch.no_grad(), context:  # torch.compile's own warnings about gradients are errors here
        found = compiled(X)
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found, expected)


def test_a_model_that_was_compiled_before_the_cast_casts_its_inputs_to_compute_in_bf16():
    torch._dynamo.reset()  # pyright: ignore[reportPrivateImportUsage]
    compiled = carried(torch.compile(Net(), backend="eager"), compute="bf16")  # pyright: ignore
    with torch.no_grad():
        assert torch.equal(compiled(X), carried(Net(), compute="bf16")(X))


@pytest.mark.parametrize("compute", ["autocast", "bf16", "fp32"])
@pytest.mark.parametrize("keep", [(), ("body.1",)])
def test_on_the_meta_device_a_model_has_its_shapes(compute, keep):
    with torch.device("meta"):
        net = BodyAndHead()
        x = torch.empty(3, 8)
    recipe = torch_bf16.get_recipe("bf16-stochastic", compute=compute, keep_fp32=keep)
    torch_bf16.carry_autocast(torch_bf16.cast_model(net, recipe))
    assert net.head(net.body(x)).shape == (3, 4)


class Shapes(list):
    """A list of a class that pytree does not know."""


class Uncopied(Shapes):
    def __copy__(self):
        raise TypeError("there is one")


class WithShape(BodyAndHead):
    kind = Shapes

    def forward(self, x):
        y = self.head(self.body(x))
        return y.shape, self.kind([y, 3])


def test_sizes_stay_sizes_and_lists_of_other_classes_are_widened():
    size, outputs = carried(WithShape())(X)
    assert size.numel() == 12
    assert type(outputs) is Shapes
    assert (outputs[0].dtype, outputs[1]) == (torch.float32, 3)


def test_a_list_that_forbids_copies_stays_what_it_is():
    net = WithShape()
    net.kind = Uncopied
    _, outputs = carried(net)(X)
    assert type(outputs) is Uncopied
    assert outputs[0].dtype == torch.bfloat16

"""What a module that carries autocast returns in fp32, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList
from collections.abc import MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from carried_parts import BodyAndHead, X
from torch.distributions import (
    AffineTransform,
    Categorical,
    Independent,
    MixtureSameFamily,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

import torch_bf16


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    more: dict


class InContainers(BodyAndHead):
    def forward(self, x, cache=None):
        y = self.head(self.body(x))
        return Output(y, {"nested": [y, 3]}), UserDict(logits=y), cache


@pytest.mark.parametrize("compiled", [False, True])
def test_dataclasses_and_mappings_are_returned_in_fp32_and_others_as_the_same_objects(compiled):
    net: Any = torch_bf16.carry_autocast(torch_bf16.cast_model(InContainers()))
    if compiled:
        net = torch.compile(net, backend="eager")
    cache = Output(torch.ones(2), {})
    with torch.no_grad():  # torch.compile's own warnings about gradients are errors here
        output, mapping, returned = net(X, cache)
    assert (type(output), type(mapping)) == (Output, UserDict)
    found = [output.logits, output.more["nested"][0], mapping["logits"]]
    assert {each.dtype for each in found} == {torch.float32}
    assert output.more["nested"][1] == 3
    assert returned is cache


@dataclasses.dataclass
class Node:
    value: torch.Tensor
    around: Any = None


def in_a_circle(y):
    node = Node(y)
    node.around = {"itself": Node(y, node)}
    return node


class Store(MutableMapping):
    """A mapping whose copies share its dict."""

    def __init__(self, value):
        self.kept = {"value": value}

    def __getitem__(self, key):
        return self.kept[key]

    def __setitem__(self, key, value):
        self.kept[key] = value

    def __delitem__(self, key):
        del self.kept[key]

    def __iter__(self):
        return iter(self.kept)

    def __len__(self):
        return len(self.kept)


class Fixed(Store):
    """A mapping that nothing can be written into."""

    def __setitem__(self, key, value):
        raise TypeError("read-only")


@dataclasses.dataclass
class Secret(Node):
    """A dataclass that does not give up a field."""

    def __getattribute__(self, name):
        if name == "around":
            raise RuntimeError("secret")
        return super().__getattribute__(name)


class Returns(BodyAndHead):
    """Returns what a function makes of its output, and keeps that, too."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        self.made = self.make(self.head(self.body(x)))
        return self.made


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (in_a_circle, torch.float32),
        (Store, torch.float32),
        (Fixed, torch.bfloat16),
        (Secret, torch.bfloat16),
    ],
)
def test_objects_that_hold_themselves_or_resist_are_returned_and_not_written(make, dtype):
    net: Any = torch_bf16.carry_autocast(torch_bf16.cast_model(Returns(make)))
    value = lambda each: each["value"] if isinstance(each, Store) else each.value  # noqa: E731
    returned = net(X)
    assert type(returned) is type(net.made)
    assert (value(returned).dtype, value(net.made).dtype) == (dtype, torch.bfloat16)


class Scored(dict):
    """A dict that cannot be made of its items."""

    def __init__(self, y, n):
        super().__init__(y=y, n=n)


class Pair(tuple):
    """A tuple that cannot be made of one argument."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Slim(Pair):
    __slots__ = ()


def dict_in_a_circle(y):
    made = {"y": y, "rows": range(3)}
    made["itself"] = made
    return made


def list_in_a_circle(y):
    made = [y]
    made.append({"around": [made, made]})
    return made


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda y: {"rows": range(8), "y": y}, "y"),
        (lambda y: Scored(y, 3), "y"),
        (lambda y: Pair(y, 3), 0),
        (lambda y: Slim(y, 3), 0),
        (lambda y: UserList([y, 3]), 0),
        (lambda y: MappingProxyType({"y": y}), "y"),
        (dict_in_a_circle, "y"),
        (list_in_a_circle, 0),
        (lambda y: Scored(y, list_in_a_circle(y)), "y"),
    ],
)
def test_containers_of_other_classes_and_those_that_hold_themselves_are_returned(make, key):
    net: Any = torch_bf16.carry_autocast(torch_bf16.cast_model(Returns(make)))
    returned = net(X)
    assert type(returned) is type(net.made)
    assert (returned[key].dtype, net.made[key].dtype) == (torch.float32, torch.bfloat16)


def test_what_is_nested_too_deep_to_be_followed_is_returned_as_it_is():
    made: Any = []
    for _ in range(5000):
        made = [made]
    net: Any = torch_bf16.carry_autocast(torch_bf16.cast_model(Returns(lambda y: made)))
    assert net(X) is made


@pytest.mark.parametrize("compute", ["autocast", "fp32", "bf16"])
def test_an_argument_that_holds_itself_reaches_every_part(compute):
    class Passing(BodyAndHead):
        def forward(self, x, around):
            return self.inner(x, around=around)

    class Inner(torch.nn.Linear):
        def forward(self, x, around):
            return super().forward(x), around

    net: Any = Passing()
    net.inner = Inner(X.shape[-1], 4)
    recipe = torch_bf16.get_recipe("bf16-stochastic", compute=compute, keep_fp32=["inner"])
    net = torch_bf16.carry_autocast(torch_bf16.cast_model(net, recipe), compute=compute)
    around = dict_in_a_circle(torch.ones(2))
    outputs, returned = net(X, around)
    assert outputs.dtype == torch.float32
    assert returned["itself"] is around


def normal(y):
    return Normal(y, y.exp())


def squashed(y):
    return Independent(
        TransformedDistribution(normal(y), [AffineTransform(y, y), TanhTransform()]), 1
    )


def mixture(y):
    return MixtureSameFamily(Categorical(logits=y), normal(y))


@pytest.mark.parametrize("make", [normal, squashed, mixture])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_distribution_is_returned_in_fp32_and_learns(make, compiled):
    net: Any = torch_bf16.carry_autocast(torch_bf16.cast_model(Returns(make)))
    called = torch.compile(net, backend="eager") if compiled else net
    returned = called(X)
    draw = returned.sample()
    loss = returned.log_prob(draw)
    assert type(returned) is type(net.made)
    assert {draw.dtype, loss.dtype} == {torch.float32}
    assert (net.made.sample().dtype, returned.batch_shape) == (torch.bfloat16, net.made.batch_shape)
    loss.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())

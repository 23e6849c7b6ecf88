"""Training a sharded model on given gradients, and its weights and states put together again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_models import ALONE, RAW, Case, held, local, make_model, mesh_of, named, placed, shard
from tensor_pickles import dumps, loads
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import torch_bf16
from torch_bf16 import Recipe

STEPS = 10
RECIPES = ("bf16-stochastic", "bf16-fp32-master")
# Bytes that blocks of a row share scales of, and rows of whole blocks.
BYTES = Recipe("bytes", weights="bf16+8", exp_avg="int8", exp_avg_sq="int8")
BLOCK = 64


def recipe_of(name):
    return BYTES if name == "bytes" else torch_bf16.get_recipe(name)


def gradient(name, shape, step):
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return (torch.randn(shape, generator=generator) / 8).to(torch.bfloat16)


def adamw(model, recipe):
    parameters = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    return torch_bf16.AdamW(parameters, lr=0.01, weight_decay=0.1, recipe=recipe)


class Part(NamedTuple):
    """Elements of a whole tensor: its shape, their indices, and themselves."""

    shape: torch.Size
    indices: Tensor
    elements: Tensor


class Run:
    """A sharded model and its optimizer.

    Args:
        case: how it is sharded.
        recipe: name.
        make: the optimizer of a model and a recipe.
        cast_first: cast, then shard, or the other way around.
        backend: for the optimizer, or None for its own choice.
        model: cast already, instead of a new one.
    """

    def __init__(
        self, case, recipe, make=adamw, *, cast_first=True, backend="eager", model=None
    ) -> None:
        self.case, recipe = case, recipe_of(recipe)
        mesh = None if case.way == "alone" else mesh_of(case)
        if model is None:
            model = make_model(case.sizes)
            if cast_first:
                torch_bf16.cast_model(model, recipe)
        self.model = shard(model, case, mesh)
        if not cast_first:
            before = [*self.model.parameters()]
            torch_bf16.cast_model(self.model, recipe)
            assert all(a is b for a, b in zip(before, self.model.parameters(), strict=True))
        if case.way in ("ddp", "fsdp2"):
            # Of DTensors, whose parts each rank has cast itself, this changes nothing.
            torch_bf16.sync_masters(self.model, group=mesh.get_group())
        self.optimizer = make(self.model, recipe)
        if backend is not None:
            self.optimizer.backend = backend

    def give(self, step):
        """Set the gradients of a step, the same for any sharding."""
        for name, parameter in named(self.model).items():
            shape, indices = held(self.case)[name]
            if parameter.numel():
                whole = gradient(name, shape, step).to(parameter.dtype)
                parameter.grad = placed(parameter, whole.view(-1)[indices])

    def train(self, steps=range(STEPS)):
        for step in steps:
            self.give(step)
            self.optimizer.step()
        return self

    def parts(self) -> dict[str, Part]:
        """This rank's elements of every weight and state, with the memory that they take."""
        found = {}
        for name, parameter in named(self.model).items():
            shape, indices = held(self.case)[name]
            found[name] = Part(shape, indices, local(parameter).reshape(-1).clone())
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = self._part(parameter, shape, indices, key, value)
        return found

    def _part(self, parameter, shape, indices, key, value) -> Part:
        value = torch.as_tensor(value)
        memory = local(value)
        # No rank keeps memory of more than its own part.
        assert memory.untyped_storage().nbytes() == memory.nbytes, key
        scales = key.endswith("_scale")
        like = scales or value.shape == parameter.shape
        assert isinstance(value, DTensor) == (like and isinstance(parameter, DTensor)), key
        if not like:
            shape, indices = value.shape, torch.arange(value.numel())
        elif scales:
            shape = torch.Size((shape[0], shape[1:].numel() // BLOCK))
            indices = indices[::BLOCK] // BLOCK
        if isinstance(value, DTensor):
            assert (value.placements, value.shape) == (parameter.placements, shape), key
        return Part(shape, indices, memory.reshape(-1).clone())

    def state_dicts(self):
        names = ("model", "optimizer")
        return dict(zip(names, get_state_dict(self.model, self.optimizer), strict=True))

    def put(self, states, options=None):
        """Load what ``state_dicts`` of some run returned."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=options,
        )
        return self

    def save(self, folder):
        dcp.save(self.state_dicts(), checkpoint_id=folder)

    def load(self, folder):
        states = self.state_dicts()
        dcp.load(states, checkpoint_id=folder)
        return self.put(states)

    def with_state(self):
        """With states as they are before the first step."""
        get_optimizer_state_dict(self.model, self.optimizer)
        return self


def joined(ranks: list[dict[str, Part]]) -> dict[str, Tensor]:
    """Whole tensors of what ranks hold, who must agree on the elements that several have."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for rank, parts in enumerate(ranks):
        for name, (shape, indices, elements) in parts.items():
            if name not in whole:
                whole[name] = torch.zeros(shape, dtype=elements.dtype)
                filled[name] = torch.zeros(shape.numel(), dtype=torch.bool)
            found = (shape, elements.dtype)
            assert found == (whole[name].shape, whole[name].dtype), (name, rank, found)
            raw = RAW[elements.itemsize]
            bits, mine, known = whole[name].view(-1).view(raw), elements.view(raw), filled[name]
            again = known[indices]
            assert torch.equal(bits[indices][again], mine[again]), (name, rank, "differs")
            bits[indices] = mine
            known[indices] = True
    missing = [name for name, known in filled.items() if not known.all()]
    assert not missing, missing
    return whole


def assert_same(expected, found, context=""):
    assert expected.keys() == found.keys(), (context, expected.keys() ^ found.keys())
    for name, want in expected.items():
        got = found[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), (context, name)
        raw = RAW[want.itemsize]
        assert torch.equal(got.view(raw), want.view(raw)), (context, name, got, want)


@functools.cache
def reference(sizes, recipe, make=adamw, steps=STEPS):
    """What one process makes of the same gradients."""
    case = Case(ALONE.way, ALONE.mesh, sizes)
    return joined([Run(case, recipe, make).train(range(steps)).parts()])


def plain(states):
    """Dictionaries of the plain kind, which can be sent."""
    if isinstance(states, Mapping):
        return {key: plain(value) for key, value in states.items()}
    return [plain(each) for each in states] if isinstance(states, (list, tuple)) else states


def everywhere(value, group=None):
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, dumps(value), group=group)
    return [*map(loads, values)]

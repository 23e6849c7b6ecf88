"""Programs made at random, beside a twin that takes the same steps without their detours.

The *program* stores its weights by a recipe. Between its steps it saves and resumes, copies itself,
looks at its numbers, averages and moves its weights, releases its gradients. The *twin* does none
of this: it steps on the eager backend, over fp32 weights if the recipe keeps fp32 masters and fp32
moments, else by the same recipe. After each operation both must start their next step from the same
bits. What a program loses by its own doing, such as a write to a weight, the twin is given, once it
is what docs/checkpoints.md promises.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from random_steps import NAMES, RandomSteps, what_differs
from random_writes import lower_bytes, numbers, write
from torch import nn

import torch_bf16
from torch_bf16 import get_recipe

BF16 = torch.bfloat16
OURS = {
    "AdamW": (torch_bf16.AdamW, {}),
    "AMSGrad": (torch_bf16.AdamW, {"amsgrad": True}),
    "cautious AdamW": (torch_bf16.AdamW, {"cautious": True}),
    "NAdam": (torch_bf16.NAdam, {}),
    "RAdam": (torch_bf16.RAdam, {}),
    "AdamWScheduleFree": (torch_bf16.AdamWScheduleFree, {}),
    "SGDScheduleFree": (torch_bf16.SGDScheduleFree, {}),
    "ADOPT": (torch_bf16.ADOPT, {}),
    "Adagrad": (torch_bf16.Adagrad, {}),
    "RMSprop": (torch_bf16.RMSprop, {"centered": True, "momentum": 0.9}),
    "SGD": (torch_bf16.SGD, {"momentum": 0.9}),
    "Lion": (torch_bf16.Lion, {}),
    "Adafactor": (torch_bf16.Adafactor, {}),
    "Muon": (torch_bf16.Muon, {}),
}
CONVERTED = {
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Rprop": (torch.optim.Rprop, {}),
}
CANNOT_RELEASE = {"Adafactor", "Muon", *CONVERTED}
RECIPES = {
    "master": get_recipe("bf16-fp32-master"),
    "fp32 beside": get_recipe("bf16-fp32-master", weights="bf16+fp32"),
    "8 bits beside": get_recipe("bf16-stochastic", weights="bf16+8"),
    "stochastic": get_recipe("bf16-stochastic"),
    "int8": get_recipe("bf16-stochastic", exp_avg="int8", exp_avg_sq="int8"),
}
EXACT = {"master", "fp32 beside"}


class Net(nn.Module):
    """Shapes of all kinds; ``late`` joins the optimizer later."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embedding": (33, 8), "matrix": (7, 5), "large": (70, 64), "late": (6, 6)}
        for name, shape in {**shapes, "bias": (9,), "scale": ()}.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))
        conv = torch.empty(4, 3, 3, 3).to(memory_format=torch.channels_last)
        self.conv = nn.Parameter(conv)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(parameter, number))


def make_optimizer(name: str, groups: list[list[Any]], recipe: torch_bf16.Recipe) -> Any:
    """An optimizer of groups of parameters, named or not; the second is no matrices."""
    kind, options = {**OURS, **CONVERTED}[name]
    made: list[dict[str, Any]] = [{"params": group} for group in groups]
    options = {"lr": 0.01, **options}
    if name == "Muon":
        made[1]["use_muon"] = False
    if name in CONVERTED:
        return torch_bf16.convert(kind(made, **options), recipe)
    return kind(made, recipe=recipe, **options)


class RandomPrograms(RandomSteps):
    """Hypothesis calls the rules in any order, and prints the shortest program that fails."""

    optimizers: tuple[str, ...] = (*OURS, *CONVERTED)
    recipes: tuple[str, ...] = tuple(RECIPES)

    @initialize(data=st.data(), named=st.booleans())
    def begin(self, data: st.DataObject, named: bool) -> None:
        self.optimizer_name = data.draw(st.sampled_from(self.optimizers), "optimizer")
        self.recipe_name = data.draw(st.sampled_from(self.recipes), "recipe")
        self.recipe, self.named = RECIPES[self.recipe_name], named
        self.exact = self.recipe_name in EXACT
        self.joined, self.steps, self.written = False, 0, False
        self.saved: Any = None
        self.monitor: Any = None
        self.average: Any = None
        self.release: Any = None
        self.net, self.optimizer = self._made("cpu", cast=True)
        self.twin, self.twin_optimizer = self._made("eager", cast=not self.exact)
        self._step_all()

    def _made(self, backend: str, cast: bool) -> tuple[nn.Module, Any]:
        net = torch_bf16.cast_model(Net(), self.recipe) if cast else Net()
        return net, self._optimizer_of(net, backend)

    def _optimizer_of(self, net: nn.Module, backend: str) -> Any:
        *named, late = [(name, getattr(net, name)) for name in NAMES]
        groups = [[each for each in named if (each[1].ndim == 2) is flag] for flag in (True, False)]
        if self.joined:
            groups.append([late])
        if not self.named:
            groups = [[p for _, p in group] for group in groups]
        return make_optimizer(self.optimizer_name, groups, get_recipe(self.recipe, backend=backend))

    # What both do besides their steps.

    @precondition(lambda self: not self.joined and self.release is None)
    @rule()
    def add_group(self) -> None:
        self.joined = True
        for net, optimizer in self._both():
            net.load_state_dict({"late": numbers(net.late, 5)}, strict=False)
            optimizer.add_param_group({"params": [("late", net.late)] if self.named else net.late})
        self._step_all()

    @rule(name=st.sampled_from(NAMES))
    def set_exact_weight(self, name: str) -> None:
        if (pair := self._pairs().get(name)) is not None:
            for each, optimizer in zip(pair, (self.optimizer, self.twin_optimizer), strict=True):
                optimizer.set_exact_weight(each, numbers(each, self.steps))
            # A second write before the next step has noise of its own, which no file counts.
            if not self.exact:
                self._step_all()

    @rule(name=st.sampled_from(NAMES))
    def load_fp32(self, name: str) -> None:
        for net in (self.net, self.twin):
            net.load_state_dict({name: numbers(net.get_parameter(name), self.steps)}, strict=False)
        # Until the next step, a write drops what was loaded.
        self.stepped = False

    @precondition(lambda self: self.release is None)
    @rule(factor=st.sampled_from([0.5, 0.9]))
    def shrink(self, factor: float) -> None:
        self._step_since_loading()
        for net, optimizer in self._both():
            with torch_bf16.exact_weights(net, optimizer), torch.no_grad():
                for name in self._pairs():
                    getattr(net, name).mul_(factor)
        self._step_all()

    @precondition(lambda self: self.release is None)
    @rule(
        name=st.sampled_from(NAMES),
        way=st.sampled_from(["copy_", "load", "data.copy_", "data =", "data[:3]", "[:3]", "mul_"]),
    )
    def write(self, name: str, way: str) -> None:
        ours, twin = self._pairs().get(name, (None, None))
        in_part = way in ("[:3]", "mul_")
        if ours is None or (in_part and not self.exact):
            return
        self._step_since_loading()
        self.stepped, self.written = False, True
        before = ours.detach().clone()
        write(self.net, name, way, self.steps)
        if not self.exact:
            write(self.twin, name, way, self.steps)
            return
        exact = self.optimizer.exact_weight(ours)
        unchanged = before == ours
        kept = (exact == twin) & unchanged
        # Where a fp32 copy still rounds to the weight, or one lower byte is another's, it stays.
        alike = exact.to(BF16) == ours
        if self.recipe_name == "master" and ours.dtype == BF16:
            alike &= (exact == ours) | (lower_bytes(before) == lower_bytes(ours))
        assert (kept | alike).all(), f"{name} has bits of numbers that were overwritten"
        if not in_part and unchanged.float().mean() > 0.5:
            assert kept[unchanged].all(), f"{name} has lost bits of numbers that nobody wrote"
        with torch.no_grad():
            twin.copy_(exact)

    @precondition(lambda self: self.release is None)
    @rule()
    def train_anew(self) -> None:
        """With an optimizer of its own, as a second fit does; that of the first one still lives."""
        if self.written:
            self._step_all()
        self._stop_looking()
        self.earlier = self.optimizer, self.twin_optimizer
        self.optimizer = self._optimizer_of(self.net, "cpu")
        self.twin_optimizer = self._optimizer_of(self.twin, "eager")
        self.stepped = False

    @precondition(lambda self: self.release is None)
    @rule()
    def save(self) -> None:
        parts = [each for both in self._both() for each in both]
        self.saved = self.joined, copy.deepcopy([each.state_dict() for each in parts])

    @precondition(lambda self: self.saved and self.saved[0] == self.joined and not self.release)
    @rule(anew=st.booleans())
    def go_back(self, anew: bool) -> None:
        if anew:
            self._make_anew()
        parts = [each for both in self._both() for each in both]
        for part, state_dict in zip(parts, copy.deepcopy(self.saved[1]), strict=True):
            part.load_state_dict(state_dict)
        self.stepped = False

    # What the program does alone.

    def _make_anew(self) -> None:
        trains = {name: p.requires_grad for name, p in self.net.named_parameters()}
        self._stop_looking()
        self.net, self.optimizer = self._made("cpu", cast=True)
        for name, flag in trains.items():
            self.net.get_parameter(name).requires_grad_(flag)

    def _stop_looking(self) -> None:
        if self.monitor is not None:
            self.monitor.remove()
        self.monitor = self.average = None

    @precondition(lambda self: self.release is None)
    @rule(way=st.sampled_from(["memory", "file", "checkpoint"]))
    def resume(self, way: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file, parts = Path(folder, "file.pt"), {"model": self.net, "optimizer": self.optimizer}
            if way == "checkpoint":
                torch_bf16.save_checkpoint(file, **parts)
                self._make_anew()
                torch_bf16.load_checkpoint(file, model=self.net, optimizer=self.optimizer)
            else:
                state_dicts: Any = {name: each.state_dict() for name, each in parts.items()}
                if way == "file":
                    torch.save(state_dicts, file)
                    state_dicts = torch.load(file, weights_only=True)
                self._make_anew()
                self.net.load_state_dict(state_dicts["model"])
                self.optimizer.load_state_dict(state_dicts["optimizer"])
        self.stepped = False

    @precondition(lambda self: self.exact and self.release is None)
    @rule(recipe=st.sampled_from(sorted(EXACT)), in_fp32=st.booleans())
    def change_recipe(self, recipe: str, in_fp32: bool) -> None:
        if self.written:
            self._step_all()
        # Planes are recoded beside the bf16 weight, which two formats round unlike at a tie.
        if in_fp32 or recipe != self.recipe_name:
            weights = torch_bf16.fp32_state_dict(self.net, self.optimizer)
            states = torch_bf16.fp32_optimizer_state_dict(self.optimizer)
        else:
            weights = copy.deepcopy(self.net.state_dict())
            states = copy.deepcopy(self.optimizer.state_dict())
        self.recipe_name, self.recipe = recipe, RECIPES[recipe]
        self._make_anew()
        self.net.load_state_dict(weights)
        self.optimizer.load_state_dict(states)
        self.stepped = False

    @precondition(lambda self: self.release is None)
    @rule(way=st.sampled_from([copy.deepcopy, pickle.dumps]))
    def become_a_copy(self, way: Any) -> None:
        self._stop_looking()
        self._step_since_loading()
        made = way((self.net, self.optimizer))
        self.net, self.optimizer = pickle.load(io.BytesIO(made)) if way is pickle.dumps else made
        torch_bf16.cast_model(self.net, self.recipe)

    @rule(
        at=st.sampled_from(
            ["describe", "fp32 weights", "fp32 states", "states", "state dict", "exact weights"]
        )
    )
    def look(self, at: str) -> None:
        if at == "describe":
            torch_bf16.describe(self.net, self.optimizer)
        elif at == "fp32 weights":
            torch_bf16.fp32_state_dict(self.net, self.optimizer)
        elif at == "fp32 states":
            torch_bf16.fp32_optimizer_state_dict(self.optimizer)
        elif at == "states":
            for each in self.optimizer.state.values():
                dict(each)
        elif at == "state dict":
            self.optimizer.state_dict()
        elif self.exact:  # otherwise the next write would have other noise
            with torch_bf16.exact_weights(self.net, self.optimizer):
                pass

    @precondition(lambda self: self.release is None)
    @rule()
    def put_weights_back(self) -> None:
        """As an evaluation does that copies an average into the model."""
        self._step_since_loading()
        self.written = True
        weights = {name: each.clone() for name, each in self.net.state_dict().items()}
        self.net.load_state_dict({name: each * 2 for name, each in weights.items()})
        self.net.load_state_dict(weights)

    @rule(
        name=st.sampled_from(NAMES),
        lies=st.sampled_from(["as before", "in rows", "transposed", "in channels_last"]),
    )
    def move_memory(self, name: str, lies: str) -> None:
        for parameter in self.net.parameters():
            parameter.data = parameter.data.clone()
        parameter = getattr(self.net, name)
        if lies == "in rows":
            parameter.data = parameter.data.contiguous()
        elif lies == "transposed" and parameter.ndim > 1:
            # With kernels of 3 by 3, in an order that kernels cannot walk.
            parameter.data = parameter.data.transpose(0, 1).contiguous().transpose(0, 1)
        elif lies == "in channels_last" and parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    @precondition(lambda self: self.release is None)
    @rule()
    def change_backend(self) -> None:
        self.optimizer.backend = "eager" if self.optimizer.backend == "cpu" else "cpu"

    @rule()
    def update_average(self) -> None:
        self.average = self.average or torch_bf16.EMA(self.net, 0.9)
        self.average.update_parameters(self.net)

    @precondition(lambda self: self.release is None)
    @rule()
    def switch_monitor(self) -> None:
        make = functools.partial(torch_bf16.UpdateMonitor, self.optimizer, every=1)
        self.monitor = _switched(self.monitor, make)

    @precondition(lambda self: self.monitor is None and self.optimizer_name not in CANNOT_RELEASE)
    @rule()
    def switch_release(self) -> None:
        make = functools.partial(torch_bf16.release_gradients, self.net, self.optimizer)
        self.release = _switched(self.release, make)

    @invariant()
    def both_start_from_the_same_bits(self) -> None:
        for name, (ours, twin) in self._pairs().items():
            other = what_differs(ours, self.optimizer, twin, self.twin_optimizer)
            assert other is None, f"{other} of {name} is another"


def _switched(handle: Any, make: Callable[[], Any]) -> Any:
    if handle is None:
        return make()
    handle.remove()
    return None

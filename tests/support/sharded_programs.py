"""Programs made at random on several ranks, each beside a twin that trains whole, in one process.

Every rank trains a twin of its own, without a wrapper: over fp32 weights if the recipe is exact,
else by the same recipe, on the eager backend. After each operation the program's exact weights and
states must be the twin's. What programs do in one process is in ``random_programs.py``.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import random_programs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from random_programs import CONVERTED, EXACT, OURS, RECIPES, make_optimizer
from random_steps import what_differs
from random_writes import numbers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import torch_bf16
from torch_bf16 import get_recipe

__all__ = ["WRAPPERS", "train"]

WRAPPERS = ("ddp", "fsdp2")
BF16 = torch.bfloat16


class Net(random_programs.Net):
    """In rows, and without a scalar, which FSDP2 refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(self.scale.detach().reshape(1))
        self.conv = nn.Parameter(self.conv.detach().contiguous())

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """A loss with these gradients, by name, which are numbers of bf16."""
        pairs = [(self.get_parameter(name), each) for name, each in gradients.items()]
        return sum(((p * each.to(p)).sum().float() for p, each in pairs), torch.zeros(()))


NAMES = [name for name, _ in Net().named_parameters()]


def train(wrapper: str, seed: int, operations: int = 10) -> None:
    """Train a random program and its twin, on each rank of the default group.

    Args:
        wrapper: one of ``WRAPPERS``.
        seed: of the program, the same on all ranks.
        operations: how many.

    Raises:
        AssertionError: the two have other bits; the message lists what the program did.
    """
    torch.set_num_threads(1)
    program = _Program(wrapper, random.Random(seed))
    for _ in range(operations):
        program.operate()


class _Program:
    def __init__(self, wrapper: str, choices: random.Random) -> None:
        self._wrapper, self._choices = wrapper, choices
        self._kind = choices.choice([*OURS, *CONVERTED])
        name = choices.choice([*RECIPES])
        self._exact, self._steps = name in EXACT, 0
        self._done: list[Any] = [self._kind, name]
        self._recipe = get_recipe(RECIPES[name], backend=choices.choice(["cpu", "eager"]))
        self._average: torch_bf16.EMA | None = None
        self._make()
        self._twin = Net() if self._exact else torch_bf16.cast_model(Net(), RECIPES[name])
        eager = get_recipe(RECIPES[name], backend="eager")
        self._twin_optimizer = self._optimizer_of(self._twin, eager)
        self._step(1)

    def _make(self) -> None:
        self._net = torch_bf16.cast_model(Net(), self._recipe)
        self._wrapped: Any = self._net
        if self._wrapper == "fsdp2":
            fully_shard(self._net, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        else:
            self._net.to(memory_format=torch.channels_last)
        self._optimizer = self._optimizer_of(self._net, self._recipe)
        if self._wrapper == "ddp":
            self._wrapped = DistributedDataParallel(self._net)
            torch_bf16.sync_masters(self._wrapped)

    def _optimizer_of(self, net: nn.Module, recipe: torch_bf16.Recipe) -> Any:
        named = [*net.named_parameters()]
        groups = [[each for each in named if (each[1].ndim == 2) is flag] for flag in (True, False)]
        return make_optimizer(self._kind, groups, recipe)

    def _both(self) -> tuple[tuple[Any, nn.Module, Any], ...]:
        """The module that is called, the one inside, and the optimizer, of program and twin."""
        return (
            (self._wrapped, self._net, self._optimizer),
            (self._twin, self._twin, self._twin_optimizer),
        )

    def operate(self) -> None:
        """Do something at random, and compare."""
        ways = [self._train, self._train, self._train, self._resume, self._look, self._write]
        self._choices.choice(ways)()
        self._compare()

    def _train(self) -> None:
        choices = self._choices
        # DDP waits for all gradients.
        most = 2 if self._wrapper == "fsdp2" else 0
        without = choices.sample(NAMES, choices.randint(0, most))
        self._step(
            choices.choice([1, 1, 2, 3]),
            without,
            size=choices.choice([1e-6, 1e-2, 10.0]),
            sums=choices.choice(["fp32", "bf16_stochastic", "bf16_nearest"]),
            max_norm=choices.choice([None, 1e-4, 1.0]),
            lr=choices.choice([1e-4, 0.01, 0.05]),
        )

    def _step(
        self,
        micro_batches: int,
        without: Sequence[str] = (),
        size: float = 1e-2,
        sums: str = "fp32",
        max_norm: float | None = None,
        lr: float = 0.01,
    ) -> None:
        self._done.append(("step", micro_batches, without, size, sums, max_norm, lr))
        self._steps += 1
        sums = "fp32" if self._exact else sums
        for wrapped, net, optimizer in self._both():
            optimizer.zero_grad()
            optimizer.param_groups[self._steps % 2]["lr"] = lr
            handle = None
            if micro_batches > 1 and not (self._exact and net is self._twin):
                handle = torch_bf16.accumulate_gradients(wrapped, optimizer, sums)
            for number in range(micro_batches):
                gradients = {
                    name: (numbers(p, 10 * self._steps + number) * size).to(BF16)
                    for name, p in net.named_parameters()
                    if number == 1 or name not in without
                }
                waits = self._wrapper == "ddp" and net is self._net and number < micro_batches - 1
                with self._wrapped.no_sync() if waits else nullcontext():
                    wrapped(gradients).backward()
            if max_norm is not None:
                torch_bf16.clip_next_step(optimizer, max_norm)
            optimizer.step()
            if handle is not None:
                handle.remove()

    def _resume(self) -> None:
        way = self._choices.choice(["whole", "whole on rank 0", "parts", "file"])
        flatten = way in ("parts", "file") and self._choices.random() < 0.5
        self._done.append(("resume", way, flatten))
        options = StateDictOptions(
            full_state_dict=way.startswith("whole"),
            cpu_offload=way == "whole on rank 0",
            flatten_optimizer_state_dict=flatten,
        )
        saved = copy.deepcopy([*get_state_dict(self._net, self._optimizer, options=options)])
        if way == "whole on rank 0":
            dist.broadcast_object_list(saved)
        if way == "file":
            with tempfile.TemporaryDirectory() as folder:
                folders = [folder]
                dist.broadcast_object_list(folders)
                dcp.save({"saved": saved}, checkpoint_id=folders[0])
                self._make()
                saved = [*get_state_dict(self._net, self._optimizer, options=options)]
                dcp.load({"saved": saved}, checkpoint_id=folders[0])
                dist.barrier()
        else:
            self._make()
        set_model_state_dict(self._net, saved[0], options=options)
        set_optimizer_state_dict(self._net, self._optimizer, saved[1], options=options)
        self._average = None
        self._compare()
        # Until the next step of all, a write drops what was loaded.
        self._step(1)

    def _look(self) -> None:
        self._done.append("look")
        torch_bf16.describe(self._net, self._optimizer)
        torch_bf16.fp32_state_dict(self._net, self._optimizer)
        torch_bf16.fp32_optimizer_state_dict(self._optimizer)
        self._average = self._average or torch_bf16.EMA(self._net, 0.9)
        self._average.update_parameters(self._net)
        self._optimizer.backend = "eager" if self._optimizer.backend == "cpu" else "cpu"

    def _write(self) -> None:
        name = self._choices.choice([*NAMES, None])
        self._done.append(("write", name))
        for _, net, optimizer in self._both():
            if name is None:
                with torch_bf16.exact_weights(net, optimizer), torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(0.9)
            else:
                parameter: Any = net.get_parameter(name)
                value = numbers(parameter, self._steps)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                optimizer.set_exact_weight(parameter, value)
        # A second write before the next step has noise of its own, which no file counts.
        self._step(1)

    def _compare(self) -> None:
        for name in NAMES:
            ours, twin = self._net.get_parameter(name), self._twin.get_parameter(name)
            other = what_differs(ours, self._optimizer, twin, self._twin_optimizer)
            assert other is None, f"{other} of {name} is another after {self._done}"

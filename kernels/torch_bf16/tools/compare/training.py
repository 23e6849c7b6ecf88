"""Train one run, of one row with one seed, and record what it costs and loses."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_bf16.errors import described
from torch_bf16.tools.factory import backward, loss_of
from torch_bf16.tools.optimizer_bytes import held_by_role

from .rows import Choice, Row, rate_of, set_rate
from .schedule import learning_rate_factor
from .subject import Subject
from .survival import Survival

__all__ = ["OngoingRun", "Plan", "Run", "move"]

_SEEDS_APART = 1_000_003


@dataclass(frozen=True)
class Plan:
    """What all runs of a comparison share.

    Attributes:
        subject: the model that is trained, and its batches.
        optimizer: the optimizer of all rows that have none of their own.
        lr: peak learning rate.
        steps: how many steps each run takes.
        schedule: ``"cosine"``, a short warm-up and half a cosine, or ``"constant"``.
        device: the device to train on.
    """

    subject: Subject
    optimizer: Choice
    lr: float
    steps: int
    schedule: str
    device: torch.device

    def factor(self, step: int) -> float:
        """The factor of the learning rate in a step, counted from 0."""
        return 1.0 if self.schedule == "constant" else learning_rate_factor(step, self.steps)


@dataclass
class Run:
    """The record of one run.

    Attributes:
        row: the row's name.
        seed: the seed of the weights, the batches and the noise.
        steps: the steps at which losses are known, from 1.
        losses: the training losses at these steps.
        seconds: the duration of each step; empty if unknown.
        optimizer_seconds: the part of it that ``optimizer.step()`` took.
        bytes: by role, at the end of a backward pass; empty if no step was taken.
        parameters: how many parameters are trained.
        ends: last steps of the windows in which updates were measured.
        survived: by layer, for each window, ``<stored, intended>`` and ``<intended, intended>``.
        unmoved: by layer, how many elements never moved, and how many there are.
        unmeasured: why updates were not measured; None if they were.
        undecoded: whether the optimizer keeps more of a weight than can be read here.
        options: the optimizer's class and options.
    """

    row: str
    seed: int
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    ends: list[int] = field(default_factory=list)
    survived: dict[str, list[list[float]]] = field(default_factory=dict)
    unmoved: dict[str, list[int]] = field(default_factory=dict)
    unmeasured: str | None = None
    undecoded: bool = False
    options: str = ""

    @property
    def broken_at(self) -> int | None:
        """The first step whose loss is not a finite number."""
        pairs = zip(self.steps, self.losses, strict=True)
        return next((step for step, loss in pairs if not math.isfinite(loss)), None)


class OngoingRun:
    """A run in progress.

    Weights and batches follow from the seed alone; each step begins with the random generators in a
    state that follows from seed and step, so that dropout is the same in every row whatever an
    optimizer draws, and an interrupted run resumes as if it had not been interrupted. Batches are
    drawn from a random stream of their own.

    Args:
        plan: what all runs share.
        row: the precision.
        seed: the seed that all of this follows from.
        state: a result of :meth:`state` to resume from.

    Attributes:
        run: the record so far.
    """

    def __init__(
        self, plan: Plan, row: Row, seed: int, state: dict[str, Any] | None = None
    ) -> None:
        _seed(seed)
        training = plan.subject.make(plan.steps)
        # Saved before the optimizer and data loaders, too, draw random numbers.
        self._stream = _generators()
        model = training.model.to(plan.device)
        model.train()
        existing = training.optimizer

        def make() -> torch.optim.Optimizer:
            if existing is None or row.own is not None:
                rate = None if existing is None else rate_of(existing.param_groups[0])
                return (row.own or plan.optimizer).over(model, rate or plan.lr)
            return existing

        self._trained = row.prepare(model, make, seed)
        optimizer = self._trained.optimizer
        self._rates = [rate_of(group) for group in optimizer.param_groups]
        self._plan, self._seed = plan, seed
        self._batches = training.cycle_batches()
        self.run = Run(row.name, seed, options=_options(optimizer))
        self.run.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._survival = Survival(self._trained, plan.steps)
        if state is not None:
            self._load(state)

    @property
    def done(self) -> int:
        """How many steps were taken."""
        return len(self.run.losses)

    @property
    def resumable(self) -> bool:
        """Whether :meth:`state` holds all that another process needs to resume."""
        return self.done > 0 and self._trained.resumable

    def steps(self) -> Iterator[float]:
        """Take the remaining steps; yields the loss of each.

        Raises:
            ValueError: the batches end, or the model cannot take one.
        """
        plan, run = self._plan, self.run
        model, optimizer = self._trained.model, self._trained.optimizer
        while self.done < plan.steps:
            step = self.done + 1
            batch = self._next_batch()
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                set_rate(group, None if rate is None else rate * plan.factor(step - 1))
            _seed(self._seed * _SEEDS_APART + step)
            begun = self._clock()
            with torch.autocast(
                plan.device.type, torch.bfloat16, enabled=self._trained.row.autocast
            ):
                loss = loss_of(model, batch)
            backward(model, loss)
            value = loss.item()
            if not math.isfinite(value):
                # Later losses would not be finite either. Moments are there once a step was taken.
                if self.done:
                    run.bytes = held_by_role(optimizer, model.parameters())
                run.steps.append(step)
                run.losses.append(value)
                return
            paused = self._clock()
            self._survival.before_step()
            resumed = self._clock()
            self._step(step)
            ended = self._clock()
            if step == plan.steps:
                run.bytes = held_by_role(optimizer, model.parameters())
            self._survival.after_step(step)
            optimizer.zero_grad()
            run.steps.append(step)
            run.losses.append(value)
            run.seconds.append(paused - begun + ended - resumed)
            run.optimizer_seconds.append(ended - resumed)
            yield value

    def finish(self) -> Run:
        """Complete the record of the run, and return it."""
        run, survival = self.run, self._survival
        run.ends, run.survived = survival.ends, dict(survival.sums)
        run.unmoved = {layer: list(counts) for layer, counts in survival.count_unmoved().items()}
        run.unmeasured = survival.missing
        run.undecoded = bool(run.bytes.get("master")) and not survival.decodes
        return run

    def state(self) -> dict[str, Any]:
        """What another process resumes from, as tensors and primitives."""
        model = self._trained.model
        saved = model.state_dict()
        buffers = model.named_buffers(remove_duplicate=False)
        return {
            "run": asdict(self.run),
            "model": saved,
            # Modules that share one share it again: torch saves it once.
            "other_buffers": {name: each for name, each in buffers if name not in saved},
            "optimizer": self._trained.optimizer.state_dict(),
            "survival": self._survival.state(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self.run = Run(**state["run"])
        # Weights first: a master is stored as what its weight lacks.
        model = self._trained.model
        model.load_state_dict(state["model"])
        for name, each in state["other_buffers"].items():
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, each)
        self._trained.optimizer.load_state_dict(state["optimizer"])
        self._survival.load(state["survival"])
        for _ in range(self.done):
            self._next_batch()

    def _step(self, step: int) -> None:
        try:
            self._trained.optimizer.step()
        # Another library's optimizer may raise anything.
        except Exception as error:
            raise ValueError(
                f"{self.run.row}, seed {self._seed}: {self.run.options} fails in step {step}: "
                f"{described(error)}"
            ) from error

    def _next_batch(self) -> Any:
        _restore(self._stream)
        batch = next(self._batches)
        self._stream = _generators()
        return self._trained.cast_batch(move(batch, self._plan.device))

    def _clock(self) -> float:
        if self._plan.device.type == "cuda":
            torch.cuda.synchronize(self._plan.device)
        return time.perf_counter()


def move(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device."""
    return tree_map_only(Tensor, lambda each: each.to(device), batch)


def _options(optimizer: torch.optim.Optimizer) -> str:
    options = (
        f"{k}={v}" for k, v in optimizer.defaults.items() if isinstance(v, (int, float, tuple))
    )
    return f"{type(optimizer).__name__}({', '.join(options)})"


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])

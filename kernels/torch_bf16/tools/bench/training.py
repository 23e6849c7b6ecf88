"""Time whole training steps of GPT-2's shape, by phase, in all precisions.

The command is ``python -m torch_bf16 bench --training``. All rows take a step in every round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_bf16.gradients.clipping import clip_next_step
from torch_bf16.model.arithmetic import arithmetic
from torch_bf16.prepare import prepare
from torch_bf16.recipe import Recipe, get_recipe
from torch_bf16.tools.system_memory import peak_growth

from .clock import Clock, clock_for
from .entries import OPTIONS

__all__ = ["BASELINE", "PHASES", "Row", "Timed", "every_row", "peak_of", "time_rows"]

BASELINE = "32-true"
PHASES = ("forward", "backward", "clip", "step")
_WIDTH, _HEADS, _VOCABULARY = 768, 12, 50257
_UNTIMED_ROUNDS = 1


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.attention = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.mixed = nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.attention(self.norms[0](x)).view(batch, tokens, 3, _HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class _GPT2(nn.Module):
    """GPT-2 (Radford et al., 2019) of any depth; returns the mean loss of the next token."""

    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_VOCABULARY, _WIDTH), nn.Embedding(tokens, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(layers))
        self.norm = nn.LayerNorm(_WIDTH)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        name: the row's name in tables.
        recipe: our recipe; None if weights and optimizer are torch's, in fp32.
        autocast: whether, without a recipe, the forward pass runs under autocast to bf16.
    """

    name: str
    recipe: Recipe | None = None
    autocast: bool = False


def every_row(recipes: Sequence[str | Recipe]) -> list[Row]:
    """fp32, torch's mixed precision, and each recipe in bf16 and in fp32 arithmetic."""
    rows = [Row(BASELINE), Row("bf16-mixed", autocast=True)]
    for compute in ("autocast", "fp32"):
        for recipe in dict.fromkeys(get_recipe(each) for each in recipes):
            name = recipe.name if compute == "autocast" else f"{recipe.name}, computes in fp32"
            rows.append(Row(name, get_recipe(recipe, compute=compute)))
    return rows


@dataclass
class Timed:
    """What was measured of one row.

    Attributes:
        row: the row that was measured.
        seconds: seconds of each phase, one number for each round.
        parameters: the number of parameters.
        loss: the loss of the last step.
        peak: bytes held at the peak of a step, activations included; None on a CPU, where another
            process measures it.
    """

    row: Row
    seconds: dict[str, list[float]] = field(default_factory=lambda: {each: [] for each in PHASES})
    parameters: int = 0
    loss: float = float("nan")
    peak: int | None = None

    @property
    def totals(self) -> np.ndarray:
        """Seconds of whole steps, ``[rounds]``."""
        return np.sum([self.seconds[each] for each in PHASES], axis=0)

    def keep(self, rounds: int) -> None:
        """Leave out what came after so many rounds."""
        self.seconds = {name: each[:rounds] for name, each in self.seconds.items()}


def time_rows(
    rows: Sequence[Row],
    layers: int,
    tokens: int,
    device: torch.device,
    rounds: int,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[list[Timed], bool]:
    """Take steps of each row, one after the other within every round.

    Ctrl-C ends the run after the last complete round.

    Args:
        rows: the baseline first; each holds a model of its own.
        layers: how many layers GPT-2 has.
        tokens: the length of the one sequence that is the batch.
        device: the device to train on.
        rounds: how many rounds are timed.
        progress: called with lines of text about the progress.

    Returns:
        What was measured of each row, and whether Ctrl-C ended the run.

    Raises:
        KeyboardInterrupt: Ctrl-C came before the first round was complete.
    """
    clock, complete = clock_for(device), 0
    training = []
    for row in rows:
        training.append(_Training(row, layers, tokens, clock))
        progress(f"{row.name}: made")
    gc.disable()
    try:
        for number in range(-_UNTIMED_ROUNDS, rounds):
            first = number % len(training)
            for each in training[first:] + training[:first]:
                each.step(clock, number >= 0)
            complete += number >= 0
            progress(f"round {number + 1} of {rounds}")
    except KeyboardInterrupt:
        if not complete:
            raise
        for each in training:
            each.timed.keep(complete)
    finally:
        gc.enable()
    return [each.timed for each in training], complete < rounds


def peak_of(row: Row, layers: int, tokens: int, threads: int, seconds: float = 600) -> int | None:
    """Growth of a fresh process's peak memory while it trains for three CPU steps; in bytes."""
    return peak_growth(_three_steps, (row, 1, 8), (row, layers, tokens), threads, seconds)


def _three_steps(row: Row, layers: int, tokens: int) -> None:
    clock = clock_for(torch.device("cpu"))
    training = _Training(row, layers, tokens, clock)
    for _ in range(3):
        training.step(clock, False)


class _Training:
    def __init__(self, row: Row, layers: int, tokens: int, clock: Clock) -> None:
        before = clock.allocated()
        torch.manual_seed(0)
        model = _GPT2(layers, tokens).to(clock.device)
        self.timed = Timed(row, parameters=sum(p.numel() for p in model.parameters()))
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.AdamW(model.parameters(), fused=row.recipe is None, **OPTIONS)
        # As users clip: with torch by a pass that writes gradients, with ours in the next step.
        self._clip: Callable[[], Any]
        if row.recipe is None:
            self._compute: str | None = "autocast" if row.autocast else None
            self._clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()], 1.0)
        else:
            model, optimizer = prepare(model, optimizer, row.recipe)
            self._compute = row.recipe.compute
            self._clip = partial(clip_next_step, optimizer, 1.0)
        self._model, self._optimizer = model, optimizer
        self._ids = torch.randint(0, _VOCABULARY, (1, tokens + 1)).to(clock.device)
        if before is not None:
            self.step(clock, False)
            # Memory that making the states needed for a moment is not part of a training run.
            clock.start_peak()
            self.step(clock, False)
            self.timed.peak = clock.peak_beside(before)

    def step(self, clock: Clock, timed: bool) -> None:
        times = [self._now(clock)]
        with self._context(clock.device.type):
            loss = self._model(self._ids)
        times.append(self._now(clock))
        loss.backward()
        times.append(self._now(clock))
        self._clip()
        times.append(self._now(clock))
        self._optimizer.step()
        times.append(self._now(clock))
        self._optimizer.zero_grad()
        if timed:
            for name, start, end in zip(PHASES, times, times[1:], strict=False):
                self.timed.seconds[name].append(end - start)
            self.timed.loss = loss.item()

    def _context(self, device_type: str) -> AbstractContextManager[Any]:
        if self._compute is None:
            return nullcontext()
        if self.timed.row.recipe is None:
            # With torch's cache of cast weights, as in mixed precision.
            return torch.autocast(device_type, torch.bfloat16)
        return arithmetic(device_type, self._compute)

    @staticmethod
    def _now(clock: Clock) -> float:
        clock.wait()
        return time.perf_counter()

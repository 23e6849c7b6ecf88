"""One entry in memory, and the copy of a large tensor that all entries are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from torch_bf16.parameters import parameters_of
from torch_bf16.tools.optimizer_bytes import held_bytes, moved_bytes

from .clock import Clock
from .entries import Entry
from .models import Shapes
from .ways import step_of

__all__ = ["Copy", "Running"]


class Running:
    """An entry that has taken its first three steps, and can take more.

    Attributes:
        entry: the entry.
        first_step: seconds of the first step, with compiling.
        held: bytes of weights, gradients and states.
        moved: bytes that a step must read and write.
        peak: most bytes during the second and third step; None if only the system knows.
        seconds: seconds per step, one number for each timed round.
        host_seconds: seconds until the call of a step returned, one for each timed round.
        seconds_after_product: seconds per step right after a matrix product, one for each timed
            round; empty on a device where that is not timed.

    Raises:
        RuntimeError: the entry does not do the work that is to be timed.
    """

    def __init__(self, entry: Entry, shapes: Shapes, clock: Clock) -> None:
        self.entry = entry
        self.seconds: list[float] = []
        self.host_seconds: list[float] = []
        self.seconds_after_product: list[float] = []
        before = clock.allocated()
        optimizer = entry.make(shapes, clock.device)
        self._step: Callable[[], object] = step_of(optimizer, entry.way)
        parameters = parameters_of(optimizer)
        sample = max(parameters, key=torch.Tensor.numel).detach().view(-1)[:4096]
        at_first = sample.clone()
        start = time.perf_counter()
        self._step()
        clock.wait()
        self.first_step = time.perf_counter() - start
        # Memory that compiling needed for a moment is not part of a training run.
        clock.start_peak()
        self._step()
        self._step()
        self.peak = clock.peak_beside(before)
        if any(parameter.grad is None for parameter in parameters):
            raise RuntimeError("its step removes the gradients, so the next one has nothing to do")
        if torch.equal(sample, at_first):
            raise RuntimeError("three steps left the weights as they were")
        self.held = held_bytes(optimizer)
        self.moved = moved_bytes(optimizer)

    def run(self, clock: Clock, timed: bool) -> None:
        """Take a round's steps."""
        seconds, host = clock.time(self._step)
        after_product = clock.time_after_product(self._step)
        if timed:
            self.seconds.append(seconds)
            self.host_seconds.append(host)
            if after_product is not None:
                self.seconds_after_product.append(after_product)

    def keep(self, rounds: int) -> None:
        """Drop the times of all but the first ``rounds`` timed rounds."""
        for times in (self.seconds, self.host_seconds, self.seconds_after_product):
            del times[rounds:]

    def count_launches(self, clock: Clock) -> dict[str, int] | None:
        """Take one more step, and count the kernels, copies and fills that it launches."""
        return clock.launches(self._step)

    def close(self) -> None:
        """Free the tensors; the figures stay."""
        del self._step


class Copy:
    """A copy of one large tensor to another: the bandwidth that a device has for reads and writes.

    Attributes:
        rates: bytes per second, read and written, one number for each timed round.
    """

    def __init__(self, size: int, clock: Clock) -> None:
        self.rates: list[float] = []
        self._source = torch.ones(size // 4, device=clock.device)
        self._target = torch.zeros_like(self._source)

    def run(self, clock: Clock, timed: bool) -> None:
        """Take a round's copies."""
        seconds, _ = clock.time(lambda: self._target.copy_(self._source))
        if timed:
            self.rates.append(2 * self._source.nbytes / seconds)

    def keep(self, rounds: int) -> None:
        """Drop the rates of all but the first ``rounds`` timed rounds."""
        del self.rates[rounds:]

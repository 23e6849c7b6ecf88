"""Certificates of all kernels that the named recipes need, tried afresh in several processes.

A kernel that kills its process costs no verdict on another kernel.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from torch_bf16 import rules
from torch_bf16.backends import Variant, choose
from torch_bf16.backends.certificates import fault_of, is_lost
from torch_bf16.errors import described
from torch_bf16.recipe import RECIPES, Recipe

__all__ = [
    "INT8_MOMENTS",
    "Certificate",
    "certify",
    "chosen_automatically",
    "fresh_verdicts",
    "variants_for",
]

INT8_MOMENTS = Recipe("int8-moments", exp_avg="int8", exp_avg_sq="int8")

_RULES = (rules.ADAMW, rules.SGD_MOMENTUM, rules.LION, rules.MUON)
_FOLDER, _BACKEND = "TORCH_BF16_CACHE", "TORCH_BF16_BACKEND"
# Seconds without a result after which a process counts as hanging: importing and compiling take
# only a few.
_PATIENCE = 90.0


@dataclass(frozen=True)
class Certificate:
    """What the trial of a variant found.

    Attributes:
        variant: the variant's name.
        backend: the backend that was tried.
        fault: why it must not be used; None if its bits are right.
        seconds: how long the trial took, with compiling.
    """

    variant: str
    backend: str
    fault: str | None
    seconds: float


def variants_for(device: torch.device) -> list[Variant]:
    """The variants that AdamW, SGD, Lion and Muon use for matrices and vectors, in bf16 and fp32.

    They cover the named recipes and one with int8 moments, and on a GPU also parameters that
    several kinds of sharding cut into runs, and those in channels_last.
    """
    found: dict[Variant, None] = {}
    for rule in _RULES:
        roles = ("weights", *(state.role for state in rule.states))
        for recipe in (*RECIPES.values(), INT8_MOMENTS):
            for shape, dtype in (
                ((64, 64), torch.bfloat16),
                ((3, 5), torch.bfloat16),
                ((64,), torch.bfloat16),
                ((64, 64), torch.float32),
            ):
                formats = tuple(recipe.format_of(role, shape, dtype) for role in roles)
                gradient = torch.float32 if rule is rules.MUON else dtype
                consecutive = Variant(rule, formats, gradient, device)
                found[consecutive] = None
                if device.type == "cuda" and shape == (64, 64) and consecutive.streams:
                    found[replace(consecutive, indices="strided")] = None
                    if all(each.block == 1 for each in formats):
                        found[replace(consecutive, indices="transposed")] = None
            for shape in ((64, 64), (3, 5)):
                momentum = (recipe.format_of(rules.FIRST_MOMENT, shape),)
                found[Variant(rules.AVERAGE, momentum, torch.bfloat16, device)] = None
    return list(found)


@contextmanager
def fresh_verdicts() -> Iterator[None]:
    """Use a temporary folder of verdicts: earlier ones do not count, and none are left behind."""
    with tempfile.TemporaryDirectory() as folder, _variable(_FOLDER, folder):
        yield


@contextmanager
def chosen_automatically() -> Iterator[str | None]:
    """Set a backend that the environment names aside, and yield its name, or None.

    Otherwise a named ``eager`` would be compared with itself, and no fault of a kernel be found.
    """
    named = os.environ.get(_BACKEND) or None
    with _variable(_BACKEND, None):
        yield named


@contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable, or unset it, for this process and those that it starts."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def certify(
    device: torch.device, processes: int, progress: Callable[[str], None] = lambda line: None
) -> list[Certificate]:
    """Try every variant of :func:`variants_for` with the first backend for the device.

    Args:
        device: the device to try them on.
        processes: how many processes compile and try at a time; with 0, this process does, and does
            not survive a kernel that kills it.
        progress: called with lines of text about the progress.

    Returns:
        A certificate for each variant, in the order of :func:`variants_for`.
    """
    variants, backend = variants_for(device), choose(device).name
    names = [each.name for each in variants]
    if processes == 0:
        pairs = zip(names, variants, strict=True)
        return [Certificate(name, backend, *_trial(each)) for name, each in pairs]
    left = list(range(len(variants)))
    found: dict[int, Certificate] = {}
    workers: dict[Connection, _Worker] = {}

    def start(numbers: list[int]) -> None:
        worker = _Worker(device, numbers)
        workers[worker.pipe] = worker

    try:
        for first in range(min(processes, len(left))):
            start(left[first::processes])
        while workers:
            ready = wait(list(workers), _PATIENCE / 30)
            for worker in workers.values():
                worker.end_if_it_hangs(worker.pipe in ready)
            for pipe in ready:
                worker = workers[pipe]  # pyright: ignore[reportArgumentType]
                try:
                    number, fault, seconds = worker.pipe.recv()
                    worker.left.remove(number)
                except EOFError:
                    worker.process.join()
                    del workers[worker.pipe]
                    if not worker.left:
                        continue
                    if worker.process.exitcode == 0:
                        # It lost the device, and said which variant that was.
                        start(worker.left)
                        continue
                    number, *remaining = worker.left
                    fault, seconds = worker.what_ended_it(), 0.0
                    if remaining:
                        start(remaining)
                found[number] = Certificate(names[number], backend, fault, seconds)
                if fault:
                    progress(f"{names[number]}: {fault}")
                if len(found) % 10 == 0 or fault:
                    progress(f"{len(found)} of {len(variants)} kernels tried")
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.join()
    return [found[number] for number in left]


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, where the system can: Windows lacks masks of signals."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _Worker:
    """A process that tries some variants, one after the other."""

    def __init__(self, device: torch.device, numbers: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self.left = list(numbers)
        self.pipe, child_pipe = context.Pipe(duplex=False)
        self.process: Any = context.Process(
            target=_try, args=(child_pipe, str(device), self.left), daemon=True
        )
        # Ctrl-C reaches the child, too, so the child inherits a mask that blocks it; the parent
        # ends the child. The resource tracker, which resets the mask, must be running before.
        resource_tracker.ensure_running()
        with _interrupts_blocked():
            self.process.start()
        child_pipe.close()
        self._heard, self._hung = time.monotonic(), False

    def end_if_it_hangs(self, said_something: bool) -> None:
        """Kill the process if it has sent nothing for too long."""
        if said_something:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > _PATIENCE:
            self._hung = True
            self.process.kill()

    def what_ended_it(self) -> str:
        """Describe how the process ended."""
        if self._hung:
            return f"the process that tried it did not end within {_PATIENCE:g} s"
        return f"the process that tried it ended with {self.process.exitcode}"


def _try(pipe: Connection, device: str, numbers: Sequence[int]) -> None:
    variants = variants_for(torch.device(device))
    for number in numbers:
        fault, seconds = _trial(variants[number])
        pipe.send((number, fault, seconds))
        if fault and is_lost(variants[number].device):
            # Whatever this process tries from now on fails.
            return


def _trial(variant: Variant) -> tuple[str | None, float]:
    """The fault of the device's first backend with a variant, and how long the trial took."""
    start = time.perf_counter()
    try:
        fault = fault_of(choose(variant.device), variant)
    except Exception as error:
        fault = described(error)
    return fault, time.perf_counter() - start

"""Checks before a backend's first use that it computes the right bits.

A variant is tried on a small made-up bucket, and its bits are compared with those of the NumPy
oracle. Ranks need not agree: backends that pass have the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from torch_bf16.backends import cuda_graphs
from torch_bf16.backends.backend import Backend
from torch_bf16.backends.bucket import Variant
from torch_bf16.backends.eager import EagerBackend
from torch_bf16.backends.host_scalars import HostScalars, evaluate
from torch_bf16.backends.inputs import StepInputs
from torch_bf16.backends.sources import source_hash
from torch_bf16.backends.subnormals import subnormals_kept
from torch_bf16.errors import described
from torch_bf16.locks import fork_safe_lock

from .digests import expected
from .sums import wrong_sum
from .trial import GROUP, Trial, digests_of, names_of
from .verdicts import verdict

__all__ = ["fault_of", "fault_of_squares", "is_lost"]

COUNTED = (1, 2, 999, 2**24 - 1)
"""The steps whose scalars are tried."""

# Wrong elements that the message shows one by one, at most.
_SHOWN = 4

_logger = logging.getLogger("torch_bf16")
_Result = TypeVar("_Result")


class _NotRun(Exception):
    """A trial that could not be completed: there is no compiler, say, or no space on disk."""


_lock = fork_safe_lock()

_known: dict[tuple[str, str, torch.device], str | None] = {}


def fault_of(backend: Backend, variant: Variant) -> str | None:
    """Why a backend must not run a variant on its device; None if its bits are right.

    The trial runs once per machine and set of versions, which takes some tens of milliseconds on a
    CPU and more on a GPU, besides compilation; later its verdict is read from a file. A trial that
    could not be run is repeated by the next process. No collective is called, and no random number
    of torch is drawn.

    Args:
        backend: a backend that is available on the device.
        variant: the variant to try.
    """
    return _tried(backend, variant.name, variant.device, lambda: _load(backend, variant))


def fault_of_squares(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """The same for sums of squares of bfloat16 or float32; see :meth:`Backend.squares`."""
    name = f"squares_{str(dtype).removeprefix('torch.')}"

    def load() -> Callable[[], str | None]:
        # No elements: this compiles the kernel without summing anything.
        _finished(device, lambda: backend.squares([torch.empty(0, dtype=dtype, device=device)]))
        return lambda: _run(device, lambda: wrong_sum(backend, device, dtype))

    return _tried(backend, name, device, load)


def facts_of(backend: Backend, device: torch.device) -> list[str]:
    """What a verdict holds for, beside the backend's name and the kernel's."""
    return [torch.__version__, *backend.fingerprint(device), source_hash()]


def _tried(
    backend: Backend,
    name: str,
    device: torch.device,
    load: Callable[[], Callable[[], str | None]],
) -> str | None:
    key = backend.name, name, device
    if key in _known or device.type == "meta":
        return _known.get(key)
    if cuda_graphs.capturing([device]):
        return "it was not tried before a CUDA graph was captured; take an ordinary step first"
    with _lock:
        if key not in _known:
            try:
                _known[key] = verdict([*key[:2], *facts_of(backend, device)], load)
            except _NotRun as error:
                # Not written to disk: another process may have what was missing here.
                _known[key] = f"it cannot be compiled or run ({error})"
    return _known[key]


def _load(backend: Backend, variant: Variant) -> Callable[[], str | None]:
    """Compile the kernels of a variant, and return the function that finds its fault."""
    try:
        trial = Trial.of(variant)
    except Exception as error:
        # A rule from outside this package, whose options cannot be made up.
        _logger.info("torch_bf16: %s cannot be tried and is used untested: %r", variant.name, error)
        return lambda: None
    device = variant.device
    loaded = _finished(
        device, lambda: (_load_kernels(backend, trial), _load_scalars(backend, variant))
    )
    return lambda: _run(device, lambda: loaded[0]() or loaded[1]())


def _run(device: torch.device, trial: Callable[[], str | None]) -> str | None:
    """The fault that a trial finds; losing the device is one. Raises as :func:`_finished` does."""
    try:
        with subnormals_kept():
            fault = _finished(device, trial)
    except _NotRun as error:
        if not is_lost(device):
            raise
        fault = f"it made the device unusable until the process ends ({error})"
    return fault and f"{fault}; please report this, with the output of `python -m torch_bf16 info`"


def _finished(device: torch.device, work: Callable[[], _Result]) -> _Result:
    """Do some work for a trial and return its result.

    Raises:
        _NotRun: the work failed; the message says how.
        torch.OutOfMemoryError: the device has too little free memory.
        RuntimeError: the device had been lost before.
    """
    if device.type == "cuda":
        # A kernel that failed earlier, such as a loss's, must not be blamed on the one tried here.
        torch.cuda.synchronize(device)
    try:
        with _undisturbed(device):
            return work()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _NotRun(described(error)) from error


def is_lost(device: torch.device) -> bool:
    """Whether a device accepts no more work from this process, as after an illegal access."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return False
    except Exception:
        return True
    return False


def _load_kernels(backend: Backend, trial: Trial) -> Callable[[], str | None]:
    """Compile a trial's kernels, and return the function that checks their bits."""
    variant, host = trial.variant, torch.device("cpu")
    digests = expected(variant)
    if digests is None:
        if backend.name == EagerBackend.name:
            return lambda: None
        digests = digests_of(trial.run(EagerBackend(), host))
    runs = {
        where: trial.load(backend, variant.device, unaligned)
        for where, unaligned in (("aligned tensors", False), ("tensors that are not aligned", True))
    }

    def other_bits() -> str | None:
        for where, run in runs.items():
            planes = run()
            found = digests_of(planes)
            for number, (want, got) in enumerate(zip(digests, found, strict=True)):
                if want != got:
                    name = names_of(variant)[number]
                    what = f"{name} has the wrong bits, in {where}"
                    return f"{what}: {_differences(trial, planes[number], number, want)}"
        return None

    return other_bits


def _differences(trial: Trial, plane: Sequence[np.ndarray], number: int, want: str) -> str:
    """Describe the elements of a plane whose bits differ from those of eager on the host."""
    planes = trial.run(EagerBackend(), torch.device("cpu"))
    pairs = [*zip(plane, planes[number], strict=True)]
    wrong = [
        (tensor, places)
        for tensor, (got, right) in enumerate(pairs)
        if len(places := np.flatnonzero(got != right))
    ]
    counts = [f"{len(places)} of {len(plane[n])} in tensor {n}" for n, places in wrong]
    found = [", ".join(counts) or "that of eager on this CPU"]
    for tensor, places in wrong[:1]:
        for place in places[:_SHOWN].tolist():
            got, right = ("0x" + each[place].tobytes()[::-1].hex() for each in pairs[tensor])
            found.append(f"tensor {tensor} has {got} at {place} and not {right}")
    if digests_of(planes)[number] != want:
        found.append("eager on this CPU is wrong, too")
    return "; ".join(found)


def _load_scalars(backend: Backend, variant: Variant) -> Callable[[], str | None]:
    """Compile the scalars of a variant, and return the function that checks them."""
    if backend.scalars is HostScalars:
        return lambda: None
    rule, n = variant.rule, len(COUNTED)
    counters = [torch.tensor(step - 1, dtype=torch.float32, device="cpu") for step in COUNTED]
    source: Any = backend.scalars(rule, variant.device, [n], [0] * n, counters)
    # Compiles without launching anything.
    source.bring([GROUP], StepInputs())

    def other_scalars() -> str | None:
        (rows,) = source.set([GROUP], StepInputs())
        table = torch.as_tensor(rows.table, device="cpu").numpy()[rows.rows]
        source.count()
        counted = [float(step) for step in source.steps]
        for step, row, number in zip(COUNTED, table, counted, strict=True):
            want = np.array(evaluate(rule, GROUP, 0, step), np.float64).astype(np.float32)
            got = row[: len(want)].astype(np.float32)
            if not np.array_equal(want, got, equal_nan=True) or number != step:
                return f"the scalars of step {step} are {got.tolist()} and not {want.tolist()}"
        return None

    return other_scalars


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Let a trial wait for the device, even if that has been made an error."""
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    with torch.no_grad():
        if mode:
            torch.cuda.set_sync_debug_mode(0)
        try:
            yield
        finally:
            if mode:
                torch.cuda.set_sync_debug_mode(mode)

"""Whether a backend computes the bits that it must, found out before its first use.

A variant is tried on a small made-up bucket, and its bits are compared with those of the NumPy
oracle. Ranks need not agree: backends that pass have the same bits.
"""

from __future__ import annotations

import logging
import threading
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

from .digests import expected, key_of
from .sums import wrong_sum
from .trial import GROUP, Trial, digests_of, names_of
from .verdicts import verdict

__all__ = ["fault_of", "fault_of_squares", "is_lost"]

COUNTED = (1, 2, 999, 2**24 - 1)
"""The steps whose scalars are tried."""

# Elements that are told of one by one.
_SHOWN = 4

_logger = logging.getLogger("torch_bf16")
_Result = TypeVar("_Result")


class _NotRun(Exception):
    """A trial that was not brought to its end: no compiler, no room on disk or on the device."""


_lock = threading.RLock()
_known: dict[tuple[str, str, torch.device], str | None] = {}


def fault_of(backend: Backend, variant: Variant) -> str | None:
    """Why a backend must not run a variant on its device; None where its bits are right.

    Tried once for a machine and its versions, in 1 to 30 ms beside what compiling takes, then
    read from a file; what could not be run is tried again by the next process. No collective is
    called, and no random number of torch is drawn.

    Args:
        backend: one that is available on the device.
        variant: what is to be run.
    """
    return _tried(backend, key_of(variant), variant.device, lambda: _load(backend, variant))


def fault_of_squares(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """The same for sums of squares of a dtype, bfloat16 or float32; see :meth:`Backend.squares`."""
    name = f"squares_{str(dtype).removeprefix('torch.')}"

    def load() -> Callable[[], str | None]:
        # Of no elements: it is compiled, and adds nothing up.
        _finished(device, lambda: backend.squares([torch.empty(0, dtype=dtype, device=device)]))
        return lambda: _run(device, lambda: wrong_sum(backend, device, dtype))

    return _tried(backend, name, device, load)


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
            facts = [torch.__version__, *backend.fingerprint(device), source_hash()]
            try:
                _known[key] = verdict([*key[:2], *facts], load)
            except _NotRun as error:
                # Another process may find what was missing here.
                _known[key] = f"it cannot be compiled or run ({error})"
    return _known[key]


def _load(backend: Backend, variant: Variant) -> Callable[[], str | None]:
    """What finds the fault of a variant, whose kernels are compiled now."""
    try:
        trial = Trial.of(variant)
    except Exception as error:
        # A rule from elsewhere, whose options cannot be made up.
        _logger.info("torch_bf16: %s cannot be tried, and is used: %r", variant.name, error)
        return lambda: None
    device = variant.device
    loaded = _finished(
        device, lambda: (_load_kernels(backend, trial), _load_scalars(backend, variant))
    )
    return lambda: _run(device, lambda: loaded[0]() or loaded[1]())


def _run(device: torch.device, trial: Callable[[], str | None]) -> str | None:
    """What a trial found, an end of the device among it; errors as of :func:`_finished`."""
    try:
        fault = _finished(device, trial)
    except _NotRun as error:
        if not is_lost(device):
            raise
        fault = f"it made the device unusable until the process ends ({error})"
    return fault and f"{fault}; please report this, with what `python -m torch_bf16 info` prints"


def _finished(device: torch.device, work: Callable[[], _Result]) -> _Result:
    """What some work for a trial results in.

    Raises:
        _NotRun: it failed, and how.
        RuntimeError: the device was lost before.
    """
    if device.type == "cuda":
        # A kernel that failed earlier, such as a loss's, is not to be blamed on the one tried here.
        torch.cuda.synchronize(device)
    try:
        with _undisturbed(device):
            return work()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise _NotRun(reason) from error


def is_lost(device: torch.device) -> bool:
    """Whether a device takes no work of this process any more, as after an illegal access."""
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
    """What finds other bits than a trial's."""
    variant, host = trial.variant, torch.device("cpu")
    digests = expected(variant)
    if digests is None:
        if backend.name == EagerBackend.name:
            return lambda: None
        digests = digests_of(trial.run(EagerBackend(), host))
    runs = {
        where: trial.load(backend, variant.device, beside)
        for where, beside in (("aligned tensors", False), ("tensors that are not aligned", True))
    }

    def other_bits() -> str | None:
        for where, run in runs.items():
            planes = run()
            found = digests_of(planes)
            for number, (want, got) in enumerate(zip(digests, found, strict=True)):
                if want != got:
                    name = names_of(variant)[number]
                    said = f"{name} has other bits than it must, in {where}"
                    return f"{said}: {_differences(trial, planes[number], number, want)}"
        return None

    return other_bits


def _differences(trial: Trial, plane: Sequence[np.ndarray], number: int, want: str) -> str:
    """Which elements of a plane have other bits than eager on the host gives them."""
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
    """What finds other scalars than the host's."""
    if backend.scalars is HostScalars:
        return lambda: None
    rule, n = variant.rule, len(COUNTED)
    counters = [torch.tensor(step - 1, dtype=torch.float32, device="cpu") for step in COUNTED]
    source: Any = backend.scalars(rule, variant.device, [n], [0] * n, counters)
    # Compiles, and launches nothing.
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
    """A trial waits for the device, even where that is made an error."""
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    with torch.no_grad():
        if mode:
            torch.cuda.set_sync_debug_mode(0)
        try:
            yield
        finally:
            if mode:
                torch.cuda.set_sync_debug_mode(mode)

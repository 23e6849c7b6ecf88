"""Backends run kernels on a device; they know no rule by name, and formats only in their codecs."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bf16.argument_checks import BACKENDS, check_backend
from torch_bf16.errors import BackendUnavailableError

from . import cuda_graphs
from .backend import Backend, CapturableKernel, CapturableSource, Kernel, ScalarSource
from .bucket import Bucket, Indices, Run, Variant
from .bus import Bus, bus_of
from .certificates import fault_of, fault_of_squares
from .cpu import CpuBackend
from .eager import EagerBackend
from .inputs import KernelInputs, ScalarRows, StepInputs
from .pieces import READ_DTYPES
from .staging import BUFFER_BYTES, BUFFERS, StagedKernel, fetch, holding, load
from .totals import Totals
from .triton import TritonBackend

__all__ = [
    "BACKENDS",
    "BUFFERS",
    "BUFFER_BYTES",
    "Backend",
    "Bucket",
    "Bus",
    "CapturableKernel",
    "CapturableSource",
    "Indices",
    "Kernel",
    "KernelInputs",
    "Run",
    "ScalarRows",
    "ScalarSource",
    "StagedKernel",
    "StepInputs",
    "Totals",
    "Variant",
    "bus_of",
    "choose",
    "choose_for",
    "explain",
    "fetch",
    "holding",
    "load",
    "squares",
]

_EAGER = EagerBackend()
_BACKENDS: dict[str, Backend] = {
    each.name: each for each in (CpuBackend(), _EAGER, TritonBackend())
}

_ENVIRONMENT = "TORCH_BF16_BACKEND"

_logger = logging.getLogger("torch_bf16")


def choose(device: torch.device, requested: str | None = None) -> Backend:
    """The backend for a device, always the same object for the same name.

    Args:
        device: the device of the parameters.
        requested: a name from :data:`BACKENDS`; None for the one that the environment variable
            ``TORCH_BF16_BACKEND`` names, or else the fastest that can run there.

    Raises:
        ValueError: there is no backend of that name.
        BackendUnavailableError: the requested backend cannot run on ``device``.

    Example:
        >>> choose(torch.device("cpu"), "eager").name
        'eager'
    """
    origin = "" if requested else f"{_ENVIRONMENT}: "
    requested = requested or os.environ.get(_ENVIRONMENT)
    if not requested:
        return _automatic(device)[0]
    try:
        check_backend(requested)
    except ValueError as error:
        raise ValueError(f"{origin}{error}") from None
    backend = _BACKENDS[requested]
    if reason := backend.unavailable(device):
        works = [name for name, reason in explain(device).items() if reason is None]
        raise BackendUnavailableError(
            f"{origin}backend {requested!r} was asked for and cannot run on {device}: {reason}. "
            f"Working here: {', '.join(works)}."
        )
    return backend


def choose_for(variant: Variant, requested: str | None = None) -> Backend:
    """The backend for a variant: the requested one, or else the fastest that passes its trial.

    Args:
        variant: the variant to run.
        requested: as for :func:`choose`.

    Raises:
        ValueError, BackendUnavailableError: as for :func:`choose`; or no backend has the right
            bits.
    """
    _note_emulation(variant.device)
    if requested or os.environ.get(_ENVIRONMENT):
        return choose(variant.device, requested)
    faults = []
    for backend in _automatic(variant.device):
        fault = fault_of(backend, variant)
        if fault is None:
            return backend
        _warn_of(backend.name, variant.name, variant.device, fault)
        faults.append(f"{backend.name}: {fault}")
    raise BackendUnavailableError(
        f"no backend computes {variant.name} correctly on {variant.device}: {'; '.join(faults)}"
    )


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements; see :meth:`Backend.squares`.

    Uses the fastest backend that passed its trial and reads such tensors. While a CUDA graph is
    captured, torch computes the sum, and its last bits differ from those of an ordinary step.

    Args:
        tensors: as for :meth:`Backend.squares`.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    found = None
    if dtype in READ_DTYPES and not cuda_graphs.capturing([device]):
        requested = os.environ.get(_ENVIRONMENT)
        backend = choose(device) if requested else _squares_by(device, dtype)
        found = backend.squares(tensors)
    return _EAGER.squares(tensors) if found is None else found


@functools.cache
def _squares_by(device: torch.device, dtype: torch.dtype) -> Backend:
    """The fastest backend whose sums passed their trial."""
    for backend in _automatic(device):
        if backend is _EAGER:
            break
        fault = fault_of_squares(backend, device, dtype)
        if fault is None:
            return backend
        _warn_of(backend.name, f"sums of squares in {dtype}", device, fault)
    return _EAGER


def explain(device: torch.device) -> dict[str, str | None]:
    """For each backend, why it cannot run on ``device``, or None if it can."""
    return {name: backend.unavailable(device) for name, backend in _BACKENDS.items()}


@functools.cache
def _automatic(device: torch.device) -> list[Backend]:
    """The backends that can run on a device, the fastest first.

    Warns once if the one for that kind of device cannot.
    """
    # On CPUs Triton only interprets, for tests.
    order = ("cpu" if device.type == "cpu" else "triton", "eager")
    reasons = {name: _BACKENDS[name].unavailable(device) for name in order}
    first = reasons[order[0]]
    if first is not None and device.type in ("cpu", "cuda"):
        _logger.warning(
            "torch_bf16: the %s backend cannot be used (%s); falling back to a slower one",
            *(order[0], first),
        )
    return [_BACKENDS[name] for name, reason in reasons.items() if reason is None]


@functools.cache
def _note_emulation(device: torch.device) -> None:
    """Warn once if a GPU has no arithmetic in bf16."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            _logger.warning(
                "torch_bf16: %s (%s) has no arithmetic in bf16 and emulates it: training takes as "
                "little memory as elsewhere, but forward and backward passes are slower than in "
                "fp32 or fp16",
                *(torch.cuda.get_device_name(device), device),
            )


@functools.cache
def _warn_of(name: str, what: str, device: torch.device, fault: str) -> None:
    _logger.warning(
        "torch_bf16: the %s backend is not used for %s on %s: %s. A slower one takes its place",
        *(name, what, device, fault),
    )

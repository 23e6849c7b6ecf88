"""Backends run kernels on a device; they know no rule by name, and formats in their codecs."""

from __future__ import annotations

import functools
import logging

import torch

from torch_bf16.errors import BackendUnavailableError

from .backend import Backend, Kernel, ScalarSource
from .bucket import Bucket, Variant
from .cpu import CpuBackend
from .eager import EagerBackend
from .inputs import KernelInputs, ScalarRows, StepInputs
from .triton import TritonBackend

__all__ = [
    "BACKENDS",
    "Backend",
    "Bucket",
    "Kernel",
    "KernelInputs",
    "ScalarRows",
    "ScalarSource",
    "StepInputs",
    "Variant",
    "choose",
    "explain",
]

_BACKENDS: dict[str, Backend] = {
    each.name: each for each in (CpuBackend(), EagerBackend(), TritonBackend())
}

BACKENDS = tuple(_BACKENDS)
"""Names of the backends that can be asked for."""

# Those that are chosen without being asked for, the fastest first. "triton" is proved by its
# interpreter and by its machine code, but not yet measured on a GPU: it joins when it is.
_AUTOMATIC = ("cpu", "eager")

_logger = logging.getLogger("torch_bf16")


def choose(device: torch.device, requested: str | None = None) -> Backend:
    """The backend for a device, always the same object for the same name.

    Args:
        device: where the parameters are.
        requested: a name from :data:`BACKENDS`; None takes the fastest that works, and says so
            once where one that should have does not. ``"triton"`` must be asked for.

    Raises:
        ValueError: there is no backend of that name.
        BackendUnavailableError: the requested backend cannot work on ``device``.

    Example:
        >>> choose(torch.device("cpu"), "eager").name
        'eager'
    """
    if requested is None:
        return _automatic(device.type)
    if requested not in _BACKENDS:
        raise ValueError(f"unknown backend {requested!r}; known backends: {', '.join(BACKENDS)}")
    backend = _BACKENDS[requested]
    if reason := backend.unavailable(device):
        works = [name for name, reason in explain(device).items() if reason is None]
        raise BackendUnavailableError(
            f"backend {requested!r} was asked for and cannot run on {device}: {reason}. "
            f"Working here: {', '.join(works)}."
        )
    return backend


def explain(device: torch.device) -> dict[str, str | None]:
    """For each backend, why it cannot run on ``device``, or None where it can."""
    return {name: backend.unavailable(device) for name, backend in _BACKENDS.items()}


@functools.cache
def _automatic(device_type: str) -> Backend:
    device = torch.device(device_type)
    for backend in map(_BACKENDS.__getitem__, _AUTOMATIC):
        reason = backend.unavailable(device)
        if reason is None:
            if device_type == "cuda":
                _logger.warning(
                    "torch_bf16: the %s backend is used on GPUs, and it is slow; the fused one has "
                    "not been measured on a GPU yet and must be asked for: "
                    "optimizer.backend = 'triton'",
                    backend.name,
                )
            return backend
        if backend.name == device_type:
            _logger.warning(
                "torch_bf16: the %s backend cannot be used (%s); falling back to a slower one",
                backend.name,
                reason,
            )
    raise BackendUnavailableError(f"no backend can run on {device}")

"""Backends: they take the step on a device, and know neither rules nor formats by name."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

from torch_bf16.errors import BackendUnavailableError

from .bucket import Bucket, Variant
from .scalars import StepInputs

__all__ = ["BACKENDS", "Bucket", "StepInputs", "Variant", "choose", "explain", "name_of_chosen"]

BACKENDS = ("cpu", "eager", "triton")
"""Names of the backends that can be asked for."""

# Those that are chosen without being asked for, the fastest first. "triton" is proved by its
# interpreter and by its machine code, but not yet measured on a GPU: it joins when it is.
_AUTOMATIC = ("cpu", "eager")

_logger = logging.getLogger("torch_bf16")


def choose(device: torch.device, requested: str | None = None) -> ModuleType:
    """The backend for a device.

    That is a module with ``unavailable(device)``, ``run(bucket)``, and ``scalars(rule, buckets,
    groups, steps)``, which gives the object that brings each step's scalars into the buckets, as
    :class:`torch_bf16.backends.scalars.HostScalars` does.

    Args:
        device: where the parameters are.
        requested: a name from :data:`BACKENDS`; None takes the fastest that works, and says so
            once where one that should have does not. ``"triton"`` must be asked for.

    Raises:
        ValueError: there is no backend of that name.
        BackendUnavailableError: the requested backend cannot work on ``device``.
    """
    if requested is None:
        return _automatic(device.type)
    if requested not in BACKENDS:
        raise ValueError(f"unknown backend {requested!r}; known backends: {', '.join(BACKENDS)}")
    backend = _load(requested)
    if reason := backend.unavailable(device):
        works = [name for name in BACKENDS if _load(name).unavailable(device) is None]
        raise BackendUnavailableError(
            f"backend {requested!r} was asked for and cannot run on {device}: {reason}. "
            f"Working here: {', '.join(works)}."
        )
    return backend


def name_of_chosen(device: torch.device, requested: str | None = None) -> str:
    """The name of what :func:`choose` gives for the same arguments."""
    return choose(device, requested).__name__.rsplit(".", 1)[-1]


def explain(device: torch.device) -> dict[str, str | None]:
    """For each backend, why it cannot run on ``device``, or None where it can."""
    return {name: _load(name).unavailable(device) for name in BACKENDS}


def _load(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __name__)


@functools.cache
def _automatic(device_type: str) -> ModuleType:
    device = torch.device(device_type)
    for name in _AUTOMATIC:
        backend = _load(name)
        reason = backend.unavailable(device)
        if reason is None:
            if device_type == "cuda":
                _logger.warning(
                    "torch_bf16: the %s backend is used on GPUs, and it is slow; the fused one has "
                    "not been measured on a GPU yet and must be asked for: "
                    "optimizer.backend = 'triton'",
                    name,
                )
            return backend
        if name == device_type:
            _logger.warning(
                "torch_bf16: the %s backend cannot be used (%s); falling back to a slower one",
                name,
                reason,
            )
    raise BackendUnavailableError(f"no backend can run on {device}")

"""Tests that need a GPU, and how the others are kept from one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import MutableMapping, Sequence

import pytest

HIDE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
REASON = "needs a CUDA or ROCm device, and pytest -m gpu"
# Below the 300 s of a test.
SANITIZER_SECONDS = 240


def asked_for(expression: str) -> bool:
    """Whether a run is one of the gpu tests, by ``-m gpu``."""
    return "gpu" in expression and "not gpu" not in expression


def hide_gpus(expression: str, environment: MutableMapping[str, str]) -> None:
    """Let a run that does not ask for the gpu tests see no GPU."""
    if not asked_for(expression):
        environment.update(dict.fromkeys(HIDE, ""))


def gpus(at_least: int = 1):
    """The marks of tests that need so many GPUs."""
    import torch

    here = torch.cuda.device_count()
    reason = REASON if at_least == 1 else f"needs {at_least} CUDA or ROCm devices, has {here}"
    return [pytest.mark.gpu, pytest.mark.skipif(here < at_least, reason=reason)]


def each_device(at_least: int = 1):
    """Parametrises ``device``: the same body runs on the CPU, and where there is one on a GPU."""
    marked = pytest.param("cuda", marks=gpus(at_least))
    return pytest.mark.parametrize("device", ["cpu", marked])


def device_is_lost() -> bool:
    """Whether an illegal access, say, has left this process without its GPU."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def sanitize(sanitizer: str, tool: str, command: Sequence[str]) -> None:
    """Run a command under compute-sanitizer; fail where it finds something.

    Skips where the sanitizer cannot reach the device, as under gVisor, or takes too long.
    """
    # Looking up what a driver does not have is an error of its API, and benign. Memory that is
    # mapped piece by piece looks like memory that is not there.
    flags = ["--tool", tool, "--error-exitcode", "7", "--report-api-errors", "no"]
    plain = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ""}
    try:
        done = subprocess.run(
            [sanitizer, *flags, *command],
            capture_output=True,
            text=True,
            timeout=SANITIZER_SECONDS,
            check=False,
            env={**os.environ, **plain},
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer did not end within {SANITIZER_SECONDS} s")
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer cannot reach the device: Device not supported")
    assert done.returncode == 0, said[-4000:]

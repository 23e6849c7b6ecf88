"""What a selftest ran on: nothing in it names a user, a host or a folder."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from typing import Any

import torch

from torch_bf16.backends import explain
from torch_bf16.tools.bench.device_state import device_state
from torch_bf16.tools.bench.memory import available_bytes
from torch_bf16.tools.bench.record import hardware, versions

__all__ = ["environment", "environment_lines"]

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_BF16_BACKEND",
    "TRITON_INTERPRET",
)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware, the GPU's own words, free memory in bytes, and which backend can run."""
    system = {"system": platform.platform(), "machine": platform.machine(), "image": None}
    with suppress(OSError):
        system["image"] = platform.freedesktop_os_release().get("PRETTY_NAME")
    capability = None
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        capability = getattr(found, "gcnArchName", f"sm_{found.major}{found.minor}")
    return {
        "device": str(device),
        "capability": capability,
        "versions": versions(),
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        **system,
        "device_state": device_state(device),
        "free_bytes": available_bytes(device),
        "backends": explain(device),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def environment_lines(found: dict[str, Any]) -> list[str]:
    """The same, for people."""
    state, size = found["device_state"], found["hardware"]
    lines = [", ".join(f"{name} {value}" for name, value in found["versions"].items() if value)]
    lines.append(f"{found['system']}, {found['image'] or 'no known image'}")
    lines.append(f"{size['processor']}, {size['cores']} cores, {found['threads']} threads")
    if "device" in size:
        lines.append(
            f"{size['device']} ({found['capability']}), {size['device_gib']} GiB, {size['runtime']}"
        )
        lines.append(", ".join(f"{name} {value}" for name, value in state.items()))
    for name, reason in found["backends"].items():
        lines.append(f"backend {name}: {'works' if reason is None else reason}")
    lines += [f"{name}={value}" for name, value in found["variables"].items()]
    return lines

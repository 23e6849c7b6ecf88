"""The machine that a command runs on: its processor and GPU, its driver and clocks, its versions.

Nothing in it names a user or a host.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "device_state",
    "hardware",
    "machine",
    "machine_lines",
    "variables",
    "versions",
    "versions_line",
    "without_home",
]

_PACKAGES = ("torch-bf16", "torch", "numpy", "numba", "triton", "lightning", "accelerate")
_PREFIXES = ("TORCH_BF16_", "BF16_", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_", "TRITON_")
_VARIABLES = (
    *("TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "NUMBA_DISABLE_JIT", "NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "CC"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE"),
    "PL_TRAINER_PRECISION",
)
# A record's names of the GPU's fields, and nvidia-smi's names.
_STATE = {
    "driver": "driver_version",
    "vbios": "vbios_version",
    "pci": "pci.bus_id",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
    "compute_mode": "compute_mode",
    "ecc": "ecc.mode.current",
    "mig": "mig.mode.current",
    "power_limit_w": "power.limit",
    "power_w": "power.draw",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_most_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "memory_clock_most_mhz": "clocks.max.mem",
    "temperature_c": "temperature.gpu",
    "utilisation_percent": "utilization.gpu",
}


def machine(device: torch.device) -> dict[str, Any]:
    """Versions, system, hardware and threads: what any report says about its machine."""
    distribution = None
    with suppress(OSError):
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME")
    return {
        "versions": versions(),
        "system": platform.platform(),
        "distribution": distribution,
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
    }


def machine_lines(found: Mapping[str, Any]) -> list[str]:
    """Format the result of :func:`machine` for people."""
    size, distribution = found["hardware"], found["distribution"]
    lines = [
        versions_line(found["versions"]),
        found["system"] + (f", {distribution}" if distribution else ""),
        f"{size['processor']}, {size['cores']} cores, {found['threads']} threads",
    ]
    if "device" in size:
        name = f"{size['device']} ({size['capability']})"
        lines.append(f"{name}, {size['device_gib']} GiB, {size['runtime']}")
    return lines


def hardware(device: torch.device) -> dict[str, Any]:
    """Names and sizes of a device and of the host's processor."""
    found: dict[str, Any] = {"processor": _processor(), "cores": os.cpu_count()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"sm_{properties.major}{properties.minor}"
        runtime = f"CUDA {torch.version.cuda}"
        if torch.version.hip:
            # Builds for CUDA have it, too: there it is the name.
            capability, runtime = properties.gcnArchName, f"ROCm {torch.version.hip}"
        found |= {
            "device": properties.name,
            "capability": capability,
            "device_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "runtime": runtime,
        }
    return found


def versions(packages: Sequence[str] = ()) -> dict[str, str | None]:
    """Versions of Python, this package, those it works with and ``packages``; None if missing."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in dict.fromkeys([*_PACKAGES, *packages]):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    # Includes what torch was built for, which the metadata may leave out.
    found["torch"] = torch.__version__
    return found


def versions_line(found: Mapping[str, str | None]) -> str:
    """Versions as one line."""
    order = sorted(found, key=lambda name: name == "Python")
    return ", ".join(f"{name} {found[name]}" if found[name] else f"no {name}" for name in order)


def variables() -> dict[str, str]:
    """The environment variables that are set and affect this package."""
    return {
        name: without_home(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) or name in _VARIABLES
    }


def without_home(text: str) -> str:
    """A text that may be shown to others: the user's home folder, if it names it, is ``~``."""
    with suppress(RuntimeError):
        home = Path.home()
        # The root of a service without a home is everyone's.
        if home.is_absolute() and home != home.parent:
            # Whole parts of a path only: /home/al is neither in /home/alice nor in /mnt/home/al.
            whole = rf"(?<![\w./~-]){re.escape(str(home))}(?![\w~-]|\.\w)"
            return re.sub(whole, "~", text)
    return text


def device_state(device: torch.device) -> dict[str, Any]:
    """Driver, clocks in MHz, power in W, temperature in °C and bus of a GPU, as they are now.

    As ``nvidia-smi`` reports them; a field that the GPU does not have is None. ``{"unknown":
    reason}`` if there is no ``nvidia-smi`` or it fails; empty for a CPU.
    """
    if device.type != "cuda":
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    # torch numbers the GPUs that it can see, nvidia-smi all of them.
    gpu = device.index or 0 if uuid is None else f"GPU-{uuid}"
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(_STATE.values())}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"unknown": f"nvidia-smi: {error}"}
    values = [_value(each.strip()) for each in done.stdout.strip().split(",")]
    if done.returncode or len(values) != len(_STATE):
        output = " ".join((done.stdout + done.stderr).split())
        return {"unknown": f"nvidia-smi ended with {done.returncode}: {output[:200]}"}
    return dict(zip(_STATE, values, strict=True))


def _value(text: str) -> str | float | None:
    if text.startswith("["):
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _processor() -> str:
    """The processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

"""What a GPU says of itself that times depend on: driver, clocks, power, ECC, bus."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

__all__ = ["device_state"]

_FIELDS = {
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


def device_state(device: torch.device) -> dict[str, Any]:
    """Driver, clocks in MHz, power in W, temperature in °C and bus of a GPU, as they are now.

    As ``nvidia-smi`` says them; a field that the GPU does not have is None. ``{"unknown": reason}``
    where there is no ``nvidia-smi`` or it fails; empty for a CPU.
    """
    if device.type != "cuda":
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    # torch counts the GPUs that it may see, nvidia-smi all of them.
    which = device.index or 0 if uuid is None else f"GPU-{uuid}"
    command = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(_FIELDS.values())}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"unknown": f"nvidia-smi: {error}"}
    values = [_value(each.strip()) for each in done.stdout.strip().split(",")]
    if done.returncode or len(values) != len(_FIELDS):
        output = " ".join((done.stdout + done.stderr).split())
        return {"unknown": f"nvidia-smi ended with {done.returncode}: {output[:200]}"}
    return dict(zip(_FIELDS, values, strict=True))


def _value(text: str) -> str | float | None:
    if text.startswith("["):
        return None
    try:
        return float(text)
    except ValueError:
        return text

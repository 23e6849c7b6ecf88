"""``python -m torch_bf16 info``: its options, its record, and how that is printed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torch_bf16.backends import choose, explain
from torch_bf16.backends.certificates import folder
from torch_bf16.errors import BackendUnavailableError
from torch_bf16.foreign.optimizer import BUCKET_BYTES
from torch_bf16.recipe import RECIPES
from torch_bf16.tools.arguments import add_json_argument
from torch_bf16.tools.estimate.optimizers import OPTIMIZERS
from torch_bf16.tools.machine import machine, machine_lines, variables, without_home
from torch_bf16.tools.output import publish
from torch_bf16.torch_patches import PATCHES, SWITCH

from .hosts import TESTED, hook, host_rows, needed
from .obstacles import devices, disabled_patches, obstacles, verdicts

__all__ = ["add_info_arguments", "info"]

# Processor time, medians over AdamW and SGD in both modes on one x86-64 thread with AVX-512.
_COST = (
    "That takes about 20 ms\nwith a CPU's kernels and 45 ms with eager ones, plus compiling, and "
    "only once: verdicts are kept."
)


def add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_json_argument(parser)


def info(options: argparse.Namespace) -> int:
    """Print what a bug report needs."""
    publish(record(), options.json, _show)
    return 0


def record() -> dict[str, Any]:
    """Everything that ``info`` shows, ready for JSON; nothing in it names a user or a machine."""
    found_hook = hook()
    kept = verdicts()
    place = folder()
    disabled = []
    with suppress(ValueError):  # the obstacles report it
        disabled = disabled_patches()
    found = {
        "schema": 1,
        "kind": "info",
        **machine(devices()[-1]),
        "torch": {"needed": needed("torch"), "newest_tested": TESTED["torch"]},
        "hook": {"works": found_hook.works, "why": found_hook.why},
        "hosts": host_rows(),
        "torch_patches": [
            {
                "name": name,
                "target": patch.target,
                "applied_by": patch.applied_by,
                "reason": patch.reason,
                "enabled": name not in disabled,
            }
            for name, patch in PATCHES.items()
        ],
        "variables": variables(),
        "recipes": [
            {
                "name": name,
                "formats": [each.weights, each.exp_avg, each.exp_avg_sq],
                "bytes": each.bytes_per_parameter,
            }
            for name, each in RECIPES.items()
        ],
        "optimizers": sorted(OPTIMIZERS),
        "backends": {str(device): _backends(device) for device in devices()},
        "proofs": {
            "folder": None if place is None else str(place),
            "kept": len(kept),
            "failed": [[*key[:2], fault] for key, fault in kept if fault is not None],
        },
        "obstacles": [asdict(each) for each in obstacles()],
    }
    # Wherever a message has a path.
    return tree_map(lambda each: without_home(each) if isinstance(each, str) else each, found)


def _backends(device: torch.device) -> dict[str, Any]:
    try:
        chosen = choose(device).name
    # The obstacles report this error.
    except (BackendUnavailableError, ValueError):
        chosen = None
    return {"used": chosen, "not_here": explain(device)}


def _show(found: Mapping[str, Any]) -> None:
    print("\n".join(machine_lines(found)))
    print("\nrecipes (formats; bytes per parameter without the gradient, AdamW):")
    for each in found["recipes"]:
        print(f"  {each['name']:22} {' / '.join(each['formats']):50} {each['bytes']:3}")
    print(
        f"\noptimizers with a fused rule: {', '.join(found['optimizers'])}; "
        f"any other: its own step on fp32 copies, {BUCKET_BYTES >> 20} MB at a time or one tensor"
    )
    for device, each in found["backends"].items():
        print(f"\nbackends for {device}:")
        for name, reason in each["not_here"].items():
            state = "works" if reason is None else f"not here: {reason}"
            print(f"  {name:8} {state}{'  <- used' if name == each['used'] else ''}")
    _show_proofs(found["proofs"])
    _show_hosts(found)
    print(f"\nwhat is patched in torch, and when ({SWITCH}=all, or names, turns it off):")
    for each in found["torch_patches"]:
        state = each["applied_by"] if each["enabled"] else "turned off"
        print(f"  {each['name']:20} {state}: {each['target']}")
    print("\nenvironment:")
    for name, value in found["variables"].items():
        print(f"  {name}={value}")
    if not found["variables"]:
        print("  none of the variables that matter here is set")
    print("\nwhat a run would meet on this machine:")
    for each in found["obstacles"]:
        print(f"  {each['kind']}: {each['what']}\n    instead: {each['instead']}")
    if not found["obstacles"]:
        print("  nothing that is refused, slow or untested")


def _show_hosts(found: Mapping[str, Any]) -> None:
    print(f"\nhook of torch: {found['hook']['why']}")
    print("hosts (oldest and newest version tested):")
    for each in found["hosts"]:
        version = each["version"] or "not installed"
        tested = f"{each['oldest'] or '-'} to {each['newest_tested']}"
        print(f"  {each['name']:18} {version:14} {tested}")


def _show_proofs(proofs: Mapping[str, Any]) -> None:
    print(
        "\nproofs: before its first use on a device, each variant of a kernel takes two steps over "
        "270,000 made-up\nelements, and its bits are compared with those that NumPy computed. "
        f"{_COST}\nA backend that was asked for by name skips this proof."
    )
    if proofs["folder"] is None:
        print("  no verdict can be kept: set TORCH_BF16_CACHE to a folder that can be written")
        return
    failed = proofs["failed"]
    print(f"  verdicts in {proofs['folder']}: {proofs['kept']} hold here, {len(failed)} failed")
    for backend, variant, fault in failed:
        print(f"  {backend}: {variant} failed: {fault}")

"""``python -m torch_bf16 selftest``: its options, and what it does with them."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from typing import Any

import torch

from torch_bf16.backends import explain
from torch_bf16.backends.certificates import is_lost
from torch_bf16.tools.arguments import add_json_argument, device_argument, picture_to_write
from torch_bf16.tools.bench.plot import plot
from torch_bf16.tools.machine import device_state, machine, variables
from torch_bf16.tools.output import STANDARD_OUTPUT, command_line, date, publish, say
from torch_bf16.tools.system_memory import available_bytes

from .certificates import certify, chosen_automatically, fresh_verdicts
from .report import show
from .speed import models_for, speed
from .steps import Outcome, all_checks, run

__all__ = ["add_selftest_arguments", "selftest"]

_PROCESSES = 8


def add_selftest_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--device",
        type=device_argument,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N (default here: %(default)s)",
    )
    add_json_argument(parser)
    parser.add_argument(
        "--plot", type=picture_to_write, metavar="FILE", help="draw the times to FILE"
    )


def selftest(options: argparse.Namespace) -> int:
    """Check whether the package works here, and how fast it is; print and write the record.

    A backend that the environment names is set aside: the fastest one is what is checked.

    Returns:
        The exit status: 0 if everything is right, else 1.
    """
    with fresh_verdicts(), chosen_automatically() as named:
        found = _examine(options.device, command_line(options.arguments))
    if named:
        note = f"TORCH_BF16_BACKEND={named} was set aside: what runs without it was checked"
        found["notes"].append(note)
    publish(found, options.json, show)
    if options.json not in (None, STANDARD_OUTPUT):
        print(f"the record, to send with a report: {options.json}")
    if options.plot and found["speed"]:
        plot(found["speed"], options.plot)
    return 0 if found["passed"] else 1


def _examine(device: torch.device, command: str) -> dict[str, Any]:
    start, notes = time.perf_counter(), []
    environment = _environment(device)
    fast = "cpu" if device.type == "cpu" else "triton"
    reason = environment["backends"][fast]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # A GPU in an exclusive mode admits no process beside this one.
    exclusive = environment["device_state"].get("compute_mode") not in (None, "Default")
    processes = 0 if exclusive else min(_PROCESSES, cores or 1)
    say(f"trying the kernels of {device} in {processes or 'no other'} processes")
    certificates = certify(device, processes, say)
    outcomes, lost = _checks(device)
    measured, broken = [], []
    models = models_for(device)
    if reason or (device.type == "cuda" and any(each.fault for each in certificates)):
        other = "Triton" if fast == "triton" else f"the {fast} backend"
        notes.append(f"nothing was timed: eager would run in place of {other}, for many minutes")
        models = {}
    if lost:
        notes.append(f"nothing was timed: {device} was lost in {lost!r}")
        models = {}
    for model, shapes in models.items():
        say(f"timing {model}")
        try:
            measured.append(speed(device, model, shapes, command, say))
        except KeyboardInterrupt:
            broken.append(f"interrupted before {model} was timed")
            break
        except Exception as error:
            # No error here may discard the results so far.
            why = f"{model} was not timed: {error}"
            too_large = isinstance(error, MemoryError | torch.OutOfMemoryError)
            (notes if too_large else broken).append(why)
            continue
        if measured[-1]["interrupted"]:
            broken.append(f"interrupted while {model} was timed")
            break
    wrong = [f"{each.backend}, {each.variant}" for each in certificates if each.fault]
    wrong += [each.name for each in outcomes if each.fault]
    wrong += [f"the {fast} backend: {reason}"] if reason else []
    wrong += broken
    for each in measured:
        wrong += [f"{name} was not timed: {why}" for name, why in each["failed"].items()]
    return {
        "schema": 1,
        "kind": "selftest",
        "date": date(),
        "command": command,
        "environment": environment,
        "certificates": [asdict(each) for each in certificates],
        "checks": [asdict(each) for each in outcomes],
        "speed": measured,
        "notes": notes,
        "passed": not wrong,
        "verdict": f"failed: {'; '.join(wrong)}" if wrong else f"passed on {device}",
        "seconds": time.perf_counter() - start,
    }


def _checks(device: torch.device) -> tuple[list[Outcome], str | None]:
    """The outcome of each check, and which one made the device unusable for the others."""
    outcomes, lost = [], None
    for name, check in all_checks().items():
        if lost:
            outcomes.append(Outcome(name, None, f"{device} was lost in {lost!r}", 0.0))
            continue
        say(name)
        outcomes.append(outcome := run(name, check, device))
        if outcome.fault:
            say(f"{name}: {outcome.fault}")
            lost = name if is_lost(device) else None
    return outcomes, lost


def _environment(device: torch.device) -> dict[str, Any]:
    """What a selftest runs on; nothing in it names a user, a machine or a folder."""
    return {
        "device": str(device),
        **machine(device),
        "device_state": device_state(device),
        "free_bytes": available_bytes(device),
        "backends": explain(device),
        "variables": {name: value for name, value in variables().items() if os.sep not in value},
    }

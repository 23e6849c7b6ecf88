"""Types of the arguments that several commands take, and options that would have no effect."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from .output import STANDARD_OUTPUT

__all__ = [
    "add_json_argument",
    "count",
    "device_argument",
    "file_to_write",
    "positive_number",
    "refuse",
]


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json FILE``, where ``-`` prints JSON and nothing else."""
    parser.add_argument(
        "--json",
        type=_json_target,
        metavar="FILE",
        help="write all figures there; - prints them in place of the tables",
    )


def refuse(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse options that would change nothing.

    Args:
        options: parsed; those that were not given are None, False or empty.
        names: of options.
        why: they would not.

    Raises:
        ValueError: one was given.
    """
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if given:
        raise ValueError(f"{why}, which leaves {', '.join(given)} without effect: leave it out")


def device_argument(text: str) -> torch.device:
    """The type of an argument that names a device: a CPU or a GPU that is there."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    if device.type == "cuda":
        gpus = torch.cuda.device_count()
        if (device.index or 0) >= gpus:
            raise argparse.ArgumentTypeError(f"{text!r} is not here: torch sees {gpus} GPUs")
        device = torch.device("cuda", device.index or 0)
    return device


def file_to_write(text: str) -> Path:
    """The type of an argument that names a file to write: asked now, not after minutes of work."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise argparse.ArgumentTypeError(f"{text!r} {why}; give the name of a file to write")
    return path


def count(text: str) -> int:
    """The type of an argument that is a whole number of 1 or more, ``1e6`` too."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < math.inf or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(value)


def positive_number(text: str) -> float:
    """The type of an argument that is a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _json_target(text: str) -> Path | str:
    return text if text == STANDARD_OUTPUT else file_to_write(text)

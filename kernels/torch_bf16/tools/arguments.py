"""Types of arguments that several commands share, and the refusal of options without effect."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import torch

from .output import STANDARD_OUTPUT

__all__ = [
    "add_json_argument",
    "count",
    "count_to",
    "device_argument",
    "file_to_write",
    "is_there",
    "keep_apart",
    "keep_inputs",
    "picture_to_write",
    "positive_number",
    "quantity",
    "refuse",
]

_PICTURES = (".png", ".pdf", ".svg")

_QUANTITY = re.compile(
    r"((?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?)(?:(e\+?\d{1,2})|([KMBT]))?", re.IGNORECASE
)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_NEVER_READ = (".html", ".png", ".pdf")
"""What commands write for people, and write again beside the records that they read."""


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json FILE``, where ``-`` prints JSON and nothing else."""
    parser.add_argument(
        "--json",
        type=_json_target,
        metavar="FILE",
        help="write all figures to FILE; - prints them instead of the tables",
    )


def refuse(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse options that would change nothing.

    Args:
        options: the parsed options; those that were not passed are None, False or empty.
        names: names of the options that would have no effect.
        why: the reason that they would not; the message begins with it.

    Raises:
        ValueError: one of the named options was passed.
    """
    useless = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if useless:
        raise ValueError(f"{why}, which leaves {', '.join(useless)} without effect: leave it out")


def device_argument(text: str) -> torch.device:
    """The type of an argument that names a device: the CPU, or a GPU that exists."""
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


def is_there(path: Path) -> bool:
    """Whether a file or folder exists.

    Raises:
        OSError: its name is too long, say, or a folder on the way is closed. ``Path.exists()`` says
            no then, from Python 3.14 on.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def file_to_write(text: str) -> Path:
    """The type of an argument that names a file to write: checked now, not after minutes."""
    path = Path(text)
    try:
        exists = is_there(path)
        if path.is_dir():
            why = "is a folder"
        elif not path.parent.is_dir():
            why = "is in a folder that does not exist"
        elif not os.access(path if exists else path.parent, os.W_OK):
            why = "may not be written by you"
        else:
            return path
    except OSError as error:
        # A name that is too long, or in a folder that is closed.
        why = f"cannot be written: {error.strerror}"
    raise argparse.ArgumentTypeError(f"{text!r} {why}; give the name of a file to write")


def picture_to_write(text: str) -> Path:
    """The type of an argument that names a picture to draw, which needs matplotlib."""
    path = file_to_write(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "a picture needs matplotlib: pip install matplotlib. --json FILE keeps all figures, to "
            "be drawn from elsewhere"
        )
    return path


def keep_inputs(output: Path | str | None, *inputs: Path | str | None) -> None:
    """Raise ValueError if what would be written is a file that is read.

    Args:
        output: a file, another target, or None for none.
        inputs: what the command reads: files, folders and indices with all that lies in them,
            something in a file (``train.py:make_model``), or anything else, such as the size of a
            model.
    """
    if not isinstance(output, Path) or not output.exists():
        return
    within = output.resolve().parents if output.suffix not in _NEVER_READ else ()
    for each in filter(None, inputs):
        files = each, f"{each}".rpartition(":")[0]
        if any(os.path.exists(path) and output.samefile(path) for path in files):
            raise ValueError(
                f"{output} is also what would be read, and would be overwritten: give another name "
                "for the output"
            )
        path = Path(each)
        folder = path.parent if path.name.endswith(".index.json") else path
        if folder.is_dir() and folder.resolve() in within:
            raise ValueError(
                f"{output} lies in what would be read, {folder}, and would be overwritten: give "
                "another name for the output, or remove that file first"
            )


def keep_apart(outputs: Mapping[str, Path | str | None]) -> None:
    """Raise ValueError if two outputs of a command are one file.

    Args:
        outputs: the file, another target, or None, by what writes it.
    """
    taken: dict[str, str] = {}
    for name, output in outputs.items():
        if isinstance(output, Path):
            other = taken.setdefault(os.path.realpath(output), name)
            if other != name:
                raise ValueError(
                    f"{other} and {name} would both write {output}, and only the last would be "
                    "left: give one of them another name"
                )


def quantity(text: str) -> Fraction | None:
    """A human-readable number: ``350``, ``1e9``, ``1,300,000``, ``8B``; None if it is not one."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    digits, exponent, unit = match.groups(default="")
    # Fraction takes underscores from Python 3.11 on.
    return Fraction(re.sub("[,_]", "", digits) + exponent) * _UNITS[unit.upper()]


def count(text: str) -> int:
    """The type of an argument that is a whole number of 1 or more, as :func:`quantity` reads it."""
    value = quantity(text)
    if value is None or value < 1 or value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(value)


def count_to(most: int, things: str) -> Callable[[str], int]:
    """The type of an argument that is a :func:`count` of at most ``most`` things."""

    def parse(text: str) -> int:
        value = count(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {most:,} {things}")
        return value

    return parse


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

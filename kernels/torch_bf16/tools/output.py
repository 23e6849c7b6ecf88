"""What commands share: tables for people, JSON for scripts, and how they end."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from torch_bf16.errors import BackendUnavailableError, CheckpointError

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "add_json_argument",
    "count",
    "ended",
    "file_to_write",
    "number",
    "positive_number",
    "print_progress",
    "print_table",
    "refuse",
    "say",
    "share",
    "write_json",
]

FAILED = 2
INTERRUPTED = 130
STANDARD_OUTPUT = "-"

_USERS = (
    *(BackendUnavailableError, CheckpointError, NotImplementedError, ValueError),
    *(ImportError, OSError, MemoryError),
)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--json FILE``, where ``-`` prints JSON and nothing else."""
    parser.add_argument(
        "--json",
        type=_json_target,
        metavar="FILE",
        help="write all figures there; - prints them in place of the tables",
    )


def write_json(found: Mapping[str, Any], target: Path | str) -> None:
    """Write what a command found where ``--json`` said."""
    text = json.dumps(found, indent=2)
    if target == STANDARD_OUTPUT:
        print(text)
    else:
        Path(target).write_text(text + "\n")


def ended(command: str, run: Callable[[], int]) -> int:
    """The exit status of a command: 2 after an error meant for its user, 130 after Ctrl-C.

    Args:
        command: its name.
        run: does its work; errors in what it was given are for the user, others are bugs and keep
            their traceback.
    """
    try:
        return run()
    except KeyboardInterrupt:
        say(f"python -m torch_bf16 {command}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Of `| head`: what is still buffered has nowhere to go.
        sys.stdout = None
        return 0
    except _USERS as error:
        say(f"python -m torch_bf16 {command}: {error}")
        return FAILED


def say(line: str) -> None:
    """Tell how it goes, beside what a command prints."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def print_progress(stream: TextIO) -> Iterator[Callable[[str], None]]:
    """What shows one line of progress at a time, on a terminal alone."""
    if not stream.isatty():
        yield lambda line: None
        return
    try:
        yield lambda line: print(f"\r\x1b[K{line[:78]}", end="", file=stream, flush=True)
    finally:
        print("\r\x1b[K", end="", file=stream, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, by rich on a terminal where it is installed, else as plain text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(f"\n{title}")
    for row in (columns, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def number(value: float, digits: int = 3) -> str:
    """With so many significant digits, and never an exponent."""
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - before)}f}"


def file_to_write(text: str) -> Path:
    """The type of an argument that names a file to write: asked now, not after minutes of work."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise argparse.ArgumentTypeError(f"{text!r} {why}; give the name of a file to write")
    return path


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


def share(value: float | None) -> str:
    """A percentage; small ones with a digit more."""
    if value is None:
        return "-"
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


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

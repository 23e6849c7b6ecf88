"""What commands print: tables for people, JSON for scripts, how far they are, how they end."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from torch_bf16.errors import BackendUnavailableError, CheckpointError

__all__ = [
    "STANDARD_OUTPUT",
    "command_line",
    "date",
    "exit_status",
    "number",
    "print_table",
    "progress_line",
    "say",
    "share",
    "write_json",
]

STANDARD_OUTPUT = "-"
"""A name of a file to write that stands for no file."""

_FAILED, _INTERRUPTED = 2, 130
_USERS = (
    *(BackendUnavailableError, CheckpointError, NotImplementedError, ValueError),
    *(ImportError, OSError, MemoryError),
)


def write_json(found: Mapping[str, Any], target: Path | str) -> None:
    """Write what a command found where ``--json`` said."""
    text = json.dumps(found, indent=2)
    if target == STANDARD_OUTPUT:
        print(text)
    else:
        Path(target).write_text(text + "\n")


def date() -> str:
    """Now, as records have it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def command_line(arguments: Sequence[str]) -> str:
    """What a user typed, as records have it."""
    return shlex.join(["python", "-m", "torch_bf16", *arguments])


def exit_status(command: str, run: Callable[[], int]) -> int:
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
        return _INTERRUPTED
    except BrokenPipeError:
        # Of `| head`: what is still buffered has nowhere to go.
        sys.stdout = None
        return 0
    except _USERS as error:
        say(f"python -m torch_bf16 {command}: {error}")
        return _FAILED


def say(line: str) -> None:
    """Tell how it goes, beside what a command prints."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress_line(stream: TextIO) -> Iterator[Callable[[str], None]]:
    """What shows a line until the next one, on a terminal alone."""
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


def share(value: float | None) -> str:
    """A percentage; small ones with a digit more."""
    if value is None:
        return "-"
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"

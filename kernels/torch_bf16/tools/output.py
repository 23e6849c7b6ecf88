"""The output of commands: tables for people, JSON for scripts, progress and exit statuses."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.utils._pytree import tree_map

from torch_bf16.checkpoints.atomic_write import replacing
from torch_bf16.errors import BackendUnavailableError, CheckpointError

from .redirection import redirected

__all__ = [
    "INTERRUPTED",
    "STANDARD_OUTPUT",
    "command_line",
    "date",
    "exit_status",
    "number",
    "only_json",
    "print_sentences",
    "print_table",
    "progress_line",
    "publish",
    "say",
    "share",
    "to_standard_error",
    "write_json",
    "write_text",
]

STANDARD_OUTPUT = "-"
"""The name that stands for standard output in place of a file to write."""

_FAILED = 2
INTERRUPTED = 130
"""The exit status of a command that Ctrl-C has ended."""
_BROKEN_PIPE = 141

# A file in a folder that is closed, or that is mounted by itself, can still be written.
_IRREPLACEABLE = (errno.EACCES, errno.EPERM, errno.EBUSY)

_USER_ERRORS = (
    *(BackendUnavailableError, CheckpointError, NotImplementedError, ValueError),
    *(ImportError, OSError, MemoryError, torch.OutOfMemoryError),
)


_json_stream: TextIO | None = None
"""Standard output within :func:`only_json`; None stands for ``sys.stdout``."""


def write_json(found: Mapping[str, Any], target: Path | str) -> None:
    """Write a command's results to a file or standard output; null stands for NaN and infinity."""
    text = json.dumps(tree_map(_finite, dict(found)), indent=2, allow_nan=False)
    if target == STANDARD_OUTPUT:
        print(text, file=_json_stream, flush=True)
    else:
        write_text(Path(target), text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that takes the place of an older one only once it is complete, if it can."""
    if not path.exists() or path.is_file():
        try:
            with replacing(path) as new:
                new.write_text(text, encoding="utf-8")
            return
        except OSError as error:
            if error.errno not in _IRREPLACEABLE:
                raise
    # A device or a pipe stays what it is.
    path.write_text(text, encoding="utf-8")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def publish(
    found: Mapping[str, Any], target: Path | str | None, show: Callable[[Mapping[str, Any]], None]
) -> None:
    """Write a command's results to the target of ``--json``, if any, and show them for people.

    Args:
        found: the results.
        target: if it is standard output, nothing else is printed there.
        show: prints the results.
    """
    if target is not None:
        write_json(found, target)
    if target != STANDARD_OUTPUT:
        show(found)


@contextmanager
def only_json(target: Path | str | None) -> Iterator[None]:
    """Keep standard output for JSON alone, if it is the target: a user's code may print, too."""
    global _json_stream
    if target != STANDARD_OUTPUT:
        yield
        return
    stream = sys.stdout
    # Not if it is a stream of Python alone.
    with suppress(OSError):
        if sys.stdout.fileno() == 1:
            stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    _json_stream = stream
    try:
        with to_standard_error():
            yield
        stream.flush()
    finally:
        _json_stream = None
        if stream is not sys.stdout:
            # Only after an error is something left unwritten.
            with suppress(OSError):
                stream.close()


@contextmanager
def to_standard_error() -> Iterator[None]:
    """Send what this process and its children print to standard error."""
    with redirected([1], 2), redirect_stdout(sys.stderr):
        yield


def date() -> str:
    """The current time, as written in records."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def command_line(arguments: Sequence[str]) -> str:
    """The command line that the user typed, as written in records."""
    return shlex.join(["python", "-m", "torch_bf16", *arguments])


def exit_status(command: str, run: Callable[[], int]) -> int:
    """The exit status of a command: 2 after an error meant for its user, 130 after Ctrl-C.

    It is 141 if what reads its output went away before it was done, as with ``| head``.

    Args:
        command: its name.
        run: does its work. Errors that its input or the machine can cause are printed for the user;
            all others are bugs and keep their traceback.
    """
    _open_what_is_closed()
    _show_every_character()
    status = _BROKEN_PIPE
    message = None
    try:
        status = run()
        # Here, where an error can still be told, and not at exit.
        sys.stdout.flush()
    except KeyboardInterrupt:
        status, message = INTERRUPTED, "interrupted"
    except BrokenPipeError:
        pass  # as with `| head`
    except _USER_ERRORS as error:
        status, message = _FAILED, str(error)
    if message is not None:
        # The reader of both streams may be gone, as with `2>&1 | head`; the status still says it.
        with suppress(OSError):
            say(f"python -m torch_bf16 {command}: {message}")
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except OSError:
            # What is still buffered has nowhere to go, and Python would try again at exit.
            setattr(sys, name, None)
    return status


def _open_what_is_closed() -> None:
    """Lead closed streams to nowhere, as with ``>&-``, for this process and its children.

    Without a stream, print() would send messages to standard output, and the next file that is
    opened would get its number.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            if nowhere != number:
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())


def _show_every_character() -> None:
    """Print what a stream's encoding does not have as an escape: a name must not end a report."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Print a message to standard error, apart from the command's output."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line until the next one, if standard error is a terminal."""
    stream = sys.stderr
    if not stream.isatty():
        yield lambda line: None
        return

    def show_line(line: str) -> None:
        # A line that wraps is not wiped by the next one.
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{line[:width]}", end="", file=stream, flush=True)

    try:
        yield show_line
    finally:
        print("\r\x1b[K", end="", file=stream, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn by rich on a terminal that it fits on, if installed, else as text."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    # With its frame; of a wider table rich would cut off parts of names and numbers.
    room = shutil.get_terminal_size().columns
    fits = sum(widths) + 3 * len(widths) + 1 <= room
    if sys.stdout.isatty() and fits and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*columns, title=escape(title), title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        # What rich itself takes for the width of a terminal that it does not know is 80.
        Console(width=room).print(table)
        return
    print(f"\n{title}")
    for row in (columns, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def print_sentences(sentences: Iterable[str], notes: Iterable[str] = ()) -> None:
    """Print what results mean, and notes on them."""
    print()
    for sentence in sentences:
        print(f"- {sentence}")
    for note in notes:
        print(f"  note: {note}")


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with at least ``digits`` significant digits; None as ``-``.

    Example:
        >>> number(1234.5), number(0.00123), number(1.23e-7)
        ('1,234', '0.00123', '1.23e-07')
    """
    if value is None:
        return "-"
    if not value or not math.isfinite(value):
        return f"{value:g}"
    scientific = f"{value:.{digits - 1}e}"
    exponent = int(scientific.partition("e")[2])
    if exponent < -4:
        return scientific
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def share(value: float | None) -> str:
    """Format a share as a percentage, with two significant digits below 10 %; None as ``-``."""
    if value is None:
        return "-"
    return f"{number(100 * value, 2)}%" if 0 < value < 0.1 else f"{value:.0%}"

"""``python -m torch_bf16`` with any standard streams, without waiting for what it imports.

The process is forked from one that has the imports. It makes Python's streams of the descriptors
as an interpreter that starts does, and ends as one does, with what that says of the streams.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import sys
import tempfile
import traceback
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from forked_scripts import outside_tests
from forkserver import forked

CLOSED, NO_READER = "closed", "a pipe that nobody reads"


class Ended(NamedTuple):
    """A process that has ended: its status, and what it printed to streams that were left alone."""

    status: int | None
    stdout: str
    stderr: str


def run_command(
    *arguments: str,
    folder: Path,
    stdin: str = os.devnull,
    stdout: str | None = None,
    stderr: str | None = None,
) -> Ended:
    """Run ``python -m torch_bf16 arguments`` in a folder.

    Args:
        *arguments: of the command line.
        folder: the working directory.
        stdin: a file, or ``CLOSED``.
        stdout: a file, ``CLOSED`` or ``NO_READER``; None for what is returned.
        stderr: as ``stdout``.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(2)]
        targets = (stdin, stdout or files[0].name, stderr or files[1].name)
        with forked(_run, str(folder), arguments, targets) as process:
            process.join(250)
            status = process.exitcode
        return Ended(status, files[0].read(), files[1].read())


def _run(folder: str, arguments: tuple[str, ...], targets: tuple[str, str, str]) -> None:
    for number, target in enumerate(targets):
        _lead(number, target)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(folder)
    outside_tests()
    sys.path.insert(0, folder)
    sys.argv = ["torch_bf16", *arguments]
    status = 1
    try:
        runpy.run_module("torch_bf16", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    # From Python 3.14 on a child forgets this, and torch's finalizers then come too late.
    atexit.register(weakref.finalize._exitfunc)
    # It runs what is left to do at an interpreter's end, and says 120 if a stream is not flushed.
    ctypes.pythonapi.Py_Exit(status)


def _lead(number: int, target: str) -> None:
    if target == CLOSED:
        os.close(number)
        return
    if target == NO_READER:
        reader, there = os.pipe()
        os.close(reader)
    else:
        there = os.open(target, os.O_RDONLY if number == 0 else os.O_WRONLY)
    os.dup2(there, number)
    os.close(there)


def _stream(number: int):
    try:
        os.fstat(number)
    except OSError:
        return None
    if number == 2:
        return open(number, "w", buffering=1, errors="backslashreplace", closefd=False)
    return open(number, "r" if number == 0 else "w", closefd=False)

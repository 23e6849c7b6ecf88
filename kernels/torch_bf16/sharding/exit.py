"""The end of a process in which gloo has run collectives.

A thread of gloo releases the tensors of a collective after it has told the main thread that the
collective is done, and needs the GIL for it. If the interpreter has begun to shut down by then,
Python kills the thread inside a destructor: "terminate called without an active exception", and a
run that has printed its result counts as failed
(https://github.com/pytorch/pytorch/issues/190489, in every precision). ``destroy_process_group``
waits for these threads only if nothing else, like DDP, holds the group.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

__all__ = ["settle_at_exit"]

_PAUSE = 0.02
_LONGEST_WAIT = 10.0


@functools.cache
def settle_at_exit() -> None:
    """Let gloo's threads finish before the interpreter shuts down; harmless to call again."""
    atexit.register(_settle)


def _settle() -> None:
    """Wait, without the GIL, until no thread of gloo has run during a pause."""
    before, end = None, time.monotonic() + _LONGEST_WAIT
    while (now := _gloo()) != before and time.monotonic() < end:
        before = now
        time.sleep(_PAUSE)


def _gloo() -> dict[str, object]:
    """The number of context switches of each of gloo's threads, which shows whether it runs.

    The value of a working thread equals no other. A thread that waits for the GIL wakes up every
    5 ms. Without /proc the result is empty.
    """
    switches_of = {}
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        try:
            lines = (thread / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"].startswith("pt_gloo"):
            sleeps = status["State"].startswith("S")
            switches = [n for name, n in status.items() if name.endswith("ctxt_switches")]
            switches_of[thread.name] = switches if sleeps else object()
    return switches_of

"""The end of a process in which gloo has run collectives.

A thread of gloo lets go of the tensors of a collective after it has told the main thread that they
are done, and takes the GIL for it. Where that is after the interpreter has begun to end, Python
kills the thread inside a destructor: "terminate called without an active exception", and a run that
has printed its result counts as failed (https://github.com/pytorch/pytorch/issues/190489, in every
precision). ``destroy_process_group`` waits for these threads only where nothing else, like DDP,
holds the group.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

__all__ = ["settle_at_exit"]

_PAUSE = 0.02
_BOUND = 10.0


@functools.cache
def settle_at_exit() -> None:
    """Let gloo's threads finish before the interpreter ends; harmless to call again."""
    atexit.register(_settle)


def _settle() -> None:
    """Wait, without the GIL, until no thread of gloo has moved during a pause."""
    before, end = None, time.monotonic() + _BOUND
    while (now := _gloo()) != before and time.monotonic() < end:
        before = now
        time.sleep(_PAUSE)


def _gloo() -> dict[str, object]:
    """How often each thread of gloo has been put on a processor, and so whether it moves.

    One that is at work compares with nothing. One that waits for the GIL wakes up every 5 ms. Where
    no kernel tells, there is none.
    """
    found = {}
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        try:
            lines = (thread / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"].startswith("pt_gloo"):
            sleeps = status["State"].startswith("S")
            switches = [n for name, n in status.items() if name.endswith("ctxt_switches")]
            found[thread.name] = switches if sleeps else object()
    return found

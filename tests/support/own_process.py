"""What a program prints, and how much memory it takes, in a process of its own."""

import subprocess
import sys
import textwrap

# What getrusage says begins with the memory of the process that this one was forked from.
_PEAK = r"""
def peak_bytes():
    import re
    from pathlib import Path

    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
"""


def printed_by(program):
    """The lines that a program prints; it may call ``peak_bytes()``, the most that it has held."""
    found = subprocess.run(
        [sys.executable, "-c", _PEAK + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()

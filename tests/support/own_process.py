"""What a program prints in an interpreter of its own."""

import subprocess
import sys
import textwrap


def printed_by(program):
    """The lines that a program prints."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()

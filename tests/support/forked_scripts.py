"""Scripts and functions in processes of their own that need not import everything anew.

A fresh interpreter shows more, but takes up to six seconds before its first line.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forkserver import forked

_TESTS = Path(__file__).parents[1]


def run_script(script: Path, *options: str, folder: Path, **variables: str) -> str:
    """What a script prints, as ``python script options`` run in a folder."""
    return call_in_fork(_run_script, str(script), options, folder=folder, **variables)


def call_in_fork(
    function: Callable[..., None],
    *arguments: Any,
    folder: Path,
    seconds: float = 280,
    **variables: str,
) -> str:
    """What a function prints to both streams, called in a forked process.

    Args:
        function: importable by its name.
        *arguments: its arguments.
        folder: the working directory.
        seconds: after which the process is killed.
        **variables: added to the environment.

    Raises:
        AssertionError: it raised, or did not return in time.
    """
    __tracebackhide__ = True
    with tempfile.NamedTemporaryFile("r") as output:
        with forked(_call, str(folder), output.name, variables, function, arguments) as process:
            process.join(seconds)
            code = process.exitcode
        printed = output.read()
    assert code == 0, f"ended with {code} (None: ran longer than {seconds} s):\n{printed}"
    return printed


def _call(
    folder: str,
    output: str,
    variables: dict[str, str],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    os.chdir(folder)
    outside_tests()
    function(*arguments)


def outside_tests() -> None:
    """What runs in this process from now on finds nothing that lies beside tests."""
    sys.path[:] = [each for each in sys.path if not Path(each).is_relative_to(_TESTS)]


def _run_script(script: str, options: tuple[str, ...]) -> None:
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")

"""Runs one command line after the other, each as ``python script.py ...`` would.

Reads a JSON list of ``[[script, *arguments], environment, file]`` and prints as JSON what each
wrote to standard output, which also goes into the file if one is given, and to standard error.
Nothing of ours is imported here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path


def run(command: list[str], environment: dict[str, str], file: str | None) -> tuple[str, str]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    sys.argv = command
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit:
            pass
        except Exception:
            traceback.print_exc()
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    if file:
        Path(file).write_text(out.getvalue())
    return out.getvalue(), err.getvalue()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps([run(*line) for line in json.load(sys.stdin)]))

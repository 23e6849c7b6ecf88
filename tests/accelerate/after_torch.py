"""Scripts as if on fresh interpreters, forked from one that has imported torch and no host of ours.

The hook of ``import torch`` runs in the fork, by the environment of the script: it finds what it
finds at the end of the real import, of which `launching.run` has the whole, in four seconds more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launching import BOUND, environment

# What Accelerate, transformers and peft import of others takes longer than what is theirs.
_SERVER = """
import faulthandler, json, os, sys, traceback, types
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor.parallel
for name in ("datasets", "scipy.optimize", "sklearn.metrics"):
    try:
        __import__(name)
    except ImportError:
        pass
import bf16_autoload
hosts = {"accelerate", "transformers", "peft", "torch_bf16"}
assert not hosts & sys.modules.keys(), hosts & sys.modules.keys()

def call(script, arguments, folder, variables, seconds):
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    faulthandler.dump_traceback_later(seconds, exit=True)
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = 0
    try:
        bf16_autoload.autoload()
        exec(compile(script, "<script>", "exec"), vars(main))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        call(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class AfterTorch:
    """Runs scripts, as ``python -c SCRIPT ARGUMENTS`` in a folder."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(
        self, script: str, *arguments: str, folder: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """What a script ended with and printed.

        Args:
            script: its text.
            *arguments: its ``sys.argv``, from the second on.
            folder: the working directory; what is printed is left there.
            **variables: added to the environment of a user.
        """
        assert self._process.stdin
        assert self._process.stdout
        call = script, arguments, str(folder), environment(**variables), BOUND
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        printed = [(folder / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess(script, code, *printed)


@contextmanager
def serving(folder: Path) -> Iterator[AfterTorch]:
    """The interpreter that is forked from, until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=folder,
        # So that the import of torch does nothing yet.
        env=environment(BF16_AUTOLOAD="0"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield AfterTorch(process)
        finally:
            process.kill()

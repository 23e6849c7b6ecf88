"""Commands in processes of their own, which find nothing because it lies beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import termios
import time
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from accelerate.commands import accelerate_cli
from forked_scripts import call_in_fork
from forkserver import forked
from free_port import free_port
from packaging.version import Version
from pexpect.fdpexpect import fdspawn

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
BOUND = 240
_OURS = ("ACCELERATE_", "BF16_", "PYTHON", "MASTER_", "RANK", "LOCAL_", "WORLD_", "COVERAGE", "HF_")


def environment(**variables):
    """That of a user, with the commands of this Python first and no GPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    path = os.pathsep.join([str(BIN), kept.get("PATH", "")])
    defaults = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return kept | defaults | {"PATH": path} | variables


def run(command, folder, **variables):
    """Runs in another folder, so that nothing is found because it lies beside."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )


def launched(command, folder, **variables):
    """Runs a script that writes its result to the file that it is told last."""
    out = folder / "result.json"
    done = run([*command, out], folder, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text()), done.stderr


def port():
    """For ``--main_process_port``: 0, which has the system choose, or a free one."""
    if Version(version("accelerate")) >= Version("1.6"):
        return 0
    return free_port()


def launched_environment(*options, **variables):
    """What ``accelerate launch`` tells a script of one process or two, which is not started."""
    found = {}

    def start(command, env):
        found.update(env)
        return mock.Mock(returncode=0)

    def run_ranks(args):
        found.update(os.environ)

    with (
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        mock.patch.object(sys, "argv", ["accelerate", "launch", *map(str, options), "train.py"]),
        mock.patch("accelerate.commands.launch.subprocess.Popen", start),
        mock.patch("torch.distributed.run.run", run_ranks),
    ):
        accelerate_cli.main()
    return {name: value for name, value in found.items() if value != os.environ.get(name)}


def accelerate_in_fork(*arguments, folder, **variables):
    """What ``accelerate ARGUMENTS`` prints, without the four seconds of its own imports."""
    with mock.patch.dict(os.environ, environment(**variables), clear=True):
        return call_in_fork(_accelerate, *map(str, arguments), folder=folder)


def _accelerate(*arguments):
    sys.argv = ["accelerate", *arguments]
    accelerate_cli.main()


@contextmanager
def questionnaire(path, **variables):
    """``accelerate config`` at a terminal, in a forked process: what ``pexpect`` speaks with."""
    ours, theirs = os.openpty()
    with ExitStack() as stack:
        with mock.patch.dict(os.environ, environment(**variables), clear=True):
            process = stack.enter_context(forked(_configure, os.ttyname(theirs), str(path)))
        child = fdspawn(ours, timeout=BOUND / 4, encoding="utf-8")
        stack.callback(child.close)
        child.expect_exact("In which compute environment")
        os.close(theirs)  # Else what it prints would never end.
        yield child
        process.join(BOUND / 4)
        assert process.exitcode == 0


def choose(child, keys):
    """Answer a menu, which throws away what was typed before it reads."""
    while termios.tcgetattr(child.fileno())[3] & termios.ICANON:
        time.sleep(0.01)
    child.send(keys)


def _configure(terminal, path):
    os.setsid()
    for number in range(3):
        os.dup2(os.open(terminal, os.O_RDWR), number)
    sys.stdin = os.fdopen(0, newline="\n", closefd=False)  # as Python opens it
    _accelerate("config", "--config_file", path)

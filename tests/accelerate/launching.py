"""Commands in processes of their own, which find nothing because it lies beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from free_port import free_port
from packaging.version import Version

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

"""FSDP1 through Accelerate, on ranks that are told that a CPU is a GPU."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
from launching import SCRIPTS, launched
from packaging.version import Version

if Version(version("accelerate")) < Version("1.10"):
    pytest.skip(
        "compares with FSDP2, of which this Accelerate has nothing or half", allow_module_level=True
    )


def run(processes, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", processes, SCRIPTS / "fsdp1.py", folder]
    return launched(command, folder, ACCELERATE_USE_CPU="true")[0]


def test_fsdp1_trains_and_saves_on_two_ranks_and_one_takes_over(tmp_path):
    failed = run(2, tmp_path)
    assert not any(failed.values()), "\n".join(failed.values())
    assert len(failed) == 7
    assert run(1, tmp_path) == {"other_ranks_take_over": ""}

"""FSDP1 through Accelerate, on two ranks that are told that a CPU is a GPU."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
from launching import SCRIPTS, launched
from packaging.version import Version

if Version(version("accelerate")) < Version("1.6"):
    pytest.skip("compares with FSDP2, which this Accelerate lacks", allow_module_level=True)


def test_fsdp1_trains_saves_and_refuses(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", SCRIPTS / "fsdp1.py", tmp_path]
    failed, _ = launched(command, tmp_path, ACCELERATE_USE_CPU="true")
    assert not any(failed.values()), "\n".join(failed.values())
    assert len(failed) == 5

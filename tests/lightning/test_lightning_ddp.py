"""Two replicas over gloo with different seeds end bit-identical."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ddp_replica import RUNS
from lightning_models import differences

HERE = Path(__file__).parent
STEPS = 50
TIMEOUT = 120


@pytest.fixture
def replicas(tmp_path):
    """Folder with what both ranks saved, for every run."""
    folder = tmp_path
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank in (0, 1):
        command = [sys.executable, str(HERE / "ddp_replica.py"), str(folder), str(STEPS)]
        with (folder / f"{rank}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        processes.append(process)
    try:
        codes = [process.wait(TIMEOUT) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    logs = "\n".join((folder / f"{rank}.log").read_text()[-2000:] for rank in (0, 1))
    assert codes == [0, 0], logs
    return folder


# One test for all runs: each worker of pytest-xdist would start the processes again.
def test_replicas_start_from_rank_0_and_are_bit_identical_after_50_steps(replicas):
    found = {}
    for package, mode in RUNS:
        one, other = (
            torch.load(replicas / f"{package}-{mode}-{rank}.pt", weights_only=True)
            for rank in (0, 1)
        )
        assert not torch.equal(one.pop("first"), other.pop("first"))
        assert float(one["state 0 step"]) == STEPS
        assert one["state 1 remainder16"].any()
        found[f"{package} {mode}"] = differences(one, other)
    assert found == {f"{package} {mode}": [] for package, mode in RUNS}
    for package in {package for package, mode in RUNS if mode == "bf16-fp32-master"}:
        masters_start_from_the_fp32_weights_of_rank_0(replicas, package)


def masters_start_from_the_fp32_weights_of_rank_0(folder, package):
    one, other = (
        torch.load(folder / f"{package}-start-{rank}.pt", weights_only=True) for rank in (0, 1)
    )
    fp32 = one.pop("first")
    other.pop("first")
    assert differences(one, other) == []
    weight = next(value for name, value in one.items() if name.endswith("0.weight"))
    master = (weight.view(torch.int16).int() << 16) + one["state 0 remainder16"].view(
        torch.int16
    ).int()
    assert torch.equal(master.view(torch.float32), fp32)

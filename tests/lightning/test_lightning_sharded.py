"""FSDP2 and tensor parallelism through ModelParallelStrategy, in two processes over gloo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_models import MODES
from sharded_fit import WAYS

SCRIPT = Path(__file__).parent / "sharded_fit.py"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What both processes printed; both ended well."""
    folder = tmp_path_factory.mktemp("sharded")
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
    try:
        for rank in (0, 1):
            with (folder / f"{rank}.log").open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, SCRIPT, folder],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            processes.append(process)
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    texts = [(folder / f"{rank}.log").read_text() for rank in (0, 1)]
    assert codes == [0, 0], "\n".join(text[-2000:] for text in texts)
    return texts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_a_clipped_and_accumulated_fit_resumes_bit_for_bit(logs, way, mode):
    assert all(f"resumed {way} {mode}\n" in text for text in logs)

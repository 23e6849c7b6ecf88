"""accelerate.local_sgd averages weights every few steps, by less than a bf16 unit each time."""

import pytest
from launching import BIN, SCRIPTS, launched, port


# Of 2048 weights rounded stochastically the mean scatters by 2 %.
@pytest.mark.parametrize(
    ("mode", "off"), [("no", 0.01), ("bf16-stochastic", 0.08), ("bf16-fp32-master", 0.01)]
)
def test_local_sgd_moves_as_far_as_in_fp32(tmp_path, mode, off):
    command = [BIN / "accelerate", "launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--dynamo_backend", "no", "--main_process_port", port()]
    command += ["--mixed_precision", mode, SCRIPTS / "local_sgd.py"]
    first, second = launched(command, tmp_path, ACCELERATE_USE_CPU="true")[0]
    assert first["weights"] == second["weights"]
    matrix, vector = first["moved"]
    assert matrix == pytest.approx(64e-5 * 1.5, rel=off)
    assert vector == pytest.approx(64e-5, rel=0.1)

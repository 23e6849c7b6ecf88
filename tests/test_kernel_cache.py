"""Kernels that other processes compiled and left in Numba's cache."""

import os
import subprocess
import sys

import pytest

# Both rules share all codecs, so that only the names of their parts keep them apart.
STEPS = """
import sys, torch, torch_bf16

def weights(momentum, backend):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5000, 2).bfloat16())
    parameter.grad = torch.randn(5000, 2).bfloat16()
    optimizer = torch_bf16.SGD([parameter], lr=0.1, momentum=momentum, weight_decay=0.1)
    optimizer.backend = backend
    for _ in range(2):
        optimizer.step()
    return parameter.detach().view(torch.int16)

for momentum in map(float, sys.argv[1:]):
    assert torch.equal(weights(momentum, "cpu"), weights(momentum, "eager")), momentum
"""


@pytest.mark.timeout(240)
def test_kernels_cached_by_several_processes_are_not_taken_for_one_another(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "BF16_AUTOLOAD": "0"}
    for arguments in (["0"], ["0.9"], ["0", "0.9"], ["0.9", "0"]):
        subprocess.run(
            [sys.executable, "-c", STEPS, *arguments], env=environment, check=True, timeout=120
        )
    cached = [file.name for file in tmp_path.rglob("*.nbi")]
    assert sum("run_sgd_bf16_stochastic" in name for name in cached) == 1
    assert sum("run_sgd_momentum_bf16_stochastic" in name for name in cached) == 1

"""Kernels that other processes compiled and left in Numba's cache."""

import os
import subprocess
import sys

import pytest

# Both rules have the same states, scalars and codecs: only the names of their parts differ.
STEPS = """
import sys, torch, torch_bf16

def weights(name, backend):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5000, 2).bfloat16())
    parameter.grad = torch.randn(5000, 2).bfloat16()
    optimizer = getattr(torch_bf16, name)([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    for _ in range(2):
        optimizer.step()
    return parameter.detach().view(torch.int16)

for name in sys.argv[1:]:
    assert torch.equal(weights(name, "cpu"), weights(name, "eager")), name
"""


@pytest.mark.timeout(240)
def test_kernels_cached_by_several_processes_are_not_taken_for_one_another(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "BF16_AUTOLOAD": "0"}
    for arguments in (["Adam"], ["AdamW"], ["Adam", "AdamW"], ["AdamW", "Adam"]):
        subprocess.run(
            [sys.executable, "-c", STEPS, *arguments], env=environment, check=True, timeout=120
        )
    cached = [file.name for file in tmp_path.rglob("*.nbi")]
    assert sum("run_adam_bf16_stochastic" in name for name in cached) == 1
    assert sum("run_adamw_bf16_stochastic" in name for name in cached) == 1

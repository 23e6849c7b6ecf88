"""Tests that need two GPUs, which they hardly ever meet, on two that are made of host memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
STEPS = "backends/test_triton_gpu_steps.py::test"
CHOSEN = [
    "sharding/test_gpu_ranks.py::test_replicas_have_the_bits_of_eager_and_of_each_other"
    "[cuda-2-bf16-stochastic]",
    "sharding/test_gpu_ranks.py::test_shards_have_the_bits_of_eager[cuda-2-bf16-stochastic]",
    "sharding/test_gpu_ranks.py::test_shards_have_the_bits_of_eager[cuda-2-bf16-fp32-master]",
    "backends/test_gpu_training.py::test_a_model_that_is_not_on_the_current_device_has_the_same_bits"
    "[bf16-fp32-master-places1]",
    "backends/test_gpu_training.py::test_one_optimizer_steps_parameters_on_two_devices"
    "[bf16-fp32-master-places1]",
    f"{STEPS}_a_replayed_graph_takes_the_steps_that_calls_would[master]",
    f"{STEPS}_a_step_with_everything_on_the_device_does_not_wait_for_it",
]


def test_chosen_tests_of_gpus_pass_on_hollow_ones(hollow_library):
    command = [sys.executable, "-m", "pytest", "-p", "hollow_plugin", "-p", "no:cacheprovider"]
    command += ["-q", "-m", "gpu", "--durations=9", *(str(TESTS / each) for each in CHOSEN)]
    path = [str(TESTS / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"HOLLOW_CUDA": str(hollow_library), "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=250,
        cwd=TESTS.parent,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(rf"^{len(CHOSEN)} passed in", done.stdout, re.MULTILINE), done.stdout

"""DeepSpeed and a mode, chosen in Accelerate's own commands; the script is never told."""

from __future__ import annotations

import pexpect
from deepspeed_ranks import WITH_DEEPSPEED
from launching import BIN, BOUND, SCRIPTS, environment, launched

from accelerate_bf16 import MODES

pytestmark = WITH_DEEPSPEED
ON_CPUS = [SCRIPTS / "deepspeed_on_cpus.py", SCRIPTS / "deepspeed_resumed.py"]


# Menus with their last option, which is there before a key is read, and fields; else the default.
QUESTIONS = {
    "compute environment.*SageMaker": "\r",
    "type of machine.*TPU": "\r",
    r"use DeepSpeed\? \[yes/NO\]:": "yes\r",
    "ZeRO optimization stage.*    3": "\r",
    "offload optimizer states.*nvme": "\r",
    "offload parameters.*nvme": "\r",
    f"mixed precision.*{MODES[-1]}": "4\r",
    r"\]:": "\r",
    pexpect.EOF: "",
}


def questionnaire(path):
    """Answers ``accelerate config`` with DeepSpeed and our first mode."""
    child = pexpect.spawn(
        str(BIN / "accelerate"),
        ["config", "--config_file", str(path)],
        env=environment(DS_ACCELERATOR="cpu"),
        timeout=BOUND / 4,
        encoding="utf-8",
        dimensions=(60, 200),
    )
    patterns, keys = list(QUESTIONS), list(QUESTIONS.values())
    while answer := keys[child.expect(patterns)]:
        child.send(answer)
    child.close()
    assert child.exitstatus == 0
    return path


def test_the_questionnaires_file_launches_and_the_run_resumes_with_all_bits(tmp_path):
    path = questionnaire(tmp_path / "config.yaml")
    assert f"mixed_precision: {MODES[0]}\n" in path.read_text()
    command = [BIN / "accelerate", "launch", "--config_file", path, *ON_CPUS]
    found, stderr = launched(command, tmp_path, DS_ACCELERATOR="cpu")
    assert found == {
        "mode": MODES[0],
        "engine": "DeepSpeedEngine",
        "optimizer": "torch_bf16.optim.adam",
        "stage": 2,
        "learned": True,
        "resumed": True,
    }
    assert f"mixed_precision={MODES[0]}: " in stderr

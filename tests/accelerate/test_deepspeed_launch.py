"""DeepSpeed and a mode, chosen in Accelerate's own commands; the script is never told."""

from __future__ import annotations

import json

import pexpect
from deepspeed_ranks import WITH_DEEPSPEED
from launching import SCRIPTS, accelerate_in_fork, choose, questionnaire

from accelerate_bf16 import MODES

pytestmark = WITH_DEEPSPEED
ON_CPUS = [SCRIPTS / "deepspeed_on_cpus.py", SCRIPTS / "deepspeed_resumed.py"]


# Menus with their last option, which is there before a key is read, and fields; else the default.
QUESTIONS = {
    "SageMaker": "\r",
    "type of machine.*TPU": "\r",
    r"use DeepSpeed\? \[yes/NO\]:": "yes\r",
    "ZeRO optimization stage.*    3": "\r",
    "offload optimizer states.*nvme": "\r",
    "offload parameters.*nvme": "\r",
    f"mixed precision.*{MODES[-1]}": "4\r",
    r"\]:": "\r",
    pexpect.EOF: "",
}


def answered(path):
    """Answers ``accelerate config`` with DeepSpeed and our first mode."""
    patterns, keys = list(QUESTIONS), list(QUESTIONS.values())
    with questionnaire(path, DS_ACCELERATOR="cpu") as child:
        while answer := keys[number := child.expect(patterns)]:
            if patterns[number].endswith("]:"):
                child.send(answer)
            else:
                choose(child, answer)
    return path


def test_the_questionnaires_file_launches_and_the_run_resumes_with_all_bits(tmp_path):
    path = answered(tmp_path / "config.yaml")
    assert f"mixed_precision: {MODES[0]}\n" in path.read_text()
    out = tmp_path / "result.json"
    command = ["launch", "--config_file", path, *ON_CPUS, out]
    printed = accelerate_in_fork(*command, folder=tmp_path, DS_ACCELERATOR="cpu")
    assert json.loads(out.read_text()) == {
        "mode": MODES[0],
        "engine": "DeepSpeedEngine",
        "optimizer": "torch_bf16.optim.adam",
        "stage": 2,
        "learned": True,
        "resumed": True,
    }
    assert f"mixed_precision={MODES[0]}: " in printed

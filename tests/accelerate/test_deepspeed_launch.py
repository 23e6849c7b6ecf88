"""DeepSpeed and a mode, chosen in Accelerate's own commands; the script is never told."""

from __future__ import annotations

import json

import pexpect
from deepspeed_ranks import WITH_DEEPSPEED
from forked_scripts import run_script
from free_port import free_port
from launching import SCRIPTS, choose, launched_environment, questionnaire

from accelerate_bf16 import MODES

pytestmark = WITH_DEEPSPEED
ON_CPUS = [SCRIPTS / "deepspeed_on_cpus.py", SCRIPTS / "deepspeed_prepared.py"]
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


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


def test_the_questionnaires_file_launches_the_mode(tmp_path):
    path = answered(tmp_path / "config.yaml")
    assert f"mixed_precision: {MODES[0]}\n" in path.read_text()
    told = launched_environment("--config_file", path, DS_ACCELERATOR="cpu")
    on_cpus, script, out = *ON_CPUS, tmp_path / "result.json"
    told |= {"DS_ACCELERATOR": "cpu", **ONE_RANK, "MASTER_PORT": str(free_port())}
    printed = run_script(on_cpus, str(script), str(out), folder=tmp_path, **told)
    assert json.loads(out.read_text()) == {
        "mode": MODES[0],
        "engine": "DeepSpeedEngine",
        "optimizer": "torch_bf16.optim.adam",
        "stage": 2,
    }
    assert f"mixed_precision={MODES[0]}: " in printed

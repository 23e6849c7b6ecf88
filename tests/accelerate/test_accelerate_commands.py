"""Choosing the mode in Accelerate's own commands; the script is never told."""

from __future__ import annotations

import json
import sys

import pexpect
import pytest
import yaml
from accelerate import Accelerator
from accelerate.commands import accelerate_cli
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import write_basic_config
from forked_scripts import run_script
from launching import (
    SCRIPTS,
    accelerate_in_fork,
    choose,
    environment,
    launched,
    launched_environment,
    port,
    questionnaire,
)

import torch_bf16
from accelerate_bf16 import MODES, selftest

ONE_PROCESS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "num_machines": 1,
    "num_processes": 1,
    "use_cpu": True,
    "mixed_precision": "bf16-stochastic",
}
TWO_PROCESSES = ONE_PROCESS | {
    "distributed_type": "MULTI_GPU",
    "num_processes": 2,
    "main_process_port": port(),
    "mixed_precision": "bf16-fp32-master",
}


@pytest.fixture
def config(tmp_path):
    """Writes a configuration file and returns its path."""

    def write(**options):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(options))
        return path

    return write


@pytest.fixture
def cli(monkeypatch, capsys):
    """The ``accelerate`` command in this process; returns what it printed."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["accelerate", *map(str, arguments)])
        accelerate_cli.main()
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize(
    ("keys", "mode"), [("4", MODES[0]), ("\x1b[B" * 5, MODES[1])], ids=["number-key", "arrow-keys"]
)
def test_questionnaire_offers_both_modes_and_its_file_launches(tmp_path, keys, mode):
    path = tmp_path / "config.yaml"
    with questionnaire(path) as child:
        child.expect_exact("SageMaker")
        choose(child, "\r")
        child.expect_exact("Which type of machine")
        child.expect_exact("TPU")
        choose(child, "\r")
        child.expect_exact("on CPU only")
        child.expect_exact("]:")
        child.send("yes\r")
        # What else is asked differs by version; the default answer to all of it is no.
        while child.expect_exact(["Do you wish to use mixed precision?", "]:"]):
            child.send("\r")
        for name in ("no", "fp16", "bf16", "fp8", *MODES):
            child.expect_exact(name)
        choose(child, keys + "\r")
        child.expect(pexpect.EOF)
    assert f"mixed_precision: {mode}\n" in path.read_text()
    told = launched_environment("--config_file", path)
    assert told["ACCELERATE_MIXED_PRECISION"] == told["BF16_MODE"] == mode


def test_sagemakers_questionnaire_asks_with_our_modes_too(monkeypatch):
    from accelerate.commands.config import config_utils, sagemaker

    shown = []

    class Menu:
        def __init__(self, prompt, choices):
            shown.append(choices)

        def run(self, default_choice):
            return default_choice

    monkeypatch.setattr(config_utils, "BulletMenu", Menu)
    ask, theirs = sagemaker._ask_options, ["no", "fp16", "bf16", "fp8"]
    for number, name in enumerate([*theirs, *MODES]):
        assert ask("?", theirs, sagemaker._convert_mixed_precision, number) == name
    assert shown == [[*theirs, *MODES]] * 6
    assert ask("?", ["a", "b"], str, 1) == "1"


SAYS = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize(
    "command",
    [["accelerate-launch"], [sys.executable, "-m", "accelerate.commands.launch"]],
    ids=["accelerate-launch", "python-m"],
)
def test_every_way_to_launch_reads_the_file_and_the_flag_and_passes_the_backend_on(
    tmp_path, config, command
):
    path = config(**ONE_PROCESS)
    flag = ["--mixed-precision", "bf16-fp32-master"] if command[0] != "accelerate-launch" else []
    (tmp_path / "says.py").write_text(SAYS)
    command = [*command, "--config_file", path, *flag, tmp_path / "says.py"]
    told, _ = launched(command, tmp_path, BF16_BACKEND="eager")
    mode = (flag or [0, "bf16-stochastic"])[1]
    assert told["ACCELERATE_MIXED_PRECISION"] == told["BF16_MODE"] == mode
    assert told["BF16_BACKEND"] == "eager"


def test_accelerates_example_script_follows_the_file_alone(tmp_path, config):
    mode = "bf16-fp32-master"
    told = launched_environment("--config_file", config(**ONE_PROCESS | {"mixed_precision": mode}))
    out = tmp_path / "result.json"
    printed = run_script(SCRIPTS / "nlp_example.py", str(out), folder=tmp_path, **told)
    result = json.loads(out.read_text())
    assert result["mode"] == mode
    assert result["weights"] == "torch.bfloat16"
    assert result["accuracy"] > 0.9
    assert printed.count(f"mixed_precision={mode}: ") == 1


def test_config_update_keeps_the_mode(config, cli):
    path = config(**ONE_PROCESS)
    path.write_text(path.read_text() + "debug: false\n")
    cli("config", "update", "--config_file", path)
    assert "machine_rank: 0" in path.read_text()
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16-stochastic"


def test_config_default_writes_the_mode(tmp_path, cli):
    path = tmp_path / "default.json"
    cli("config", "default", "--config_file", path, "--mixed_precision", "bf16-fp32-master")
    assert json.loads(path.read_text())["mixed_precision"] == "bf16-fp32-master"


def test_env_shows_the_mode(config, cli, monkeypatch):
    monkeypatch.setenv("PATH", environment()["PATH"])  # it looks for itself
    path = config(**ONE_PROCESS)
    assert "- mixed_precision: bf16-stochastic" in cli("env", "--config_file", path)


def test_write_basic_config_differs_by_the_mode_only(tmp_path):
    for mode in ("no", *MODES):
        assert write_basic_config(mode, tmp_path / f"{mode}.json")
    expected = (tmp_path / "no.json").read_text()
    for mode in MODES:
        text = (tmp_path / f"{mode}.json").read_text()
        assert text == expected.replace('"mixed_precision": "no"', f'"mixed_precision": "{mode}"')
        assert write_basic_config(mode, tmp_path / f"{mode}.json") is False
    with pytest.raises(ValueError, match="should be one of"):
        write_basic_config("bf17", tmp_path / "bf17.json")


def test_accelerate_test_runs_our_own_selftest_on_every_process(tmp_path, config):
    path = config(**TWO_PROCESSES)
    variables = {"ACCELERATE_USE_CPU": "true"}
    printed = accelerate_in_fork("test", "--config_file", path, folder=tmp_path, **variables)
    assert "Test is a success!" in printed
    mode = TWO_PROCESSES["mixed_precision"]
    assert f"{mode}: weights are bfloat16" in printed
    assert f"{mode}: 2 replicas are bit-identical" in printed
    assert f"{mode}: a resumed run repeats itself bit for bit" in printed


def test_selftest_passes_in_one_process_and_fails_without_the_mode(monkeypatch, capsys, mode):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(RuntimeError, match="mixed_precision='no' has reached this process"):
        selftest.main()
    AcceleratorState._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mode)
    selftest.main()
    assert capsys.readouterr().out.count(f"{mode}: ") == 3


@pytest.mark.parametrize(
    ("owner", "method", "broken", "claim"),
    [
        (Accelerator, "load_state", lambda *_: None, "a resumed run repeats itself bit for bit"),
        (torch_bf16.AdamW, "step", lambda *_: None, "the loss ends at "),
        (
            Accelerator,
            "prepare",
            lambda _, m, o: (m, AcceleratedOptimizer(o)),
            "weights are bfloat16 and ",
        ),
    ],
)
def test_selftest_fails_where_a_promise_is_broken(monkeypatch, mode, owner, method, broken, claim):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mode)
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(RuntimeError, match=f"mixed_precision='{mode}': not true: {claim}"):
        selftest.main()


@pytest.mark.parametrize("steps", ["3", "4"])
def test_selftest_passes_where_gradients_are_accumulated(steps, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-stochastic")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
    selftest.main()
    assert "a resumed run repeats itself bit for bit" in capsys.readouterr().out


def test_accelerate_test_leaves_accelerates_own_modes_to_accelerate(monkeypatch, config, cli):
    from accelerate.commands import test as command

    launched = []

    class Done:
        returncode = 0

    monkeypatch.setattr(command, "execute_subprocess_async", lambda c: launched.append(c) or Done)
    cli("test", "--config_file", config(**ONE_PROCESS | {"mixed_precision": "bf16"}))
    cli("test", "--config_file", config(**ONE_PROCESS))
    assert [str(each[-1]).rsplit("/", 1)[-1] for each in launched] == [
        "test_script.py",
        "selftest.py",
    ]

"""Scripts that name a mode of Accelerate's own, and what they get in ours."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from launching import launched_environment
from small_model import Model
from transformers import TrainingArguments
from yaml.representer import SafeRepresenter

from accelerate_bf16._patches import accelerator
from accelerate_bf16.modes import ModeName

OWN = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision=sys.argv[1], cpu=True)
model = torch.nn.Linear(4, 4)
accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
print(accelerator.mixed_precision, model.weight.dtype)
"""


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("BF16_MODE", raising=False)


@pytest.mark.parametrize("own", ["no", "bf16", "fp16"])
def test_a_script_that_names_a_mode_of_accelerates_wins_with_a_line_that_names_both(
    make_accelerator, monkeypatch, caplog, own
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-stochastic")
    assert make_accelerator(own).mixed_precision == own
    seen = caplog.text
    assert seen.count(f"mixed_precision='{own}' in the script wins over ACCELERATE_MIXED") == 1
    assert "BF16_MODE=bf16-stochastic" in seen


@pytest.mark.parametrize("own", ["no", "bf16", None])
def test_bf16_mode_is_meant_whatever_the_script_names(make_accelerator, monkeypatch, caplog, own):
    monkeypatch.setenv("BF16_MODE", "BF16-Stochastic")
    accelerator = make_accelerator(own)
    assert str(accelerator.mixed_precision) == "bf16-stochastic"
    again = make_accelerator(own)
    assert str(again.mixed_precision) == "bf16-stochastic"
    line = f"mixed_precision='{own}' in the script becomes 'bf16-stochastic'"
    assert caplog.text.count(line) == (own is not None)
    model = Model()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert model.up.weight.dtype == torch.bfloat16
    assert not accelerator.native_amp


@pytest.mark.parametrize("own", ["fp16", "fp8", "bf16-fp32-master"])
def test_bf16_mode_takes_the_place_of_no_other_mode(make_accelerator, monkeypatch, own):
    monkeypatch.setenv("BF16_MODE", "bf16-stochastic")
    with pytest.raises(ValueError, match=f"BF16_MODE=bf16-stochastic cannot .*='{own}'"):
        make_accelerator(own)


@pytest.mark.parametrize("launched", ["fp16", "fp8", "bf16-fp32-master"])
def test_bf16_mode_takes_the_place_of_no_other_launched_mode(
    make_accelerator, tmp_path, monkeypatch, launched
):
    monkeypatch.setenv("BF16_MODE", "bf16-stochastic")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    match = f"BF16_MODE=bf16-stochastic cannot .* ACCELERATE_MIXED_PRECISION='{launched}'"
    with pytest.raises(ValueError, match=match):
        make_accelerator()
    with pytest.raises(ValueError, match=match):
        TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for replaced in ("", "no", "bf16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", replaced)
        assert make_accelerator().mixed_precision == "bf16-stochastic"


@pytest.mark.parametrize("value", ["bf16", "stochastic"])
def test_bf16_mode_is_checked(make_accelerator, monkeypatch, value):
    monkeypatch.setenv("BF16_MODE", value)
    with pytest.raises(ValueError, match=rf"BF16_MODE='{value}' is not one of .*bf16-fp32-master"):
        make_accelerator("no")


def test_training_arguments_follow_bf16_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("BF16_MODE", "bf16-fp32-master")
    for bf16 in (False, True):
        arguments: Any = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], bf16=bf16)
        assert arguments.mixed_precision == "bf16-fp32-master"
    with pytest.raises(ValueError, match="fp16=True cannot be combined"):
        TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], fp16=True)


def test_the_launcher_means_it(tmp_path, run_unhooked):
    options = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--dynamo_backend", "no"]
    told = launched_environment(*options, "--mixed_precision", "bf16-stochastic")
    done = run_unhooked(OWN, "no", folder=tmp_path, **told)
    assert done.stdout == "bf16-stochastic torch.bfloat16\n", done.stderr
    assert done.stderr.count("becomes 'bf16-stochastic'") == 1


def test_switched_off_but_meant_fails_at_prepare(tmp_path, run_unhooked):
    variables = {"BF16_AUTOLOAD": "0", "BF16_MODE": "bf16-stochastic"}
    done = run_unhooked(OWN, "bf16", folder=tmp_path, **variables)
    assert done.returncode == 1
    assert (
        "RuntimeError: BF16_MODE=bf16-stochastic was asked for, but BF16_AUTOLOAD=0" in done.stderr
    )


def test_a_parser_that_does_not_know_the_mode_says_how_to_get_it(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--mixed_precision", "bf16-stochastic"])
    assert "set BF16_MODE=bf16-stochastic in the environment" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(["--mixed_precision", "bf17"])
    assert "BF16_MODE" not in capsys.readouterr().err


def test_dumpers_to_which_something_was_added_before_write_modes_too():
    class Dumper(yaml.SafeDumper):
        """As jsonargparse's, to which it adds an entry: that makes a table of the dumper's own."""

    Dumper.add_representer(bytes, lambda dumper, data: dumper.represent_str("bytes"))
    tables = [*map(id, accelerator._tables_of(SafeRepresenter))]
    assert id(Dumper.yaml_representers) in tables
    assert tables.count(id(SafeRepresenter.yaml_representers)) == 1


def test_modes_that_differ_are_not_equal():
    first, second = map(ModeName, ("bf16-stochastic", "bf16-fp32-master"))
    assert first != second
    assert first == ModeName(first) == "bf16" == second


def test_the_mode_equals_bf16_where_scripts_ask_for_it(make_accelerator, mode):
    name = make_accelerator(mode).mixed_precision
    assert name == mode
    assert name == "bf16"
    assert "bf16" == name  # noqa: SIM300
    assert (name != "bf16") is False
    assert name not in ("no", "fp16", "fp8")
    assert name != 16
    assert {"fp16": torch.float16, "bf16": torch.bfloat16}[name] == torch.bfloat16
    assert f"{name}" == str(name) == mode
    assert json.dumps({"mode": name}) == json.dumps({"mode": mode})
    assert copy.copy(name) is copy.deepcopy([name])[0] is name
    for dumper in (yaml.Dumper, yaml.SafeDumper):
        assert yaml.dump({"mode": name}, Dumper=dumper) == f"mode: {mode}\n"
    # For where this package is not installed.
    assert type(pickle.loads(pickle.dumps(name))) is str
    # A second one, as libraries make it.
    assert str(make_accelerator(name).mixed_precision) == mode


@pytest.mark.parametrize("own", ["no", "bf16"])
def test_accelerates_own_modes_are_plain_strings(make_accelerator, own):
    assert type(make_accelerator(own).mixed_precision) is str


def test_parts_that_are_not_trained_get_the_dtype_of_stock_bf16(make_accelerator):
    """The lines of diffusers' training scripts, with a stand-in for each part."""

    def dtypes(own, trained):
        torch.manual_seed(0)
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = make_accelerator(own)
        parts = {"text_encoder": Model(), "vae": Model(), "unet": Model()}
        weight_dtype = torch.float32
        if accelerator.mixed_precision == "fp16":
            weight_dtype = torch.float16
        elif accelerator.mixed_precision == "bf16":
            weight_dtype = torch.bfloat16
        for name, part in parts.items():
            part.requires_grad_(name == trained)
            if name != trained:
                part.to(accelerator.device, dtype=weight_dtype)
        part = parts[trained]
        accelerator.prepare(part, torch.optim.AdamW(part.parameters()))
        return {
            name: {p.dtype for p in part.parameters()}
            for name, part in parts.items()
            if name != trained
        }

    assert dtypes("bf16-stochastic", "unet") == dtypes("bf16", "unet")


def test_the_launcher_exports_what_it_means(monkeypatch):
    from accelerate.commands.config.config_args import SageMakerConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import (
        prepare_multi_gpu_env,
        prepare_sagemager_args_inputs,
        prepare_simple_launcher_cmd_env,
    )

    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")
    config = SageMakerConfig(
        compute_environment="AMAZON_SAGEMAKER", distributed_type="NO", mixed_precision="no",
        use_cpu=False, debug=False, ec2_instance_type="ml.p3.2xlarge", iam_role_name="role",
        profile="default",
    )  # fmt: skip
    for mode, meant in (("bf16-fp32-master", "bf16-fp32-master"), ("bf16", None)):
        options = ["--mixed_precision", mode, "--num_processes", "1", "--dynamo_backend", "no"]
        arguments = launch_command_parser().parse_args([*options, "train.py"])
        arguments.num_machines, arguments.use_cpu = 1, True
        assert prepare_simple_launcher_cmd_env(arguments)[1].get("BF16_MODE") == meant
        assert prepare_multi_gpu_env(arguments).get("BF16_MODE") == meant
        estimator, _ = prepare_sagemager_args_inputs(config, arguments)
        assert estimator["environment"].get("BF16_MODE") == meant

"""The names: where Accelerate takes them, and what it says about others."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import re

import pytest
import torch
from accelerate import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import PrecisionType
from torch import nn
from torch.distributed.fsdp import MixedPrecision

import accelerate_bf16
from accelerate_bf16 import MODES


def test_modes_are_members_of_accelerates_own_enum(mode):
    member = PrecisionType(mode)
    assert mode in PrecisionType
    assert mode in PrecisionType.list()
    assert member is PrecisionType[member.name] is getattr(PrecisionType, member.name)
    assert str(member) == member.value == mode == member
    assert isinstance(member, PrecisionType)
    assert hash(member) == hash(PrecisionType[member.name])
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member
    assert json.dumps({"mixed_precision": member}) == json.dumps({"mixed_precision": mode})


def test_enum_lists_every_mode_once_and_keeps_accelerates_own():
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16", *MODES]
    assert len(PrecisionType) == 4 + len(MODES)
    assert PrecisionType("bf16") is PrecisionType.BF16


def test_accelerator_takes_each_mode(make_accelerator, mode):
    assert make_accelerator(mode).mixed_precision == mode


def test_scripts_may_compare_the_mode_with_bf16(make_accelerator, mode, tmp_path):
    """As they do to choose the dtype of what they do not train."""
    for accelerator in (make_accelerator(mode), Accelerator()):
        for name in (accelerator.mixed_precision, accelerator.state.mixed_precision):
            assert name == "bf16"
            assert name in {"bf16"}
            assert str(name) == mode
            torch.save({"mode": name}, tmp_path / "saved")
            assert type(torch.load(tmp_path / "saved")["mode"]) is str
        # Or Accelerate would put the model under autocast of its own.
        assert not accelerator.native_amp


def test_accelerator_takes_the_enum_member(make_accelerator):
    accelerator = make_accelerator(PrecisionType("bf16-fp32-master"))
    assert accelerator.mixed_precision == "bf16-fp32-master"


def test_second_accelerator_of_another_mode_gets_accelerates_own_error(make_accelerator):
    make_accelerator("bf16-stochastic")
    with pytest.raises(ValueError, match="has already been initialized"):
        make_accelerator("bf16-fp32-master")


def test_unknown_mode_gets_accelerates_own_error_with_our_names(make_accelerator):
    with pytest.raises(ValueError, match=r"Unknown mixed_precision mode: bf17.*bf16-stochastic"):
        make_accelerator("bf17")


@pytest.mark.parametrize("value", ["BF16-Stochastic", "bf16-stochastic", " bf16-stochastic "])
def test_environment_variable_names_the_mode_in_every_spelling(
    make_accelerator, monkeypatch, value
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
    assert make_accelerator().mixed_precision == "bf16-stochastic"


@pytest.mark.parametrize(
    "value",
    [
        "bf16_stochastic",
        "bf16-stochastc",
        "BF16-mixed",
        "bf16stochastic",
        "bf-16-stochastic",
        "'bf16-stochastic'",
        "fp32-master",
        "stochastic",
    ],
)
def test_misspelt_environment_variable_raises_instead_of_training_in_fp32(
    make_accelerator, monkeypatch, value
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
    with pytest.raises(ValueError, match=re.escape(f"_PRECISION={value!r} is not a mode")):
        make_accelerator()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16-stochastic")
    assert make_accelerator().mixed_precision == "bf16-stochastic"


@pytest.mark.parametrize("value", ["no", "bf16", "fp32"])
def test_accelerates_own_modes_stay_what_they_were(make_accelerator, monkeypatch, value):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", value)
    accelerator = make_accelerator()
    assert accelerator.mixed_precision == value
    assert accelerator.native_amp == (value == "bf16")


def test_launcher_offers_the_modes_and_refuses_others(capsys):
    parser = launch_command_parser()
    for name in (*MODES, "bf16"):
        assert parser.parse_args(["--mixed_precision", name, "x.py"]).mixed_precision == name
        assert parser.parse_args(["--mixed-precision", name, "x.py"]).mixed_precision == name
    with pytest.raises(SystemExit):
        parser.parse_args(["--mixed_precision", "bf17", "x.py"])
    assert "invalid choice: 'bf17'" in capsys.readouterr().err


def test_other_parsers_keep_their_choices():
    parser = argparse.ArgumentParser()
    action = parser.add_argument("--mixed_precision", choices=["no", "bf16"])
    assert action.choices == ["no", "bf16"]


def test_engines_with_optimizers_of_their_own_are_refused_and_leave_nothing_behind(
    make_accelerator, monkeypatch, mode
):
    engine = "MEGATRON_LM"
    # So far Accelerator comes where the plugin was made, which needs the engine.
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(NotImplementedError, match=f"'{mode}' cannot be combined with {engine}"):
        AcceleratorState(mode, _from_accelerator=True)
    monkeypatch.delenv(f"ACCELERATE_USE_{engine}")
    assert make_accelerator("no").mixed_precision == "no"


def sharded(monkeypatch, make_accelerator, mode, **options):
    """An accelerator that takes this process for one of several that shard by FSDP1."""
    # Accelerate sets the variable itself; this makes the test take it back.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return make_accelerator(mode, fsdp_plugin=FullyShardedDataParallelPlugin(**options))


def test_fsdp1s_flat_parameters_are_refused_with_what_works(make_accelerator, monkeypatch, mode):
    accelerator = sharded(monkeypatch, make_accelerator, mode, use_orig_params=False)
    model = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"use_orig_params=False.*What works: use_orig"):
        accelerator.prepare(model)
    assert model.weight.dtype == torch.float32
    assert accelerator.mixed_precision == mode


def test_gradients_are_reduced_in_fp32_unless_the_user_has_a_policy(
    make_accelerator, monkeypatch, mode
):
    accelerator = sharded(monkeypatch, make_accelerator, mode)
    assert accelerator.state.fsdp_plugin.mixed_precision_policy == MixedPrecision(
        reduce_dtype=torch.float32
    )
    AcceleratorState._reset_state(reset_partial_state=True)
    own = MixedPrecision(reduce_dtype=torch.bfloat16)
    accelerator = sharded(monkeypatch, make_accelerator, mode, mixed_precision_policy=own)
    assert accelerator.state.fsdp_plugin.mixed_precision_policy is own


def test_registering_again_changes_nothing():
    from accelerate import Accelerator

    before = Accelerator.prepare, PrecisionType.list()
    accelerate_bf16.register()
    assert (Accelerator.prepare, PrecisionType.list()) == before


def test_old_accelerate_is_refused_with_both_versions_and_the_remedy(monkeypatch):
    for found in ("1.1.0", "1.16.0.dev0"):
        monkeypatch.setattr(accelerate_bf16, "version", {"accelerate": found}.get)
        accelerate_bf16.register()
    monkeypatch.setattr(accelerate_bf16, "version", {"accelerate": "0.34.2"}.get)
    with pytest.raises(ImportError, match=r'>=1\.1 and found 0\.34\.2\. Run: pip install -U "acc'):
        accelerate_bf16.register()


def test_missing_accelerate_is_named_with_the_remedy(monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(accelerate_bf16, "version", missing)
    with pytest.raises(ImportError, match=r"which is not installed\. Run: pip install"):
        accelerate_bf16.register()


def test_an_accelerator_keeps_its_mode_when_another_one_sets_the_shared_state(
    make_accelerator, mode
):
    def trained_in(accelerator):
        model = nn.Linear(2, 2)
        accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        return model.weight.dtype

    ours = make_accelerator(mode)
    # As every new TrainingArguments does.
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = make_accelerator("no")
    assert (ours.mixed_precision, trained_in(ours)) == (mode, torch.bfloat16)
    assert (plain.mixed_precision, trained_in(plain)) == ("no", torch.float32)
    AcceleratorState._reset_state(reset_partial_state=True)
    make_accelerator(mode)
    assert (plain.mixed_precision, trained_in(plain)) == ("no", torch.float32)

"""DeepSpeed's configuration: completed, or refused by the line; nothing of DeepSpeed is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import torch_bf16
from torch_bf16 import plugin_api
from torch_bf16.sharding import deepspeed


def test_it_gets_what_is_needed_and_the_one_given_stays():
    given = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "fp16": {}}
    found = torch_bf16.deepspeed_config(given)
    assert given["bf16"] == {"enabled": "auto"}
    assert "zero_allow_untested_optimizer" not in given
    assert found["zero_allow_untested_optimizer"]
    assert found["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
    assert torch_bf16.deepspeed_config(found) == found


@pytest.mark.parametrize("section", [None, {}, {"immediate_grad_update": True}])
def test_what_else_its_section_says_stays(section):
    given = {"zero_optimization": {"stage": 3}, "bf16": section}
    assert torch_bf16.deepspeed_config(given)["bf16"].items() >= (section or {}).items()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"optimizer": {"type": "Adam"}}, '"optimizer": {...}'),
        ({"fp16": {"enabled": True}}, '"enabled": true (in fp16)'),
        ({"torch_autocast": {"enabled": True}}, '"enabled": true (in torch_autocast)'),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, '"grad_accum_dtype": "fp32"'),
        ({"bf16": {"bf16_optimizer_states": False}}, '"bf16_optimizer_states": false (in bf16)'),
        ({"zero_optimization": {}}, "zero_optimization.stage is not set"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0"),
        ({"zero_optimization": True}, "zero_optimization.stage is not set"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, '"cpu_offload": true'),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, '"zenflow": {...}'),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, '"mics_shard_size": 2'),
        (
            {"zero_optimization": {"stage": 3, "pipeline_loading_checkpoint": True}},
            '"pipeline_loading_checkpoint": true (in zero_optimization)',
        ),
        ({"tensor_parallel": {"autotp_size": 4}}, '"autotp_size": 4 (in tensor_parallel)'),
        ({"compile": {"deepcompile": True}}, '"deepcompile": true (in compile)'),
    ],
)
def test_a_line_that_cannot_be_is_named(lines, said):
    with pytest.raises((ValueError, NotImplementedError)) as error:
        torch_bf16.deepspeed_config({"zero_optimization": {"stage": 1}, **lines})
    assert said in f"{error.value}"


@pytest.mark.parametrize("given", ["ds.json", None, 3])
def test_what_is_no_configuration_is_refused(given):
    with pytest.raises(ValueError, match="deepspeed_config takes a dict, not"):
        torch_bf16.deepspeed_config(given)


@pytest.mark.parametrize("section", ["yes", True])
def test_a_section_that_is_none_is_refused(section):
    with pytest.raises(ValueError, match="bf16"):
        torch_bf16.deepspeed_config({"zero_optimization": {"stage": 1}, "bf16": section})


def test_vectors_can_be_kept_like_matrices():
    recipe = torch_bf16.get_recipe("bf16-stochastic", vectors="like_matrices")
    for role in ("weights", "exp_avg", "exp_avg_sq"):
        assert recipe.format_of(role, (8,)) == recipe.format_of(role, (8, 8))
    with pytest.raises(ValueError, match="vectors='some' is not a way"):
        torch_bf16.get_recipe(recipe, vectors="some")


def test_a_copy_of_a_vector_is_no_flat_tensor_and_nothing_is_searched_for_it(monkeypatch):
    """Averages are made of copies, thousands in each update."""

    def search(kind):
        raise AssertionError("all objects of the process were searched")

    monkeypatch.setattr(deepspeed, "instances_of", search)
    name = "deepspeed.runtime.base_optimizer"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(DeepSpeedOptimizer=object))
    assert not deepspeed.is_flat(torch.ones(3))
    with pytest.raises(AssertionError):
        deepspeed.is_flat(torch.ones(3, requires_grad=True))


def test_an_optimizer_is_converted_and_grouped_and_its_model_is_only_read():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    plugin_api.prepare_for_deepspeed(model, optimizer, "bf16-fp32-master", [scheduler])
    assert isinstance(optimizer, torch_bf16.AdamW)
    assert [[p.dim() for p in each["params"]] for each in optimizer.param_groups] == [[2], [1] * 3]
    assert len(scheduler.base_lrs) == 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_parameters_that_would_stay_fp32_are_refused_before_anything_changes():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(NotImplementedError, match=r"keeps 2 parameters in float32 \('1.bias'"):
        plugin_api.prepare_for_deepspeed(model, optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert len(optimizer.param_groups) == 1

"""What describe() finds, as fields and as one line."""

import pytest
import torch
from torch import nn

import torch_bf16
from torch_bf16 import backends


def model():
    return torch_bf16.cast_model(nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64)))


@pytest.mark.parametrize("given", ["bf16-stochastic", torch_bf16.AdamW], ids=["name", "optimizer"])
def test_fields_count_what_each_role_takes(given):
    network = model()
    found = torch_bf16.describe(
        network, given if isinstance(given, str) else given(network.parameters(), backend="eager")
    )
    assert found.recipe == "bf16-stochastic"
    assert found.parameters == {"bfloat16": 4096, "float32": 128}
    assert found.trained == 4224
    mean = (2 * 4096 + 4 * 128) / 4224
    roles = dict.fromkeys(("weights", "gradients", "exp_avg", "exp_avg_sq"), mean)
    assert found.bytes_by_role == pytest.approx(roles)
    assert found.bytes_per_parameter == pytest.approx(4 * mean)
    assert isinstance(given, str) or found.backend == "eager"


def test_it_prints_one_line():
    network = model()
    optimizer = torch_bf16.Lion(network.parameters(), recipe="bf16-fp32-master", backend="eager")
    assert str(torch_bf16.describe(network, optimizer)) == (
        "bf16-fp32-master: 4.2 k parameters (4.1 k bfloat16, 128 float32), 10.06 bytes per trained "
        "parameter (weights 4.00, gradients 2.06, exp_avg 4.00), backend eager"
    )


def test_it_names_the_formats_that_were_changed_in_a_recipe():
    recipe = torch_bf16.get_recipe("bf16-fp32-master", weights="bf16_stochastic", exp_avg="int8")
    line = str(torch_bf16.describe(model(), torch_bf16.get_recipe(recipe, seed=3)))
    assert line.startswith("bf16-fp32-master with weights=bf16_stochastic, exp_avg=int8: 4.2 k ")
    assert torch_bf16.describe(model(), torch_bf16.Recipe(exp_avg="int8")).recipe == "custom"


def test_the_backend_is_the_one_that_the_recipe_names():
    recipe = torch_bf16.get_recipe("bf16-stochastic", backend="eager")
    assert torch_bf16.describe(model(), recipe).backend == "eager"


def test_a_backend_that_cannot_run_where_the_model_is_now_is_left_out(monkeypatch):
    monkeypatch.setenv("TORCH_BF16_BACKEND", "cpu")
    network = model().to("meta")
    found = torch_bf16.describe(network, torch_bf16.AdamW(network.parameters()))
    assert found.backend is None
    assert str(found).endswith("exp_avg_sq 2.06)")


@pytest.mark.parametrize(
    ("fails", "name"), [(("bf16", "fp32"), "eager"), (("bf16",), "cpu and eager")]
)
def test_after_a_step_it_is_the_backend_that_took_it(fails, name, monkeypatch):
    def fault_of(backend, variant):
        weight = variant.formats[0].name.partition("_")[0]
        return "wrong" if backend.name == "cpu" and weight in fails else None

    monkeypatch.setattr(backends, "fault_of", fault_of)
    network = model()
    optimizer = torch_bf16.AdamW(network.parameters())
    assert torch_bf16.describe(network, optimizer).backend == "cpu"
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch_bf16.describe(network, optimizer).backend == name


def test_frozen_and_empty_models_take_nothing():
    frozen = torch_bf16.describe(nn.Linear(3, 3).requires_grad_(False), "bf16-stochastic")
    assert (frozen.trained, frozen.bytes_by_role, frozen.bytes_per_parameter) == (0, {}, 0)
    assert "bytes" not in str(frozen)
    empty = torch_bf16.describe([], "bf16-stochastic")
    assert empty.backend is None
    assert str(empty) == "bf16-stochastic: 0 parameters ()"


class Adamax(torch.optim.Adamax):
    """No rule of ours is known for it."""


def test_states_of_an_optimizer_without_a_rule_are_counted_when_they_are_there():
    network = nn.Linear(64, 64, bias=False)
    _, optimizer = torch_bf16.prepare(network, Adamax(network.parameters()), "bf16-fp32-master")
    before = torch_bf16.describe(network, optimizer)
    assert before.bytes_by_role == {"weights": 4, "gradients": 2}
    assert "more than 6.00 bytes per trained parameter (weights 4.00, gradients 2.00, and the " in (
        found := str(before)
    )
    assert "states that the first step of Adamax makes)" in found
    network.weight.grad = torch.ones_like(network.weight)
    optimizer.step()
    after = torch_bf16.describe(network, optimizer)
    assert after.bytes_by_role == {"weights": 4, "gradients": 2, "exp_avg": 4, "exp_inf": 4}
    assert after.unmade is None


def test_each_group_of_muon_counts_the_states_of_its_own_rule():
    network = torch_bf16.cast_model(nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 64)))
    groups = torch_bf16.param_groups(network, muon=True)
    optimizer = torch_bf16.Muon(groups, backend="eager")
    sizes = torch_bf16.describe(network, optimizer).bytes_by_role
    for p in network.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    trained = sum(p.numel() for p in network.parameters())
    for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        held = [state[name] for state in optimizer.state.values() if name in state]
        assert sizes[name] * trained == sum(each.nbytes for each in held), name


def test_states_in_host_memory_are_said():
    recipe = torch_bf16.get_recipe("bf16-stochastic", offload="states")
    found = torch_bf16.describe(nn.Linear(3, 3), recipe)
    assert found.offload == "states"
    assert ", states in host memory, backend " in str(found)
    assert "host memory" not in str(torch_bf16.describe(nn.Linear(3, 3), "bf16-stochastic"))


def test_describe_takes_one_converted_optimizer_or_a_recipe_and_says_so():
    model = torch_bf16.cast_model(nn.Linear(2, 2))
    optimizer = torch_bf16.AdamW(model.parameters())
    for wrong in (None, torch.optim.SGD(nn.Linear(2, 2).parameters()), [optimizer]):
        match = (
            rf"one optimizer that was prepared .* recipe or its name, not {type(wrong).__name__}\."
        )
        with pytest.raises(ValueError, match=match):
            torch_bf16.describe(model, wrong)
    with pytest.raises(
        ValueError, match=r"describe was given an AdamW and takes a torch.nn.Module"
    ):
        torch_bf16.describe(optimizer, model)
    with pytest.raises(ValueError, match="unknown recipe 'fp8'"):
        torch_bf16.describe(model, "fp8")

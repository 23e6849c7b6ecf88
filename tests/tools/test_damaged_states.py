"""Commands over files with whole weights and an optimizer's state that torch has not built."""

import json

import pytest
import torch

from torch_bf16.tools import cli

STATE = {
    0: {"exp_avg": torch.ones(4, 4), "remainder16": torch.zeros(4, 4, dtype=torch.int16)},
}
OTHERS = {
    "params is a number": {"param_groups": [{"params": 3}]},
    "params holds lists": {"param_groups": [{"params": [[0]]}]},
    "no params": {"param_groups": [{"lr": 1e-3}]},
    "a group is a number": {"param_groups": [3]},
    "no groups": {"param_groups": None},
    "names are a number": {"param_groups": [{"params": [0], "param_names": 3}]},
    "the entry is a number": {"torch_bf16": 3},
    "the recipe is a name": {"torch_bf16": {"schema": 1, "recipe": "bf16-stochastic"}},
    "a newer schema": {"torch_bf16": {"schema": 2}},
}


@pytest.mark.parametrize("layout", [("model", "optimizer"), ("state_dict", "optimizer_states")])
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("command", ["doctor", "export"])
def test_it_is_refused_in_one_line(command, kind, layout, tmp_path, capsys):
    saved = {"state": STATE, "param_groups": [{"params": [0]}], **OTHERS[kind]}
    weights, states = layout
    source, target = tmp_path / "run.pt", tmp_path / "fp32.pt"
    torch.save({weights: {"w": torch.ones(4, 4).bfloat16()}, states: saved}, source)
    assert cli.main([command, str(source), *([str(target)] if command == "export" else [])]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "the state of an optimizer cannot be read: " in err
    assert not target.exists()


def test_what_other_libraries_leave_out_or_add_is_no_fault(tmp_path, capsys):
    state = {"w": {"exp_avg": torch.ones(4, 4), "step": torch.tensor(3.0)}, "count": torch.ones(2)}
    files = [tmp_path / "earlier.pt", tmp_path / "later.pt"]
    for number, file in enumerate(files):
        weights = {"w": torch.full((4, 4), 1.0 + number).bfloat16()}
        torch.save({"model": weights, "optimizer": {"state": state}}, file)
    assert cli.main(["doctor", *map(str, files)]) == 0
    groups = [{"params": {0}, "param_names": None}]
    torch.save(
        {"model": weights, "optimizer": {"state": {0: {}}, "param_groups": groups}}, files[0]
    )
    assert cli.main(["export", str(files[0]), str(tmp_path / "fp32.pt")]) == 0


STEPS = [float("nan"), float("inf"), "three", torch.tensor(float("nan")), 10**400, -5]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step)[:9])
def test_a_step_that_is_no_number_is_unknown(step, tmp_path, capsys):
    file = tmp_path / "run.pt"
    saved = {"state": {0: {**STATE[0], "step": step}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"w": torch.ones(4, 4).bfloat16()}, "optimizer": saved}, file)
    assert cli.main(["doctor", str(file), "--json", "-"]) in (0, 1, 3)
    assert json.loads(capsys.readouterr().out)["steps"] is None


ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
LION = {"betas": (0.9, 0.99)}
SGD = {"momentum": 0.9, "dampening": 0.0}
SPOILED = {
    "Adam's mean is NaN": (ADAM, "exp_avg", float("nan")),
    "Adam's mean is infinite": (ADAM, "exp_avg", float("inf")),
    "Adam's square is infinite": (ADAM, "exp_avg_sq", float("inf")),
    "Lion's is NaN": (LION, "exp_avg", float("nan")),
    "Lion's is infinite": (LION, "exp_avg", float("inf")),
    "SGD's is NaN": (SGD, "momentum_buffer", float("nan")),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", SPOILED)
def test_states_that_are_not_finite_are_counted(case, dtype, tmp_path, capsys):
    options, name, number = SPOILED[case]
    names = {"Adam": ["exp_avg", "exp_avg_sq"]}.get(case.partition("'")[0], [name])
    state = {"step": 100, **{each: torch.full((8, 8), 0.01, dtype=dtype) for each in names}}
    group = {"lr": 0.5, "weight_decay": 0.0, "params": ["w"], **options}
    for spoiled in (0, 5):
        state[name].view(-1)[:spoiled] = number
        optimizer = {"state": {"w": state}, "param_groups": [group]}
        file = tmp_path / "run.pt"
        torch.save(
            {"model": {"w": torch.full((8, 8), 0.01, dtype=dtype)}, "optim": optimizer}, file
        )
        assert cli.main(["doctor", str(file), "--json", "-"]) == (spoiled > 0)
        found = json.loads(capsys.readouterr().out)
        assert found["weights"][0]["update_not_finite"] == spoiled
    assert found["weights"][0]["verdict"] == "broken"
    assert "in 5 of 64 elements" in found["verdict"][0]

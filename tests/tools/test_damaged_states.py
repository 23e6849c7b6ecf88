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


@pytest.mark.parametrize("step", [float("nan"), float("inf"), "three", torch.tensor(float("nan"))])
def test_a_step_that_is_no_number_is_unknown(step, tmp_path, capsys):
    file = tmp_path / "run.pt"
    saved = {"state": {0: {**STATE[0], "step": step}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": {"w": torch.ones(4, 4).bfloat16()}, "optimizer": saved}, file)
    assert cli.main(["doctor", str(file), "--json", "-"]) in (0, 1, 3)
    assert json.loads(capsys.readouterr().out)["steps"] is None

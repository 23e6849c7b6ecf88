"""Commands over files with whole weights and an optimizer's state that torch has not built."""

import pytest
import torch

from torch_bf16.tools import cli

STATE = {0: {"exp_avg": torch.ones(4, 4)}}
OTHERS = {
    "params is a number": {"param_groups": [{"params": 3}]},
    "params holds lists": {"param_groups": [{"params": [[0]]}]},
    "no params": {"param_groups": [{"lr": 1e-3}]},
    "a group is a number": {"param_groups": [3]},
    "no groups": {"param_groups": None},
    "a state is a number": {"state": {0: 3}},
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

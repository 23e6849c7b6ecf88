"""Runs that come back from an fp32 run in between."""

import copy

import torch
from optimizer_cases import take_steps

import torch_bf16


def test_masters_that_start_from_loaded_fp32_weights_are_not_called_rounded(caplog):
    """After a run in fp32 in between, the bits beside the weights are old, and are not needed."""
    runs = [torch.nn.Linear(8, 8) for _ in range(3)]
    ours, theirs, again = (torch.optim.AdamW(each.parameters()) for each in runs)
    torch_bf16.prepare(runs[0], ours, "bf16-fp32-master")
    take_steps(ours, [0, 1])
    theirs.load_state_dict(ours.state_dict())
    take_steps(theirs, [2, 3])
    torch_bf16.prepare(runs[2], again, "bf16-fp32-master")
    runs[2].load_state_dict(runs[1].state_dict())
    again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert "rounded" not in caplog.text
    for weight, fp32 in zip(runs[2].parameters(), runs[1].parameters(), strict=True):
        assert torch.equal(again.exact_weight(weight), fp32)

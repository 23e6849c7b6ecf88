"""Trains as the launcher says: ``launch ... fsdp2.py FOLDER RESULT``.

Two ranks shard and train. One goes on with what two have saved in the folder, and writes what that
makes of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

sys.path += [
    str(Path(__file__).parents[3] / each)
    for each in ("tests/accelerate", "tests/support", "examples")
]
from fsdp2_on_ranks import step_on_given_gradients
from sharded_llama import PartialState, contents, prepared, sharding, train
from small_model import Counter


def trains():
    made, model, optimizer = prepared()
    assert made.is_fsdp2
    assert made.mixed_precision == os.environ["ACCELERATE_MIXED_PRECISION"]
    policy = made.state.fsdp_plugin.mixed_precision_policy
    assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False), policy
    groups = [each for each in model.modules() if type(each).__name__.startswith("FSDP")]
    assert len(groups) >= 3, groups
    losses = train(made, model, optimizer, range(12))
    assert losses[-1] < 0.7 * losses[0], losses
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype == torch.bfloat16
        assert parameter.to_local().numel() < parameter.numel()


def takes_over(folder):
    made, model, optimizer = prepared()
    made.register_for_checkpointing(Counter())
    made.load_state(f"{folder}/state")
    step_on_given_gradients(model, optimizer)
    torch.save(contents(model, optimizer), f"{folder}/taken over")


with sharding():
    folder, result = sys.argv[1:]
    if int(os.environ["WORLD_SIZE"]) == 2:
        trains()
    else:
        takes_over(folder)
    Path(result).write_text(json.dumps({"mode": os.environ["ACCELERATE_MIXED_PRECISION"]}))
    PartialState().destroy_process_group()

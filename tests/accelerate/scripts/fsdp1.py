"""FSDP1 through Accelerate, on two ranks: ``torchrun ... fsdp1.py FOLDER RESULT``.

torch shards by FSDP1 on GPUs only; here what asks for one is told that a CPU will do.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object
from sharded_llama import (
    accelerator,
    assert_same,
    contents,
    llama,
    loss_of,
    prepared,
    report,
    train,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils

from accelerate_bf16 import MODES, BF16RecipeKwargs

CPU = torch.device("cpu")
_init_utils._get_compute_device = lambda *_: CPU
_init_utils._check_module_states_for_sync_module_states = lambda _: None


def flat(mode, model=llama, lr=1e-2, late=False, synced=False, **options):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        use_orig_params=True,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
    )
    plugin.sync_module_states = synced  # the constructor asks for a GPU
    made = accelerator(mode, plugin=plugin, **options)
    torch.manual_seed(0)
    model = model()
    if late:  # as the Hugging Face Trainer does it
        model = made.prepare(model)
        return made, model, made.prepare(torch.optim.AdamW(model.parameters(), lr=lr))
    return (made, *made.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr)))


def weights(model):
    with FullyShardedDataParallel.summon_full_params(model):
        named = model.named_parameters()
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in named}


def training_has_the_bits_of_fsdp2():
    for mode in MODES:
        made, model, optimizer = prepared(mode)
        losses = train(made, model, optimizer, range(3))
        expected = {n: t for n, t in contents(model, optimizer).items() if "/" not in n}
        for late in (False, True):
            made, model, optimizer = flat(mode, late=late)
            assert made.distributed_type.value == "FSDP"
            assert not made.is_fsdp2
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            assert train(made, model, optimizer, range(3)) == losses
            assert_same(weights(model), expected)


def masters_are_those_of_the_first_rank():
    def loaded_on_the_first_rank():
        model = llama()
        if made.process_index:
            for parameter in model.parameters():
                nn.init.constant_(parameter, 3.0)
        return model

    made, model, optimizer = flat("bf16-fp32-master")
    train(made, model, optimizer, range(3))
    expected = weights(model)
    made, model, optimizer = flat("bf16-fp32-master", loaded_on_the_first_rank, synced=True)
    train(made, model, optimizer, range(3))
    assert_same(weights(model), expected)


def clipping_takes_the_exact_norm_over_all_shards():
    made, model, optimizer = flat("bf16-stochastic")
    with made.no_sync(model):
        made.backward(loss_of(made, model, 0) / 2)
    made.backward(loss_of(made, model, 1) / 2)
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    squares = gather_object([sum(g.square().sum() for g in gradients)])
    norm = made.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm.double(), torch.stack(squares).sum().sqrt(), rtol=1e-6, atol=0)
    optimizer.step()


def a_resumed_run_repeats_itself_bit_for_bit(folder):
    for mode in MODES:
        made, model, optimizer = flat(mode)
        train(made, model, optimizer, range(3))
        made.save_state(f"{folder}/{mode}")
        train(made, model, optimizer, range(3, 5))
        expected = weights(model)
        made, model, optimizer = flat(mode)
        train(made, model, optimizer, [7])
        made.load_state(f"{folder}/{mode}")
        train(made, model, optimizer, range(3, 5))
        assert_same(weights(model), expected)


def what_fsdp1_cannot_flatten_is_refused():
    handler = BF16RecipeKwargs(keep_fp32=("*.q_proj",))
    with pytest.raises(NotImplementedError, match=r"keeps some .* in float32 .* fsdp_version=2"):
        flat("bf16-stochastic", kwargs_handlers=[handler])
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=False)
    with pytest.raises(NotImplementedError, match=r"use_orig_params=False.* use_orig_params=True"):
        accelerator("bf16-stochastic", plugin=plugin)


report(
    [
        training_has_the_bits_of_fsdp2,
        masters_are_those_of_the_first_rank,
        clipping_takes_the_exact_norm_over_all_shards,
        a_resumed_run_repeats_itself_bit_for_bit,
        what_fsdp1_cannot_flatten_is_refused,
    ]
)

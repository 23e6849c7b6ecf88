"""FSDP1 through Accelerate, as every rank does it.

torch shards by FSDP1 on GPUs only; here what asks for one is told that a CPU will do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object
from sharded_llama import (
    accelerator,
    assert_same,
    contents,
    loss_of,
    on_ranks,
    prepared,
    train,
    trained_and_resumed,
)
from tiny_llm import llama
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils, _state_dict_utils

from accelerate_bf16 import BF16RecipeKwargs

CPU = torch.device("cpu")
_unshard = _state_dict_utils._common_unshard_pre_state_dict_hook


def _unshard_where_it_is(*args, offload_to_cpu, **options):
    return _unshard(*args, offload_to_cpu=False, **options)


@contextmanager
def flattening() -> Iterator[None]:
    answers = [
        (_init_utils, "_get_compute_device", lambda *_: CPU),
        (_init_utils, "_check_module_states_for_sync_module_states", lambda _: None),
        # What is offloaded from a CPU to a CPU lies in memory that torch has freed.
        (_state_dict_utils, "_common_unshard_pre_state_dict_hook", _unshard_where_it_is),
    ]
    with on_ranks(), ExitStack() as stack:
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, answer))
        yield


def flat(mode, model=llama, lr=1e-2, late=False, synced=False, kind="SHARDED", **options):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        use_orig_params=True,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type=f"{kind}_STATE_DICT",
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
    )
    if kind == "FULL":  # torch shares what it should copy from a CPU to a CPU
        plugin.optim_state_dict_config.offload_to_cpu = False
    if synced:  # as the constructor does it where it finds a GPU
        plugin.sync_module_states = True
        plugin.param_init_fn = lambda each: each.to_empty(device=CPU, recurse=False)
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


def whole_states(model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer.optimizer, options=options)["state"]
    # NaN stands where a weight has no lower half.
    return {
        f"{name}/{key}": torch.as_tensor(value).nan_to_num(nan=1e9)
        for name, each in states.items()
        for key, value in each.items()
    }


@flattening()
def training_has_the_bits_of_fsdp2(mode, late):
    made, model, optimizer = prepared(mode)
    losses = train(made, model, optimizer, range(3))
    expected = {n: t for n, t in contents(model, optimizer).items() if "/" not in n}
    made, model, optimizer = flat(mode, late=late)
    assert made.distributed_type.value == "FSDP"
    assert not made.is_fsdp2
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert train(made, model, optimizer, range(3)) == losses
    assert_same(weights(model), expected)


def nowhere(made):
    return llama().to("meta") if made.process_index else llama()


def constant(made):
    model = llama()
    if made.process_index:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 3.0)
    return model


@flattening()
def masters_are_those_of_the_first_rank(load, late):
    made, model, optimizer = flat("bf16-fp32-master")
    train(made, model, optimizer, range(3))
    expected = weights(model)
    loaded = functools.partial(load, made)
    made, model, optimizer = flat("bf16-fp32-master", loaded, late=late, synced=True)
    train(made, model, optimizer, range(3))
    assert_same(weights(model), expected)


@flattening()
def an_optimizer_of_weights_that_are_nowhere_is_refused():
    made = accelerator("bf16-fp32-master")
    refused = pytest.raises(ValueError, match="AdamW holds parameters on the meta device")
    with refused if made.process_index else nullcontext():
        flat("bf16-fp32-master", functools.partial(nowhere, made), synced=True)


@flattening()
def a_model_that_another_mode_has_wrapped_is_refused():
    _, model, optimizer = flat("no")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)
    made = accelerator("bf16-stochastic", plugin=plugin)
    with pytest.raises(ValueError, match=r"wrapped in FullyShardedDataParallel .* float32 weights"):
        made.prepare(model, optimizer)
    assert type(optimizer.optimizer) is torch.optim.AdamW


@flattening()
def a_model_of_this_mode_is_taken_by_a_later_accelerator():
    keep = BF16RecipeKwargs(keep_fp32=(nn.Module,))
    for handlers in ([], [keep]):
        _, model, optimizer = flat("bf16-stochastic", kwargs_handlers=handlers)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True)
        made = accelerator("bf16-stochastic", plugin=plugin, kwargs_handlers=handlers)
        assert made.prepare(model, optimizer)[0] is model
        train(made, model, optimizer, range(1))


@flattening()
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


@flattening()
def micro_batches_are_reduced_as_by_hand():
    results = []
    for by_hand in (False, True):
        made, model, optimizer = flat(
            "bf16-stochastic", gradient_accumulation_steps=1 if by_hand else 2
        )
        if by_hand:
            for step in range(0, 4, 2):
                with made.no_sync(model):
                    made.backward(loss_of(made, model, step) / 2)
                made.backward(loss_of(made, model, step + 1) / 2)
                optimizer.step()
                optimizer.zero_grad()
        else:
            train(made, model, optimizer, range(4))
        results.append(weights(model))
    assert_same(*results)


@flattening()
def clipping_by_value_is_refused():
    made, model, _ = flat("bf16-stochastic")
    made.backward(loss_of(made, model, 0))
    with pytest.raises(Exception, match="FSDP  do not support `clip_grad_value_`"):
        made.clip_grad_value_(model.parameters(), 1e-3)


def trained_and_saved(mode, kind, folder):
    made, model, optimizer = flat(mode, kind=kind)
    train(made, model, optimizer, range(3))
    made.save_state(f"{folder}/state")
    return made, model, optimizer


@flattening()
def saved(mode, kind, folder):
    """The weights and states that a training saves there."""
    _, model, optimizer = trained_and_saved(mode, kind, folder)
    return weights(model), whole_states(model, optimizer)


@flattening()
def takes_over(mode, kind, folder):
    """The weights and states that are loaded from there; training goes on."""
    made, model, optimizer = flat(mode, kind=kind)
    made.load_state(f"{folder}/state")
    found = weights(model), whole_states(model, optimizer)
    train(made, model, optimizer, [3])
    assert made.num_processes == 1
    return found


@flattening()
def a_resumed_run_repeats_itself_bit_for_bit(mode, kind, folder):
    made, model, optimizer = trained_and_saved(mode, kind, folder)
    then = weights(model)
    train(made, model, optimizer, range(3, 5))
    expected = weights(model)
    state = made.get_state_dict(model)
    if made.is_main_process:
        assert {p.dtype for p in state.values()} == {torch.bfloat16}
        assert torch.equal(state["lm_head.weight"], expected["lm_head.weight"])
    made, model, optimizer = flat(mode, kind=kind)
    if kind == "FULL":
        train(made, model, optimizer, [7])
    # With a sharded file Accelerate by itself would leave a fresh optimizer as it is.
    made.load_state(f"{folder}/state")
    assert_same(weights(model), then)
    train(made, model, optimizer, range(3, 5))
    assert_same(weights(model), expected)


@flattening()
def what_stays_fp32_is_refused():
    handler = BF16RecipeKwargs(keep_fp32=("*.q_proj",))
    with pytest.raises(NotImplementedError, match=r"keeps some .* in float32 .* fsdp_version=2"):
        flat("bf16-stochastic", kwargs_handlers=[handler])


@flattening()
def parameters_that_are_not_the_original_ones_are_refused():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=False)
    made = accelerator("bf16-stochastic", plugin=plugin)
    with pytest.raises(NotImplementedError, match=r"use_orig_params=False.* use_orig_params=True"):
        made.prepare(llama())


@flattening()
def the_trainer_trains_saves_and_resumes_bit_for_bit(folder):
    config = {"version": 1, "sync_module_states": False}
    first, second = trained_and_resumed(folder, config, gradient_accumulation_steps=2)
    assert not first.accelerator.is_fsdp2
    assert isinstance(first.model_wrapped, FullyShardedDataParallel)
    assert_same(weights(second.model_wrapped), weights(first.model_wrapped))

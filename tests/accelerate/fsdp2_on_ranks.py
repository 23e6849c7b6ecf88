"""FSDP2 and tensor parallelism through Accelerate, as every rank does it."""

from __future__ import annotations

import functools
import io
import os
import warnings
from contextlib import redirect_stderr
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ParallelismConfig, TorchDynamoPlugin, gather_object
from sharded_llama import (
    TOKENS,
    accelerator,
    assert_same,
    contents,
    loss_of,
    on_ranks,
    prepared,
    train,
    trained_and_resumed,
    whole,
)
from small_model import Counter, Model
from tiny_llm import llama
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import mse_loss

import torch_bf16
from accelerate_bf16 import BF16RecipeKwargs


def loaded_on_the_first_rank():
    model = llama()
    if dist.get_rank():
        for parameter in model.parameters():
            nn.init.constant_(parameter, 3.0)
    return model


# What Accelerate does around sharding. Made on the ranks: a plugin reads the environment.
AROUND = {
    "nothing": dict,
    "activation-checkpointing": lambda: {"plugin": {"activation_checkpointing": True}},
    "weights-of-the-first-rank": lambda: {
        "plugin": {"cpu_ram_efficient_loading": True},
        "model": loaded_on_the_first_rank,
    },
    "compiled": lambda: {"dynamo_plugin": TorchDynamoPlugin(backend="eager")},
    "not-resharded": lambda: {"plugin": {"reshard_after_forward": False}},
}


@on_ranks()
def trained(mode, around):
    """The losses of this rank, and the contents of model and optimizer."""
    made, model, optimizer = prepared(mode, **AROUND[around]())
    losses = train(made, model, optimizer, range(3))
    return losses, contents(model, optimizer)


def step_on_given_gradients(model, optimizer):
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        given = torch.randn(parameter.shape, generator=generator).bfloat16()
        parameter.grad = distribute_tensor(given, parameter.device_mesh, parameter.placements)
    optimizer.step()
    optimizer.zero_grad()


def muon(parameters, lr, mode):
    every = [*parameters]
    groups = [
        {"params": [p for p in every if p.ndim == 2]},
        {"params": [p for p in every if p.ndim != 2], "use_muon": False},
    ]
    return torch_bf16.Muon(groups, lr=lr, recipe=mode)


@on_ranks()
def training_has_the_bits_of_ddp(mode, name):
    """The same forward, the same noise, the same masters; batch norm, shards of which are fp32."""
    results = []
    make = functools.partial(muon, mode=mode) if name == "Muon" else getattr(torch.optim, name)
    for fsdp in (False, True):
        made, model, optimizer = prepared(mode, Model, make=make, fsdp=fsdp)
        generator = torch.Generator().manual_seed(made.process_index)
        losses = []
        for _ in range(6):
            x = torch.randn(16, 8, generator=generator)
            loss = mse_loss(model(x), x[:, :1].tanh())
            made.backward(loss)
            optimizer.step()
            if fsdp:
                kept = model.batch_norm.parameters()
                assert {p.grad.dtype for p in kept} == {torch.float32}
                assert model.up.weight.grad.dtype == torch.bfloat16
            optimizer.zero_grad()
            losses.append(loss)
        results.append((losses, contents(model, optimizer)))
        made.free_memory()
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


@on_ranks()
def masters_start_from_the_weights_that_the_user_had():
    made, model, optimizer = prepared("bf16-fp32-master", lr=0.0)
    torch.manual_seed(0)
    fresh = dict(llama().named_parameters())
    train(made, model, optimizer, [0])
    for name, parameter in model.named_parameters():
        halves = whole(parameter), whole(optimizer.state[parameter]["remainder16"])
        exact = (halves[0].view(torch.int16).int() << 16) + halves[1].int()
        assert torch.equal(exact.view(torch.float32), fresh[name]), name


@on_ranks()
def clipping_takes_the_exact_norm_and_leaves_gradients_unwritten():
    made, model, optimizer = prepared("bf16-fp32-master", lr=1.0, make=torch.optim.SGD)
    before = {n: whole(p).float() for n, p in model.named_parameters()}
    made.backward(loss_of(made, model, 0))
    gradients = [whole(p.grad) for p in model.parameters()]
    exact = torch.stack([each.double().norm() for each in gradients]).norm()
    norm = made.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0.0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(whole(parameter.grad), gradient)
    optimizer.step()
    moved = [whole(p).float() - before[n] for n, p in model.named_parameters()]
    length = torch.stack([each.norm() for each in moved]).norm()
    torch.testing.assert_close(length, torch.tensor(0.5), rtol=0.02, atol=0.0)
    # What is not a whole optimizer's is scaled in place.
    some = list(model.parameters())[:3]
    norm = made.clip_grad_norm_(some, 1e-3)
    after = torch.stack([whole(p.grad).double().norm() for p in some]).norm()
    assert norm > 2e-3
    torch.testing.assert_close(after.item(), 1e-3, rtol=1e-2, atol=0.0)


@on_ranks()
def micro_batches_are_reduced_once():
    results = []
    for by_hand in (False, True):
        made, model, optimizer = prepared(
            "bf16-stochastic", gradient_accumulation_steps=1 if by_hand else 2
        )
        if by_hand:
            for step in range(0, 6, 2):
                for number in (step, step + 1):
                    loss = loss_of(made, model, number) / 2
                    if number == step:
                        with made.no_sync(model):
                            made.backward(loss)
                        assert all(p.grad is None for p in model.parameters())
                    else:
                        made.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        else:
            train(made, model, optimizer, range(6))
        found = contents(model, optimizer)
        assert found["model.norm.weight/step"] == 3
        results.append(found)
    assert_same(*results)


@on_ranks()
def sums_in_fp32_reach_the_step():
    made, model, optimizer = prepared(
        "bf16-stochastic",
        gradient_accumulation_steps=2,
        kwargs_handlers=[BF16RecipeKwargs(accumulate="fp32")],
    )
    losses = train(made, model, optimizer, range(12))
    assert losses[-1] < losses[0] - 0.5, losses


@on_ranks()
def what_stays_fp32_is_a_group_of_its_own():
    def declared():
        model = llama()
        model._keep_in_fp32_modules_strict = {"q_proj", "norm"}
        return model

    handler = BF16RecipeKwargs(keep_fp32=("*.down_proj",))
    plugin = {"activation_checkpointing": True}
    made, model, optimizer = prepared(
        "bf16-stochastic", declared, plugin=plugin, kwargs_handlers=[handler]
    )
    losses = train(made, model, optimizer, range(8))
    assert losses[-1] < losses[0] - 0.5, losses
    for name, parameter in model.named_parameters():
        kept = any(f"{each}.weight" in name for each in ("q_proj", "model.norm", "down_proj"))
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name


@on_ranks()
def what_would_be_fp32_beside_bf16_in_one_group_is_refused():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

    model = nn.Sequential(nn.Linear(4, 4), Scaled())
    handler = BF16RecipeKwargs(keep_fp32=("1.scale",))
    plugin = {"auto_wrap_policy": None}
    made = accelerator("bf16-stochastic", plugin=plugin, kwargs_handlers=[handler])
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(NotImplementedError, match=r"'1.scale' in float32 beside bfloat16"):
        made.prepare(model, optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert {(type(p), p.dtype) for p in model.parameters()} == {(nn.Parameter, torch.float32)}


@on_ranks()
def adapters_stay_fp32_beside_a_bf16_base():
    from peft import LoraConfig, get_peft_model

    def adapted():
        model = llama().to(torch.bfloat16)
        return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))

    made, model, optimizer = prepared("bf16-fp32-master", adapted, lr=0.1)
    losses = train(made, model, optimizer, range(12))
    assert losses[-1] < losses[0] - 0.1, losses
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name


@on_ranks()
def models_that_are_sharded_already_and_ones_prepared_again():
    made, model, optimizer = prepared("bf16-stochastic")
    train(made, model, optimizer, range(3))
    expected = contents(model, optimizer)
    made = accelerator("bf16-stochastic", plugin={"auto_wrap_policy": None})
    torch.manual_seed(0)
    model = llama()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = made.prepare(model, optimizer)
    train(made, model, optimizer, range(2))
    model, optimizer = made.prepare(model, optimizer)
    train(made, model, optimizer, range(2, 3))
    assert_same(contents(model, optimizer), expected)


def counting(mode, kind):
    """What a run has, and something of the user's that is saved with it."""
    made, model, optimizer = prepared(mode, plugin={"state_dict_type": f"{kind}_STATE_DICT"})
    counter = Counter()
    made.register_for_checkpointing(counter)
    return made, model, optimizer, counter


def trained_and_saved(mode, kind, folder):
    made, model, optimizer, counter = counting(mode, kind)
    train(made, model, optimizer, range(3))
    counter.value = 3
    made.save_state(f"{folder}/state")
    return made, model, optimizer


@on_ranks()
def a_resumed_run_repeats_itself_bit_for_bit(mode, kind, folder):
    made, model, optimizer = trained_and_saved(mode, kind, folder)
    train(made, model, optimizer, range(3, 6))
    expected = contents(model, optimizer)
    weights = made.get_state_dict(model)
    if made.is_main_process:
        assert {p.dtype for p in weights.values()} == {torch.bfloat16}
        assert torch.equal(weights["lm_head.weight"], expected["lm_head.weight"])

    made, model, optimizer, counter = counting(mode, kind)
    train(made, model, optimizer, [1])
    made.load_state(f"{folder}/state")
    assert counter.value == 3
    train(made, model, optimizer, range(3, 6))
    assert_same(contents(model, optimizer), expected)


@on_ranks()
def saved(mode, kind, folder):
    """What one step makes of what a training saves there."""
    _, model, optimizer = trained_and_saved(mode, kind, folder)
    step_on_given_gradients(model, optimizer)
    return contents(model, optimizer)


@on_ranks()
def taken_over(mode, kind, folder):
    """What one step makes of what is loaded from there."""
    made, model, optimizer, _ = counting(mode, kind)
    made.load_state(f"{folder}/state")
    step_on_given_gradients(model, optimizer)
    assert made.num_processes != 2
    return contents(model, optimizer)


@on_ranks()
def taken_over_as_launched(told, mode, folder):
    """The same, where the launcher's words alone say how."""
    with mock.patch.dict(os.environ, told):
        made, model, optimizer = prepared()
    assert made.mixed_precision == mode
    made.register_for_checkpointing(Counter())
    made.load_state(f"{folder}/state")
    step_on_given_gradients(model, optimizer)
    return contents(model, optimizer)


@on_ranks()
def trained_as_launched(told):
    """What is printed in a training where the launcher's words alone say how."""
    printed = io.StringIO()
    with mock.patch.dict(os.environ, told), redirect_stderr(printed):
        made, model, optimizer = prepared()
    assert made.is_fsdp2
    assert made.mixed_precision == told["ACCELERATE_MIXED_PRECISION"]
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
    return printed.getvalue()


@on_ranks()
def tensor_parallelism_trains_the_same_on_every_rank(mode, folder):
    losses = []
    config = ParallelismConfig(tp_size=2)
    made = accelerator(mode, fsdp=False, parallelism_config=config)
    torch.manual_seed(0)
    if made.is_main_process:
        llama().save_pretrained(f"{folder}/llama")
    made.wait_for_everyone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = type(llama()).from_pretrained(
            f"{folder}/llama",
            tp_plan="auto",
            device_mesh=made.torch_device_mesh["tp"],
            dtype=torch.float32,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = made.prepare(model, optimizer)
    placed = {type(p) for p in model.parameters()}
    assert placed == {DTensor, nn.Parameter}
    for _ in range(3):
        loss = model(input_ids=TOKENS[:8], labels=TOKENS[:8]).loss
        made.backward(loss)
        made.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert losses[-1] < losses[-3] - 0.3
    norm = model.model.norm.weight.tolist()
    assert gather_object([norm, losses]) == [norm, losses] * 2


@on_ranks()
def the_trainer_trains_saves_and_resumes_bit_for_bit(folder):
    first, second = trained_and_resumed(folder, {"version": 2})
    assert first.accelerator.is_fsdp2
    results = [contents(each.model, each.optimizer.optimizer) for each in (first, second)]
    assert_same(*results)
    assert {first.model.lm_head.weight.dtype} == {torch.bfloat16}

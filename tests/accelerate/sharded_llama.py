"""A tiny Llama that Accelerate shards over CPUs, and its training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, gather_object
from tiny_llm import llama, sequences
from torch.distributed.tensor import DTensor
from torchrun_variables import as_torchrun_says

TOKENS = torch.tensor([each["input_ids"] for each in sequences()])
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
averages = pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="torch 2.7's FSDP2 sums gradients over gloo where it should average",
)
_make_state = PartialState.__init__
_sharding = True


def _sharding_state(self, *args, **kwargs):
    _make_state(self, *args, timeout=timedelta(seconds=60), **kwargs)
    found = PartialState._shared_state
    if _sharding and found["distributed_type"] == DistributedType.MULTI_CPU:
        found["distributed_type"] = DistributedType.MULTI_GPU


@contextmanager
def sharding() -> Iterator[None]:
    """Accelerate shards where it has GPUs only. What it does then works on CPUs, too."""
    with mock.patch.object(PartialState, "__init__", _sharding_state):
        yield


@contextmanager
def on_ranks() -> Iterator[None]:
    """For a rank that others will use after this: it is left as it was found."""
    variables = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    variables["TOKENIZERS_PARALLELISM"] = "false"
    with as_torchrun_says(), mock.patch.dict(os.environ, variables), sharding():
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def accelerator(mode=None, fsdp=True, plugin=None, **options):
    """A fresh one; without a mode, all of it comes from the launcher."""
    global _sharding
    _sharding = fsdp or "parallelism_config" in options
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if mode is not None:
        for name in [name for name in os.environ if name.startswith("FSDP_")]:
            del os.environ[name]
    if fsdp and mode is not None:
        if plugin is None or isinstance(plugin, dict):
            plugin = {"auto_wrap_policy": "transformer_based_wrap"} | (plugin or {})
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **plugin)
        options["fsdp_plugin"] = plugin
    os.environ["ACCELERATE_USE_FSDP"] = str(fsdp).lower()
    return Accelerator(mixed_precision=mode, cpu=True, **options)


def prepared(mode=None, model=llama, lr=1e-2, make=torch.optim.AdamW, **options):
    """An accelerator, a model and its optimizer."""
    made = accelerator(mode, **options)
    torch.manual_seed(0)
    model = model()
    return (made, *made.prepare(model, make(model.parameters(), lr=lr)))


def batch_of(accelerator, step):
    start = (8 * step + 4 * accelerator.process_index) % 64
    return TOKENS[start : start + 4]


def loss_of(accelerator, model, step):
    batch = batch_of(accelerator, step)
    return model(input_ids=batch, labels=batch).loss


def train(accelerator, model, optimizer, steps):
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = loss_of(accelerator, model, step)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensor):
    """The whole tensor, on every rank; Python carries the parts, as gloo knows no int16."""
    if isinstance(tensor, DTensor):
        return torch.cat(gather_object([tensor.to_local().detach()]))
    return tensor.detach().clone()


def contents(model, optimizer):
    """Weights, moments and masters, whole, under the names they have without wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        for part in WRAPPERS:
            name = name.replace(part, "")
        found[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = whole(torch.as_tensor(value))
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def trained_and_resumed(folder, fsdp_config, **options):
    """A Trainer after 8 steps, and one that went on from its checkpoint of step 4."""
    from transformers import Trainer, TrainingArguments

    def trainer(name):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            f"{folder}/{name}",
            max_steps=8,
            save_steps=4,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            fsdp=True,
            fsdp_config=fsdp_config | {"state_dict_type": "SHARDED_STATE_DICT"},
            **options,
        )
        return Trainer(llama(), arguments, train_dataset=sequences())

    mode = os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16-stochastic"
    accelerator("no")  # and with it a state that shards
    first = trainer("first")
    first.train()
    assert first.accelerator.mixed_precision == mode
    losses = [each["loss"] for each in first.state.log_history if "loss" in each]
    assert losses[-1] < losses[0] - 0.5, losses
    second = trainer("second")
    second.train(resume_from_checkpoint=f"{folder}/first/checkpoint-4")
    return first, second

"""Schedule-free optimizers follow the model's modes, and what is saved is their average."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from tiny_llm import llama, sequences
from transformers import Trainer, TrainingArguments

import torch_bf16


def prepared(make_accelerator, mode, model, together=True):
    accelerator = make_accelerator(mode)
    optimizer = torch_bf16.AdamWScheduleFree(model.named_parameters(), lr=0.02, recipe=mode)
    if together:
        return accelerator, *accelerator.prepare(model, optimizer)
    return accelerator, accelerator.prepare(model), accelerator.prepare(optimizer)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_validating_in_eval_mode_uses_the_average_and_changes_no_bit_of_the_run(
    make_accelerator, train, mode, model, batches
):
    other = copy.deepcopy(model)
    runs = [prepared(make_accelerator, mode, each, each is other) for each in (model, other)]
    for half in (batches[:5], batches[5:10]):
        for accelerator, each, optimizer in runs:
            train(accelerator, each, optimizer, half)
        trained = weights(model)
        model.eval()
        assert sum(map(torch.equal, model.parameters(), trained)) <= 1
        model.train()
        assert all(map(torch.equal, model.parameters(), trained))
    assert all(map(torch.equal, model.parameters(), weights(other)))


def test_what_is_saved_in_train_mode_is_the_average_and_resumes_to_the_bit(
    make_accelerator, train, mode, model, batches, tmp_path
):
    second = copy.deepcopy(model)
    accelerator, _, optimizer = prepared(make_accelerator, mode, model)
    train(accelerator, model, optimizer, batches[:5])
    trained = weights(model)
    accelerator.save_state(tmp_path / "state")
    found = accelerator.get_state_dict(model)
    accelerator.save_model(model, tmp_path / "model")
    assert all(map(torch.equal, model.parameters(), trained))
    model.eval()
    averages = dict(model.named_parameters())
    assert all(torch.equal(found[name], averages[name]) for name in averages)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], averages[name]) for name in averages if name in saved)
    model.train()
    train(accelerator, model, optimizer, batches[5:10])

    resumed = prepared(make_accelerator, mode, second)
    resumed[0]._models, resumed[0]._optimizers = [resumed[1]], [resumed[2]]
    resumed[0].load_state(tmp_path / "state")
    assert all(map(torch.equal, second.parameters(), trained))
    train(*resumed, batches[5:10])
    assert all(map(torch.equal, second.parameters(), weights(model)))


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluating", "not evaluating"])
def test_the_trainer_saves_averages_and_resumes_to_the_bit(mode, monkeypatch, tmp_path, evaluates):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mode)

    def make(folder):
        options = {"eval_strategy": "steps", "eval_steps": 4} if evaluates else {}
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder), use_cpu=True, report_to=[], disable_tqdm=True,
            per_device_train_batch_size=4, max_steps=8, save_steps=4,
            lr_scheduler_type="constant", **options,
        )  # fmt: skip
        model, data = llama(), sequences()
        optimizer = torch_bf16.AdamWScheduleFree(model.named_parameters(), lr=0.01, recipe=mode)
        return Trainer(
            model=model, args=arguments, train_dataset=data, eval_dataset=data[:8],
            optimizers=(optimizer, None),
        )  # fmt: skip

    whole = make("whole")
    whole.train()
    resumed = make("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    (first, second) = (each.model.state_dict() for each in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)

    saved = load_file(tmp_path / "whole" / "checkpoint-8" / "model.safetensors")
    whole.model.train()
    trained = whole.model.state_dict()
    assert not any(torch.equal(saved[name], trained[name]) for name in saved if "proj" in name)
    whole.model.eval()
    assert all(torch.equal(saved[name], whole.model.state_dict()[name]) for name in saved)

"""Released gradients in the Trainer: of an optimizer by its class, and by the environment."""

import math

import pytest
import torch
from tiny_llm import llama, sequences
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import torch_bf16


def test_the_trainer_takes_it_among_the_options_of_a_class(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    data = [
        {"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(20)
    ]
    models = []
    for release in (False, {"max_norm": None, "accumulation_steps": 2}):
        torch.manual_seed(0)
        model = torch_bf16.cast_model(LlamaForCausalLM(config))
        arguments = TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=2, max_grad_norm=0.0,
            gradient_accumulation_steps=2, report_to=[], save_strategy="no", use_cpu=True, seed=0,
            disable_tqdm=True,
        )  # fmt: skip
        options = {"lr": 0.01, "release": release}
        trainer = Trainer(
            model, arguments, train_dataset=data,
            optimizer_cls_and_kwargs=(torch_bf16.AdamW, options),
        )  # fmt: skip
        trainer.train()
        models.append(model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def by_the_environment(folder, **options):
    """Trains with a rest: seven batches of an epoch, of which three or one make the last step."""
    arguments = TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-2,
        report_to=[], save_strategy="no", logging_steps=1, use_cpu=True, seed=0, disable_tqdm=True,
        **options,
    )  # fmt: skip
    trainer = Trainer(llama(), arguments, train_dataset=sequences()[:56])
    trainer.train()
    return trainer


@pytest.mark.parametrize("passes", [1, 3, 4])
def test_the_environment_releases_with_the_bits_of_ordinary_steps(monkeypatch, tmp_path, passes):
    monkeypatch.setenv("BF16_MODE", "bf16-stochastic")
    options = {"max_grad_norm": 0.0, "gradient_accumulation_steps": passes}
    ordinary = by_the_environment(tmp_path, **options)
    monkeypatch.setenv("BF16_RELEASE_GRADIENTS", "1")
    taken = []
    with monkeypatch.context() as patches:
        patches.setattr(
            Trainer,
            "_get_grad_norm",
            lambda self, model, grad_norm=None, of=Trainer._get_grad_norm: (
                taken.append(all(p.grad is None for p in model.parameters()))
                or of(self, model, grad_norm)
            ),
        )
        released = by_the_environment(tmp_path, **options)
    # All passes of a step were there, or the step took the sum of fewer.
    assert taken == ([True] * 14 if passes == 1 else ([True] * (7 // passes) + [False]) * 2)
    assert all(map(torch.equal, ordinary.model.parameters(), released.model.parameters()))
    norms = [each["grad_norm"] for each in released.state.log_history if "grad_norm" in each]
    assert [math.isnan(norm) for norm in norms] == taken


def test_what_the_trainer_would_clip_is_refused_before_it_trains(monkeypatch, tmp_path):
    monkeypatch.setenv("BF16_MODE", "bf16-stochastic")
    monkeypatch.setenv("BF16_RELEASE_GRADIENTS", "1")
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 .* Set max_grad_norm=0; BF16_RELEASE"):
        TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])


def test_the_environment_clips_what_it_releases(monkeypatch, tmp_path):
    monkeypatch.setenv("BF16_MODE", "bf16-fp32-master")
    monkeypatch.setenv("BF16_RELEASE_GRADIENTS", "1")
    ends = []
    for bound in (None, "0.001"):
        if bound:
            monkeypatch.setenv("BF16_RELEASE_MAX_NORM", bound)
        trainer = by_the_environment(tmp_path, max_grad_norm=0.0, optim="sgd")
        start = llama()
        pairs = zip(trainer.model.parameters(), start.parameters(), strict=True)
        ends.append(max((a.float() - b).abs().max().item() for a, b in pairs))
    # 14 steps at 0.01 and less, of gradients of norm 0.001.
    assert ends[1] < 0.005 < ends[0]

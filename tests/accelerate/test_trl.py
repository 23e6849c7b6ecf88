"""TRL, whose configurations say bf16=True by default, and peft."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_llm import llama, sequences, tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import torch_bf16

pytest.importorskip("trl", minversion="1")
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:trl"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def launched(monkeypatch, mode):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mode)
    return mode


@pytest.fixture
def options(tmp_path):
    return {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
    }


@pytest.fixture
def fine_tune(options):
    """Trains with SFTTrainer; returns the trainer."""

    def tune(model, **further):
        trainer = SFTTrainer(
            model,
            SFTConfig(max_length=None, **options),
            train_dataset=Dataset.from_list(sequences()),
            processing_class=tokenizer(),
            **further,
        )
        trainer.train()
        return trainer

    return tune


def preferences():
    return Dataset.from_dict(
        {
            "prompt": ["def f(x):"] * 8,
            "chosen": [f" return x + {i}" for i in range(8)],
            "rejected": [" pass"] * 8,
        }
    )


def adapters(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def test_sft_trains_in_the_mode_although_its_default_is_bf16(fine_tune, launched):
    trainer = fine_tune(llama())
    assert trainer.args.bf16 is True
    assert trainer.accelerator.mixed_precision == launched
    assert isinstance(trainer.optimizer.optimizer, torch_bf16.AdamW)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_of_an_fp32_base_become_bf16_with_it(fine_tune, launched, dora):
    trainer = fine_tune(llama(), peft_config=LoraConfig(r=4, use_dora=dora))
    trained = adapters(trainer.model)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    assert any(p.any() for n, p in trained.items() if "lora_B" in n)
    if dora:
        magnitudes = [p for n, p in trained.items() if "magnitude" in n]
        optimizer = trainer.optimizer.optimizer
        # A vector: an exact master, whose updates bf16 alone would drop.
        assert all("remainder16" in optimizer.state[p] for p in magnitudes)
        assert magnitudes


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_that_peft_made_fp32_beside_a_bf16_base_stay_fp32(fine_tune, caplog, dora):
    model = get_peft_model(llama().bfloat16(), LoraConfig(r=4, use_dora=dora))
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainer = fine_tune(model)
    assert {p.dtype for p in adapters(trainer.model).values()} == {torch.float32}
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)
    assert any("adapters stay float32 as peft made them" in each for each in caplog.messages)
    assert not any("cast_model" in each for each in caplog.messages)


def test_adapters_that_peft_left_in_bf16_train_by_the_recipe(fine_tune, launched):
    model = get_peft_model(llama().bfloat16(), LoraConfig(r=4), autocast_adapter_dtype=False)
    trainer = fine_tune(model)
    (state, *_) = [trainer.optimizer.optimizer.state[p] for p in adapters(model).values()]
    assert {p.dtype for p in adapters(model).values()} == {torch.bfloat16}
    assert ("remainder16" in state) == (launched == "bf16-fp32-master")


def test_quantised_weights_of_the_base_are_not_touched(fine_tune):
    class Quantised(nn.Parameter):
        """Pretends to be a float, as those of bitsandbytes do."""

    model = llama()
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        layer.self_attn.q_proj.weight = Quantised(weight.detach(), requires_grad=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    held = {n: p for n, p in model.named_parameters() if type(p) is Quantised}
    before = {n: p.detach().clone() for n, p in held.items()}
    trainer = fine_tune(model)
    after = dict(trainer.model.named_parameters())
    assert held
    assert all(after[n] is p and torch.equal(p, before[n]) for n, p in held.items())
    assert {p.dtype for p in adapters(model).values()} == {torch.float32}


def test_weights_that_bitsandbytes_has_quantised_are_not_touched(fine_tune, tmp_path):
    """QLoRA; TRL makes the adapters bf16, all but the magnitudes of DoRA."""
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path / "llama")
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "llama", quantization_config=four_bits, device_map={"": "cpu"}
    )
    model = get_peft_model(model, LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]))
    held = [p for p in model.parameters() if type(p).__name__ == "Params4bit"]
    before = [p.detach().view(torch.uint8).clone() for p in held]
    trainer = fine_tune(model)
    assert len(held) == 14
    assert all(torch.equal(p.view(torch.uint8), b) for p, b in zip(held, before, strict=True))
    found = {n.split(".")[-3][:14]: p.dtype for n, p in adapters(trainer.model).items()}
    assert found == {
        "lora_A": torch.bfloat16,
        "lora_B": torch.bfloat16,
        "lora_magnitude": torch.float32,
    }


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_dpo_trains_in_the_mode_and_its_reference_stays(options, launched, lora):
    model = llama()
    reference = None if lora else copy.deepcopy(model)
    trainer = DPOTrainer(
        model,
        ref_model=reference,
        args=DPOConfig(**options),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4) if lora else None,
    )
    trainer.train()
    assert trainer.accelerator.mixed_precision == launched
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    if reference is not None:
        expected = llama().lm_head.weight
        assert torch.equal(reference.lm_head.weight, expected.bfloat16())


def test_a_reference_that_follows_the_model_does_so_in_fp32_after_float(options):
    """In bf16, most of these numbers would stay where they are."""
    trainer = DPOTrainer(
        llama(),
        ref_model=llama(),
        args=DPOConfig(
            **{**options, "learning_rate": 1e-3},
            sync_ref_model=True,
            ref_model_sync_steps=1,
            ref_model_mixup_alpha=0.02,
        ),
        train_dataset=preferences(),
        processing_class=tokenizer(),
    )
    reference = trainer.ref_model.float().lm_head.weight
    before = reference.clone()
    trainer.train()
    assert reference.dtype == torch.float32
    assert (reference != before).float().mean() > 0.95
    assert trainer.model.lm_head.weight.dtype == torch.bfloat16

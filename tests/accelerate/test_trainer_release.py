"""``release`` in the constructor of an optimizer that the Trainer makes by its class."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import torch_bf16


def test_the_trainer_takes_it_among_the_options_of_a_class():
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
            "unused", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_grad_norm=0.0, report_to=[], save_strategy="no", use_cpu=True, seed=0,
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

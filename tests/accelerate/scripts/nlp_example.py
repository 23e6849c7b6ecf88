"""Sequence classification, in the shape of Accelerate's own nlp_example.py, on data made here."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 32


def get_dataloaders(accelerator: Accelerator, batch_size: int = 16):
    """Pairs of sentences: equivalent where both hold the same rare word."""

    def make(n, seed):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(8, 64, (n, 16), generator=generator)
        labels = torch.randint(2, (n,), generator=generator)
        tokens[:, 0], tokens[:, 8] = 1, 2
        tokens[:, 4] = torch.where(labels.bool(), 3, 4)
        return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]

    def collate_fn(examples):
        return {key: torch.stack([each[key] for each in examples]) for key in examples[0]}

    with accelerator.main_process_first():
        train, evaluate = make(512, 0), make(128, 1)
    return (
        DataLoader(train, shuffle=True, collate_fn=collate_fn, batch_size=batch_size),
        DataLoader(evaluate, shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE),
    )


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs = config["lr"], int(config["num_epochs"])
    seed, batch_size = int(config["seed"]), int(config["batch_size"])
    gradient_accumulation_steps = 1
    if batch_size > MAX_GPU_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_GPU_BATCH_SIZE
        batch_size = MAX_GPU_BATCH_SIZE

    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
        )
    )
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=10,
        num_training_steps=(len(train_dataloader) * num_epochs) // gradient_accumulation_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right.append((predictions == references).float())
        accelerator.print(f"epoch {epoch}:", torch.cat(right).mean().item())

    if accelerator.is_main_process:
        with open(args.result, "w") as file:
            weights = str(next(model.parameters()).dtype)
            accuracy = torch.cat(right).mean().item()
            json.dump(
                {"mode": accelerator.mixed_precision, "weights": weights, "accuracy": accuracy},
                file,
            )
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument(
        "--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16", "fp8"]
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("result")
    config = {"lr": 3e-3, "num_epochs": 3, "seed": 42, "batch_size": 16}
    training_function(config, parser.parse_args())


if __name__ == "__main__":
    main()

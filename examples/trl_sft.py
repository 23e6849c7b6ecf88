"""Supervised fine-tuning with TRL, of all weights or of an adapter.

accelerate launch --mixed_precision bf16-stochastic examples/trl_sft.py
accelerate launch --mixed_precision bf16-stochastic examples/trl_sft.py --lora --base trl-sft

The first command teaches a small model sums, from prompts and completions. The second loads the
saved model, freezes it, and teaches adapters of peft differences. Needs trl and peft.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from byte_llama import byte_tokenizer, make_llama
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer


def exercises(sign: str, n: int, seed: int) -> Dataset:
    """Return ``n`` sums or differences of two digits each."""
    drawn = random.Random(seed)
    pairs = [(drawn.randint(0, 9), drawn.randint(0, 9)) for _ in range(n)]
    answers = [a + b if sign == "+" else a - b for a, b in pairs]
    return Dataset.from_list(
        [
            {"prompt": f"{a}{sign}{b}=", "completion": str(answer)}
            for (a, b), answer in zip(pairs, answers, strict=True)
        ]
    )


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lora", action="store_true", help="train an adapter, not the weights")
    parser.add_argument("--base", help="a folder with the model to start from; default: a new one")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output", help="the folder to save to; default: trl-sft, or trl-sft-lora")
    args = parser.parse_args(arguments)
    if args.base and not Path(args.base).is_dir():
        parser.error(f"--base {args.base} does not exist: train it first, without --lora")

    output = args.output or ("trl-sft-lora" if args.lora else "trl-sft")
    set_seed(0)
    model = make_llama(width=args.width, layers=args.layers, context=32)
    if args.base:
        model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    sign = "-" if args.lora else "+"
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=output,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            logging_steps=max(1, args.steps // 6),
            save_strategy="no",
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            max_length=32,
        ),
        train_dataset=exercises(sign, 2000, seed=1),
        eval_dataset=exercises(sign, 100, seed=2),
        processing_class=byte_tokenizer(),
        peft_config=adapter if args.lora else None,
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"loss of the answers {loss:.4f}, saved to {output}")
    return loss


if __name__ == "__main__":
    main()

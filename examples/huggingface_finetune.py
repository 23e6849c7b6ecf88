"""Fine-tunes a tiny Llama and a tiny Qwen3 with the Hugging Face Trainer and with TRL.

python examples/huggingface_finetune.py --seeds 3 --output finetune.json

Each model is trained in fp32 on one half of the corpus and then fine-tuned on the other half: in
fp32, in the two modes, and, as the control, with bf16 weights under torch's own AdamW. All four
start from the same weights and see the same batches; the final weights are compared in fp32. Needs
transformers, trl and datasets.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from accelerate.utils import extract_model_from_parallel
from byte_llama import byte_tokenizer, llama_sizes
from datasets import Dataset
from records import make_room_for
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from torch_bf16.tools.arguments import count
from torch_bf16.tools.compare.corpus import batches, load_corpus
from torch_bf16.tools.output import write_json

CONTROL = "bf16 weights, torch AdamW"
MODES = ("no", "bf16-fp32-master", "bf16-stochastic", CONTROL)
TOLERANCE = 0.01


def make_model(kind: str, args: argparse.Namespace) -> nn.Module:
    sizes = llama_sizes(args.width, args.layers, args.context + 1)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return Qwen3ForCausalLM(Qwen3Config(head_dim=args.width // 4, **sizes))


def dataset(text: Tensor, args: argparse.Namespace, *, n: int, seed: int) -> Dataset:
    windows = batches(text, n=n, batch_size=args.batch_size, context=args.context, seed=seed)
    rows = windows.flatten(0, 1).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def train(
    model: nn.Module,
    data: Dataset,
    trainer: str,
    mode: str,
    *,
    batch_size: int,
    lr: float,
    seed: int,
) -> nn.Module:
    """Run once, as a launched script would: the environment names the mode."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no" if mode == CONTROL else mode
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder,
            "use_cpu": not torch.cuda.is_available(),
            "num_train_epochs": 1,
            "per_device_train_batch_size": batch_size,
            "learning_rate": lr,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 20,
            "weight_decay": 0.1,
            "seed": seed,
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        if trainer == "trl":
            # TRL's own default is bf16=True; fp32 must be requested.
            precision = {"bf16": False} if mode == "no" else {}
            SFTTrainer(
                model,
                SFTConfig(max_length=None, **precision, **options),
                train_dataset=data,
                processing_class=byte_tokenizer(),
            ).train()
        else:
            Trainer(model, TrainingArguments(**options), train_dataset=data).train()
    return model


@torch.no_grad()
def validation_loss(model: nn.Module, windows: Tensor) -> float:
    """Return the mean negative log-likelihood of the text in nats per byte, computed in fp32."""
    # Stock bf16 keeps autocast around a model that TRL has trained.
    model = extract_model_from_parallel(copy.deepcopy(model), keep_fp32_wrapper=False)
    model.float().eval()
    device = next(model.parameters()).device
    losses = [model(input_ids=w, labels=w).loss.item() for w in windows.to(device)]
    return statistics.fmean(losses)


def study(args: argparse.Namespace) -> Iterator[dict]:
    corpus = load_corpus(args.corpus_bytes)
    half = len(corpus.train) // 2
    shape = {"batch_size": args.batch_size, "context": args.context}
    windows = batches(corpus.validation, n=args.validation_batches, seed=9, **shape)
    for seed in range(args.seeds):
        options = {"batch_size": args.batch_size, "seed": seed}
        first = dataset(corpus.train[:half], args, n=args.steps, seed=2 * seed)
        second = dataset(corpus.train[half:], args, n=args.steps, seed=2 * seed + 1)
        for kind in ("llama", "qwen3"):
            set_seed(seed)
            base = make_model(kind, args)
            base = train(base, first, "trainer", "no", lr=args.base_lr, **options)
            before = validation_loss(base, windows)
            for trainer in ("trainer", "trl"):
                for mode in MODES:
                    model = copy.deepcopy(base)
                    if mode == CONTROL:
                        model.to(torch.bfloat16)
                    model = train(model, second, trainer, mode, lr=args.lr, **options)
                    loss = validation_loss(model, windows)
                    run = {"model": kind, "trainer": trainer, "mode": mode, "seed": seed}
                    run |= {"before": before, "loss": loss}
                    print(json.dumps(run), flush=True)
                    yield run


def verdicts(runs: list[dict]) -> list[tuple[bool, str]]:
    """Return a verdict on each model, trainer and mode, with its mean distance from fp32."""
    found = []
    for kind in ("llama", "qwen3"):
        for trainer in ("trainer", "trl"):
            losses = {
                mode: {
                    run["seed"]: run["loss"]
                    for run in runs
                    if (run["model"], run["trainer"], run["mode"]) == (kind, trainer, mode)
                }
                for mode in MODES
            }
            for mode in MODES[1:]:
                gaps = [loss - losses["no"][seed] for seed, loss in losses[mode].items()]
                gap = statistics.fmean(gaps)
                holds = gap > TOLERANCE if mode == CONTROL else abs(gap) <= TOLERANCE
                each = ", ".join(f"{one:+.4f}" for one in gaps)
                end = "ends" if holds else "does NOT end"
                side = "more than" if mode == CONTROL else "within"
                sentence = f"{kind}, {trainer}, {mode}: {end} {side} {TOLERANCE} nats from fp32"
                found.append((holds, f"{sentence} ({gap:+.4f}; {each})"))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--base-lr", type=float, default=2e-3)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
    parser.add_argument("--validation-batches", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    make_room_for(args.output)
    runs = list(study(args))
    found = verdicts(runs)
    for _, sentence in found:
        print(sentence)
    if args.output:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        settings = {k: v for k, v in vars(args).items() if k != "output"}
        record = {"settings": settings | versions, "runs": runs, "verdicts": [s for _, s in found]}
        write_json(record, args.output)
    return 0 if all(holds for holds, _ in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The same GPT with Accelerate's own loop, in the precision that the launcher names.

accelerate launch --cpu --mixed_precision bf16-stochastic examples/accelerate_demo.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed, tqdm
from gpt import GPT, GPTConfig, add_size_arguments, next_byte_loss
from torch.utils.data import DataLoader, TensorDataset

from torch_bf16.tools.compare.corpus import batches, load_corpus
from torch_bf16.tools.compare.schedule import learning_rate_factor


def loader(text: torch.Tensor, args: argparse.Namespace, *, n: int, seed: int) -> DataLoader:
    """Return ``n`` batches of fixed windows, which ``prepare`` distributes over the processes."""
    windows = batches(text, n=n, batch_size=args.batch_size, context=args.context, seed=seed)
    return DataLoader(TensorDataset(windows.flatten(0, 1)), batch_size=args.batch_size)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixed-precision", help="default: what the launcher says")
    parser.add_argument("--steps", type=int, default=800)
    add_size_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation-batches", type=int, default=64)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> float:
    args = parse_arguments(arguments)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    set_seed(args.seed)
    corpus = load_corpus(args.corpus_bytes)
    ranks = accelerator.num_processes

    model = GPT(GPTConfig(context=args.context, width=args.width, layers=args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    # At each step a prepared scheduler advances by the number of processes.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.steps * ranks)
    )
    train = loader(corpus.train, args, n=args.steps * ranks, seed=args.seed + 1)
    validation = loader(corpus.validation, args, n=args.validation_batches, seed=args.seed + 2)
    model, optimizer, scheduler, train, validation = accelerator.prepare(
        model, optimizer, scheduler, train, validation
    )

    model.train()
    for (batch,) in (bar := tqdm(train)):
        loss = next_byte_loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")

    model.eval()
    losses = []
    with torch.no_grad():
        for (batch,) in validation:
            loss = next_byte_loss(model, batch)
            # One value for each window, because the windows that fill up the last round of batches
            # are dropped by their number.
            losses.append(accelerator.gather_for_metrics(loss.double().repeat(len(batch))))
    validation_loss = torch.cat(losses).mean().item()
    accelerator.print(f"{accelerator.mixed_precision}: validation loss {validation_loss:.4f}")
    accelerator.end_training()
    return validation_loss


if __name__ == "__main__":
    main()

"""A whole training loop in plain PyTorch: schedule, clipping, micro-batches, checkpoint, resume.

python examples/pytorch_loop.py --precision bf16-stochastic
python examples/pytorch_loop.py --precision bf16-stochastic --steps 600 --resume loop.pt

The second command continues where the first one ended, with the bits of an uninterrupted run.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from gpt import GPT, GPTConfig, add_size_arguments, next_byte_loss

import torch_bf16
from torch_bf16.tools.compare.corpus import batches, load_corpus


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = ("fp32", "bf16-stochastic", "bf16-fp32-master")
    parser.add_argument("--precision", choices=modes, default="bf16-stochastic")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--micro-batches", type=int, default=2, help="summed before each step")
    add_size_arguments(parser, batch_size=8)
    parser.add_argument("--checkpoint", type=Path, default=Path("loop.pt"))
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    args = parser.parse_args(arguments)
    if args.micro_batches < 1:
        parser.error(f"--micro-batches {args.micro_batches} must be at least 1")
    return args


def main(arguments: list[str] | None = None) -> float:
    args = parse_arguments(arguments)
    torch.manual_seed(0)
    corpus = load_corpus(args.corpus_bytes)
    model = GPT(GPTConfig(context=args.context, width=args.width, layers=args.layers))
    model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 50))

    autocast = nullcontext()
    if args.precision != "fp32":
        # Sums the gradients of micro-batches in the same two bytes without losing small ones.
        recipe = torch_bf16.get_recipe(args.precision, accumulate="bf16_stochastic")
        torch_bf16.prepare(model, optimizer, recipe)
        print(torch_bf16.describe(model, optimizer))
        autocast = torch.autocast(args.device, torch.bfloat16)

    start = 0
    if args.resume:
        state = torch.load(args.resume, map_location=args.device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["step"]
        if start >= args.steps:
            raise SystemExit(
                f"{args.resume} has {start} steps already: --steps {args.steps} must be more"
            )

    loss = torch.tensor(float("nan"))
    for step in range(start, args.steps):
        shape = {"batch_size": args.batch_size, "context": args.context}
        for batch in batches(corpus.train, n=args.micro_batches, seed=step, **shape):
            with autocast:
                loss = next_byte_loss(model, batch.to(args.device))
            (loss / args.micro_batches).backward()
        if args.precision == "fp32":
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            norm = torch_bf16.clip_next_step(optimizer, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}")

    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    saved = {name: each.state_dict() for name, each in states.items()}
    torch.save(saved | {"step": args.steps}, args.checkpoint)
    return loss.item()


if __name__ == "__main__":
    main()

"""A custom loop on Lightning Fabric: the mode is a precision there, too.

fabric run --precision bf16-stochastic examples/fabric.py
python examples/fabric.py --precision bf16-stochastic
"""

from __future__ import annotations

import argparse
import os

import lightning
import torch
from gpt import GPT, GPTConfig, add_size_arguments, next_byte_loss
from torch.utils.data import DataLoader

from torch_bf16.tools.compare.corpus import batches, load_corpus


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", help="default: what `fabric run` says")
    parser.add_argument("--steps", type=int, default=300)
    add_size_arguments(parser)
    args = parser.parse_args(arguments)

    fabric = lightning.Fabric(precision=args.precision)
    if "LT_CLI_USED" not in os.environ:  # `fabric run` has launched the processes
        fabric.launch()
    fabric.seed_everything(0)
    corpus = load_corpus(args.corpus_bytes)
    shape = {"batch_size": args.batch_size, "context": args.context}
    windows = batches(corpus.train, n=args.steps, seed=1, **shape).flatten(0, 1)

    model = GPT(GPTConfig(context=args.context, width=args.width, layers=args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(windows, batch_size=args.batch_size))

    loss = torch.tensor(float("nan"))
    for step, batch in enumerate(loader, start=1):
        loss = next_byte_loss(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            fabric.print(f"step {step}: loss {loss.item():.4f}")
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
    return loss.item()


if __name__ == "__main__":
    main()

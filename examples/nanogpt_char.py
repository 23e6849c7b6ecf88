"""nanoGPT's character model of Shakespeare, with its settings for a CPU, in four precisions.

python examples/nanogpt_char.py --text shakespeare.txt

These are the settings for which Karpathy's nanoGPT (github.com/karpathy/nanoGPT, README and
config/train_shakespeare_char.py) states a validation loss of 1.88 after 2,000 steps: 4 layers, 4
heads, 128 wide, 64 characters, 12 windows per step, a warm-up of 100 steps to 1e-3 and a cosine
down to 1e-4, betas 0.9 and 0.99, decay 0.1 on matrices, gradients clipped at 1. The text is the
tiny Shakespeare of char-rnn, 1.1 MB, which you must provide; as in nanoGPT, the first nine tenths
are for training.

The differences from nanoGPT: norms have a bias, and windows and weights are drawn differently.
"""

from __future__ import annotations

import argparse
import math
import statistics
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpt import GPT, GPTConfig, next_byte_loss
from records import make_room_for
from torch import Tensor

import torch_bf16
from torch_bf16.tools.arguments import count
from torch_bf16.tools.compare.corpus import batches
from torch_bf16.tools.output import write_json

PUBLISHED = 1.88
CONTROL = "bf16, to the nearest"
PRECISIONS = ("fp32", "bf16-fp32-master", "bf16-stochastic", CONTROL)


@dataclass(frozen=True)
class Settings:
    """Options with nanoGPT's names and its values for a CPU."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    batch_size: int = 12
    max_iters: int = 2000
    warmup_iters: int = 100
    learning_rate: float = 1e-3
    min_lr: float = 1e-4
    beta2: float = 0.99
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    eval_batches: int = 200

    def lr(self, step: int) -> float:
        if step < self.warmup_iters:
            return self.learning_rate * (step + 1) / (self.warmup_iters + 1)
        done = (step - self.warmup_iters) / max(1, self.max_iters - self.warmup_iters)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.min_lr + cosine * (self.learning_rate - self.min_lr)


def load_text(path: Path) -> tuple[Tensor, Tensor, int]:
    """Return training and validation text as indices, and the number of different characters."""
    text = path.read_text(encoding="utf-8")
    characters = sorted(set(text))
    number = {character: position for position, character in enumerate(characters)}
    encoded = torch.tensor([number[character] for character in text])
    end = int(0.9 * len(encoded))
    return encoded[:end], encoded[end:], len(characters)


def train(text: Path, precision: str, seed: int, settings: Settings) -> float:
    """Train, and return the final validation loss in nats per character."""
    training, validation, vocabulary = load_text(text)
    shape = {"batch_size": settings.batch_size, "context": settings.block_size}
    torch.manual_seed(seed)
    config = GPTConfig(
        vocabulary, settings.block_size, settings.n_layer, settings.n_head, settings.n_embd
    )
    model = GPT(config)
    if precision == CONTROL:
        model.to(torch.bfloat16)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    autocast = nullcontext()
    if precision != "fp32":
        autocast = torch.autocast("cpu", torch.bfloat16)
        if precision != CONTROL:
            torch_bf16.prepare(model, optimizer, precision)
    for step in range(settings.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr(step)
        (batch,) = batches(training, n=1, seed=seed * settings.max_iters + step, **shape)
        with autocast:
            loss = next_byte_loss(model, batch)
        loss.backward()
        torch_bf16.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    windows = batches(validation, n=settings.eval_batches, seed=1, **shape)
    with torch.no_grad(), autocast:
        return statistics.fmean(next_byte_loss(model, batch).item() for batch in windows)


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="tiny Shakespeare, as one file")
    parser.add_argument("--steps", type=int, default=Settings.max_iters)
    parser.add_argument("--seeds", type=count, default=1)
    parser.add_argument("--eval-batches", type=int, default=Settings.eval_batches)
    parser.add_argument("--json", type=Path, help="a file for the settings and all losses")
    args = parser.parse_args(arguments)
    make_room_for(args.json)
    settings = Settings(max_iters=args.steps, eval_batches=args.eval_batches)
    losses: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for seed in range(args.seeds):
        for precision in PRECISIONS:
            losses[precision].append(train(args.text, precision, seed, settings))
            gap = losses[precision][-1] - losses["fp32"][-1]
            print(f"seed {seed}, {precision}: {losses[precision][-1]:.4f} ({gap:+.4f})", flush=True)
    for precision, each in losses.items():
        print(f"{precision:22} {statistics.fmean(each):.4f} (nanoGPT states {PUBLISHED})")
    if args.json:
        record = {"settings": asdict(settings), "torch": torch.__version__, "losses": losses}
        write_json(record, args.json)
    return losses


if __name__ == "__main__":
    main()

"""Is what ``recommend`` says right where it is known what each recipe has lost?

    python tests/proofs/recommended.py

The model of ``examples/learning_rate_sweep.py`` is trained as there, on the sources of the standard
library, and ``recommend`` then takes 20 steps on the prose of Python's help topics, at each rate of
the record. Where ``bf16-stochastic`` reached less than 99.8 % of fp32's improvement in 500 steps,
it must recommend ``bf16+8`` or more, elsewhere not. Rates that were not run have no share.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import learning_rate_sweep  # noqa: E402
import paired_runs  # noqa: E402

from torch_bf16.tools import cli  # noqa: E402
from torch_bf16.tools.recommend.verdict import LEARNED  # noqa: E402

RECORD = ROOT / "examples" / "results" / "2026-11-21-cpu" / "learning_rate_sweep.json"
STEPS, TAKEN, CONTEXT, WIDTH, LAYERS = 500, 20, 64, 64, 2
MORE_RATES = ("1e-3",)


class NextByte(nn.Module):
    """The model, returning its loss."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, batch: Tensor) -> Tensor:
        return paired_runs.next_byte_loss(self.gpt, batch)


def training() -> tuple[nn.Module, list[Tensor], torch.optim.Optimizer]:
    """What is recommended for: the fine-tuning of the sweep, at the rate of the environment."""
    gpt = paired_runs.GPT(paired_runs.GPTConfig(context=CONTEXT, width=WIDTH, layers=LAYERS))
    gpt.load_state_dict(torch.load(os.environ["RECOMMENDED_WEIGHTS"]))
    optimizer = torch.optim.AdamW(
        gpt.parameters(), lr=float(os.environ["RECOMMENDED_LR"]), betas=(0.9, 0.95), weight_decay=0
    )
    drawn = paired_runs.batches(
        learning_rate_sweep.help_topics().train, n=TAKEN, seed=1001, batch_size=16, context=CONTEXT
    )
    return NextByte(gpt), list(drawn), optimizer


def recommended(lr: str, weights: Path) -> dict[str, Any]:
    """The record of the command."""
    os.environ.update(RECOMMENDED_LR=lr, RECOMMENDED_WEIGHTS=str(weights))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        given = [f"{Path(__file__).resolve()}:training", "--total-steps", str(STEPS)]
        assert cli.main(["recommend", *given, "-n", str(TAKEN), "--json", "-"]) == 0
    return json.loads(out.getvalue())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--pretraining-steps", type=int, default=2000)
    parser.add_argument("--weights", type=Path, help="those of an earlier run; written if missing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shares = json.loads(RECORD.read_text())["share_of_improvement"]["bf16-stochastic"]
    with tempfile.TemporaryDirectory() as folder:
        weights = args.weights or Path(folder) / "weights.pt"
        if not weights.exists():
            run = paired_runs.Run(seed=0, steps=args.pretraining_steps, lr=1e-3)
            corpus = learning_rate_sweep.load_corpus(4_000_000)
            torch.save(paired_runs.train(run, paired_runs.REFERENCE, corpus)[1], weights)
        wrong = 0
        print("learning rate  reached     S  recommended")
        for lr in (*MORE_RATES, *shares):
            found = recommended(lr, weights)
            distance = found["recipes"][1]["distance"]
            share = shares.get(lr)
            smallest = found["recommended"] == "bf16-stochastic"
            wrong += share is not None and (share["mean"] >= LEARNED) != smallest
            reached = "not run" if share is None else f"{share['mean']:.2%}"
            print(f"{float(lr):13g}  {reached:>7}  {distance:5.1f}  {found['recommended']}")
    print(f"{wrong} of {len(shares)} rates wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

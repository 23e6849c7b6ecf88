"""What each library's optimizer does with small numbers, compared with fp32: five measurements.

    python examples/small_updates.py --json small_updates.json

Each optimizer that ``bench`` knows and that is installed steps one matrix of bf16 weights, and
torch's AdamW steps the same weights in fp32 with the same gradients. Measured on the weights that
a forward pass would use:

- decay: how much of fp32's weight decay is applied if gradients are zero;
- updates: how much of fp32's movement they make, at the learning rate of a fine-tuning;
- distance: how far from fp32's weights they end, relative to that movement;
- replicas: whether two processes have the same bits if they have drawn other random numbers before;
- resume: whether half of the steps, a state dict, and the other half in a new process with the same
  seed give the bits of all steps in one process.

Compiled steps run eagerly here, because numbers are compared and not times.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from records import make_room_for
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from torch_bf16 import Recipe
from torch_bf16.tools.bench.entries import Entry, ours
from torch_bf16.tools.bench.peers import BASELINE, PEERS
from torch_bf16.tools.output import write_json

SIDE = 256
RECIPES = ("bf16-fp32-master", "bf16-stochastic", Recipe("6.2", exp_avg="int8", exp_avg_sq="int8"))
LIBRARIES = (
    "torch",
    "torchao",
    "flashoptim",
    "optimi",
    "torchastic",
    "heavyball",
    "pytorch-optimizer",
    "bitsandbytes",
)
COMMON = {"betas": (0.9, 0.999), "eps": 1e-8}
DECAY = {"lr": 1e-3, "weight_decay": 0.1, **COMMON}
FINE_TUNING = {"lr": 1e-5, "weight_decay": 0.0, **COMMON}


@dataclass
class Answers:
    """The measurements of one optimizer; see above. The first three are relative to fp32's."""

    decay: float
    updates: float
    distance: float
    replicas: bool
    resume: bool


class Process:
    """A matrix and its optimizer in one process, new or resumed from a state dict.

    Args:
        entry: the optimizer.
        weights: what the matrix is.
        seed: of torch's random numbers.
        arguments: hyperparameters.
        states: a file of the optimizer's state dict.
    """

    def __init__(
        self,
        entry: Entry,
        weights: Tensor,
        seed: int = 0,
        arguments: Mapping[str, Any] = FINE_TUNING,
        states: io.BytesIO | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self._weight = nn.Parameter(weights.to(entry.dtype, copy=True))
        self._optimizer = entry.over([self._weight], arguments)
        if states is not None:
            states.seek(0)
            self._optimizer.load_state_dict(torch.load(states, weights_only=False))

    def take(self, gradients: Sequence[Tensor]) -> Tensor:
        """Take a step with each of these gradients, and return a copy of the weights."""
        for gradient in gradients:
            self._weight.grad = gradient.to(self._weight.dtype, copy=True)
            self._optimizer.step()
        return self._weight.detach().clone()

    def saved(self) -> io.BytesIO:
        """Return the state dict in a file in memory."""
        file = io.BytesIO()
        torch.save(self._optimizer.state_dict(), file)
        return file


def ask(entry: Entry, fp32: Entry, start: Tensor, gradients: Sequence[Tensor]) -> Answers:
    """Measure an optimizer over all steps, from these weights and with these gradients."""

    def movement(of: Entry, gradients: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
        return Process(of, start, arguments=arguments).take(gradients).double() - start.double()

    zeros = [torch.zeros_like(start)] * len(gradients)
    updates, wanted = (movement(each, gradients, FINE_TUNING) for each in (entry, fp32))
    whole = Process(entry, start).take(gradients)
    half = len(gradients) // 2
    first = Process(entry, start)
    second = Process(entry, first.take(gradients[:half]), states=first.saved())
    return Answers(
        decay=share(*(movement(each, zeros, DECAY) for each in (entry, fp32))),
        updates=share(updates, wanted),
        distance=float((updates - wanted).norm() / wanted.norm()),
        replicas=torch.equal(Process(entry, start, seed=1).take(gradients), whole),
        resume=torch.equal(second.take(gradients[half:]), whole),
    )


def share(movement: Tensor, wanted: Tensor) -> float:
    """Return the share of the wanted movement that another one makes: its projection."""
    return float((movement * wanted).sum() / (wanted * wanted).sum())


def entries(device: str) -> list[Entry]:
    """Return our optimizers, and those of libraries that are installed and run on this device."""
    found = [*ours(RECIPES)]
    for name in LIBRARIES:
        if PEERS[name].installed:
            found += [e for e in PEERS[name].entries if e.only_on in (None, device)]
    return [each for each in found if each.name != BASELINE]


def numbers(device: str, steps: int) -> tuple[Tensor, list[Tensor]]:
    """Return weights like a layer's, and bf16 gradients that are noise around a mean."""
    source = torch.Generator().manual_seed(2)

    def normal() -> Tensor:
        return torch.randn(SIDE, SIDE, generator=source)

    start, mean = 0.02 * normal(), normal()
    gradients = [1e-3 * (mean + normal()) for _ in range(steps)]
    return start.bfloat16().to(device), [each.bfloat16().to(device) for each in gradients]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, help="write the answers there")
    options = parser.parse_args(arguments)
    make_room_for(options.json)
    torch.compiler.set_stance("force_eager")
    start, gradients = numbers(options.device, options.steps)
    fp32 = next(each for each in PEERS["torch"].entries if each.name == BASELINE)
    table = Table("", "decay", "updates", "distance", "replicas", "resume")
    record: dict[str, Any] = {}
    for entry in entries(options.device):
        answers = ask(entry, fp32, start, gradients)
        record[entry.name] = asdict(answers)
        flags = ["same" if flag else "differ" for flag in (answers.replicas, answers.resume)]
        parts = [f"{each:.1%}" for each in (answers.decay, answers.updates, answers.distance)]
        table.add_row(entry.name, *parts, *flags)
    Console().print(table)
    if options.json:
        libraries = [PEERS[name] for name in LIBRARIES]
        versions = {each.pip: version(each.pip) for each in libraries if each.installed}
        content = {"steps": options.steps, "versions": versions, "answers": record}
        write_json(content, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The bits of 50 steps of every rule in every format, compared with a record.

    python tests/proofs/bits.py            compare; exits with 1 where a bit differs
    python tests/proofs/bits.py --record   write the record

What is stored (weights, planes, moments) is hashed without its names, so that a change of names or
of rooms must leave every line of the record as it is.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.formats import ROLES
from torch_bf16.tools.bench.rules import RULES

RECORD = Path(__file__).with_suffix(".json")
STEPS = 50

WEIGHTS = tuple(ROLES["weights"])
MOMENTS = tuple(name for name in ROLES["exp_avg"] if name in ROLES["exp_avg_sq"])
NAMED = ("bf16-stochastic", "bf16-fp32-master")


def recipes() -> dict[str, Recipe]:
    """Each format of weights beside the usual moments, and each of moments beside such weights."""
    found = {f"weights {name}": Recipe(weights=name) for name in WEIGHTS}
    for name in MOMENTS:
        found[f"moments {name}"] = Recipe(exp_avg=name, exp_avg_sq=name)
    return found


class Model(torch.nn.Module):
    """Parameters of every kind that takes a path of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"blocks": (6, 128), "odd": (7, 5), "cube": (4, 2, 32), "vector": (9,)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator)))
        self.transposed = torch.nn.Parameter(torch.randn(5, 64, generator=generator).t())
        self.kept = torch.nn.Parameter(torch.randn(3, 4, generator=generator))


def cast(recipe: Recipe, only: tuple[str, ...] | None = None) -> Model:
    model = Model()
    for name in [name for name, _ in model.named_parameters() if only and name not in only]:
        delattr(model, name)
    keep = () if only else ("kept",)
    return torch_bf16.cast_model(model, torch_bf16.get_recipe(recipe, keep_fp32=keep))


def set_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in model.parameters():
        # Now and then nothing, and sizes that differ by orders of magnitude.
        scale = 0.0 if step % 7 == 6 else 10.0 ** (step % 4 - 2)
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = gradient.to(parameter.dtype)


def digest(model: torch.nn.Module, optimizer: Any = None) -> str:
    total = blake2b(digest_size=8)
    for parameter in model.parameters():
        state = optimizer.state[parameter].values() if optimizer is not None else ()
        tensors = [parameter.detach(), *(each for each in state if isinstance(each, Tensor))]
        parts = [each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for each in tensors]
        for each in sorted(blake2b(part, digest_size=8).digest() for part in parts):
            total.update(each)
    return total.hexdigest()


def train(model: torch.nn.Module, optimizer: Any, backend: str) -> str:
    optimizer.backend = backend
    for step in range(STEPS):
        set_gradients(model, step)
        optimizer.step()
    return digest(model, optimizer)


def fused(recipe: Recipe, optimizer: str, arguments: Any) -> Callable[[str], str]:
    def run(backend: str) -> str:
        model = cast(recipe)
        made = getattr(torch_bf16, optimizer)(
            model.named_parameters(), recipe=recipe, **{**arguments, "lr": 1e-2}
        )
        return train(model, made, backend)

    return run


def matrices(optimizer: str, recipe: Recipe) -> Callable[[str], str]:
    def run(backend: str) -> str:
        model = cast(recipe, ("blocks", "odd", "transposed"))
        made = getattr(torch_bf16, optimizer)(model.named_parameters(), lr=1e-2, recipe=recipe)
        return train(model, made, backend)

    return run


def converted(recipe: Recipe) -> Callable[[str], str]:
    def run(backend: str) -> str:
        model = cast(recipe)
        made = torch.optim.Adamax(model.named_parameters(), lr=1e-2)
        return train(model, torch_bf16.convert(made, recipe), backend)

    return run


def summed(backend: str) -> str:
    recipe = Recipe(accumulate="bf16_stochastic")
    model = cast(recipe)
    optimizer = torch_bf16.AdamW(model.named_parameters(), lr=1e-2, recipe=recipe, backend=backend)
    for step in range(10):
        optimizer.zero_grad()
        for batch in range(4):
            generator = torch.Generator().manual_seed(10 * step + batch)
            sum(
                (p * torch.randn(p.shape, generator=generator).to(p.dtype)).float().sum()
                for p in model.parameters()
            ).backward()
        optimizer.step()
    return digest(model, optimizer)


def averaged(format: str) -> Callable[[str], str]:
    def run(backend: str) -> str:
        model = cast(Recipe())
        optimizer = torch_bf16.AdamW(model.named_parameters(), lr=1e-2, backend=backend)
        ema = torch_bf16.EMA(model, 0.99, format=format, seed=3, backend=backend)
        for step in range(STEPS):
            set_gradients(model, step)
            optimizer.step()
            ema.update_parameters(model)
        return digest(ema.module)

    return run


def reloaded(source: Recipe, target: Recipe) -> Callable[[str], str]:
    def run(backend: str) -> str:
        model = cast(source)
        optimizer = torch_bf16.AdamW(model.named_parameters(), lr=1e-2, recipe=source)
        train(model, optimizer, backend)
        saved = copy.deepcopy(optimizer.state_dict())
        other = torch_bf16.AdamW(model.named_parameters(), lr=1e-2, recipe=target)
        other.load_state_dict(saved)
        return train(model, other, backend)

    return run


def cases() -> Iterator[tuple[str, Callable[[str], str]]]:
    for rule, (_, optimizer, arguments) in RULES.items():
        for name, recipe in recipes().items():
            yield f"{rule}, {name}", fused(recipe, optimizer, arguments)
    for name, recipe in recipes().items():
        yield f"Muon, {name}", matrices("Muon", recipe)
        yield f"Adafactor, {name}", matrices("Adafactor", recipe)
        yield f"converted Adamax, {name}", converted(recipe)
    yield "sums of micro-batches", summed
    yield "EMA, float32", averaged("fp32")
    yield "EMA, bfloat16", averaged("bf16_stochastic")
    named = {name: torch_bf16.get_recipe(name) for name in NAMED}
    blocks = Recipe("blocks", exp_avg="int8", exp_avg_sq="int8")
    for one, two in ((*NAMED,), (*reversed(NAMED),)):
        yield f"{one} loaded into {two}", reloaded(named[one], named[two])
        yield f"int8 loaded into {two}", reloaded(blocks, named[two])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the record")
    parser.add_argument("--backends", default="eager,cpu", help="comma-separated")
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.record and options.only:
        parser.error("--record writes the whole record; leave --only out")
    known = {} if options.record else json.loads(RECORD.read_text())
    found: dict[str, str] = {}
    wrong = 0
    for backend in options.backends.split(","):
        for name, run in cases():
            if options.only not in name:
                continue
            bits = run(backend)
            if name not in known and not options.record:
                wrong += 1
                print(f"{name}: not in the record; write a new one with --record", flush=True)
            if bits != known.setdefault(name, bits):
                wrong += 1
                print(f"{name}: {bits} on {backend}, {known[name]} is the record", flush=True)
            found[name] = bits
    if options.record:
        RECORD.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{len(found)} cases on {options.backends}: {wrong} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

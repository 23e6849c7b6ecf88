"""Time steps over real models' shapes against torch's fused AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_bf16.backends import choose
from torch_bf16.recipe import RECIPES
from torch_bf16.tools.bench.entries import ours
from torch_bf16.tools.bench.models import MODELS, Shapes, gpt2, llama
from torch_bf16.tools.bench.peers import BASELINE, PEERS
from torch_bf16.tools.bench.record import record
from torch_bf16.tools.bench.rounds import measure
from torch_bf16.tools.bench.ways import in_ways
from torch_bf16.tools.machine import device_state

from .certificates import INT8_MOMENTS

__all__ = ["models_for", "speed"]

# For CPUs, on which the real shapes would take minutes.
_SMALL: dict[str, Shapes] = {
    "gpt2-small-layers": gpt2(layers=4, width=256, vocabulary=8000, context=256),
    "llama-small-layers": llama(4, 256, 1024, 128, 8000, tied=True),
}
_ROUNDS = {"cpu": 3, "cuda": 20}


def models_for(device: torch.device) -> dict[str, Shapes]:
    """Shapes by name: those of gpt2-124m and llama-1b on a GPU, smaller ones on a CPU."""
    if device.type == "cpu":
        return dict(_SMALL)
    return {name: MODELS[name] for name in ("gpt2-124m", "llama-1b")}


def speed(
    device: torch.device, model: str, shapes: Shapes, command: str, progress: Callable[[str], None]
) -> dict[str, Any]:
    """The record of a benchmark: each recipe and torch fused, plain, moved, and in a CUDA graph.

    Args:
        device: the device to measure on.
        model: the name of the shapes.
        shapes: the shapes of the parameters.
        command: the command line, for the record.
        progress: called with lines of text about the progress.

    Raises:
        MemoryError: torch's fused AdamW does not fit.
    """
    recipes = ours([*RECIPES.values(), INT8_MOMENTS])
    (baseline,) = (each for each in PEERS["torch"].entries if each.name == BASELINE)
    plain = (baseline, *recipes)
    ways = ("moved", "graph") if device.type == "cuda" else ("moved",)
    before = device_state(device)
    rounds = _ROUNDS[device.type]
    measured = measure([*plain, *in_ways(plain, ways)], shapes, device, rounds, progress)
    backend = choose(device).name
    named = {"command": command, "model": model, "backend": backend, "baseline": BASELINE}
    return record(measured, {**named, "rules": "AdamW"}, shapes, device, before)

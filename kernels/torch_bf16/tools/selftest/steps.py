"""Compare whole optimizers with the eager backend, bit for bit, in situations of training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.errors import described
from torch_bf16.gradients.clipping import clip_next_step
from torch_bf16.optim.adam import AdamW
from torch_bf16.optim.lion import Lion
from torch_bf16.optim.muon import Muon
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.optim.sgd import SGD
from torch_bf16.parameters import parameters_of
from torch_bf16.recipe import RECIPES, Recipe

from .certificates import INT8_MOMENTS

__all__ = ["Check", "NotHere", "Outcome", "all_checks", "differences", "run", "waiting_is_an_error"]

Check = Callable[[torch.device], str | None]
"""Returns what is wrong on a device, or None; raises :class:`NotHere` if it does not apply."""

_SHAPES = {
    "embedding": (1000, 64),
    "wide": (64, 192),
    "tall": (130, 64),
    "odd": (37, 65),
    "bias": (192,),
    "gain": (64,),
    "head": (2,),
}
_KEPT_FP32 = ("gain",)
_STEPS = 4

_OPTIMIZERS: dict[str, tuple[type[BF16Optimizer], Mapping[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Lion": (Lion, {"lr": 0.01, "weight_decay": 0.1}),
    "Muon": (Muon, {"lr": 0.01}),
}
_NAMED = tuple(RECIPES.values())


class NotHere(Exception):
    """Raised by a check that does not apply to a device."""


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        name: the check's name.
        fault: what is wrong; None if nothing is.
        skipped: why the check was skipped; None if it was not.
        seconds: how long it took.
    """

    name: str
    fault: str | None
    skipped: str | None
    seconds: float


def run(name: str, check: Check, device: torch.device) -> Outcome:
    """Run a check; an exception counts as a fault."""
    start, fault, skipped = time.perf_counter(), None, None
    try:
        fault = check(device)
    except NotHere as reason:
        skipped = str(reason)
    except Exception as error:
        fault = described(error)
    return Outcome(name, fault, skipped, time.perf_counter() - start)


def all_checks() -> dict[str, Check]:
    """All checks by their names."""
    found: dict[str, Check] = {}
    for name in _OPTIMIZERS:
        for recipe in (*_NAMED, INT8_MOMENTS):
            found[f"{name}, {recipe.name}"] = partial(_plain, recipe=recipe, name=name)
    for recipe in _NAMED:
        for what, check in _SITUATIONS.items():
            found[f"{what}, {recipe.name}"] = partial(check, recipe=recipe)
    return found


def _make(
    device: torch.device,
    recipe: Recipe,
    name: str = "AdamW",
    backend: str | None = None,
    **more: Any,
) -> BF16Optimizer:
    """Make an optimizer over parameters with the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    named = []
    for key, shape in _SHAPES.items():
        dtype = torch.float32 if key in _KEPT_FP32 else torch.bfloat16
        tensor = torch.randn(shape, generator=generator).to(device, dtype)
        named.append((key, nn.Parameter(tensor)))
    groups: list[Any] = named
    if name == "Muon":
        matrices = [pair for pair in named if pair[1].ndim == 2 and pair[0] != "embedding"]
        rest = [pair for pair in named if pair not in matrices]
        groups = [{"params": matrices}, {"params": rest, "use_muon": False}]
    kind, options = _OPTIMIZERS[name]
    arguments: dict[str, Any] = {**options, **more, "recipe": recipe, "backend": backend}
    return kind(groups, **arguments)


def _judge_of(
    device: torch.device, recipe: Recipe, name: str = "AdamW", **more: Any
) -> BF16Optimizer:
    # The last bits of Muon's matrix products depend on the device.
    place = device if name == "Muon" else torch.device("cpu")
    return _make(place, recipe, name, "eager", **more)


def _give(optimizer: BF16Optimizer, seed: int, keep: bool = True) -> None:
    """Give parameters random gradients; with ``keep``, in the memory of those that they had."""
    generator = torch.Generator().manual_seed(1000 + seed)
    held = []
    for parameter in parameters_of(optimizer):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if keep and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            # Old gradients live until all new ones exist, so that no address is reused.
            held.append(parameter.grad)
            parameter.grad = gradient.to(parameter.device)


def differences(one: BF16Optimizer, other: BF16Optimizer) -> str | None:
    """The first difference in bits between two optimizers' weights and states; None if none."""
    pairs = zip(parameters_of(one), parameters_of(other), strict=True)
    for number, (a, b) in enumerate(pairs):
        states, other_states = (
            {"weight": p, **optimizer.state[p]} for p, optimizer in ((a, one), (b, other))
        )
        if states.keys() != other_states.keys():
            return f"parameter {number} has states {sorted(states)} and not {sorted(other_states)}"
        for key in states:
            wrong = _bytes(states[key]) != _bytes(other_states[key])
            if count := int(wrong.sum()):
                return f"{count} bytes of {key} of parameter {number} differ from eager's"
    return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _plain(device: torch.device, recipe: Recipe, name: str) -> str | None:
    ours, judge = _make(device, recipe, name), _judge_of(device, recipe, name)
    for seed in range(_STEPS):
        for optimizer in (ours, judge):
            _give(optimizer, seed)
            optimizer.scale_next_step(0.5)
            optimizer.step()
    return differences(ours, judge)


def _moved_gradients(device: torch.device, recipe: Recipe) -> str | None:
    ours, judge = _make(device, recipe), _judge_of(device, recipe)
    for seed in range(_STEPS):
        for optimizer in (ours, judge):
            _give(optimizer, seed, keep=False)
            optimizer.step()
    return differences(ours, judge)


def _changed_sets(device: torch.device, recipe: Recipe) -> str | None:
    """Other parameters have a gradient in every step, as with experts or dropped layers."""
    ours, judge = _make(device, recipe), _judge_of(device, recipe)
    for seed in range(2 * _STEPS):
        for optimizer in (ours, judge):
            _give(optimizer, seed)
            for number, parameter in enumerate(parameters_of(optimizer)):
                if seed and (number + seed) % 3 == 0:
                    parameter.grad = None
            optimizer.step()
    return differences(ours, judge)


def _found_inf(device: torch.device, recipe: Recipe) -> str | None:
    ours, judge = _make(device, recipe), _judge_of(device, recipe)
    for seed in range(_STEPS):
        skip = seed == 1
        _give(ours, seed)
        ours.skip_next_step_where(torch.tensor([float(skip)], device=device))
        ours.step()
        if not skip:
            _give(judge, seed)
            judge.step()
    if ours.skipped_steps != 1:
        return f"{ours.skipped_steps} steps were counted as skipped and not 1"
    return differences(ours, judge)


def _clip(device: torch.device, recipe: Recipe) -> str | None:
    ours, judge = _make(device, recipe), _judge_of(device, recipe)
    for seed in range(_STEPS):
        _give(ours, seed)
        _give(judge, seed)
        norm = clip_next_step(ours, 1.0, skip_nonfinite=True)
        judge.scale_next_step((1.0 / (norm + 1e-6)).clamp(max=1.0).cpu())
        exact = sum(float(p.grad.double().square().sum()) for p in parameters_of(judge)) ** 0.5  # pyright: ignore
        if abs(float(norm) / exact - 1) > 1e-5:
            return f"the norm of the gradients is {float(norm)} and not {exact}"
        ours.step()
        judge.step()
    return differences(ours, judge)


def _graph_replay(device: torch.device, recipe: Recipe) -> str | None:
    _needs_cuda(device)
    rate = torch.tensor(0.01, device=device)
    ours = _make(device, recipe, lr=rate, capturable=True)
    judge = _judge_of(device, recipe, lr=rate.cpu())
    _give(ours, 0)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        ours.step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # torch's default stream for captures may belong to another device.
    with torch.cuda.graph(graph, stream=side):
        ours.step()
    _give(judge, 0)
    judge.step()
    for seed in range(1, 2 * _STEPS):
        _give(ours, seed)
        # Replays and ordinary steps may alternate.
        graph.replay() if seed % 3 else ours.step()
        _give(judge, seed)
        judge.step()
    return differences(ours, judge)


def _nothing_waits(device: torch.device, recipe: Recipe) -> str | None:
    _needs_cuda(device)
    optimizer = _make(device, recipe)
    gradients = []
    for seed in (0, 1):
        _give(optimizer, seed, keep=False)
        gradients.append([p.grad for p in parameters_of(optimizer)])
    optimizer.step()
    for moved in (False, True):
        for parameter, gradient in zip(parameters_of(optimizer), gradients[not moved], strict=True):
            parameter.grad = gradient
        with waiting_is_an_error():
            clip_next_step(optimizer, 1.0, skip_nonfinite=True)
            optimizer.step()
    return None


def _needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise NotHere(f"not on a {device.type}")


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Make torch raise if something in the block waits for a CUDA device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns once, after setting the mode, that it is a prototype: this must not raise.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


_SITUATIONS: dict[str, Callable[..., str | None]] = {
    "gradients that move": _moved_gradients,
    "other gradients in each step": _changed_sets,
    "found_inf": _found_inf,
    "clipping": _clip,
    "CUDA graph": _graph_replay,
    "nothing waits for the device": _nothing_waits,
}

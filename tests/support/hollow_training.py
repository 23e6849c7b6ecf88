"""Trainings on a device that is not there: where a GPU would wait, and which bits they have.

A process of its own.

python hollow_training.py <library of hollow_cuda.py> <found.json>
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hollow_cuda import Device
from interpreter_speed import patch_language_once

WARM = 2
MASTER = "bf16-fp32-master"
CLIPPED = {"max_norm": 1.0}
# The devices that a run is carried over by checkpoints.
CARRIED = ("cpu", "cpu", "cpu"), ("cuda:0", "cpu", "cuda:1"), ("cpu", "cuda:1", "cuda:0")


def optimizer_of(model: Any, name: str, recipe: str, **options: Any) -> Any:
    groups = model.named_parameters()
    if name == "Muon":
        groups = torch_bf16.param_groups(model, muon=True)
    kind = getattr(torch_bf16, name)
    return kind(groups, **{"lr": 1e-2, **options}, recipe=recipe)


def converted(model: Any, name: str, recipe: str) -> Any:
    theirs = getattr(torch.optim, name)(model.parameters())
    return torch_bf16.convert(theirs, recipe)


def summed(model: Any, recipe: str, format: str) -> Any:
    optimizer = optimizer_of(model, "AdamW", recipe)
    torch_bf16.accumulate_gradients(model, optimizer, format)
    return optimizer


def averaged(model: Any, optimizer: Any, kept: dict[str, Any]) -> None:
    if not kept:
        kept["average"] = torch_bf16.EMA(model, 0.9)
    kept["average"].update_parameters(model, optimizer)


def averaged_there(model: Any, optimizer: Any, kept: dict[str, Any]) -> None:
    """As when an average is moved with the model, by which its count of updates is moved, too."""
    if not kept:
        kept["average"] = torch_bf16.EMA(model, 0.9).to("cuda:0")
    kept["average"].update_parameters(model, optimizer)


def logged(model: Any, optimizer: Any, kept: dict[str, Any]) -> None:
    """The norms of weights, which stay on the device."""
    kept["norms"] = [p.data.norm() for p in model.parameters()]


def clamped(model: Any, optimizer: Any, kept: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)


def blended(model: Any, optimizer: Any, kept: dict[str, Any]) -> None:
    if not kept:
        kept.update((name, p.detach().float()) for name, p in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kept[name].lerp_(parameter.float(), 0.01)


def waiting(model: Any, optimizer: Any, kept: dict[str, Any]) -> None:
    """What the tests are to see: each of these waits on a GPU."""
    weight = model[0].weight.detach()
    weight.sum().item(), torch.equal(weight, weight), weight.nonzero(), weight.cpu()
    torch.empty(weight.shape, dtype=weight.dtype).copy_(weight, non_blocking=True)
    weight.copy_(weight.cpu())


def waits(
    make: Callable[..., Any],
    recipe: str = "bf16-stochastic",
    *,
    steps: int = 5,
    clips: bool = False,
    passes: int = 1,
    after: Callable[..., None] | None = None,
    device: str = "cuda:0",
) -> dict[str, list[int]]:
    """Train, and return what waited, by the function of ours, each with the steps that did."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    model = torch_bf16.cast_model(torch.nn.Sequential(*layers).to(device), recipe)
    optimizer = make(model, recipe=recipe)
    batch = torch.randn(16, 8).to(device, torch.bfloat16)
    found: dict[str, list[int]] = defaultdict(list)
    kept: dict[str, Any] = {}

    def waited(what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/torch_bf16/" in f.filename]
        place = "elsewhere"
        if frames:
            place = f"{frames[-1].filename.split('/torch_bf16/')[1]} {frames[-1].name}"
        found[f"{place}: {what}"].append(step)

    for step in range(1, steps + 1):
        with hollow.observed(waited if step > WARM else None):
            for _ in range(passes):
                model(batch).float().square().mean().backward()
            if clips:
                torch_bf16.clip_next_step(optimizer, 1.0, skip_nonfinite=True)
            optimizer.step()
            if after is not None:
                after(model, optimizer, kept)
            optimizer.zero_grad()
    assert torch.cuda.current_device() == 0
    return found


def legs(recipe: str, *devices: str) -> list[Any]:
    """Train a few steps on each device, by a checkpoint from one to the next; return the bits."""
    saved = None
    for number, device in enumerate(devices):
        torch.manual_seed(0)
        model = torch_bf16.cast_model(torch.nn.Linear(24, 16).to(device), recipe)
        backend = "eager" if device == "cpu" else "triton"
        optimizer = optimizer_of(model, "AdamW", recipe, backend=backend)
        average = torch_bf16.EMA(model, 0.9, backend=backend)
        parts = model, optimizer, average
        if saved is not None:
            saved.seek(0)
            states = torch.load(saved, map_location=device, weights_only=True)
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
        for step in range(2):
            for parameter in model.parameters():
                generator = torch.Generator().manual_seed(2 * number + step)
                values = torch.randn(parameter.shape, generator=generator)
                parameter.grad = values.to(device, parameter.dtype)
            optimizer.step()
            average.update_parameters(model, optimizer)
        saved = io.BytesIO()
        torch.save([part.state_dict() for part in parts], saved)
    values = [*torch_bf16.fp32_state_dict(model, optimizer).values()]
    values += [value for state in optimizer.state.values() for value in state.values()]
    values += average.state_dict().values()
    tensors = [value.cpu().reshape(-1) for value in values if isinstance(value, torch.Tensor)]
    return [tensor.view(torch.uint8).tolist() for tensor in tensors]


def moved(recipe: str, *devices: str) -> list[Any]:
    """Train one model on each device, moved there with its state as an error says; return bits."""
    torch.manual_seed(0)
    model = torch_bf16.cast_model(torch.nn.Linear(24, 16).to(devices[0]), recipe)
    optimizer = optimizer_of(model, "AdamW", recipe, backend="eager")
    for number, device in enumerate(devices):
        model.to(device)
        optimizer.load_state_dict(optimizer.state_dict())
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.grad = values.to(device, parameter.dtype)
        optimizer.step()
    exact = torch_bf16.fp32_state_dict(model, optimizer).values()
    return [value.cpu().view(torch.int32).tolist() for value in exact]


def by(name: str, **options: Any) -> Callable[..., Any]:
    return lambda model, recipe: optimizer_of(model, name, recipe, **options)


def trainings() -> dict[str, Callable[[], dict[str, list[int]]]]:
    """Each training by its name."""
    stochastic, master = ("bf16-stochastic",), (MASTER,)
    return {
        **{
            f"{name}, clipped": lambda name=name: waits(by(name), clips=True)
            for name in (
                *("ADOPT", "Adafactor", "Adagrad", "Adam", "AdamW", "AdamWScheduleFree", "Lion"),
                *("Muon", "NAdam", "RAdam", "RMSprop", "SGD", "SGDScheduleFree"),
            )
        },
        "a master": lambda: waits(by("AdamW"), *master, clips=True),
        "means of tensors": lambda: waits(by("AdamW", cautious=True), *stochastic),
        "a rate on the device": lambda: waits(by("AdamW", lr=torch.tensor(0.01, device="cuda"))),
        "not on the current device": lambda: waits(by("AdamW"), *master, device="cuda:1"),
        "released": lambda: waits(by("AdamW", release=CLIPPED | {"norm": "last_step"})),
        "sums in fp32": lambda: waits(
            lambda model, recipe: summed(model, recipe, "fp32"), clips=True, passes=2
        ),
        "stochastic sums": lambda: waits(
            lambda model, recipe: summed(model, recipe, "bf16_stochastic"), passes=3
        ),
        "an average": lambda: waits(by("AdamW"), *master, after=averaged),
        "an average that was moved": lambda: waits(by("AdamW"), *master, after=averaged_there),
        "windows in which blends are looked for": lambda: waits(
            by("SGD"), *stochastic, steps=74, after=blended
        ),
        "converted": lambda: waits(
            lambda model, recipe: converted(model, "Adamax", recipe), *master
        ),
        "waits of the program's own": lambda: waits(by("SGD"), after=waiting),
        "weights read": lambda: waits(by("SGD"), *master, after=logged),
        "weights clamped": lambda: waits(by("SGD"), *master, after=clamped),
    }


if __name__ == "__main__":
    hollow = Device(Path(sys.argv[1]))
    hollow.let_triton_interpret()
    patch_language_once()
    # By name, so that no kernel has to prove itself in the interpreter.
    os.environ["TORCH_BF16_BACKEND"] = "triton"

    import torch

    import torch_bf16

    results = {name: run() for name, run in trainings().items()}
    carried = {
        recipe: {", ".join(each): legs(recipe, *each) for each in CARRIED}
        for recipe in ("bf16-stochastic", MASTER)
    }
    in_place = {
        recipe: [moved(recipe, *each) for each in CARRIED] for recipe in ("bf16-stochastic", MASTER)
    }
    found = {"waits": results, "carried": carried, "moved": in_place}
    Path(sys.argv[2]).write_text(json.dumps(found))

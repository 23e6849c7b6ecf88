"""Find who calls an optimizer, for how many steps, and at which learning rates; imports no host."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from torch_bf16.living import instances_of

__all__ = ["Host", "host_of", "planned_rates", "rate_of", "schedulers_of"]

# The modules and packages whose methods call the step, and the hosts that they belong to.
_HOSTS = {
    "transformers.trainer": "trainer",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "pytorch_lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "lightning_fabric",
    "accelerate": "accelerate",
}
_MOST_STEPS = 200_000


@dataclass(frozen=True)
class Host:
    """The program that trains.

    Attributes:
        name: ``"trainer"``, ``"lightning"``, ``"pytorch_lightning"``, ``"fabric"``,
            ``"lightning_fabric"``, ``"accelerate"`` or ``"pytorch"``.
        steps: the length of the whole run, if the host knows it.
    """

    name: str = "pytorch"
    steps: int | None = None


def host_of(frame: FrameType | None) -> Host:
    """Find the host among the callers of an optimizer's step.

    Args:
        frame: the innermost caller's.
    """
    found: list[tuple[str, Any]] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        for source, name in _HOSTS.items():
            if f"{module}.".startswith(f"{source}."):
                found.append((name, frame.f_locals.get("self")))
        frame = frame.f_back
    # The Trainer steps through Accelerate, and Lightning's Trainer through a strategy of Fabric.
    for wanted in dict.fromkeys(_HOSTS.values()):
        owners = [owner for name, owner in found if name == wanted]
        if owners:
            return Host(wanted, next(filter(None, map(_steps, owners)), None))
    return Host()


def _steps(owner: Any) -> int | None:
    """The length of the whole run, if the object that trains knows it."""
    try:
        steps = getattr(getattr(owner, "state", None), "max_steps", None)
        if not steps:
            steps = getattr(owner, "estimated_stepping_batches", None)
    # In Lightning it is a property, which may load data.
    except Exception:
        return None
    known = isinstance(steps, (int, float)) and math.isfinite(steps) and steps > 0
    return int(steps) if known else None  # pyright: ignore[reportArgumentType]


def planned_rates(
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
    taken: list[list[float]],
    steps: int,
) -> tuple[list[list[float]], str | None]:
    """Learning rates of the whole of a run that has been ended: steps its schedule to the end.

    Args:
        optimizer: its groups' rates are set by the schedule; mutated.
        schedulers: what :func:`schedulers_of` found of it.
        taken: the rates of its groups at each step that was taken.
        steps: the length of the whole run.

    Returns:
        Rates of the groups for each step, and why the last ones are assumed for all later steps;
        None if the schedule gave them.
    """
    rates = taken[:steps]
    missing = steps - len(rates)
    if missing <= 0 or not rates:
        return rates, None
    constant = [rates[-1]] * missing
    if not schedulers:
        return rates + constant, "no schedule of torch.optim.lr_scheduler was found"
    if missing > _MOST_STEPS:
        return rates + constant, f"the schedule was not followed over {missing:,} steps"
    if any(each.last_epoch + 2 < len(taken) for each in schedulers):
        return rates + constant, "the schedule does not change at each step"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for done in range(missing):
            try:
                for each in schedulers:
                    each.step()
            # Some schedulers end, such as OneCycleLR, and some need a metric.
            except Exception as error:
                rest = [rates[-1]] * (missing - done)
                return rates + rest, f"{type(error).__name__} in the schedule: {error}"
            rates.append([rate_of(group) for group in optimizer.param_groups])
    return rates, None


def schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[Any]]:
    """The living schedulers of each optimizer, except those that another scheduler steps."""
    living = instances_of(LRScheduler)
    inner = {id(y) for x in living for y in getattr(x, "_schedulers", ())}
    outer = [x for x in living if id(x) not in inner]
    return [
        [x for x in outer if _bare(getattr(x, "optimizer", None)) is each] for each in optimizers
    ]


def _bare(optimizer: Any) -> Any:
    """An optimizer without Accelerate's or Fabric's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def rate_of(group: Mapping[str, Any]) -> float:
    """A group's learning rate; NaN if it has none."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)

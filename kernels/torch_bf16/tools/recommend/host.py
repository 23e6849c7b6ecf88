"""Who calls an optimizer, for how many steps, and at which learning rates: asked, not imported."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Host", "host_of", "planned_rates"]

# Of a method that calls the step, its module's beginning, and what writes the two lines.
_HOSTS = {
    "transformers.trainer": "trainer",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "pytorch_lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "lightning_fabric",
    "accelerate": "accelerate",
}
_MOST = 200_000


@dataclass(frozen=True)
class Host:
    """Who trains.

    Attributes:
        name: ``"trainer"``, ``"lightning"``, ``"pytorch_lightning"``, ``"fabric"``,
            ``"lightning_fabric"``, ``"accelerate"`` or ``"pytorch"``.
        steps: of the whole run, where the host knows it.
    """

    name: str
    steps: int | None = None


def host_of(frame: FrameType | None) -> Host:
    """The host among the callers of an optimizer's step.

    Args:
        frame: of the innermost one.
    """
    found: list[tuple[str, Any]] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        for prefix, name in _HOSTS.items():
            if module.startswith(prefix):
                found.append((name, frame.f_locals.get("self")))
        frame = frame.f_back
    # The Trainer steps through Accelerate, and Lightning's through a strategy of Fabric's.
    for wanted in dict.fromkeys(_HOSTS.values()):
        owners = [owner for name, owner in found if name == wanted]
        if owners:
            return Host(wanted, next(filter(None, map(_steps, owners)), None))
    return Host("pytorch")


def _steps(owner: Any) -> int | None:
    """Of the whole run, as the object that trains says."""
    try:
        steps = getattr(getattr(owner, "state", None), "max_steps", None)
        if not steps:
            steps = getattr(owner, "estimated_stepping_batches", None)
    # Lightning's is a property, which may load data.
    except Exception:
        return None
    known = isinstance(steps, (int, float)) and math.isfinite(steps) and steps > 0
    return int(steps) if known else None  # pyright: ignore[reportArgumentType]


def planned_rates(
    optimizer: torch.optim.Optimizer, taken: list[list[float]], steps: int
) -> tuple[list[list[float]], str | None]:
    """The learning rates of a run that will not go on: its schedule is stepped to the end.

    Args:
        optimizer: whose groups a schedule sets; mutated.
        taken: the rates of its groups at each step that was taken.
        steps: of the whole run.

    Returns:
        Rates of the groups for each step, and why the last ones were taken for all that follow;
        None where the schedule told them.
    """
    rates = taken[:steps]
    missing = steps - len(rates)
    if missing <= 0 or not rates:
        return rates, None
    schedulers = list(_schedulers(optimizer))
    constant = [rates[-1]] * missing
    if not schedulers:
        return rates + constant, "no schedule of torch.optim.lr_scheduler was found"
    if missing > _MOST:
        return rates + constant, f"the schedule was not followed over {missing:,} steps"
    if any(each.last_epoch + 2 < len(taken) for each in schedulers):
        return rates + constant, "the schedule does not change at each step"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for done in range(missing):
            try:
                for each in schedulers:
                    each.step()
            # Some end, such as OneCycleLR, and some want a metric.
            except Exception as error:
                rest = [rates[-1]] * (missing - done)
                return rates + rest, f"{type(error).__name__} in the schedule: {error}"
            rates.append([_number(group.get("lr")) for group in optimizer.param_groups])
    return rates, None


def _schedulers(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The schedulers of an optimizer, but not those that another one steps."""
    # Not isinstance(), which asks lazy modules and proxies what they are.
    living = [x for x in gc.get_objects() if issubclass(type(x), LRScheduler)]
    own = [x for x in living if _bare(getattr(x, "optimizer", None)) is optimizer]
    inner = {id(y) for x in own for y in getattr(x, "_schedulers", ())}
    return (x for x in own if id(x) not in inner)


def _bare(optimizer: Any) -> Any:
    """An optimizer without what Accelerate or Fabric has put around it."""
    return getattr(optimizer, "optimizer", optimizer)


def _number(rate: Any) -> float:
    return math.nan if rate is None else float(rate)

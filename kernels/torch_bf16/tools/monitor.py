"""Observe what rounding does to an optimizer's updates while it trains."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bf16.backends import StepInputs
from torch_bf16.backends.host_scalars import multiplier_of
from torch_bf16.engine.batch import alike
from torch_bf16.engine.member import Member
from torch_bf16.formats import BF16_PLUS_16
from torch_bf16.gradients.clipping import total_norm
from torch_bf16.optim.optimizer import BF16Optimizer

from .sampling import STALLING, Sample, is_foreseen, layer_of, sample_of

__all__ = ["LayerUpdate", "UpdateMonitor", "take_figures"]

_logger = logging.getLogger("torch_bf16")


@dataclass(frozen=True)
class LayerUpdate:
    """What rounding left of one layer's update in one step, over the observed elements.

    With the intended update ``d`` (the rule's, in fp32) and the one that was stored, ``s``:

    Attributes:
        survived: ``<s, d> / <d, d>``, the share of the update that rounding let through. 1 on
            average for stochastic rounding, 1 for exact masters, less where updates are lost.
        unmoved: share of the elements that should have moved and did not.
        snr: drift over noise after ``horizon`` such steps, ``sqrt(horizon) * |d| / |s - d|``, with
            the expected noise for stochastic rounding; inf if nothing is rounded away. Below about
            1 the random walk that rounding adds outweighs what is learned.
        update: root mean square of ``d``.
        lr: learning rate of the layer's first parameter.
        stochastic: whether its weights are rounded stochastically: then ``survived`` of few
            elements is a matter of chance, and ``snr`` is the number to watch.
    """

    survived: float
    unmoved: float
    snr: float
    update: float
    lr: float
    stochastic: bool


class UpdateMonitor:
    """Observe what share of an optimizer's updates survives rounding, and where training stalls.

    At every ``every``-th step it computes, for some elements of each parameter, the update that the
    rule intends, lets the step happen, and compares what was stored. It never writes: training has
    the same bits without it. Steps that are skipped, or have a gradient that is not finite, are
    left out; of a sharded parameter, this rank's part is observed. For matrices under Muon and
    Adafactor, and for optimizers without a fused rule, it reports only the gradient norm.

    Args:
        optimizer: an optimizer of this package.
        every: steps from one observation to the next; None observes only after
            :meth:`observe_next_step`.
        sample: the most elements of each parameter to observe, in runs spread over it.
        horizon: the number of steps for which ``LayerUpdate.snr`` is computed.
        warn: whether to log, once per layer, that it stalls and what helps.

    Attributes:
        layers: the last observation, by layer: a parameter's name without its last part.
        gradient_norm: norm of all gradients at that step, in fp32, as they were in memory.

    Raises:
        ValueError: ``optimizer`` is not one of ours, its gradients are released, or a number is
            not positive.

    Example:
        >>> monitor = UpdateMonitor(optimizer, every=1)
        >>> optimizer.step()
        >>> shares = [layer.survived for layer in monitor.layers.values()]
    """

    def __init__(
        self,
        optimizer: BF16Optimizer,
        *,
        every: int | None = 100,
        sample: int = 4096,
        horizon: int = 1000,
        warn: bool = True,
    ) -> None:
        if not isinstance(optimizer, BF16Optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} does not round by a recipe, so there is nothing to "
                "watch; pass an optimizer of torch_bf16, or convert() it first"
            )
        if optimizer._engine.release is not None:
            raise ValueError(
                "the optimizer's steps run inside the backward pass, one parameter at a time: its "
                "gradients are released. Leave the release out to watch whole steps, or end it: "
                "remove() of what release_gradients returned"
            )
        for name, number in (("every", every), ("sample", sample), ("horizon", horizon)):
            is_count = isinstance(number, int) and type(number) is not bool and number > 0
            if not is_count and (name, number) != ("every", None):
                raise ValueError(f"{name}={number!r} must be a positive int")
        self.every, self.sample, self.horizon, self.warn = every, sample, horizon, warn
        self.layers: dict[str, LayerUpdate] = {}
        self.gradient_norm = math.nan
        self._optimizer = optimizer
        self._steps = 0
        self._asked = False
        self._fresh = False
        self._samples: list[Sample] = []
        self._norm: Tensor | None = None
        self._warned: set[str] = set()
        optimizer.observers.append(self)

    def observe_next_step(self) -> None:
        """Observe the next step, too."""
        self._asked = True

    def remove(self) -> None:
        """Stop observing."""
        if self in self._optimizer.observers:
            self._optimizer.observers.remove(self)

    def metrics(self, prefix: str = "bf16") -> dict[str, float]:
        """The last observation as flat names and numbers for a logger, without infinite ``snr``."""
        found: dict[str, float] = {}
        for layer, each in self.layers.items():
            found[f"{prefix}/survived/{layer}"] = each.survived
            found[f"{prefix}/unmoved/{layer}"] = each.unmoved
            if math.isfinite(each.snr):
                found[f"{prefix}/snr/{layer}"] = each.snr
        if not math.isnan(self.gradient_norm):
            found[f"{prefix}/gradient_norm"] = self.gradient_norm
            found[f"{prefix}/skipped_steps"] = float(self._optimizer.skipped_steps)
        return found

    def take_metrics(self, prefix: str = "bf16") -> dict[str, float]:
        """:meth:`metrics`, once after each observation; an empty dict until the next one."""
        fresh, self._fresh = self._fresh, False
        return self.metrics(prefix) if fresh else {}

    def before_update(self, members: Sequence[Any], inputs: StepInputs) -> None:
        """Called by the optimizer when gradients have arrived and nothing is updated yet."""
        self._steps += 1
        self._samples, self._norm = [], None  # of a step that was broken off
        if not self._asked and (self.every is None or self._steps % self.every):
            return
        if inputs.is_skipped:
            return
        self._asked = False
        groups = self._optimizer.param_groups
        # All parameters: those of which FSDP1 left nothing on this rank are in the norm, too.
        self._norm = total_norm([p for group in groups for p in group["params"]])
        scale = multiplier_of(inputs)
        self._samples = [
            sample_of(each, groups[each.group], scale, self.sample)
            for each in members
            if is_foreseen(each) and each.shard.memory.numel()
        ]

    def after_update(self) -> None:
        """Called by the optimizer when parameters and states are updated."""
        if self._norm is None:
            return
        samples, norm = self._samples, self._norm.item()
        self._samples, self._norm = [], None
        # If a gradient was not finite, the step spoilt what it touched.
        if not math.isfinite(norm):
            return
        self.gradient_norm, self._fresh = norm, True
        if not samples:
            return
        sums = [_sums(each) for each in samples]
        table = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
        by_layer: dict[str, list[tuple[Sample, list[float]]]] = defaultdict(list)
        for sample, row in zip(samples, table, strict=True):
            name = sample.member.shard.name
            by_layer[layer_of(name)].append((sample, row))
        self.layers = {layer: self._update_of(rows) for layer, rows in by_layer.items()}
        if self.warn:
            for layer, rows in by_layer.items():
                # Apart, as vectors move by far larger steps than matrices, and would hide theirs.
                for part in alike(rows, lambda row: len(row[0].member.shard.shape) > 1):
                    self._warn_once(layer, self._update_of(part), part[0][0].member)

    def _update_of(self, rows: list[tuple[Sample, list[float]]]) -> LayerUpdate:
        columns = zip(*(row for _, row in rows), strict=True)
        product, intended, error, unmoved, moving = map(sum, columns)
        n = sum(len(sample.where) for sample, _ in rows)
        return LayerUpdate(
            survived=product / intended if intended else 1.0,
            unmoved=unmoved / moving if moving else 0.0,
            snr=math.sqrt(self.horizon * intended / error) if error else math.inf,
            update=math.sqrt(intended / n),
            lr=rows[0][0].lr,
            stochastic=any(sample.noise is not None for sample, _ in rows),
        )

    def _warn_once(self, layer: str, each: LayerUpdate, member: Member) -> None:
        if layer in self._warned or each.update == 0:
            return
        if each.survived < STALLING and not each.stochastic:
            trouble = f"{1 - each.survived:.0%} of its updates are lost to rounding"
        elif each.snr < 1:
            noise = f"{1 / each.snr:.1f} times what it learns in {self.horizon} steps"
            trouble = f"rounding noise is {noise}"
        else:
            return
        self._warned.add(layer)
        more = BF16_PLUS_16.bytes_per_element - member.formats[0].bytes_per_element
        _logger.warning(
            "layer %s: %s at lr %.3g; use weights='bf16+16', which keeps every update "
            "(%d %s more per parameter)",
            *(layer, trouble, each.lr, more, "byte" if more == 1 else "bytes"),
        )


def take_figures(monitors: Sequence[UpdateMonitor]) -> dict[str, float]:
    """What monitors measured since the last call, as flat names and numbers for a logger.

    Args:
        monitors: those of a run, in the order of its optimizers.

    Returns:
        ``bf16/survived/<layer>`` and so on of an only monitor; of several,
        ``bf16/optimizer_0/survived/<layer>``, ``bf16/optimizer_1/survived/<layer>`` and so on.
    """
    figures: dict[str, float] = {}
    for number, monitor in enumerate(monitors):
        prefix = f"bf16/optimizer_{number}" if len(monitors) > 1 else "bf16"
        figures |= monitor.take_metrics(prefix)
    return figures


def _sums(sample: Sample) -> Tensor:
    """fp64 sums over a sample: ``<s, d>``, ``<d, d>``, squared noise, unmoved, moving."""
    intended = sample.intended.double()
    stored = (sample.now() - sample.before).double()
    moving = intended != 0
    error = (stored - intended).square().sum() if sample.noise is None else sample.noise
    unmoved = (moving & (stored == 0)).sum()
    return torch.stack(
        [stored @ intended, intended @ intended, error, unmoved.double(), moving.sum().double()]
    )

"""The states that an optimizer keeps, and the scratch that its step needs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_bf16 import rules
from torch_bf16.optim import adafactor, adagrad, adam, lion, muon, schedule_free, sgd
from torch_bf16.optim.optimizer import BF16Optimizer
from torch_bf16.rules import Rule
from torch_bf16.tools.factory import class_and_options

from .live import LiveBytes
from .shapes import Weight

__all__ = ["OPTIMIZERS", "PLAIN", "OptimizerSpec", "measure_spec", "optimizer_spec"]

# Rule and scratch without options; to measure them would import all of torch's compiler.
PLAIN: dict[type[BF16Optimizer], tuple[Rule, float | None]] = {
    adam.AdamW: (rules.ADAMW, 1.0),
    adam.Adam: (rules.ADAM, 1.0),
    adam.NAdam: (rules.NADAM, 1.0),
    adam.RAdam: (rules.RADAM, 1.0),
    adam.ADOPT: (rules.ADOPT, None),
    sgd.SGD: (rules.SGD, 0.0),
    lion.Lion: (rules.LION, None),
    adagrad.RMSprop: (rules.RMSPROP, 1.0),
    adagrad.Adagrad: (rules.ADAGRAD, 2.0),
    schedule_free.AdamWScheduleFree: (rules.SCHEDULE_FREE_ADAMW, None),
    schedule_free.SGDScheduleFree: (rules.SCHEDULE_FREE_SGD, None),
    muon.Muon: (rules.MUON, 3.0),
    adafactor.Adafactor: (rules.ADAFACTOR, 1.0),
}
OPTIMIZERS = {each.__name__: each for each in PLAIN}
_PROBE = (512, 512)


@dataclass(frozen=True)
class OptimizerSpec:
    """The memory that an optimizer needs.

    Attributes:
        name: the optimizer as the user wrote it.
        rule: the rule, which says what states it keeps.
        scratch: elements, of the parameters' dtype, that torch's own step holds for each element of
            the parameters, by default with ``foreach=True``, as on GPUs; None if torch has no such
            optimizer.
        foreach: whether torch's own steps all tensors at once; None for its default on GPUs, where
            only optimizers that work on whole tensors step one after the other.
        fused: whether torch's own steps in one kernel.
    """

    name: str
    rule: Rule
    scratch: float | None
    foreach: bool | None = None
    fused: bool = False

    def rule_of(self, weight: Weight) -> Rule:
        """The rule of a weight: beside Muon's matrices, AdamW updates all other weights."""
        if self.rule is rules.MUON and not _is_orthogonalised(weight):
            return rules.ADAMW
        if self.rule is rules.ADAFACTOR and len(weight.shape) < 2:
            return rules.ADAFACTOR_VECTOR
        return self.rule

    def scratch_of(self, rule: Rule) -> float | None:
        """The scratch of a rule that :meth:`rule_of` returned."""
        return self.scratch if rule is self.rule else PLAIN[adam.AdamW][1]

    def steps_singly(self, rule: Rule) -> bool:
        """Whether torch's own holds the scratch of such a rule for one tensor at a time."""
        if self.foreach is None or rule is not self.rule:
            return bool(rule.stage_states)
        return not self.foreach


def _is_orthogonalised(weight: Weight) -> bool:
    return len(weight.shape) == 2 if weight.hidden is None else weight.hidden


def optimizer_spec(text: str) -> OptimizerSpec:
    """An optimizer by its class and options: ``AdamW`` or ``SGD(momentum=0.9)``.

    Raises:
        ValueError: the optimizer is not in :data:`OPTIMIZERS`, or an option is wrong.
    """
    dotted, options = class_and_options(text)
    name = re.split("[.:]", dotted)[-1]
    if name not in OPTIMIZERS:
        raise ValueError(f"no optimizer {name!r}; known ones: {', '.join(OPTIMIZERS)}")
    if options:
        return measure_spec(text, name, options)
    rule, scratch = PLAIN[OPTIMIZERS[name]]
    return OptimizerSpec(text, rule, scratch if hasattr(torch.optim, name) else None)


def measure_spec(text: str, name: str, options: Mapping[str, Any]) -> OptimizerSpec:
    """The same, measured by making the optimizer and by taking a step with torch's own."""
    # Not on the meta device: torch's Adafactor reads numbers.
    parameter = torch.zeros(_PROBE, requires_grad=True)
    our_class: Any = OPTIMIZERS[name]
    try:
        optimizer = our_class([parameter], **{"lr": 1e-3, **options}, backend="eager")
        rule = optimizer.rule_of_parameter(optimizer.param_groups[0], parameter)
        torch_class = getattr(torch.optim, name, None)
        own, foreach, fused = dict(options), options.get("foreach"), bool(options.get("fused"))
        if foreach is None and not fused:
            own["foreach"] = not rule.stage_states
        torch_optimizer = torch_class and _make(torch_class, parameter, own)
    # torch's constructors may raise anything.
    except Exception as error:
        raise ValueError(f"{text!r} cannot be made: {error}") from error
    scratch = torch_optimizer and _scratch(torch_optimizer, parameter)
    return OptimizerSpec(text, rule, scratch, foreach, fused)


def _make(
    torch_class: type[torch.optim.Optimizer], parameter: torch.Tensor, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """torch's optimizer, with those options that it has."""
    accepted = inspect.signature(torch_class).parameters
    wanted = {"lr": 1e-3, **options}
    return torch_class(
        [parameter], **{key: each for key, each in wanted.items() if key in accepted}
    )


def _scratch(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> float:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    return live.peak / (parameter.numel() * parameter.element_size())

"""Checks what our optimizers can train, and that nothing relevant changed between two steps.

All checks run before a step updates anything, so that the optimizer stays usable after an error.
Messages begin with a verb: the caller prepends the parameter's label.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torch_bf16.engine.versions import Snapshot
from torch_bf16.errors import Label, StateMismatchError, prefix_errors
from torch_bf16.memory import over_same_memory
from torch_bf16.sharding import Shard, missing_memory, shard_of

__all__ = [
    "FULLY_DECOUPLED",
    "check_gradient",
    "check_group",
    "check_options",
    "check_parameter",
    "check_real",
    "check_separate",
    "check_unchanged",
    "resolve_peak_lr",
]

FULLY_DECOUPLED = "fully_decoupled_weight_decay"

_TRAINABLE = (torch.bfloat16, torch.float32, torch.complex64)


def check_group(
    group: Mapping[str, Any],
    number: int,
    names: Sequence[str] = (),
    cast: Collection[int] = (),
) -> None:
    """Refuse parameters that cannot be trained, or are in a group twice.

    Args:
        group: a parameter group.
        number: the group's number, for messages.
        names: of the parameters, for messages, if the group has none; ``""`` for one without.
        cast: ids of parameters that will have another dtype by then, and are not checked.

    Raises:
        ValueError: a parameter is in the group twice, or has a dtype or memory that cannot be
            trained.
        NotImplementedError: a parameter is sharded in a way that cannot be trained.
    """
    if len({id(p) for p in group["params"]}) < len(group["params"]):
        raise ValueError(
            f"parameter group {number} holds a parameter twice, which would be updated twice per "
            "step; give each parameter once, tied ones too (module.parameters() does)"
        )
    for position, parameter in enumerate(group["params"]):
        # Frozen parameters of other dtypes are checked only when they get a gradient.
        frozen = not parameter.requires_grad and parameter.dtype not in _TRAINABLE
        if not (is_lazy(parameter) or frozen or id(parameter) in cast):
            with prefix_errors(functools.partial(_label, group, number, position, names)):
                check_parameter(shard_of(parameter))


def check_real(
    group: Mapping[str, Any], number: int, optimizer: str, names: Sequence[str] = ()
) -> None:
    """Refuse complex parameters, for an optimizer that looks at whole real matrices.

    Args:
        group: a parameter group.
        number: the group's number, for messages.
        optimizer: the optimizer's name.
        names: as for :func:`check_group`.

    Raises:
        ValueError: a parameter is complex.
    """
    for position, parameter in enumerate(group["params"]):
        if parameter.is_complex():
            with prefix_errors(functools.partial(_label, group, number, position, names)):
                raise ValueError(
                    f"is {parameter.dtype}, and {optimizer} looks at whole real matrices. Step it "
                    "by AdamW, which takes complex parameters: in a group with use_muon=False of "
                    "torch_bf16.Muon, or in an optimizer of its own"
                )


def _label(group: Mapping[str, Any], number: int, position: int, names: Sequence[str]) -> str:
    """A parameter as messages describe it, while its group is not yet in the optimizer."""
    names, shape = group.get("param_names") or names, tuple(group["params"][position].shape)
    name = f"{names[position]!r}, " if position < len(names) and names[position] else ""
    return f"parameter {name}number {position} of group {number}, shape {shape},"


def check_parameter(shard: Shard) -> None:
    """Refuse a parameter that a kernel cannot update.

    Raises:
        ValueError: it is neither bf16, fp32 nor complex64, or its elements are not numbers in
            memory.
        NotImplementedError: it is sharded in a way that cannot be trained.
    """
    parameter = shard.parameter
    if parameter.dtype not in _TRAINABLE:
        remedy = "Call model.float() before the model is cast or prepared"
        if parameter.is_complex():
            remedy = "Make it complex64: torch.nn.Parameter(p.detach().to(torch.complex64))"
        raise ValueError(
            f"is {parameter.dtype}; bfloat16, float32 and complex64 parameters can be trained. "
            f"{remedy}"
        )
    if parameter.is_complex() and shard.sharded:
        raise NotImplementedError(
            f"is {parameter.dtype} and sharded, and a rank's part of a complex parameter cannot be "
            "trained. Leave it whole on every rank (fully_shard(..., ignored_params={p}), and sum "
            "its gradients over ranks yourself), train with DDP, or store it as "
            "torch.view_as_real(p)"
        )
    if why := shard.obstacle():
        raise NotImplementedError(why)
    kind, memory = None, shard.memory
    if parameter.layout != torch.strided:
        kind = f"{parameter.layout}"
    elif _overlaps_itself(memory):
        kind = "an expanded view"
    elif memory.is_neg() or parameter.is_conj():
        kind = "a view that is negated or conjugated when it is read"
    elif parameter.is_inference():
        kind = "an inference tensor"
    if kind:
        raise ValueError(
            f"is {kind}; each element must have its own place in memory, which can be written as "
            "it is read. Make it dense: torch.nn.Parameter(p.to_dense()) or "
            "torch.nn.Parameter(p.clone()), outside of inference_mode"
        )
    if why := missing_memory(parameter):
        raise ValueError(
            f"is {why}. Keep a bf16 or fp32 weight and let the library cast it as it computes "
            "(TransformerEngine: fp8 autocast without fp8_model_init; torchao: float8 training, of "
            "which weights are trained here), or train it with an optimizer of that library"
        )


def check_options(group: Mapping[str, Any], number: int) -> None:
    """Refuse options that no rule supports, or that cannot be set per group.

    Raises:
        ValueError: an option can only be set for the whole optimizer.
        NotImplementedError: no rule supports an option of the group.
    """
    if group.get("differentiable"):
        raise NotImplementedError(
            f"differentiable=True in parameter group {number} is not supported by torch_bf16; set "
            "it to False, or train this group with an optimizer of torch.optim"
        )
    if "recipe" in group or "backend" in group:
        raise ValueError(
            f"parameter group {number} has an option 'recipe' or 'backend', and an optimizer has "
            "one for all of its groups: give it to the constructor. If a wrapper wrote its options "
            "into the groups, as SAM does, pass it functools.partial(torch_bf16.AdamW, recipe=...) "
            "as the class of its base optimizer. If ZeroRedundancyOptimizer made this group, make "
            "that one with a class of torch.optim and call torch_bf16.convert(zero, recipe, "
            "model=model)"
        )


def resolve_peak_lr(group: dict[str, Any], number: int, decouples: bool) -> None:
    """Resolve ``fully_decoupled_weight_decay`` to the peak learning rate of the schedule.

    At this learning rate, a step multiplies weights by ``1 - weight_decay``.

    Args:
        group: a parameter group; True is replaced by its current learning rate.
        number: the group's number, for messages.
        decouples: whether the group's rule has a decoupled decay.

    Raises:
        ValueError: the option is not a learning rate, or the rule's decay is an L2 penalty.
    """
    wanted = group.get(FULLY_DECOUPLED)
    if not wanted:
        return
    if not decouples:
        raise ValueError(
            f"{FULLY_DECOUPLED}={wanted} in parameter group {number}: this optimizer adds weight "
            "decay to the gradient. Use decoupled_weight_decay=True where it has that option, or "
            "AdamW or Lion"
        )
    peak: Any = float(group["lr"]) if wanted is True else wanted
    if not isinstance(peak, Real) or not 0.0 < float(peak) < float("inf"):
        raise ValueError(
            f"{FULLY_DECOUPLED}={wanted} in parameter group {number} with lr={group['lr']}: it "
            "must be the highest learning rate of the schedule, a positive number, or True where "
            "lr already is that"
        )
    group[FULLY_DECOUPLED] = float(peak)


def check_gradient(shard: Shard) -> None:
    """Refuse a gradient that a kernel cannot read.

    Raises:
        ValueError: it is sparse, has a dtype that the parameter's gradient cannot have, or differs
            from the parameter in shape, device or mesh, because the parameter's data was replaced
            since.
    """
    parameter: Any = shard.parameter
    gradient: Tensor = parameter.grad
    if (gradient.shape, gradient.device) != (parameter.shape, parameter.device):
        raise ValueError(
            f"on {parameter.device} has a gradient of shape {tuple(gradient.shape)} on "
            f"{gradient.device}: it was changed after backward. Call zero_grad() and backward() "
            "again"
        )
    if why := shard.obstacle_of_gradient(gradient):
        raise ValueError(why)
    if gradient.layout != torch.strided:
        raise ValueError(
            f"has a sparse gradient ({gradient.layout}), which the fused update cannot read; make "
            "it dense (Embedding(sparse=False)), or keep its module in fp32 by keep_fp32 and train "
            "it with an optimizer of its own: torch.optim.SparseAdam, which prepare leaves as it "
            "is, or another, such as SGD or Adagrad, that prepare is not given"
        )
    if gradient.dtype not in _TRAINABLE or gradient.is_complex() != parameter.is_complex():
        wanted = "complex64" if parameter.is_complex() else "bfloat16 or float32"
        raise ValueError(f"has a gradient of dtype {gradient.dtype}; it must be {wanted}")
    if why := missing_memory(gradient):
        raise ValueError(
            f"has a gradient that is {why}. Give it a dense one before the step: p.grad = "
            "p.grad.dequantize(), or whatever that class provides"
        )


def check_unchanged(shard: Shard, snapshot: Snapshot, state: Mapping[str, Any]) -> None:
    """Refuse a parameter that was moved, recast or reshaped since the last step.

    Raises:
        StateMismatchError: its state no longer fits it.
    """
    parameter = shard.parameter
    if (parameter.dtype, parameter.shape) != (snapshot.dtype, snapshot.shape):
        raise StateMismatchError(
            f"was {snapshot.dtype} of shape {tuple(snapshot.shape)} at the last step and was "
            "changed since. Change it back, or make a new optimizer for the changed model"
        )
    devices = {v.device for k, v in state.items() if k != "step" and isinstance(v, Tensor)}
    if devices - {parameter.device}:
        raise StateMismatchError(
            f"is on {parameter.device} and its optimizer state on "
            f"{', '.join(map(str, devices))}: it was moved after the first step. Move it back, or "
            "let the state follow: optimizer.load_state_dict(optimizer.state_dict())"
        )


def _overlaps_itself(memory: Tensor) -> bool:
    reach = 1
    for stride, length in sorted(zip(memory.stride(), memory.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += (length - 1) * stride
    return False


def check_separate(shards: Iterable[Shard], labels: Mapping[Tensor, Label]) -> None:
    """Refuse two parameters over the same memory, which one kernel call would update at once.

    Args:
        shards: shards of the parameters that are about to take a step.
        labels: labels of these parameters.

    Raises:
        ValueError: two parameters begin at the same address, or overlap and are contiguous: others
            may lie between each other.
    """
    shared = over_same_memory((each.parameter, each.memory) for each in shards)
    for one, other in shared:
        if one is not other:
            raise ValueError(
                f"{labels[other]()} and {labels[one]()} are two parameters over the same memory, "
                "which a step would update twice. Tie them by giving both modules one parameter, "
                "one.weight = other.weight, or, transposed, compute with other.weight.t() in "
                "forward()"
            )

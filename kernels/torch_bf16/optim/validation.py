"""What our optimizers can train, and what may not change between two steps.

Everything here is asked before a step updates anything, so that an error leaves the optimizer as
usable as it was. ``label`` is a function that names the parameter in the message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torch_bf16.errors import StateMismatchError
from torch_bf16.sharding.dtensor import is_dtensor, local, version_of
from torch_bf16.sharding.fsdp1 import is_flattened, is_part, obstacle

__all__ = [
    "Snapshot",
    "check_formats",
    "check_gradient",
    "check_group",
    "check_options",
    "check_parameter",
    "check_replaced",
    "check_unchanged",
    "check_whole",
]

_TRAINABLE = (torch.bfloat16, torch.float32)
_UNSUPPORTED = ("differentiable",)


@dataclass(slots=True)
class Snapshot:
    """What a parameter was when the last step had updated it, or its first one was planned."""

    version: int
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, parameter: Tensor) -> Snapshot:
        """What ``parameter`` is now."""
        return cls(version_of(parameter), parameter.dtype, parameter.shape)


def check_group(
    optimizer: torch.optim.Optimizer, number: int, own_step: bool | None = None
) -> None:
    """Refuse options and dtypes that cannot be trained.

    Args:
        optimizer: with the group.
        number: of the group.
        own_step: whether the class's own step reads the options, so that any will do; None asks
            the optimizer.

    Raises:
        ValueError: the dtype of a parameter.
        NotImplementedError: an option of the group.
    """
    group = optimizer.param_groups[number]
    if not (hasattr(optimizer, "roles") if own_step is None else own_step):
        check_options(group, number)
    if len({id(p) for p in group["params"]}) < len(group["params"]):
        raise ValueError(
            f"parameter group {number} holds a parameter twice, which would be updated twice per "
            "step; give each parameter once, tied ones too (module.parameters() does)"
        )
    names = group.get("param_names")
    for position, parameter in enumerate(group["params"]):
        if not is_lazy(parameter):
            name = f"{names[position]!r}, " if names else ""
            place = f"parameter {name}number {position} of group {number}"
            label = functools.partial("{}, shape {}".format, place, tuple(parameter.shape))
            check_parameter(parameter, label)


def check_parameter(parameter: Tensor, label: Callable[[], str]) -> None:
    """Refuse a parameter that a kernel cannot update.

    Raises:
        ValueError: it is neither bf16 nor fp32, or its elements are no numbers in memory.
        NotImplementedError: FSDP1 has flattened it, and where its elements belong is not known.
    """
    if parameter.dtype not in _TRAINABLE:
        raise ValueError(
            f"{label()}, is {parameter.dtype}; bfloat16 and float32 parameters can be trained. "
            f"{_remedy(parameter.dtype)}"
        )
    kind = None
    if is_flattened(parameter) and (why := obstacle(parameter)):
        raise NotImplementedError(f"{label()}, {why}. Nothing was updated")
    memory = local(parameter)
    if parameter.layout != torch.strided:
        kind = f"{parameter.layout}"
    elif _overlaps(memory):
        kind = "an expanded view"
    elif memory.is_neg():
        kind = "a view that is negated when it is read"
    elif parameter.is_inference():
        kind = "an inference tensor"
    if kind:
        raise ValueError(
            f"{label()}, is {kind}; each element must have a place of its own in memory, and be "
            "written as it is read. Make it dense: torch.nn.Parameter(p.to_dense()) or "
            "torch.nn.Parameter(p.clone()), outside of inference_mode"
        )


def check_formats(optimizer: Any) -> None:
    """Refuse a recipe that has no format for what FSDP1 has made of parameters.

    Raises:
        NotImplementedError: a flat parameter would need several, or blocks would be cut.
    """
    own_step = hasattr(optimizer, "roles")
    for group in optimizer.param_groups:
        for parameter in filter(is_flattened, group["params"]):
            states = () if own_step else optimizer.rule_for(group, parameter).states
            for role in ("weights", *(state.role for state in states)):
                optimizer.recipe.format_of(role, parameter)


def _overlaps(parameter: Tensor) -> bool:
    pairs = zip(parameter.shape, parameter.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def check_options(group: Mapping[str, Any], number: int) -> None:
    """Refuse options that no rule has.

    Raises:
        NotImplementedError: an option of the group.
    """
    for option in _UNSUPPORTED:
        if group.get(option):
            raise NotImplementedError(
                f"{option}=True in parameter group {number} is not supported by torch_bf16; set it "
                "to False, or train this group with an optimizer of torch.optim. Nothing was "
                "updated"
            )


def _remedy(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "Store it as torch.view_as_real(p), or train it with an optimizer of its own"
    if dtype.is_floating_point:
        return "Call model.float() and then torch_bf16.cast_module(model)"
    return "Leave parameters that are no floating-point numbers out of the optimizer"


def check_gradient(parameter: Tensor, gradient: Tensor, label: Callable[[], str]) -> None:
    """Refuse a gradient that a kernel cannot read.

    Raises:
        ValueError: it is sparse, neither bf16 nor fp32, or of another shape or device than the
            parameter, whose data was replaced since.
    """
    if (gradient.shape, gradient.device) != (parameter.shape, parameter.device):
        raise ValueError(
            f"{label()} on {parameter.device} has a gradient of shape {tuple(gradient.shape)} on "
            f"{gradient.device}: it was changed after backward. Call zero_grad() and backward() "
            "again. Nothing was updated"
        )
    if is_dtensor(parameter) and not is_dtensor(gradient):
        raise ValueError(
            f"{label()} is a DTensor and has a gradient that is a plain tensor: give it one on the "
            "same mesh, by DTensor.from_local(...) or distribute_tensor(...). Nothing was updated"
        )
    mesh, other = (getattr(each, "device_mesh", None) for each in (parameter, gradient))
    if mesh != other:
        raise ValueError(
            f"{label()} is placed on {mesh or 'no mesh'} and its gradient on {other}: ranks would "
            "read other elements than they hold. Give it a gradient on the parameter's mesh. "
            "Nothing was updated"
        )
    if gradient.layout != torch.strided:
        raise ValueError(
            f"{label()} has a sparse gradient ({gradient.layout}), which the fused update cannot "
            "read; make it dense (Embedding(sparse=False)), or train this parameter with "
            "torch.optim.SparseAdam. Nothing was updated"
        )
    if gradient.dtype not in _TRAINABLE:
        raise ValueError(
            f"{label()} has a gradient of {gradient.dtype}; bfloat16 and float32 gradients can be "
            "used. Nothing was updated"
        )


def check_whole(parameter: Tensor, label: Callable[[], str]) -> None:
    """Refuse a shard for a rule that looks at the whole tensor.

    Raises:
        NotImplementedError: the parameter is distributed.
    """
    if hasattr(parameter, "placements") or is_part(parameter):
        raise NotImplementedError(
            f"{label()}, is sharded, and this optimizer needs the whole matrix at once. Use DDP, "
            "or AdamW or Lion over the shards. Nothing was updated"
        )


def check_unchanged(
    parameter: Tensor, seen: Snapshot, state: Mapping[str, Any], label: Callable[[], str]
) -> None:
    """Refuse a parameter that was moved, recast or reshaped since the last step.

    Raises:
        StateMismatchError: its state would not fit it any more.
    """
    if (parameter.dtype, parameter.shape) != (seen.dtype, seen.shape):
        raise StateMismatchError(
            f"{label()} was {seen.dtype} of shape {tuple(seen.shape)} at the last step and was "
            "changed since. Change it back, or make a new optimizer for the changed model. Nothing "
            "was updated"
        )
    devices = {v.device for k, v in state.items() if k != "step" and isinstance(v, Tensor)}
    if devices - {parameter.device}:
        raise StateMismatchError(
            f"{label()} is on {parameter.device} and its optimizer state on "
            f"{', '.join(map(str, devices))}: it was moved after the first step. Move it back, or "
            "let the state follow: optimizer.load_state_dict(optimizer.state_dict()). Nothing was "
            "updated"
        )


def check_replaced(
    optimizer: torch.optim.Optimizer, labels: Mapping[Tensor, Callable[[], str]]
) -> None:
    """Refuse a new parameter in the place of one whose state is still here.

    Args:
        optimizer: its groups and its state.
        labels: the parameters that are about to take a step, and what names them.

    Raises:
        StateMismatchError: one of them seems to have replaced another.
    """
    current = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    orphans = [p for p in optimizer.state if isinstance(p, Tensor) and p not in current]
    stateless = [label for parameter, label in labels.items() if not optimizer.state.get(parameter)]
    if orphans and stateless:
        raise StateMismatchError(
            f"{stateless[0]()} has no optimizer state, while a parameter of shape "
            f"{tuple(orphans[0].shape)} that has one is in no group any more: it was replaced "
            "after the first step. Put the old one back and write into it (p.data.copy_(...)), or "
            "drop the old state: del optimizer.state[old_parameter]. Nothing was updated"
        )

"""What our optimizers can train, and what may not change between two steps.

Everything here is asked before a step updates anything, so that an error leaves the optimizer as
usable as it was. Messages begin with a verb: the caller puts the parameter's label before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torch_bf16.engine.member import Snapshot, formats_of
from torch_bf16.errors import StateMismatchError, prefix_errors
from torch_bf16.sharding import Shard, shard_of

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = [
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


def check_group(group: Mapping[str, Any], number: int) -> None:
    """Refuse parameters that cannot be trained, or are in a group twice.

    Args:
        group: a parameter group.
        number: of the group, for messages.

    Raises:
        ValueError: the dtype or the memory of a parameter.
        NotImplementedError: how a parameter is sharded.
    """
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
            label = f"{place}, shape {tuple(parameter.shape)},"
            with prefix_errors(lambda label=label: label):
                check_parameter(shard_of(parameter))


def check_parameter(shard: Shard) -> None:
    """Refuse a parameter that a kernel cannot update.

    Raises:
        ValueError: it is neither bf16 nor fp32, or its elements are no numbers in memory.
        NotImplementedError: it is sharded in a way that cannot be trained.
    """
    parameter = shard.parameter
    if parameter.dtype not in _TRAINABLE:
        raise ValueError(
            f"is {parameter.dtype}; bfloat16 and float32 parameters can be trained. "
            f"{_remedy(parameter.dtype)}"
        )
    if why := shard.obstacle():
        raise NotImplementedError(why)
    kind, memory = None, shard.memory
    if parameter.layout != torch.strided:
        kind = f"{parameter.layout}"
    elif any(
        n > 1 and stride == 0 for n, stride in zip(memory.shape, memory.stride(), strict=True)
    ):
        kind = "an expanded view"
    elif memory.is_neg():
        kind = "a view that is negated when it is read"
    elif parameter.is_inference():
        kind = "an inference tensor"
    if kind:
        raise ValueError(
            f"is {kind}; each element must have a place of its own in memory, and be written as it "
            "is read. Make it dense: torch.nn.Parameter(p.to_dense()) or "
            "torch.nn.Parameter(p.clone()), outside of inference_mode"
        )


def check_options(group: Mapping[str, Any], number: int) -> None:
    """Refuse options that no rule has, or that groups cannot have.

    Raises:
        ValueError: an option is one of the whole optimizer.
        NotImplementedError: no rule has an option of the group.
    """
    for option in _UNSUPPORTED:
        if group.get(option):
            raise NotImplementedError(
                f"{option}=True in parameter group {number} is not supported by torch_bf16; set it "
                "to False, or train this group with an optimizer of torch.optim"
            )
    if "recipe" in group or "backend" in group:
        raise ValueError(
            f"parameter group {number} has an option 'recipe' or 'backend', and an optimizer has "
            "one for all of its groups: give it to the constructor. If it is "
            "ZeroRedundancyOptimizer that made this group, make that one with a class of "
            "torch.optim and call torch_bf16.convert(zero, recipe, model=model)"
        )


def _remedy(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "Store it as torch.view_as_real(p), or train it with an optimizer of its own"
    if dtype.is_floating_point:
        return "Call model.float() and then torch_bf16.cast_model(model)"
    return "Leave parameters that are no floating-point numbers out of the optimizer"


def check_formats(optimizer: BF16Optimizer) -> None:
    """Refuse a recipe whose blocks would be cut: here, where every rank sees every parameter.

    FSDP1 leaves some ranks nothing of a parameter, so that they take no part in its step.

    Raises:
        NotImplementedError: a parameter is cut within the blocks of a format.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shard = shard_of(parameter)
            if shard.sharded and not shard.can_gather:
                formats_of(shard, optimizer.rule_for(group, parameter), optimizer.recipe)


def check_gradient(shard: Shard) -> None:
    """Refuse a gradient that a kernel cannot read.

    Raises:
        ValueError: it is sparse, neither bf16 nor fp32, or of another shape, device or mesh than
            the parameter, whose data was replaced since.
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
            "it dense (Embedding(sparse=False)), or train this parameter with "
            "torch.optim.SparseAdam"
        )
    if gradient.dtype not in _TRAINABLE:
        raise ValueError(
            f"has a gradient of {gradient.dtype}; bfloat16 and float32 gradients can be used"
        )


def check_whole(shard: Shard) -> None:
    """Refuse a shard for a rule that looks at the whole tensor.

    Raises:
        NotImplementedError: the parameter is sharded.
    """
    if shard.sharded:
        raise NotImplementedError(
            "is sharded, and this optimizer needs the whole matrix at once. Use DDP, or AdamW or "
            "Lion over the shards"
        )


def check_unchanged(shard: Shard, snapshot: Snapshot, state: Mapping[str, Any]) -> None:
    """Refuse a parameter that was moved, recast or reshaped since the last step.

    Raises:
        StateMismatchError: its state would not fit it any more.
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


def check_replaced(
    optimizer: torch.optim.Optimizer, labels: Mapping[Tensor, Callable[[], str]]
) -> None:
    """Refuse a new parameter in the place of one whose state is still here.

    Args:
        optimizer: its groups and its state.
        labels: the parameters that are about to take a step, and their labels.

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
            "after the first step. Put the old one back and write into it (p.copy_(...) under "
            "torch.no_grad()), or drop the old state: del optimizer.state[old_parameter]"
        )

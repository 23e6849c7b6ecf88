"""FSDP2 (``fully_shard``): what it gathers and reduces together, and where a pass arrives at it.

This is the only file that names what is private in it; what a rank holds of a parameter,
:mod:`.dtensor` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .local import is_dtensor

__all__ = ["Unit", "before_backward_of", "has_run", "places", "reshard", "units"]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together.

    Attributes:
        name: of the module in its model, or what stands for the model itself.
        module: that ``fully_shard`` was applied to, or the first of several.
        parameters: sharded; those in ``ignored_params`` are none of them.
        reduce_dtype: of gradients; None for that of the parameters.
        group: the ranks that hold other parts; None where each holds all.
        replicates: whether ranks of another group hold the same part, as in HSDP.
    """

    name: str
    module: Any
    parameters: list[Any]
    reduce_dtype: torch.dtype | None
    group: Any
    replicates: bool


def units(model: nn.Module) -> Iterator[Unit]:
    """Those in a model, from the outside in."""
    for name, module, state in _states(model):
        for group in _groups(state):
            mesh = group.mesh_info
            yield Unit(
                name or "the model",
                module,
                [each.sharded_param for each in group.fsdp_params],
                state._mp_policy.reduce_dtype,
                None if mesh.shard_mesh_dim is None else mesh.shard_process_group,
                mesh.replicate_mesh_dim is not None,
            )


def has_run(model: nn.Module) -> bool:
    """Whether a forward pass has settled the dtypes of a unit."""
    return any(state._is_root is not None for _, _, state in _states(model))


def before_backward_of(unit: Unit, call: Callable[[], None]) -> RemovableHandle:
    """Call each time that a backward pass arrives at what a unit returned, by whichever method."""
    state = unit.module._get_fsdp_state()
    calls: OrderedDict[int, Callable[[], None]] | None = getattr(state, "_torch_bf16_calls", None)
    if calls is None:
        calls = state._torch_bf16_calls = OrderedDict()
        own = state._pre_backward

        # FSDP2 hangs this on all outputs.
        def pre_backward(gradient: Tensor) -> Tensor:
            for each in [*calls.values()]:
                each()
            return own(gradient)

        state._pre_backward = pre_backward
    handle = RemovableHandle(calls)
    calls[handle.id] = call
    return handle


def reshard(parameters: Iterable[Tensor]) -> None:
    """Make FSDP2 gather again the weights that are about to be written outside a step.

    It keeps the root's gathered weights until a backward pass, which a validation does not have. A
    DTensor does not know its module, so all modules give up what they keep.
    """
    if not any(map(is_dtensor, parameters)):
        return
    for module in _every_module():
        if callable(give_back := getattr(module, "reshard", None)):
            give_back()


def places() -> Iterator[tuple[Tensor, nn.Module, str]]:
    """What was sharded, each with the module that it is a parameter of and its name there."""
    for module in _every_module():
        if (state_of := getattr(module, "_get_fsdp_state", None)) is None:
            continue
        for each in (each for group in _groups(state_of()) for each in group.fsdp_params):
            yield each.sharded_param, each._module_info.module, each._module_info.param_name


def _every_module() -> list[nn.Module]:
    from torch.distributed._composable_state import _module_state_mapping

    return list(_module_state_mapping)


def _states(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """FSDP2's states, each with the first of the modules that share it and its name."""
    seen = set()
    for name, module in model.named_modules():
        # What fully_shard adds to a module's class.
        if (state_of := getattr(module, "_get_fsdp_state", None)) is None:
            continue
        state: Any = state_of()
        if id(state) not in seen:
            seen.add(id(state))
            yield name, module, state


def _groups(state: Any) -> Iterable[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    # Older torch has one for each module.
    return filter(None, [state._fsdp_param_group]) if groups is None else groups

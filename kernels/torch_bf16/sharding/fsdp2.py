"""FSDP2 (``fully_shard``): its units, and hooks for when a backward pass reaches one.

This is the only file that names private parts of FSDP2; :mod:`.dtensor` describes a rank's part of
a parameter.
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
        name: name of the module in its model, or "the model" for the model itself.
        module: the module that ``fully_shard`` was applied to, or the first of several.
        parameters: the sharded parameters, without those in ``ignored_params``.
        reduce_dtype: dtype in which gradients are reduced; None for that of the parameters.
        group: the group of ranks that hold other parts; None if each rank holds all.
        replicates: whether ranks of another group hold the same part, as in HSDP.
    """

    name: str
    module: Any
    parameters: list[Any]
    reduce_dtype: torch.dtype | None
    group: Any
    replicates: bool


def units(model: nn.Module) -> Iterator[Unit]:
    """The units of a model, the outermost first."""
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
    """Call ``call`` each time a backward pass reaches the outputs of a unit, of any method."""
    state = unit.module._get_fsdp_state()
    calls: OrderedDict[int, Callable[[], None]] | None = getattr(state, "_torch_bf16_calls", None)
    if calls is None:
        calls = state._torch_bf16_calls = OrderedDict()
        own = state._pre_backward

        # FSDP2 hooks this to all outputs.
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
    DTensor does not know its module, so all modules free their gathered weights.
    """
    if not any(map(is_dtensor, parameters)):
        return
    for group in _every_group():
        # Not by a module's reshard(), which keeps the root's after a forward pass that has raised.
        group._to_sharded()


def places() -> Iterator[tuple[Tensor, nn.Module, str]]:
    """All sharded parameters, each with the module that owns it and its name there."""
    for each in (each for group in _every_group() for each in group.fsdp_params):
        yield each.sharded_param, each._module_info.module, each._module_info.param_name


def _every_group() -> Iterator[Any]:
    """The groups of parameters of all modules that live."""
    from torch.distributed._composable_state import _module_state_mapping

    for module in list(_module_state_mapping):
        if (state_of := getattr(module, "_get_fsdp_state", None)) is not None:
            yield from _groups(state_of())


def _states(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """FSDP2's states, each with the first module that shares it, and that module's name."""
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
    # Older versions of torch have one group for each module.
    return filter(None, [state._fsdp_param_group]) if groups is None else groups

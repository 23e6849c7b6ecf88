"""State dicts of exact fp32 weights and moments, for programs that do not know this package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.wrappers import optimizer_for, optimizers_for, owners, warn_of_left_out
from torch_bf16.memory import span
from torch_bf16.parameters import parameters_in
from torch_bf16.sharding import any_flattened, local, reshard, units
from torch_bf16.states.schema import HEADER
from torch_bf16.states.views import fp32_numbers, from_view

__all__ = ["fp32_optimizer_state_dict", "fp32_state_dict"]


def fp32_state_dict(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The module's state dict with each bf16 weight as the fp32 number that its next step reads.

    Args:
        model: the module; buffers and parameters of other dtypes are as in ``model.state_dict()``.
            While this runs, its modules have fp32 parameters: no other thread may compute by it.
        optimizers: the optimizers that have the exact masters, also in a host's wrapper. A bf16
            weight that none of them has, or whose recipe keeps no master, is upcast.

    Returns:
        New tensors for bf16 weights, one for tied ones, and for what hooks make of them; the
        module's own tensors for the rest.

    Raises:
        ValueError: ``model`` is not a module, or an optimizer is not one of this package.
        NotImplementedError: FSDP1 has flattened the module, or it has a weight outside of its
            modules' parameters; the message says what works.

    Example:
        >>> fp32 = torch.nn.Linear(4, 4)
        >>> fp32.load_state_dict(torch_bf16.fp32_state_dict(model, optimizer))
        <All keys matched successfully>
    """
    check_module("fp32_state_dict", model)
    ours = optimizers_for("fp32_state_dict", optimizers)
    if any_flattened(parameters_in(model)):
        raise NotImplementedError(
            "fp32_state_dict was given a module that FullyShardedDataParallel (FSDP1) has "
            "flattened: its weights are in pieces on all ranks. Gather {'model': "
            "model.state_dict(), 'optimizer': FSDP.optim_state_dict(model, optimizer)} with "
            "FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT), torch.save it, and "
            "export that file: python -m torch_bf16 export FILE TARGET"
        )
    # FSDP2 puts other parameters in the place of those that it has gathered.
    reshard(parameter for unit in units(model) for parameter in unit.parameters)
    warn_of_left_out("fp32_state_dict", model, ours)
    of_parameters = owners(ours)

    def exact(parameter: Tensor) -> Tensor:
        if not ours:
            return parameter.detach().float()
        # A parameter that is not trained may still have the bits that its cast dropped.
        return of_parameters.get(parameter, ours[0]).exact_weight(parameter)

    with _in_place(model, exact) as replaced:
        # The module's own kind of dictionary, which has the versions of its parts.
        weights = model.state_dict()
    buffers = {span(local(each)) for each in model.buffers()}
    rounded = [each for each in {*replaced, *of_parameters} if each.dtype == torch.bfloat16]
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            continue
        if value.dtype == torch.bfloat16 and span(local(value)) not in buffers:
            _check_not_rounded(model, name, value, rounded)
        weights[name] = value.detach()
    return weights


@contextmanager
def _in_place(
    model: nn.Module, exact: Callable[[Tensor], Tensor]
) -> Iterator[Collection[nn.Parameter]]:
    """Within the context modules have fp32 parameters in the place of bf16 ones, which it gives.

    So whatever makes a state dict of them, hooks and overrides included, makes it of exact numbers.
    """
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dtype == torch.bfloat16 and not is_lazy(parameter)
    ]
    replaced = {parameter for _, _, parameter in places}
    # All before the first is replaced: some exact weights are found by the parameter's place.
    made = {each: nn.Parameter(exact(each), each.requires_grad) for each in replaced}
    try:
        for parameters, name, parameter in places:
            parameters[name] = made[parameter]
        yield replaced
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def _check_not_rounded(
    model: nn.Module, name: str, value: Tensor, parameters: Iterable[Tensor]
) -> None:
    """Refuse a value in the memory of a bf16 weight that no module has as its parameter."""
    first, last = span(local(value))
    for each in parameters:
        start, stop = span(local(each))
        if max(first, start) < min(last, stop):
            raise NotImplementedError(
                f"fp32_state_dict: state_dict() of this {type(model).__name__} has {name!r} in "
                "bf16, in the memory of a weight that it keeps outside of its modules' parameters, "
                "so that the bits that bf16 lacks would be missing. Register that weight with "
                "register_parameter() before the model is cast, or read it by "
                "optimizer.exact_weight(parameter)"
            )


def fp32_optimizer_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict of new tensors for the same ``torch.optim`` class over fp32 parameters.

    Moments become fp32 numbers, exactly those that the next step would read. Masters are left out:
    they belong to the weights, see :func:`fp32_state_dict`.

    Args:
        optimizer: an optimizer of this package, also in a host's wrapper.

    Raises:
        ValueError: it is not of this package, or holds several.

    Example:
        >>> fp32 = torch.nn.Linear(4, 4)
        >>> fp32.load_state_dict(torch_bf16.fp32_state_dict(model, optimizer))
        <All keys matched successfully>
        >>> plain = torch.optim.AdamW(fp32.parameters())
        >>> plain.load_state_dict(torch_bf16.fp32_optimizer_state_dict(optimizer))
    """
    optimizer = optimizer_for("fp32_optimizer_state_dict", optimizer)
    state_dict = optimizer.state_dict()
    state_dict.pop(HEADER, None)
    dims = {
        key: parameter.ndim
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
        for parameter, key in zip(group["params"], saved["params"], strict=True)
    }
    state_dict["state"] = {
        key: fp32_numbers(from_view(each, dims[key])) if key in dims else each
        for key, each in state_dict["state"].items()
    }
    return state_dict

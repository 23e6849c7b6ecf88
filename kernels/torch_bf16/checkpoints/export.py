"""Exact fp32 weights and moments, for programs that do not know this package."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torch_bf16.argument_checks import check_module
from torch_bf16.engine.wrappers import optimizer_for
from torch_bf16.errors import CheckpointError, first_line
from torch_bf16.sharding import any_flattened, local, saved_names
from torch_bf16.states.recoding import stored_format
from torch_bf16.states.schema import HEADER, readable
from torch_bf16.states.views import MASTERS, fp32_numbers, from_view, masters_in

from .atomic_write import replacing
from .files import check_complete, damaged_safetensors, first_keys, read_file

__all__ = [
    "export_file",
    "export_weights",
    "fp32_optimizer_state_dict",
    "fp32_state_dict",
    "fp32_weights",
    "read_checkpoint",
]

_States: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


def fp32_state_dict(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The module's state dict with each bf16 weight as the fp32 number that its next step reads.

    Args:
        model: the module; buffers and parameters of other dtypes are as in ``model.state_dict()``.
        optimizers: the optimizers that have the exact masters, also in a host's wrapper. A bf16
            weight that none of them has, or whose recipe keeps no master, is upcast.

    Returns:
        New tensors for bf16 weights; the module's own tensors for the rest.

    Raises:
        ValueError: ``model`` is not a module, or an optimizer is not one of this package.
        NotImplementedError: FSDP1 has flattened the module; the message says what works.

    Example:
        >>> fp32 = torch.nn.Linear(4, 4)
        >>> fp32.load_state_dict(torch_bf16.fp32_state_dict(model, optimizer))
        <All keys matched successfully>
    """
    check_module("fp32_state_dict", model)
    ours = [optimizer_for("fp32_state_dict", each) for each in optimizers]
    if any_flattened(model.parameters()):
        raise NotImplementedError(
            "fp32_state_dict was given a module that FullyShardedDataParallel (FSDP1) has "
            "flattened: its weights are in pieces on all ranks. Gather {'model': "
            "model.state_dict(), 'optimizer': FSDP.optim_state_dict(model, optimizer)} with "
            "FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT), torch.save it, and "
            "export that file: python -m torch_bf16 export FILE TARGET"
        )
    weights = dict(model.state_dict(keep_vars=True))
    owners = {p: each for each in ours for group in each.param_groups for p in group["params"]}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            continue
        if ours and isinstance(value, nn.Parameter):
            # A parameter that is not trained may still have the bits that its cast dropped.
            weights[name] = owners.get(value, ours[0]).exact_weight(value)
        elif isinstance(value, nn.Parameter) and value.dtype == torch.bfloat16:
            weights[name] = value.detach().float()
        else:
            weights[name] = value.detach()
    return weights


def fp32_optimizer_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict of new tensors for the same ``torch.optim`` class over fp32 parameters.

    Moments become fp32 numbers, exactly those that the next step would read. Masters are left out:
    they belong to the weights, see :func:`fp32_state_dict`.

    Args:
        optimizer: an optimizer of this package, also in a host's wrapper.

    Raises:
        ValueError: it is none of this package, or holds several.

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


def fp32_weights(model: Mapping[str, Tensor], optimizers: _States) -> tuple[dict[str, Tensor], int]:
    """Exact fp32 weights from two saved state dicts.

    Args:
        model: the state dict of the module.
        optimizers: the state dict of the optimizer, or of several; None upcasts.

    Returns:
        The weights, and how many of them had an exact master.

    Raises:
        CheckpointError: an optimizer's state dict is not built as torch builds it, or the masters
            cannot be assigned, because it has no parameter names, several have the same, or a
            master fits no weight.
    """
    states: dict[str, Mapping[str, Any]] = {}
    for each in _as_list(optimizers):
        more = _by_name(each)
        if twice := [name for name in more if name in states and masters_in(more[name])]:
            raise CheckpointError(
                f"several optimizers have an exact master of {twice[0]!r} ({len(twice)} in all): "
                "they were given names that are not those of the whole model. Export from the "
                "program: torch_bf16.fp32_state_dict(model, *optimizers). Nothing was written"
            )
        states |= more
    key_of = saved_names(states, model)
    lost = [name for name in states if name not in key_of and masters_in(states[name])]
    if lost:
        raise CheckpointError(
            f"the exact masters of {', '.join(lost[:4])} ({len(lost)} in all) belong to no weight "
            f"here; the weights are {', '.join([*model][:4])} and so on: model and optimizer are "
            "not from the same run. Nothing was written"
        )
    states = {key: states[name] for name, key in key_of.items()}
    # A tied weight has a state under one of its names only.
    same = {_place(model[n]): state for n, state in states.items() if n in model}
    weights, exact = {}, 0
    for name, value in model.items():
        if not isinstance(value, Tensor):
            continue
        state = states.get(name) or same.get(_place(value), {})
        masters = masters_in(state)
        if value.dtype != torch.bfloat16:
            weights[name] = value
        elif masters:
            format_ = stored_format(masters, "")
            if format_ is None or any(each.shape != value.shape for each in masters.values()):
                raise CheckpointError(
                    f"the master of {name!r} does not fit its weight of shape "
                    f"{tuple(value.shape)}: model and optimizer are not from one checkpoint"
                )
            keys = format_.plane_names("")[1:]
            beside = [masters[key].to(value.device) for key in keys]
            weights[name] = format_.decode([value.contiguous(), *beside])
            exact += 1
        else:
            weights[name] = value.float()
    return weights, exact


def _place(weight: Tensor) -> tuple[Any, ...]:
    """A key that tied weights share; a view of a part, or an empty tensor, has another shape."""
    memory = local(weight)
    return memory.data_ptr(), memory.shape, memory.stride()


def export_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "float32",
    optimizer: str | os.PathLike[str] | None = None,
) -> str:
    """Write the weights of a checkpoint to a file of their own.

    Args:
        source: a file of ``save_checkpoint``, ``torch.save`` or Lightning, or a safetensors file of
            weights, such as that in a folder of Accelerate.
        target: ``*.safetensors``; any other name gets a file of ``torch.save``.
        dtype: ``"float32"`` makes bf16 weights fp32, exact if there is a master; ``"bfloat16"``
            leaves all weights as they were trained.
        optimizer: the file with the optimizer's state dict, if ``source`` has none.

    Returns:
        One line about what was written.

    Raises:
        CheckpointError: there are no weights in ``source``, they are one rank's part, or the
            masters cannot be assigned.
    """
    weights, states = read_checkpoint(Path(source))
    return export_weights(weights, states, target, dtype, optimizer)


def export_weights(
    weights: Mapping[str, Any],
    states: _States,
    target: str | os.PathLike[str],
    dtype: str = "float32",
    optimizer: str | os.PathLike[str] | None = None,
) -> str:
    """:func:`export_file` for the state dicts of a checkpoint that has been read.

    Args:
        weights: the state dict of the model.
        states: the state dict of its optimizer, or of several; None without one.
        target: as for :func:`export_file`, and so are ``dtype`` and ``optimizer``.
    """
    if optimizer is not None:
        content = read_file(Path(optimizer))
        states = _as_list(content) or _parts(content)[1]
        if not states:
            raise CheckpointError(
                f"{optimizer} has no state dict of an optimizer: it holds {first_keys(content)}. "
                "It is looked for under 'optimizer' and 'optimizer_states', or as the whole file. "
                "Nothing was written"
            )
    check_complete(weights)
    if dtype == "float32":
        weights, exact = fp32_weights(weights, states)
        origin = f"{exact} of them from exact masters"
    else:
        weights = {name: each for name, each in weights.items() if isinstance(each, Tensor)}
        origin = "as they were trained"
    _write({name: each.contiguous() for name, each in weights.items()}, Path(target))
    return f"{target}: {len(weights)} tensors, {origin}"


# The names of torch's tutorial, and ours.
_NAMES = {"model_state_dict": "model", "optimizer_state_dict": "optimizer"}


def read_checkpoint(source: Path) -> tuple[Mapping[str, Any], _States]:
    """The state dicts of the model and of its optimizers in a file."""
    if source.suffix == ".safetensors":
        safetensors = _safetensors()
        from safetensors import SafetensorError

        try:
            return safetensors.load_file(source), None
        except SafetensorError as error:
            raise damaged_safetensors(source, error) from None
    content = {_NAMES.get(key, key): each for key, each in read_file(source, mmap=True).items()}
    weights, states = _parts(content)
    if weights is None:
        raise CheckpointError(
            f"{source} has no weights: it holds {first_keys(content)}. They are looked for under "
            "'model', 'state_dict' and 'model_state_dict', or as the whole file"
        )
    return weights, states


def _as_list(states: Any) -> list[Mapping[str, Any]]:
    """The state dicts of optimizers in ``states``, which holds one or several."""
    several = states if isinstance(states, (list, tuple)) else [states]
    fit = (each for each in several if isinstance(each, Mapping))
    return [each for each in fit if isinstance(each.get("state"), Mapping)]


def _parts(content: Any) -> tuple[Any, list[Mapping[str, Any]]]:
    weights = content.get("model", content.get("state_dict"))
    states = _as_list(content.get("optimizer", content.get("optimizer_states")))
    if weights is None and content and all(isinstance(v, Tensor) for v in content.values()):
        weights = content
    return weights, states


def _by_name(optimizer: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    saved = [each for each in optimizer["state"].values() if isinstance(each, Mapping)]
    if not any(key in MASTERS for state in saved for key in state):
        return {}  # however it is built, nothing in it is needed
    optimizer = readable(optimizer)
    groups, states = optimizer["param_groups"], optimizer["state"]
    names = (optimizer.get(HEADER) or {}).get("names") or [
        g.get("param_names") or () for g in groups
    ]
    named = {
        key: name
        for group, names_of_group in zip(groups, names, strict=False)
        for name, key in zip(names_of_group, group["params"], strict=False)
        if name is not None
    }
    # FSDP1 and torch.distributed.checkpoint put names in place of numbers.
    named |= {key: key for key in states if isinstance(key, str)}
    nameless = [state for key, state in states.items() if key not in named]
    if not any(key in MASTERS for state in nameless for key in state):
        return {name: states[key] for key, name in named.items() if key in states}
    raise CheckpointError(
        "the optimizer's state dict has no parameter names, so that its exact masters cannot be "
        "assigned. Export from the program: torch_bf16.fp32_state_dict(model, optimizer); and "
        "give the optimizer model.named_parameters(), or convert() it with its model, next time"
    )


def _write(weights: dict[str, Tensor], target: Path) -> None:
    safetensors = _safetensors() if target.suffix == ".safetensors" else None
    try:
        with replacing(target) as partial:
            if safetensors is None:
                torch.save(weights, partial)
            else:
                # A copy for each name: the format has no tensors that share memory.
                safetensors.save_file({k: v.clone() for k, v in weights.items()}, partial)
    except CheckpointError:
        raise
    # Both libraries have errors of their own for a full disk or a closed folder.
    except Exception as error:
        raise CheckpointError(
            f"{target} was not written: {first_line(error)}. Free space on its disk, or give the "
            "name of a file in another folder"
        ) from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError(
            "this needs safetensors: pip install 'torch-bf16[safetensors]', or give the target "
            "another suffix for a file of torch.save"
        ) from error
    return safetensors.torch

"""Files of exact fp32 weights, for programs that do not know this package."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_bf16.errors import CheckpointError, first_line
from torch_bf16.sharding import local, saved_names
from torch_bf16.states.recoding import stored_format
from torch_bf16.states.views import MASTERS, masters_in

from .atomic_write import replacing
from .reader import OptimizerStates, Saved, SavedTensor, read_optimizer

__all__ = ["export_weights", "fp32_weights"]

_NARROW = (torch.bfloat16, torch.float16)


def fp32_weights(
    model: Mapping[str, Any], optimizers: Iterable[OptimizerStates]
) -> tuple[dict[str, Tensor], int]:
    """Exact fp32 weights from a saved model and the states of its optimizers.

    Args:
        model: the state dict of the module, or the tensors of a file, which are read one by one.
        optimizers: the optimizers with its masters; without any, bf16 and fp16 weights are upcast.

    Returns:
        The weights, and how many of them had an exact master.

    Raises:
        CheckpointError: the masters cannot be assigned, because an optimizer's state dict has no
            parameter names, several have the same, or a master fits no weight.
    """
    states: dict[str, Mapping[str, Any]] = {}
    for each in optimizers:
        more = _with_masters(each)
        if twice := [name for name in more if name in states]:
            raise CheckpointError(
                f"several optimizers have an exact master of {twice[0]!r} ({len(twice)} in all): "
                "they were saved at different times, or were given names that are not those of the "
                "whole model. Export from the program: torch_bf16.fp32_state_dict(model, "
                "*optimizers). Nothing was written"
            )
        states |= more
    key_of = saved_names(states, model)
    if lost := [name for name in states if name not in key_of and _masters(states[name])]:
        raise CheckpointError(
            f"the exact masters of {', '.join(lost[:4])} ({len(lost)} in all) belong to no weight "
            f"here, by name; the weights are {', '.join([*model][:4])} and so on. If they were "
            "trained by this optimizer, export from the program: torch_bf16.fp32_state_dict(model, "
            "optimizer). Nothing was written"
        )
    states = {key: states[name] for name, key in key_of.items()}
    states |= _of_tied(model, states)
    weights, exact = {}, 0
    for name, each in model.items():
        value = _whole(each)
        if not isinstance(value, Tensor):
            continue
        masters = {}
        if value.dtype == torch.bfloat16:
            masters = _masters(states.get(name, {}))
        if masters:
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
            weights[name] = value.float() if value.dtype in _NARROW else value
    return weights, exact


def _with_masters(optimizer: OptimizerStates) -> dict[str, Mapping[str, Any]]:
    """The states that hold an exact master, by the names of their parameters."""
    names = optimizer.names()
    states = {k: each for k, each in optimizer.state.items() if not each.keys().isdisjoint(MASTERS)}
    if states.keys() <= names.keys():
        return {names[key]: state for key, state in states.items()}
    raise CheckpointError(
        "the optimizer's state dict has no parameter names, so that its exact masters cannot be "
        "assigned. Export from the program: torch_bf16.fp32_state_dict(model, optimizer); and "
        "give the optimizer model.named_parameters(), or convert() it with its model, next time"
    )


def _masters(state: Mapping[str, Any]) -> dict[str, Any]:
    return masters_in({key: _whole(state[key]) for key in sorted(MASTERS & state.keys())})


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, SavedTensor) else value


def _of_tied(
    model: Mapping[str, Any], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """The states of tied weights, which have one under one of their names only, by the others.

    Weights are tied if they were one tensor when they were saved. Many formats do not say so: a
    weight without a state that has the shape and the bits of one with a state is taken for it.
    """
    known = {_place(model[name]): state for name, state in states.items()}
    other = {name: each for name, each in model.items() if name not in states}
    found = {name: known[_place(each)] for name, each in other.items() if _place(each) in known}
    left = {name: each for name, each in other.items() if name not in found and _is_bf16(each)}
    shapes = {tuple(each.shape) for each in left.values()}
    # Under the same bits there are the same masters, or it is not known whose they are.
    by_bits: dict[Any, Mapping[str, Any] | None] = {}
    for name, state in states.items():
        if _is_bf16(model[name]) and tuple(model[name].shape) in shapes:
            bits = _bits(model[name])
            by_bits[bits] = None if bits in by_bits or not bits[1] else state
    shapes = {shape for shape, _ in by_bits}
    for name, each in left.items():
        if tuple(each.shape) in shapes and (state := by_bits.get(_bits(each))) is not None:
            found[name] = state
    return found


def _place(weight: Any) -> Any:
    """A key that tied weights share; a view of a part, or an empty tensor, has another shape."""
    if isinstance(weight, SavedTensor):
        return weight.tied or id(weight)
    memory = local(weight)
    return memory.data_ptr(), memory.shape, memory.stride()


def _is_bf16(weight: Any) -> bool:
    return getattr(weight, "dtype", None) == torch.bfloat16


def _bits(weight: Any) -> tuple[tuple[int, ...], bytes]:
    """The shape, and a key that weights with the same bits share."""
    memory = local(_whole(weight)).detach().contiguous().cpu().view(torch.int16)
    # Equal numbers all over, as norms begin with, say nothing about whose they are.
    one = not memory.numel() or bool((memory == memory.view(-1)[0]).all())
    return tuple(weight.shape), b"" if one else hashlib.blake2b(memory.numpy().data).digest()


def export_weights(
    saved: Saved,
    target: str | os.PathLike[str],
    dtype: str = "float32",
    optimizer: str | os.PathLike[str] | None = None,
) -> str:
    """Write the weights of a checkpoint to a file of their own.

    Args:
        saved: the checkpoint.
        target: ``*.safetensors``; any other name gets a file of ``torch.save``.
        dtype: ``"float32"`` makes bf16 and fp16 weights fp32, exact if there is a master;
            ``"bfloat16"`` leaves all weights as they were trained.
        optimizer: the file with the optimizer's state dict, if it is not in the checkpoint.

    Returns:
        One line about what was written.

    Raises:
        ValueError: ``dtype`` is neither of the two.
        CheckpointError: weights were left out or are one rank's part, or the masters cannot be
            assigned.
    """
    if not isinstance(dtype, str) or dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"export was given dtype={dtype!r}; it writes 'float32', in which bf16 weights are "
            "exact if they have a master, or 'bfloat16', all weights as they were trained. "
            "Nothing was written"
        )
    if saved.further and optimizer is None:
        raise CheckpointError(
            f"{saved.path} holds {len(saved.further) + 1} optimizers, and does not say which "
            "weights belong to which. Export one model at a time: its file of weights, with its "
            "--optimizer FILE"
        )
    if saved.left_out:
        raise CheckpointError(
            f"{saved.path} holds tensors that cannot be exported: {'; '.join(saved.notes)[:300]}. "
            "Load it in the program that wrote it, and save what "
            "torch_bf16.fp32_state_dict(model, optimizer) returns. Nothing was written"
        )
    states = saved.optimizers
    if optimizer is not None:
        states, notes = read_optimizer(Path(optimizer), verify=True)
        if not states:
            raise CheckpointError(f"{optimizer} cannot be used: {'; '.join(notes)}")
    if dtype == "float32":
        weights, exact = fp32_weights(saved.tensors, states)
        origin = f"{exact} of them from exact masters"
    else:
        weights = {name: each.whole() for name, each in saved.tensors.items()}
        origin = "as they were trained"
    _write({name: each.contiguous() for name, each in weights.items()}, Path(target))
    return f"{target}: {len(weights)} tensors, {origin}"


def _write(weights: dict[str, Tensor], target: Path) -> None:
    safetensors = _safetensors() if target.suffix == ".safetensors" else None
    try:
        with replacing(target) as partial:
            if safetensors is None:
                torch.save(weights, partial)
            else:
                # The format has no tensors that share memory.
                seen: set[int] = set()
                for name, each in weights.items():
                    place = each.untyped_storage().data_ptr()
                    weights[name] = each.clone() if place in seen else each
                    seen.add(place)
                safetensors.save_file(weights, partial)
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
            "this needs safetensors: pip install safetensors, or give the target another suffix "
            "for a file of torch.save"
        ) from error
    return safetensors.torch

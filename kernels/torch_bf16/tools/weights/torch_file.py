"""Files of torch.save: they are mapped into memory, not read, and no code in them is run."""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import re
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.errors import CheckpointError, first_line
from torch_bf16.sharding import as_real
from torch_bf16.states.schema import HEADER, readable

from .saved import OptimizerStates, Saved, SavedTensor, is_number

__all__ = ["STATES", "WEIGHTS", "read_optimizer", "read_torch_file"]

WEIGHTS = ("state_dict", "model", "model_state_dict", "module", "weights", "params", "net")
STATES = ("optimizer_states", "optimizer", "optimizer_state_dict", "optim")
_STEPS = ("global_step", "step", "iteration", "steps")
_PAGEOUT = 21  # MADV_PAGEOUT, Linux: unlike DONTNEED it loses nothing, whatever lies there


def read_torch_file(path: Path) -> Saved:
    """Weights, the optimizer's states and the step of a file of torch.save, Lightning or Trainer.

    Raises:
        CheckpointError: it is truncated, damaged or of another kind, or holds no weights, or an
            optimizer's state that is not built as torch builds it.
        OSError: it cannot be read.
    """
    content, notes = _load(path)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not tensors by name")
    weights = next((content[k] for k in WEIGHTS if isinstance(content.get(k), Mapping)), content)
    tensors = _tensors_in(weights)
    if not tensors:
        held = ", ".join(str(key)[:40] for key in list(content)[:8])
        raise CheckpointError(
            f"{path} has no weights: it holds {held or 'nothing'}. They are looked for under "
            f"{', '.join(WEIGHTS)}, or as the whole file"
        )
    held = (content.get(key) for key in STATES)
    states = next(
        (each for each in held if isinstance(each, (Mapping, list, tuple)) and each), None
    )
    step = next((content[k] for k in _STEPS if isinstance(content.get(k), int)), None)
    optimizer, left_out = _optimizers(states)
    return Saved(path, tensors, optimizer, step, notes + left_out)


def read_optimizer(path: Path) -> tuple[OptimizerStates | None, list[str]]:
    """The states in a file that holds nothing else, such as ``optimizer.pt`` of the Trainer."""
    content, notes = _load(path)
    optimizer, left_out = _optimizers(content)
    return optimizer, notes + left_out


def _tensors_in(weights: Mapping[Any, Any], prefix: str = "") -> dict[str, SavedTensor]:
    """The plain tensors in a mapping, and in mappings within it, by dotted names."""
    found: dict[str, SavedTensor] = {}
    for key, value in weights.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            if (saved := _saved_tensor(value)) is not None:
                found[name] = saved
        elif isinstance(value, Mapping) and prefix.count(".") < 4:
            found |= _tensors_in(value, f"{name}.")
    return found


def _load(path: Path) -> tuple[Any, list[str]]:
    with path.open("rb"):
        pass  # an OSError says more than what torch makes of it
    zipped = zipfile.is_zipfile(path)
    foreign: list[str] = []
    try:
        if zipped:
            foreign = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        if any(name.startswith("torch.distributed.tensor") for name in foreign):
            importlib.import_module("torch.distributed.tensor")

            foreign = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        inert: list[Any] = [_inert(name) for name in foreign]
        with torch.serialization.safe_globals(inert) if inert else nullcontext():
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
    except MemoryError:
        raise
    # torch and zipfile raise almost anything over damaged bytes.
    except Exception as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size:,} bytes) was cut short or damaged, or is not a file "
            f"that torch.save made of tensors and numbers: {_reason(error)}. What works: "
            "safetensors, or torch.save(model.state_dict(), path)"
        ) from None
    notes = []
    if foreign:
        shown = ", ".join(foreign[:4]) + (", ..." if len(foreign) > 4 else "")
        notes.append(f"{path.name} also holds {shown}; none of its code was run: it was left out")
    return content, notes


def _reason(error: Exception) -> str:
    # torch's message begins with how to run the file's code anyway, and ends with a link.
    text = re.split(r"WeightsUnpickler error:|from a trusted source\.\n+", str(error))[-1]
    return first_line(error, text).partition(" Please use `torch")[0][:300].rstrip(".")


class _Inert:
    """Stands for an object whose class is never imported: nothing of it is created or run."""

    def __new__(cls, *arguments: Any, **options: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _inert(path: str) -> type:
    module, _, name = path.rpartition(".")
    return type(name, (_Inert,), {"__module__": module, "__qualname__": name})


def _optimizers(states: Any) -> tuple[OptimizerStates | None, list[str]]:
    """The states of all optimizers of a run as those of one, and a note if some were left out."""
    state_dicts = list(states) if isinstance(states, (list, tuple)) else [states]
    found = [each for each in map(_optimizer, state_dicts) if each is not None]
    if len(found) < 2:
        return (found[0] if found else None), []
    recipe = found[0].header.get("recipe")
    same_recipe = [each for each in found if each.header.get("recipe") == recipe]
    notes = []
    if lost := len(found) - len(same_recipe):
        notes.append(
            f"the states of {lost} of {len(found)} optimizers are of another recipe than the "
            "first, and were left out"
        )
    return _together(same_recipe), notes


def _together(optimizers: list[OptimizerStates]) -> OptimizerStates:
    """One optimizer with the groups of all; each optimizer numbers its parameters from 0."""
    state: dict[Any, Mapping[str, Any]] = {}
    groups: list[Mapping[str, Any]] = []
    names: list[Any] = []
    for number, each in enumerate(optimizers):
        own_names = each.header.get("names") or [group.get("param_names") for group in each.groups]
        names += [own_names[n] if n < len(own_names) else None for n in range(len(each.groups))]
        keys = {key: key if isinstance(key, str) else (number, key) for key in each.state}
        state |= {keys[key]: kept for key, kept in each.state.items()}
        groups += [
            {**group, "params": [keys.get(key, key) for key in group.get("params", ())]}
            for group in each.groups
        ]
    return OptimizerStates(state, groups, {**optimizers[0].header, "names": names})


def _optimizer(states: Any) -> OptimizerStates | None:
    if not isinstance(states, Mapping) or not isinstance(states.get("state"), Mapping):
        return None
    states = readable(states)
    found = {
        key: {
            name: (
                _saved_tensor(value)
                if isinstance(value, Tensor) and not is_number(name, value.shape)
                else value
            )
            for name, value in each.items()
        }
        for key, each in states["state"].items()
    }
    return OptimizerStates(found, list(states["param_groups"]), states.get(HEADER) or {})


def _saved_tensor(tensor: Tensor) -> SavedTensor | None:
    # The numbers of another library's tensor class need not lie in one place.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_quantized:
        return None
    is_complex, tensor = tensor.is_complex(), as_real(tensor.detach())
    tied = (tensor.data_ptr(), tuple(tensor.shape)) if tensor.numel() else None
    read = functools.partial(_read, tensor)
    return SavedTensor(tuple(tensor.shape), tensor.dtype, read, tied, is_complex)


def _read(tensor: Tensor, start: int, stop: int) -> Tensor:
    piece = tensor.reshape(-1)[start:stop]
    copy = piece.clone()
    if piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        _page_out(piece)
    return copy


def _page_out(piece: Tensor) -> None:
    """Free the pages of a mapped file, which would add up to the whole file."""
    page = mmap.PAGESIZE
    begin = piece.data_ptr() // page * page
    end = piece.data_ptr() + piece.numel() * piece.element_size()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGEOUT)

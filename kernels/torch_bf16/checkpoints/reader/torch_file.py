"""Files of torch.save: they are mapped into memory, not read, and no code in them is run."""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import re
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.checkpoints.files import check_complete, check_records, first_keys
from torch_bf16.errors import CheckpointError, first_line, with_article
from torch_bf16.sharding import as_real, is_dtensor, local
from torch_bf16.states.views import MASTERS

from .saved import OptimizerStates, Saved, SavedTensor, boxes, is_scalar

__all__ = ["STATES", "WEIGHTS", "read_optimizer", "read_torch_file"]

WEIGHTS = ("state_dict", "model", "model_state_dict", "module", "weights", "params", "net")
STATES = ("optimizer_states", "optimizer", "optimizer_state_dict", "optim")
_STEPS = ("global_step", "step", "iteration", "steps")
_PAGEOUT = 21  # MADV_PAGEOUT, Linux: unlike DONTNEED it loses nothing, whatever lies there


def read_torch_file(path: Path, verify: bool) -> Saved:
    """Weights, the optimizers' states and the step of a file of torch.save, Lightning or Trainer.

    Raises:
        CheckpointError: it is truncated, damaged, of another kind or one rank's part, or holds no
            weights, or masters in an optimizer's state that is not built as torch builds it.
        OSError: it cannot be read.
    """
    content, notes = _load(path, verify)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds {with_article(content)}, not tensors by name")
    saved = Saved(path, {}, notes=notes)
    held = _held(content)
    rest = {key: each for key, each in content.items() if key not in held}
    for key in WEIGHTS:
        if isinstance(part := content.get(key), Mapping):
            _add_tensors(saved, part)
        if saved.tensors:
            others = [name for name, each in rest.items() if name != key and _is_model(each)]
            notes += [_note_of_other(path, each, key) for each in others]
            break
    else:
        _add_tensors(saved, rest)
    if not saved.tensors:
        raise CheckpointError(
            f"{path} has no weights: it holds {first_keys(content)}. They are looked for under "
            f"{', '.join(WEIGHTS)}, or as the whole file"
        )
    saved.optimizers = _optimizers(held.values(), notes)
    saved.step = next((content[k] for k in _STEPS if isinstance(content.get(k), int)), None)
    return saved


def read_optimizer(path: Path, verify: bool) -> tuple[list[OptimizerStates], list[str]]:
    """The optimizers' states in a file that may hold nothing else, and notes on what it holds."""
    content, notes = _load(path, verify)
    parts = content if isinstance(content, Mapping) else {}
    found = _optimizers(_held(parts).values(), notes) or _optimizers([content], notes)
    if not found:
        notes.append(
            f"{path.name} has no state dict of an optimizer: it holds {first_keys(parts)}. It is "
            "looked for at the first level, alone or several together, or as the whole file"
        )
    return found, notes


def _is_model(part: Any) -> bool:
    """Whether a part of a file is built as a module's state dict: of tensors, with weights."""
    return (
        isinstance(part, Mapping)
        and all(isinstance(each, Tensor) or key == "_extra_state" for key, each in part.items())
        and any(map(_is_weight, part.values()))
    )


def _is_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _note_of_other(path: Path, key: Any, chosen: Any) -> str:
    return (
        f"{path.name} also holds tensors under {key!r} beside {chosen!r}: left out. To read them, "
        f"save torch.load(...)[{key!r}] in a file of its own"
    )


def _add_tensors(saved: Saved, weights: Mapping[Any, Any], prefix: str = "") -> None:
    """Add the plain tensors in a mapping, and in mappings within it, by dotted names."""
    for key, value in weights.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            if (tensor := _saved_tensor(value, name)) is not None:
                saved.tensors[name] = tensor
            else:
                saved.left_out.append(name)
                saved.notes.append(
                    f"{name} is sparse, quantized, on the meta device or of another class: left out"
                )
        elif _is_states(value):
            saved.notes.append(f"{name} is an optimizer's, and not at the first level: left out")
        elif isinstance(value, Mapping) and prefix.count(".") < 4 and key != "_extra_state":
            _add_tensors(saved, value, f"{name}.")


def _load(path: Path, verify: bool) -> tuple[Any, list[str]]:
    with path.open("rb"):
        pass  # an OSError says more than what torch makes of it
    zipped = zipfile.is_zipfile(path)
    foreign: list[str] = []
    try:
        if zipped and verify:
            check_records(path)
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
    if isinstance(error, LookupError):
        # Of text, the unpickler says no more than the code of a letter.
        text = f"it is no pickle ({type(error).__name__}: {text})"
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


def _held(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """The parts of a file that are the states of optimizers, by what they are or by their names."""
    if _is_states(content):
        return dict(content)
    return {
        key: each
        for key, each in content.items()
        if (key in STATES and not isinstance(each, Tensor))
        or ((several := _several(each)) and all(map(_is_states, several)))
    }


def _is_states(part: Any) -> bool:
    return isinstance(part, Mapping) and {"state", "param_groups"} <= part.keys()


def _several(entry: Any) -> list[Any]:
    """The state dicts in a part of a file, which may be one, or a list or a mapping of several."""
    several = entry if isinstance(entry, (list, tuple)) else [_nested(entry)]
    if isinstance(entry, Mapping) and several[0] is entry and "state" not in entry:
        several = entry.values()
    return [_nested(each) for each in several if isinstance(each, (Mapping, Tensor))]


def _nested(part: Any) -> Any:
    """A state dict that torch flattened to names such as "state.layer.weight.step", as it was."""
    keys = [str(key).split(".") for key in part] if isinstance(part, Mapping) else []
    if {key[0] for key in keys} != {"state", "param_groups"} or min(map(len, keys)) < 3:
        return part
    found: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    for (word, *inner, last), value in zip(keys, part.values(), strict=True):
        name = ".".join(inner)
        found[word].setdefault(name, {"params": [name]} if word == "param_groups" else {})
        found[word][name][last] = value
    return {"state": found["state"], "param_groups": [*found["param_groups"].values()]}


def _optimizers(entries: Iterable[Any], notes: list[str]) -> list[OptimizerStates]:
    """The states of all optimizers in parts of a file."""
    whole = [each for entry in entries for each in _several(entry) if isinstance(each, Mapping)]
    whole = [each for each in whole if isinstance(each.get("state"), Mapping)]
    return [found for each in whole if (found := _optimizer(each, notes)) is not None]


def _optimizer(states: Mapping[str, Any], notes: list[str]) -> OptimizerStates | None:
    try:
        found = OptimizerStates.of(states)
    except CheckpointError as error:
        every = (each for each in states["state"].values() if isinstance(each, Mapping))
        if any(key in MASTERS for state in every for key in state):
            raise
        notes.append(f"{error}: left out")
        return None
    in_file = {
        key: {
            name: (
                _saved_tensor(value, f"{key}.{name}")
                if isinstance(value, Tensor) and not is_scalar(name, value.shape)
                else value
            )
            for name, value in each.items()
        }
        for key, each in found.state.items()
    }
    return OptimizerStates(in_file, found.groups, found.header)


def _saved_tensor(tensor: Tensor, name: str) -> SavedTensor | None:
    check_complete(tensor, name)
    tensor = local(tensor) if is_dtensor(tensor) else tensor
    # The numbers of another library's tensor class need not lie in one place.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    if tensor.is_quantized or tensor.is_meta:
        return None
    is_complex, tensor = tensor.is_complex(), as_real(tensor.detach())
    tied = (tensor.data_ptr(), tuple(tensor.shape)) if tensor.numel() else None
    read = functools.partial(_read, tensor)
    return SavedTensor(tuple(tensor.shape), tensor.dtype, read, tied, is_complex, tensor)


def _read(tensor: Tensor, start: int, stop: int) -> Tensor:
    if tensor.is_contiguous():
        piece = tensor.view(-1)[start:stop]
        copy = piece.clone()
        _page_out(piece)
        return copy
    # Of a tensor in channels_last, or of a transposed one, only the rows asked for are copied.
    rows = [tensor.new_empty(0)]
    for at, first, last in boxes(tensor.shape, start, stop):
        piece = tensor[at][first:last]
        rows.append(piece.reshape(-1))
        if _reach(piece) == piece.numel():
            _page_out(piece)
    if stop == tensor.numel():
        # Not before: where rows lie all over it, their pages hold parts of the next ones.
        _page_out(tensor)
    return torch.cat(rows)


def _reach(piece: Tensor) -> int:
    """Elements of memory from the first of a tensor to the last."""
    return 1 + sum((n - 1) * step for n, step in zip(piece.shape, piece.stride(), strict=True))


def _page_out(piece: Tensor) -> None:
    """Free the pages of a mapped file, which would add up to the whole file."""
    page = mmap.PAGESIZE
    begin = piece.data_ptr() // page * page
    end = piece.data_ptr() + _reach(piece) * piece.element_size()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGEOUT)

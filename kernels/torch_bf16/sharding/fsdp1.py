"""Which elements of which whole tensors FSDP1 has left in a parameter.

``FullyShardedDataParallel`` lays the parameters of a unit end to end and cuts the row into equal
shards. With ``use_orig_params=True`` a parameter stays the object that it was and becomes, outside
of forward and backward passes, a view of its elements in this rank's shard: one dimension, often no
element. Otherwise the optimizer gets one flat parameter per unit, the shard itself. Neither knows
the shapes that formats follow from, nor the indices that noise follows. FSDP1's handles do; this is
the only file that names what is private in them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .dtensor import Span, span_of

__all__ = [
    "bare_name",
    "clean_name",
    "is_flattened",
    "is_part",
    "obstacle",
    "owners_of",
    "register",
    "shapes_of",
    "shard_group",
    "spans_of",
    "unit_shapes",
    "whole_numel",
]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_DDP = "module."
_FLAT = "_flat_param"

_handles: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The handle that has flattened a parameter, as a weak reference: handles hold the parameters."""


def is_flattened(parameter: Any) -> bool:
    """Whether FSDP1 has laid the parameter into a flat one, or it is a flat one."""
    return getattr(parameter, "_fsdp_flattened", False)


def is_part(parameter: Tensor) -> bool:
    """Whether it is not one whole tensor, but a part of one or of several.

    Without sharding (``NO_SHARD``, one rank) and with ``use_orig_params=True`` FSDP1 leaves a
    parameter as it was.
    """
    if not is_flattened(parameter):
        return False
    handle = _handle(parameter)
    return handle.uses_sharded_strategy or not handle._use_orig_params


def obstacle(parameter: Tensor) -> str | None:
    """Why a parameter that FSDP1 has flattened cannot be trained, or None where it can."""
    try:
        handle = _handle(parameter)
    except LookupError as error:
        return str(error)
    if not is_part(parameter):
        return None
    flat = handle.flat_param
    for name, contiguous, extension in zip(
        *(flat._fqns, flat._contiguities, flat._param_extensions), strict=True
    ):
        if extension is not None:
            return (
                f"holds {name!r}, which tensor parallelism had cut before FSDP1 flattened it. "
                "Shard with torch.distributed.fsdp.fully_shard (FSDP2), which goes with tensor "
                "parallelism"
            )
        if not contiguous:
            return (
                f"holds {name!r}, which was not contiguous when FSDP1 flattened it: its elements "
                "lie in another order than their indices, which the noise follows. Make it "
                "contiguous before wrapping (p.data = p.data.contiguous())"
            )
    return None


def register(module: nn.Module) -> None:
    """Note what FSDP1 has flattened in a module, which saves a search for it."""
    for sub in module.modules():
        if type(sub).__name__ == "FullyShardedDataParallel":
            handle = sub.__dict__.get("_handle")
            if handle is not None:
                _note(handle)


def spans_of(parameter: Tensor, name: str) -> list[Span]:
    """What whole tensors a parameter's memory on this rank is made of.

    Args:
        parameter: plain, a DTensor, or what FSDP1 has made of it.
        name: what keys its noise; of a flat parameter, the names of what it was made of are
            derived from it.

    Raises:
        NotImplementedError: a DTensor's elements are no equally long runs at equal distances.
        ValueError: FSDP1 has gathered the parameter for the time being.
    """
    if not is_part(parameter):
        return [span_of(parameter, name)]
    flat = _handle(parameter).flat_param
    found = []
    for number in _numbers(parameter):
        info, whole = flat._shard_param_infos[number], name
        numel, start = info.numel_in_shard or 0, 0
        if flat is parameter:
            whole, start = _inner_name(name, flat._fqns[number]), info.offset_in_shard
        elif (parameter.ndim, parameter.numel()) != (1, numel):
            raise ValueError(
                f"parameter {name!r} has shape {tuple(parameter.shape)} now and {numel} elements "
                "in this rank's shard: FSDP1 has gathered it. Step outside of summon_full_params, "
                "after a backward pass. Nothing was updated"
            )
        run, offset = max(numel, 1), info.intra_param_start_idx or 0
        found.append(Span(whole, tuple(flat._shapes[number]), start, numel, offset, run, run))
    return found


def shapes_of(parameter: Tensor) -> list[tuple[int, ...]]:
    """The shapes of the whole tensors in a parameter, on whichever rank their elements are."""
    if not is_part(parameter):
        return [tuple(parameter.shape)]
    flat = _handle(parameter).flat_param
    if flat is parameter:
        return [tuple(shape) for shape in flat._shapes]
    return [tuple(s) for s, p in zip(flat._shapes, flat._params, strict=True) if p is parameter]


def unit_shapes(parameter: Tensor) -> list[tuple[int, ...]]:
    """The shapes of all whole tensors that were flattened together with a parameter."""
    return [tuple(shape) for shape in _handle(parameter).flat_param._shapes]


def whole_numel(parameter: Tensor) -> int:
    """Elements of the whole tensors in a parameter, those of other ranks too."""
    return sum(prod(shape) for shape in shapes_of(parameter))


def owners_of(parameter: Tensor) -> list[tuple[nn.Module, str, Span | None]]:
    """For each whole tensor in a part: the module and the attribute that it belonged to.

    With it comes the span that is on this rank, if any.
    """
    infos = _handle(parameter).flat_param._param_infos
    here = dict(zip(_numbers(parameter), spans_of(parameter, ""), strict=True))
    numbers = here if len(shapes_of(parameter)) == 1 else range(len(infos))
    return [(infos[n].module, infos[n].param_name, here.get(n)) for n in numbers]


def shard_group(parameter: Tensor) -> Any:
    """The process group whose ranks hold different elements, or None where each holds all."""
    handle = _handle(parameter)
    return handle.process_group if handle.uses_sharded_strategy else None


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def clean_name(name: str) -> str:
    """A parameter's name without what FSDP1 and the wrappers below it put there."""
    return _unwrapped(name) if _WRAPPERS[0] in name else name


def bare_name(name: str) -> str:
    """A parameter's name, the same whether its module is compiled, wrapped by DDP, both or none."""
    name = _unwrapped(name)
    while name.startswith(_DDP):
        name = name.removeprefix(_DDP)
    return name


def _numbers(parameter: Tensor) -> Iterator[int]:
    """Numbers of the whole tensors of which a parameter has elements; an original one has one."""
    flat: Any = _handle(parameter).flat_param
    for number, info in enumerate(flat._shard_param_infos):
        if info.in_shard if flat is parameter else flat._params[number] is parameter:
            yield number


def _inner_name(name: str, inner: str) -> str:
    inner = _unwrapped(inner)
    if name == _FLAT or name.endswith("." + _FLAT):
        return name.removesuffix(_FLAT) + inner
    return f"{name}/{inner}"


def _handle(parameter: Tensor) -> Any:
    """The handle of a parameter that FSDP1 has flattened.

    Raises:
        LookupError: no handle is known; the message says what helps.
    """
    known = _handles.get(parameter)
    handle = known() if known is not None else None
    if handle is None:
        # A parameter does not know who flattened it. Once per model: this asks all that lives.
        for each in _live_handles():
            _note(each)
        known = _handles.get(parameter)
        handle = known() if known is not None else None
    if handle is None:
        raise LookupError(
            "belongs to FullyShardedDataParallel (FSDP1), and the module that wrapped it cannot be "
            "found. Make the optimizer by torch_bf16.convert(torch.optim.AdamW(...), recipe, "
            "module=model) with the wrapped model"
        )
    return handle


def _live_handles() -> Iterator[Any]:
    private = sys.modules.get("torch.distributed.fsdp._flat_param")
    if private is not None:
        yield from (o for o in gc.get_objects() if type(o) is private.FlatParamHandle)


def _note(handle: Any) -> None:
    flat = handle.flat_param
    members: Sequence[Tensor] = (flat, *(flat._params or ()))
    for each in members:
        _handles[each] = ref(handle)

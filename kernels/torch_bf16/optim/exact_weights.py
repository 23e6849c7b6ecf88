"""Reads and writes the fp32 numbers that bf16 weights stand for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bf16.argument_checks import check_module
from torch_bf16.backends import fetch
from torch_bf16.engine import data_writes
from torch_bf16.engine.encoder import Encoder
from torch_bf16.engine.states import note_replaced
from torch_bf16.engine.versions import Snapshot
from torch_bf16.engine.wrappers import optimizers_for, warn_of_left_out
from torch_bf16.errors import with_article
from torch_bf16.model import remainders
from torch_bf16.model.cast_modules import stored_by
from torch_bf16.sharding import Shard, local, reshard, shard_of, units
from torch_bf16.states.recoding import Changes, stored_format
from torch_bf16.states.views import COUNTER, masters_in

from . import inherited_masters
from .overview import Place, overview_of, placed
from .overwritten import without_remainders

if TYPE_CHECKING:
    from .optimizer import BF16Optimizer

__all__ = ["Write", "exact_weights", "find_and_write", "read", "write"]


class Write(NamedTuple):
    """Numbers for a parameter.

    Attributes:
        place: where the parameter is in the optimizer.
        parameter: the parameter.
        value: the numbers.
    """

    place: Place
    parameter: Tensor
    value: Tensor


def read(optimizer: BF16Optimizer, parameter: Tensor) -> Tensor:
    """See :meth:`BF16Optimizer.exact_weight`."""
    inherited_masters.keep(optimizer, [parameter])
    if parameter.dtype != torch.bfloat16:
        return parameter.detach()
    shard = shard_of(parameter)
    if shard.in_row and shard.obstacle() is None:
        # Raises where FSDP1 has gathered more than the masters here belong to.
        _ = shard.spans
    visible = shard.memory.contiguous()
    state = dict.get(optimizer.state, parameter, {})
    state = without_remainders(optimizer, shard, state)
    masters: dict[str, Any] = masters_in(state)
    if masters:
        format_ = stored_format(masters, "")
    else:
        # What the first step makes of the bits that wait for it.
        format_ = optimizer.recipe.format_of("weights", shard.shape, parameter.dtype)
        if len(format_.planes) == 1:  # they wait in a model that another recipe has cast
            whole = remainders.second_plane(shard, torch.float32)
            return shard.place(visible.float() if whole is None else whole)
        waiting = zip(format_.plane_names("")[1:], format_.planes[1:], strict=True)
        masters = {key: remainders.second_plane(shard, plane.dtype) for key, plane in waiting}
    if format_ is None or any(each is None for each in masters.values()):
        return shard.place(visible.float())
    beside = fetch([masters[key] for key in format_.plane_names("")[1:]], visible.device)
    return shard.place(format_.decode([visible, *beside]))


def find_and_write(optimizer: BF16Optimizer, parameter: Tensor, value: Tensor) -> None:
    """See :meth:`BF16Optimizer.set_exact_weight`."""
    places = overview_of(optimizer, [parameter]).places_of([parameter])
    if not places:
        raise ValueError(
            f"set_exact_weight was given a parameter of shape {tuple(parameter.shape)} that is in "
            f"no group of this {type(optimizer).__name__}; write to it directly: "
            "parameter.copy_(...)"
        )
    (place,) = places
    _check_value(optimizer, place, parameter, value)
    inherited_masters.keep(optimizer, [parameter])
    reshard([parameter])
    write(optimizer, [Write(place, parameter, value)])


def write(optimizer: BF16Optimizer, writes: Iterable[Write]) -> None:
    """Write fp32 numbers into parameters and what their formats keep beside them, all at once.

    Args:
        optimizer: the optimizer that has the parameters.
        writes: parameters, not gathered by FSDP2, with their numbers, fp32 in their shapes.
    """
    encoder, engine, encoded = Encoder(), optimizer._engine, []
    for each in writes:
        if each.parameter.dtype == torch.bfloat16:
            keys = overview_of(optimizer, [each.parameter]).keys
            shard = shard_of(each.parameter, keys[id(each.parameter)])
            snapshot = engine.snapshots.setdefault(each.parameter, Snapshot.of(shard))
            state = _queue(encoder, optimizer, each, shard, snapshot)
            encoded.append((shard, state, snapshot))
        else:
            each.parameter.copy_(each.value)
    encoder.run(optimizer.recipe.seed, optimizer.backend)
    for shard, state, snapshot in encoded:
        # Kernels write through addresses, which autograd does not notice.
        torch.autograd.graph.increment_version(shard.parameter)
        snapshot.version = shard.version()
        data_writes.note_step([snapshot.data])
        snapshot.data = data_writes.DataWatch.of(shard, state, snapshot.data)


def _queue(
    encoder: Encoder, optimizer: BF16Optimizer, write: Write, shard: Shard, snapshot: Snapshot
) -> dict[str, Any]:
    """Add a parameter's numbers to an encoder, and return its state, which is complete then."""
    parameter, (number, position) = write.parameter, write.place
    value = write.value.detach().to(parameter.device)
    # Under FSDP1 a parameter has the shape of this rank's part.
    part = value if shard.in_row else shard.take(value)
    format_ = optimizer.recipe.format_of("weights", shard.shape, parameter.dtype)
    state: dict[str, Any] = dict.get(optimizer.state, parameter, {})
    if len(format_.planes) > 1:
        label = functools.partial(optimizer.label, number, position)
        group = optimizer.param_groups[number]
        complete = optimizer._complete(state, shard, group, label, Changes())
        # Replace the dict only if needed, because plans and graphs refer to it.
        if complete.keys() != state.keys() or any(complete[k] is not state[k] for k in complete):
            state = complete
            dict.__setitem__(optimizer.state, parameter, state)
            note_replaced(optimizer.state)
        remainders.forget(shard)
    # Its noise must differ from that of the steps around it and of any write before it.
    step = int(state.get(COUNTER, state.get("step", 0)) or 0)
    count = snapshot.writes[1] + 1 if snapshot.writes[0] == step else 0
    snapshot.writes = step, count
    planes = [local(parameter).detach(), *(local(state[k]) for k in format_.plane_names("")[1:])]
    for span in shard.spans:
        span = replace(span, name=f"{span.name}/exact weight {count}")
        encoder.add(format_, planes, part, span, step + 1)
    return state


def _check_value(optimizer: BF16Optimizer, place: Place, parameter: Tensor, value: Tensor) -> None:
    wanted = torch.complex64 if parameter.is_complex() else torch.float32
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (parameter.shape, wanted):
        given = with_article(value)
        if isinstance(value, Tensor):
            given = f"{value.dtype} of shape {tuple(value.shape)}"
        raise ValueError(
            f"set_exact_weight was given {given} for {optimizer.label(*place)}; it takes "
            f"{str(wanted).removeprefix('torch.')} of the parameter's shape. Nothing was changed"
        )


@contextmanager
def exact_weights(
    model: nn.Module, *optimizers: torch.optim.Optimizer
) -> Iterator[dict[str, Tensor]]:
    """Give access to a model's weights in fp32, and write them back when the context ends.

    Averages of replicas (local SGD, DiLoCo), of checkpoints (soups) and of earlier weights
    (lookahead) often move a weight by less than a bf16 spacing: computed on ``p.data`` they are
    rounded, and the remainders of exact masters are lost. The context gives fp32 copies to compute
    them on, 4 bytes per parameter; :meth:`BF16Optimizer.exact_weight` copies one at a time.

    Args:
        model: the model, or a part of it. Of parameters that no optimizer has, those that were
            changed are written back.
        optimizers: optimizers of this package, or a host's wrappers around them.

    Yields:
        Copies by the names of ``model.named_parameters()``, in its order: fp32 tensors, or of the
        parameter's dtype if that is neither bf16 nor fp16. Write to them in place, by ``.data =
        ...`` or by assigning to the dict. Pass ``weights.values()`` to functions that take
        parameters. Gradients are off inside; after an exception nothing is written back.

    Raises:
        ValueError: an optimizer is not one of this package, another context has given some of
            these weights, a key was added or deleted, or a new value does not fit its parameter;
            nothing has been changed.

    Example:
        >>> others = {name: p.detach().float() for name, p in model.named_parameters()}
        >>> with torch_bf16.exact_weights(model, optimizer) as weights:
        ...     for name, weight in weights.items():
        ...         weights[name] = (weight + others[name]) / 2
    """
    check_module("exact_weights", model)
    ours = optimizers_for("exact_weights", optimizers)
    owners = {p: (each, place) for each in ours for place, p in placed(each)}
    # Parameters that FSDP2 has gathered for an evaluation are not those of the optimizer.
    reshard(owners)
    reshard(each for unit in units(model) for each in unit.parameters)
    warn_of_left_out("exact_weights", model, ours)
    named = dict(model.named_parameters())
    with torch.no_grad(), _given_once(model, named):
        weights = {
            name: owners[p][0].exact_weight(p).clone() if p in owners else _copy(p, ours)
            for name, p in named.items()
        }
        yield weights
        # Check all of them before writing the first one.
        if weights.keys() != named.keys():
            odd = sorted(map(str, weights.keys() ^ named.keys()))
            raise ValueError(
                f"exact_weights was given names that are not those of the {type(model).__name__}, "
                f"or lacks some: {', '.join(odd[:4])}{', ...' if odd[4:] else ''}. Its keys are "
                "the names of model.named_parameters(). Nothing was changed"
            )
        for name, parameter in named.items():
            if parameter in owners:
                _check_value(*owners[parameter], parameter, weights[name])
            elif not isinstance(weights[name], Tensor):
                raise ValueError(
                    f"exact_weights was given {with_article(weights[name])} for {name!r}, and "
                    "takes a tensor. Nothing was changed"
                )
            elif weights[name].shape != parameter.shape:
                raise ValueError(
                    f"exact_weights was given shape {tuple(weights[name].shape)} for {name!r}, "
                    f"which has shape {tuple(parameter.shape)}. Nothing was changed"
                )
        reshard(owners)
        writes: dict[BF16Optimizer, list[Write]] = {each: [] for each in ours}
        others: dict[Tensor, Tensor] = {}
        for name, parameter in named.items():
            if parameter in owners:
                owner, place = owners[parameter]
                writes[owner].append(Write(place, parameter, weights[name]))
            elif not _same_numbers(weights[name], _copy(parameter, ours)):
                others[parameter] = weights[name]
        _write_others(model, others, ours)
        for optimizer, of_optimizer in writes.items():
            write(optimizer, of_optimizer)


_given: set[int] = set()
"""The ids of parameters of which contexts have given copies that are not written back yet."""


@contextmanager
def _given_once(model: nn.Module, named: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse weights within another context, which would write its older copies over them."""
    if twice := [name for name, each in named.items() if id(each) in _given]:
        raise ValueError(
            f"exact_weights was given a {type(model).__name__} within another exact_weights of the "
            f"same weights ({twice[0]!r}, {len(twice)} in all), which would write its older copies "
            "over them when it ends: change those of the outer context, or end it first. Nothing "
            "was changed"
        )
    ids = {*map(id, named.values())}
    _given.update(ids)
    try:
        yield
    finally:
        _given.difference_update(ids)


def _copy(parameter: Tensor, optimizers: Sequence[BF16Optimizer]) -> Tensor:
    """A copy of a parameter that no optimizer has, with the bits that its cast dropped."""
    if parameter.dtype == torch.bfloat16 and optimizers:
        return optimizers[0].exact_weight(parameter).clone()
    narrow = parameter.dtype in (torch.bfloat16, torch.float16)
    return parameter.detach().float() if narrow else parameter.detach().clone()


def _same_numbers(value: Tensor, before: Tensor) -> bool:
    one, other = local(value).to(before.device), local(before)
    return one.dtype == other.dtype and torch.equal(one, other)


def _write_others(
    model: nn.Module, values: Mapping[Tensor, Tensor], optimizers: Sequence[BF16Optimizer]
) -> None:
    """Write parameters that no optimizer has; what bf16 drops is kept as a cast keeps it."""
    dropped_from = {}
    cast = ((sub, stored_by(sub)) for sub in model.modules())
    recipes = {id(p): each for sub, each in cast if each for p in sub._parameters.values()}
    for parameter, value in values.items():
        visible = value.detach().to(parameter.device)
        if optimizers and (parameter.dtype, value.dtype) == (torch.bfloat16, torch.float32):
            recipe = recipes.get(id(parameter), optimizers[0].recipe)
            visible, dropped = remainders.split(visible, recipe)
            if dropped is not None:
                dropped_from[id(parameter)] = dropped
        parameter.copy_(visible)
    if dropped_from:
        remainders.remember(model, dropped_from)

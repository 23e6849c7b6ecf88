"""A parameter's state: makes it, checks it, and adopts one that was saved.

``state[p]`` holds ``step`` (fp32, 0-d, on the CPU, as in torch), one tensor per plane of each of
the rule's states (``exp_avg`` ...), and the planes of the weight beyond the parameter itself
(``remainder16``, ``remainder8`` or ``master``); :mod:`.views` says how a state dict shows a
``remainder16``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torch_bf16.errors import Label, StateMismatchError, prefix_errors
from torch_bf16.formats import FP32, ROLES, Format
from torch_bf16.model import remainders
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule, State
from torch_bf16.sharding import Shard, as_real, local, same_memory
from torch_bf16.sharding import whole as gathered

from .home import Home, order_of
from .recoding import Changes, recode, recode_weight, stored_format
from .views import COUNTER, MASTERS, MOMENTS, masters_in

__all__ = ["complete_master", "complete_moment", "complete_state", "keys_of", "place_states"]

_BESIDE_MOMENTS = {plane for each in MOMENTS for plane in each.planes[1:]}


@cache
def keys_of(rule: Rule) -> frozenset[str]:
    """All keys under which a state may hold what a rule uses, in any format."""
    formats = {each for role in ROLES.values() for each in role.values()}
    names = [each.name for each in (*rule.states, *rule.stage_states)]
    planes = {key for name in names for each in formats for key in each.plane_names(name)}
    return frozenset({"step", COUNTER, *MASTERS, *planes})


def complete_state(
    state: Mapping[str, Any],
    shard: Shard,
    rule: Rule,
    recipe: Recipe,
    label: Label,
    changes: Changes,
) -> dict[str, Any]:
    """A parameter's state in the recipe's formats: new, converted from ``state``, or unchanged.

    Tensors that need no change are passed on, not copied. Numbers in another format, such as those
    of ``torch.optim`` or of another recipe, are rounded to nearest in the recipe's format.

    Args:
        state: the existing state, possibly empty; not changed.
        shard: the parameter's shard, with the weights that ``state`` belongs to.
        rule: the rule that will use the state.
        recipe: the optimizer's recipe.
        label: makes the parameter's name for errors.
        changes: counts the numbers that were rounded.

    Returns:
        A new dict. For a sharded parameter its tensors are placed like the parameter; in ``state``
        they may be whole, or placed otherwise. Entries that the rule does not use stay, as in
        torch: a momentum that is off for a while, or the user's own entries.

    Raises:
        StateMismatchError: a tensor has another shape or dtype, or an exact master belongs to a
            parameter that is fp32 now.
    """
    factors = {each.name for each in rule.stage_states if each.shape is not None}
    others = {k: v for k, v in state.items() if k not in keys_of(rule)}
    source = {k: v for k, v in state.items() if k not in others}
    state = _take_states(source, shard, factors, label)
    with prefix_errors(label):
        home = Home.of(shard, recipe, order_of(shard, rule, recipe))
    complete: dict[str, Any] = {"step": _step(state, rule, label)}
    whole: dict[str, Tensor] = {}
    began = complete["step"].item() > 0
    for each in (*rule.states, *rule.stage_states):
        # Momentum may be switched on at any time, but moments of Adam exist from the first step on.
        if began and state.get(each.name) is None and not each.optional:
            raise StateMismatchError(
                f"the state of {label()} counts {complete['step'].item():.0f} steps and has no "
                f"{each.name}, which {rule.name} keeps from the first step on. If an option was "
                "changed in between (centered of RMSprop, use_muon of Muon), set it back: it "
                "cannot change during a run. If none was, the state is damaged: load it as it was "
                "saved"
            )
        if each.shape is not None:
            whole[each.name] = _factor(state.get(each.name), each, shard, label, changes)
            continue
        format_ = recipe.format_of(each.role, shard.shape, shard.parameter.dtype)
        if format_.block > 1:
            shard.check_blocks(format_.block)
        planes = complete_moment(state, each.name, format_, home, label, changes)
        complete.update(zip(format_.plane_names(each.name), planes, strict=True))
    complete |= complete_master(state, shard, recipe, home, label, changes)
    return others | place_states(complete, source, shard) | whole


def complete_moment(
    state: Mapping[str, Any],
    name: str,
    format_: Format,
    home: Home,
    label: Label,
    changes: Changes,
) -> tuple[Tensor, ...]:
    """The planes of a number that a rule keeps; zeros where ``state`` has none.

    Raises:
        StateMismatchError: it has another shape, or a dtype that no format has.
    """
    if state.get(name) is None:
        return tuple(home.zeros(plane.shape(home.shape), plane.dtype) for plane in format_.planes)
    # A tensor in no known format may still hold numbers; it is then converted to fp32.
    source = stored_format(state, name) or FP32
    # Blocks are of neighbours in row-major order.
    there = replace(home, order=None) if source.block > 1 else home
    saved = tuple(
        _fitting(state[key], plane.shape(home.shape), there, key, label)
        for key, plane in zip(source.plane_names(name), source.planes, strict=True)
    )
    if [each.dtype for each in saved] == [plane.dtype for plane in format_.planes]:
        return saved
    if source is FP32 and not saved[0].is_floating_point():
        raise StateMismatchError(
            f"{name} of {label()} is {saved[0].dtype} and must be floating-point; the state is "
            "damaged, load it as it was saved"
        )
    x = source.decode(saved)
    planes = tuple(map(home.put, recode(x, format_)))
    now, then, old = format_.decode(planes), x, source.name
    if source is FP32 and saved[0].dtype != torch.float32:
        old = str(saved[0].dtype).removeprefix("torch.")
    if saved[0].dtype == torch.float64:  # decoding has rounded it
        now, then = now.double(), saved[0]
    changes.add(name, old, format_.name, x.numel(), _differing(now, then))
    return planes


def complete_master(
    state: Mapping[str, Any],
    shard: Shard,
    recipe: Recipe,
    home: Home,
    label: Label,
    changes: Changes,
) -> dict[str, Tensor]:
    """The weight's planes beside the parameter, in the recipe's format: this rank's part of them.

    Raises:
        StateMismatchError: a plane has a wrong shape, or a dtype that no format has, or belongs to
            a parameter that is fp32 now.
    """
    memory, dtype = shard.memory, shard.parameter.dtype
    weights = recipe.format_of("weights", shard.shape, dtype)
    keys = weights.plane_names("")[1:]
    saved = masters_in(state)
    # set_optimizer_state_dict adds what a whole state dict has to the optimizer's own entries.
    saved = {key: each for key, each in saved.items() if key not in keys} or saved
    if not saved:
        return {
            key: _first_master(shard, plane.dtype, home)
            for key, plane in zip(keys, weights.planes[1:], strict=True)
        }
    if dtype != torch.bfloat16:
        raise StateMismatchError(
            f"the state of {label()} has {', '.join(saved)}, the remainder of a bf16 weight, and "
            "the parameter is fp32 now. Cast the model (torch_bf16.cast_model) before loading, or "
            "export the checkpoint to fp32: torch_bf16.fp32_state_dict"
        )
    source = stored_format(saved, "")
    if shard.loads_states_first and source != weights:
        raise StateMismatchError(
            f"the state of {label()} has {', '.join(saved)}, and weights={weights.name!r} of "
            f"recipe {recipe.name!r} are kept in another format: DeepSpeed loads states before "
            "the weights that they belong to. Resume with the recipe that was saved"
        )
    if source is None or len(source.planes) != len(saved) + 1:
        found = ", ".join(f"{key} {getattr(each, 'dtype', each)}" for key, each in saved.items())
        raise StateMismatchError(
            f"{found} of {label()} is in no format of a weight's remainder; it was cast on its way "
            "here, for example by an optimizer that was not converted yet, or by torch.cat with a "
            "tensor of another dtype. Convert the optimizer first, and load the state dict as it "
            "was saved; where a program joins states with new numbers, give these the same dtype"
        )
    planes = [_fitting(each, memory.shape, home, key, label) for key, each in saved.items()]
    if source == weights:
        return dict(zip(keys, planes, strict=True))
    visible = memory.to(home.device).contiguous()
    x = source.decode([visible, *planes])
    remainder = tuple(map(home.put, recode_weight(x, visible, weights)))
    now = weights.decode([visible, *remainder])
    changes.add("weights", source.name, weights.name, x.numel(), _differing(now, x))
    return dict(zip(keys, remainder, strict=True))


def _take_states(
    state: Mapping[str, Any], shard: Shard, factors: Collection[str], label: Label
) -> dict[str, Any]:
    """This rank's part of each entry of a state, whose tensors may be whole or placed in any way.

    For a plain parameter, this is the whole tensor: a sharded one is gathered, on every rank. So
    are ``factors``, which every rank keeps whole. Numbers that are not tensors stay as they are.
    """
    taken = dict(state)
    for key, saved in state.items():
        # A 0-d tensor, such as mu_product of torch's NAdam, is the same on every rank.
        if key == "step" or not isinstance(saved, Tensor):
            continue
        if saved.ndim == 0 < len(shard.shape) and not saved.is_complex():
            continue
        if key in factors:
            taken[key] = gathered(saved)
            continue
        if shard.sharded and not (shard.in_row and saved.shape == shard.memory.shape):
            _check_shape(saved, _whole_shape(key, shard), key, label)
        taken[key] = shard.take(saved)
    return taken


def _differing(new: Tensor, old: Tensor) -> int:
    # Bits are compared, so that a NaN equals itself, and 0.0 differs from -0.0.
    bits = torch.int64 if old.dtype == torch.float64 else torch.int32
    return int((new.view(bits) != old.view(bits)).sum())


def _check_shape(saved: Any, shape: Sequence[int], key: str, label: Label) -> None:
    if not isinstance(saved, Tensor) or tuple(saved.shape) != tuple(shape):
        found = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
        raise StateMismatchError(
            f"{key} of {label()} has shape {found} in its state and must have shape "
            f"{tuple(shape)}; it was saved from another model, or a program that replaced the "
            "parameter left this state as it was"
        )


def _fitting(saved: Any, shape: Sequence[int], home: Home, key: str, label: Label) -> Tensor:
    _check_shape(saved, shape, key, label)
    if saved.layout != torch.strided or (saved.is_meta and home.device.type != "meta"):
        raise StateMismatchError(
            f"{key} of {label()} is {saved.layout} on {saved.device} in the state dict and must be "
            "a dense tensor with memory; load it as it was saved"
        )
    return home.put(saved)


def _step(state: Mapping[str, Any], rule: Rule, label: Label) -> Tensor:
    step = state.get("step")
    if step is None:
        # torch's SGD does not count steps; a buffer shows that it has taken the first one.
        needed = [each.name for each in rule.states if not each.optional]
        if len(needed) > 1 and any(state.get(name) is not None for name in needed):
            raise StateMismatchError(
                f"the state of {label()} has {', '.join(needed)} and no step, which corrects their "
                "bias: it is damaged. Load it as it was saved"
            )
        began = any(state.get(each.name) is not None for each in (*rule.states, *rule.stage_states))
        step = float(began)
    known = isinstance(step, (Tensor, Real))
    number = torch.as_tensor(step if known else -1, dtype=torch.float32, device="cpu")
    if number.numel() != 1 or not 0 <= number.item() < float("inf"):
        raise StateMismatchError(
            f"step of {label()} is {step!r} and must be a number of steps; the state is damaged, "
            "load it as it was saved"
        )
    return number.reshape(()) if number.ndim else number


def _factor(saved: Any, state: State, shard: Shard, label: Label, changes: Changes) -> Tensor:
    """A state with a shape of its own, such as Adafactor's rows: fp32, whole on every rank."""
    shape = state.shape(shard.shape)  # pyright: ignore[reportOptionalCall]
    # On the device even if the recipe offloads states: it is small, and each step reads all of it.
    home = Home(shape, shard.memory.device)
    if isinstance(saved, Tensor) and tuple(saved.shape) != shape:
        # FSDP1 can only gather states of the parameter's shape: it was saved expanded.
        saved = shard.unexpand(saved, shape)
    return complete_moment({state.name: saved}, state.name, FP32, home, label, changes)[0]


def _first_master(shard: Shard, dtype: torch.dtype, home: Home) -> Tensor:
    """The second plane of a new exact master: that of the fp32 weight before the cast, if known."""
    known = remainders.second_plane(shard, dtype)
    if known is not None:
        return home.put(known)
    if not dtype.is_floating_point:
        return home.zeros(home.shape, dtype)
    return home.put(shard.memory.to(dtype))


def place_states(
    here: Mapping[str, Any], source: Mapping[str, Any], shard: Shard
) -> dict[str, Any]:
    """Place this rank's parts of a state like the parameter.

    Args:
        here: this rank's parts, by key; ``step`` and entries that are not tensors stay as they are.
        source: the state from which they were made; its tensors that are in place are reused.
        shard: the parameter's shard.
    """
    placed = dict(here)
    for key, each in here.items():
        if key == "step" or not isinstance(each, Tensor):
            continue
        old = source.get(key)
        in_place = isinstance(old, Tensor) and _is_in_place(old, each, shard)
        placed[key] = old if in_place else shard.place(each, _whole_shape(key, shard))
    return placed


def _is_in_place(old: Tensor, part: Tensor, shard: Shard) -> bool:
    """Whether a tensor, of which ``part`` is this rank's part, is placed like the parameter."""
    if old.is_complex() != shard.parameter.is_complex():
        return False
    return same_memory(as_real(old), part) if old.is_complex() else local(old) is part


def _whole_shape(key: str, shard: Shard) -> tuple[int, ...]:
    """The shape of a state of the whole parameter; there are fewer scales than numbers."""
    plane = next((each for each in _BESIDE_MOMENTS if key.endswith(f"_{each.suffix}")), None)
    return shard.shape if plane is None else plane.shape(shard.shape)

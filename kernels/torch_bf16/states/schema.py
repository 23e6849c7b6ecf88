"""What the optimizer keeps for a parameter: its schema, how it is made, checked and taken over.

``state[p]`` holds ``step`` (fp32, 0-d, on the CPU, as in torch), one tensor per plane of each of
the rule's states (``exp_avg`` ...), and the planes of the weight beyond the parameter itself
(``remainder16``, ``remainder8`` or ``master``). A state dict is torch's, with one more top-level
entry, ``"torch_bf16"``, made of primitives, which torch and its distributed checkpoints ignore;
``views`` says how it shows a ``remainder16``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16.errors import StateMismatchError
from torch_bf16.formats import FP32, Format
from torch_bf16.model import residuals
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule, State
from torch_bf16.sharding.dtensor import check_blocks, local

from .placement import check_shape, local_state, placed_states
from .recoding import Changes, recode, recode_weight, stored_format
from .views import masters_in

__all__ = [
    "HEADER",
    "check_has_memory",
    "check_header",
    "check_hyperparameters",
    "check_whole",
    "complete_master",
    "complete_moment",
    "complete_state",
    "header",
    "notice",
]

HEADER = "torch_bf16"
SCHEMA = 2

# What rules read from a parameter group, where the class has it.
_NEEDED = (
    *("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "alpha"),
    *("centered", "lr_decay", "initial_accumulator_value", "momentum_decay"),
)
_FORMAT_FIELDS = ("weights", "exp_avg", "exp_avg_sq")


def header(recipe: Recipe, names: list[list[str | None]]) -> dict[str, Any]:
    """The entry that says how a state dict is to be read.

    Args:
        recipe: the optimizer's.
        names: of the parameters of each group, None where unknown.
    """
    fields = {name: getattr(recipe, name) for name in ("name", *_FORMAT_FIELDS, "seed")}
    return {"schema": SCHEMA, "recipe": fields, "names": names}


def check_whole(state_dict: Any) -> None:
    """Refuse what is no optimizer's state dict.

    Raises:
        StateMismatchError: its two parts are not there.
    """
    whole = isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping)
    if not whole or not isinstance(state_dict.get("param_groups"), (list, tuple)):
        found = list(state_dict)[:8] if isinstance(state_dict, Mapping) else type(state_dict)
        raise StateMismatchError(
            "this is no optimizer's state dict: it needs a dict 'state' and a list 'param_groups' "
            f"and has {found}. Pass what optimizer.state_dict() returned; nothing was changed"
        )


def check_has_memory(parameter: Tensor, label: str) -> None:
    """Refuse to load into a parameter without memory, where nothing would be kept.

    Raises:
        StateMismatchError: it is on the meta device.
    """
    if parameter.device.type == "meta":
        raise StateMismatchError(
            f"{label} is on the meta device, where a state would be lost. Give the model memory "
            "first (model.to_empty(device=...)), make the optimizer of its parameters, and load "
            "the weights, then the state dict. Nothing was changed"
        )


def check_hyperparameters(saved: Mapping[str, Any], live: Mapping[str, Any], number: int) -> None:
    """Refuse a parameter group of an optimizer with other hyperparameters.

    Raises:
        StateMismatchError: one that steps need is missing; torch would fail at the next step.
    """
    if missing := [name for name in _NEEDED if name in live and name not in saved]:
        raise StateMismatchError(
            f"parameter group {number} of the state dict has no {', '.join(missing)}: it was saved "
            "from another class of optimizer or is damaged. Load it into an optimizer of the class "
            "it was saved from; nothing was changed"
        )


def check_header(saved: Mapping[str, Any] | None, recipe: Recipe) -> Recipe:
    """The recipe to go on with after loading: the live one, with the saved seed.

    Args:
        saved: a state dict's ``"torch_bf16"`` entry, None for one that is not ours.
        recipe: the live optimizer's.

    Raises:
        StateMismatchError: the entry is of a newer schema, or damaged.
    """
    if saved is None:
        return recipe
    if not isinstance(saved, Mapping) or not isinstance(saved.get("schema"), int):
        raise StateMismatchError(
            f"the entry {HEADER!r} of the state dict is damaged: {saved!r}. Delete it to load the "
            "rest as it is; nothing was changed"
        )
    if saved["schema"] > SCHEMA:
        raise StateMismatchError(
            f"the state dict has schema {saved['schema']} and this version of torch_bf16 reads "
            f"schemas up to {SCHEMA}; update torch-bf16. Nothing was changed"
        )
    other = saved.get("recipe", {})
    if missing := {"name", "seed", *_FORMAT_FIELDS} - other.keys():
        raise StateMismatchError(
            f"the entry {HEADER!r} of the state dict has no {', '.join(sorted(missing))} of its "
            "recipe; it is damaged. Delete it to load the rest as it is; nothing was changed"
        )
    return dataclasses.replace(recipe, seed=other["seed"])


def notice(saved: Mapping[str, Any] | None, recipe: Recipe, changes: Changes) -> str:
    """One line for a load that changed formats."""
    source = repr(saved["recipe"]["name"]) if saved else "none of torch_bf16"
    return (
        f"loaded a state dict of recipe {source} into recipe {recipe.name!r}: {changes}. Keep the "
        "file, if what was rounded is needed again"
    )


def complete_state(
    state: Mapping[str, Any],
    parameter: Tensor,
    rule: Rule,
    recipe: Recipe,
    label: str,
    changes: Changes | None = None,
    like: Tensor | None = None,
) -> dict[str, Any]:
    """A parameter's state in the recipe's formats, made, taken over, or as it is.

    Tensors that already are as they must be are passed on, not copied. Numbers in another format,
    such as those of ``torch.optim`` or of another recipe, are rounded to nearest into theirs.

    Args:
        state: what there is, possibly empty; not changed.
        parameter: bf16 or fp32, with the weights that ``state`` belongs to.
        rule: the rule that will use it.
        recipe: the optimizer's recipe.
        label: how to call the parameter in an error.
        changes: counts what was rounded.
        like: what formats follow from, where it is not the parameter.

    Returns:
        A new dict; beside a DTensor its tensors are DTensors placed like it, and ``state`` may have
        them placed in another way or whole. Keys of ``state`` that the rule does not know are
        dropped.

    Raises:
        StateMismatchError: a tensor has another shape or dtype, or an exact master belongs to a
            parameter that is fp32 now.
    """
    changes = Changes() if changes is None else changes
    like = parameter if like is None else like
    memory, given = local(parameter), state
    state = {key: local_state(key, each, parameter, label) for key, each in state.items()}
    complete: dict[str, Any] = {"step": _step(state, parameter, rule, label)}
    began = complete["step"].item() > 0
    for each in (*rule.states, *rule.stage_states):
        # Momentum may be switched on at any time; moments of Adam are there from the first step on.
        if began and each.name not in state and not each.optional:
            raise StateMismatchError(
                f"the state of {label} counts {complete['step'].item():.0f} steps and has no "
                f"{each.name}: it is damaged. Load it as it was saved; nothing was changed"
            )
        if each.shape is not None:
            complete[each.name] = _factor(state.get(each.name), each, parameter, label)
            continue
        format_ = recipe.format_of(each.role, like)
        if format_.block > 1 and memory is not parameter:
            check_blocks(parameter, format_.block)
        planes = complete_moment(state, each.name, format_, memory, label, changes)
        complete.update(zip(format_.plane_names(each.name), planes, strict=True))
    complete |= complete_master(state, parameter, recipe, label, changes, like)
    return placed_states(complete, given, parameter)


def complete_moment(
    state: Mapping[str, Any],
    name: str,
    format_: Format,
    parameter: Tensor,
    label: str,
    changes: Changes,
) -> tuple[Tensor, ...]:
    """The planes of a number that a rule keeps; zeros where ``state`` has none.

    Raises:
        StateMismatchError: it has another shape, or a dtype that no format has.
    """
    if state.get(name) is None:
        return tuple(
            torch.zeros(plane.shape(parameter.shape), dtype=plane.dtype, device=parameter.device)
            for plane in format_.planes
        )
    saved = [state.get(key) for key in format_.plane_names(name)]
    if [getattr(each, "dtype", None) for each in saved] == [p.dtype for p in format_.planes]:
        return _fitting_planes(state, format_, parameter, name, label)
    first = _fitting(state[name], parameter, name, label)
    source = stored_format(state, name, None)
    if source is not None:
        x = source.decode(_fitting_planes(state, source, parameter, name, label))
    elif first.is_floating_point():
        source, x = FP32, first.float()
    else:
        raise StateMismatchError(
            f"{name} of {label} is {first.dtype} and must be floating-point; the state is damaged, "
            "load it as it was saved. Nothing was changed"
        )
    planes = recode(x, format_)
    changes.add(name, source, format_, x.numel(), _differing(format_.decode(planes), x))
    return planes


def complete_master(
    state: Mapping[str, Any],
    parameter: Tensor,
    recipe: Recipe,
    label: str,
    changes: Changes,
    like: Tensor | None = None,
) -> dict[str, Tensor]:
    """The planes of the weight beyond the parameter, in the recipe's format, as they are here.

    Raises:
        StateMismatchError: a plane has another shape or dtype than every format, or belongs to a
            parameter that is fp32 now.
    """
    memory = local(parameter)
    weights = recipe.format_of("weights", parameter if like is None else like)
    keys = weights.plane_names("")[1:]
    saved = masters_in(state)
    if not saved:
        return {
            key: _first_master(parameter, plane.dtype)
            for key, plane in zip(keys, weights.planes[1:], strict=True)
        }
    if parameter.dtype != torch.bfloat16:
        raise StateMismatchError(
            f"the state of {label} has {', '.join(saved)}, the rest of a bf16 weight, and the "
            "parameter is fp32 now. Cast the model (torch_bf16.cast_module) before loading, or "
            "export the checkpoint to fp32: torch_bf16.fp32_state_dict. Nothing was changed"
        )
    source = stored_format(saved, "", torch.bfloat16)
    if source is None or len(source.planes) != len(saved) + 1:
        found = ", ".join(f"{key} {getattr(each, 'dtype', each)}" for key, each in saved.items())
        raise StateMismatchError(
            f"{found} of {label} is in no format of a weight's rest; it was cast on its way here, "
            "load the state dict as it was saved. Nothing was changed"
        )
    planes = [_fitting(each, memory, key, label) for key, each in saved.items()]
    if source == weights:
        return dict(zip(keys, planes, strict=True))
    visible = memory.detach().contiguous()
    x = source.decode([visible, *planes])
    rest = recode_weight(x, visible, weights)
    now = weights.decode([visible, *rest])
    changes.add("weights", source, weights, x.numel(), _differing(now, x))
    return dict(zip(keys, rest, strict=True))


def _differing(new: Tensor, old: Tensor) -> int:
    # By bits: a NaN is what it was, and 0.0 is not -0.0.
    return int((new.view(torch.int32) != old.view(torch.int32)).sum())


def _fitting_planes(
    state: Mapping[str, Any], format_: Format, parameter: Tensor, name: str, label: str
) -> tuple[Tensor, ...]:
    return tuple(
        _fitting(state[key], parameter, key, label, plane.shape(parameter.shape))
        for key, plane in zip(format_.plane_names(name), format_.planes, strict=True)
    )


def _fitting(
    saved: Any, parameter: Tensor, key: str, label: str, shape: tuple[int, ...] | None = None
) -> Tensor:
    check_shape(saved, parameter, key, label, shape)
    return saved.to(parameter.device).contiguous()


def _step(state, parameter, rule, label) -> Tensor:
    step = state.get("step")
    if step is None:
        # torch's SGD keeps no step; a buffer shows that the first one was taken.
        needed = [each.name for each in rule.states if not each.optional]
        if len(needed) > 1 and any(state.get(name) is not None for name in needed):
            raise StateMismatchError(
                f"the state of {label} has {', '.join(needed)} and no step, which corrects their "
                "bias: it is damaged. Load it as it was saved; nothing was changed"
            )
        began = any(state.get(each.name) is not None for each in (*rule.states, *rule.stage_states))
        step = float(began)
    number = torch.as_tensor(step, dtype=torch.float32, device="cpu")
    if number.numel() != 1 or not 0 <= number.item() < float("inf"):
        raise StateMismatchError(
            f"step of {label} is {step!r} and must be a number of steps; the state is damaged, "
            "load it as it was saved. Nothing was changed"
        )
    return number.reshape(())


def _factor(saved, state: State, parameter: Tensor, label: str) -> Tensor:
    """A state with a shape of its own, in fp32."""
    shape = state.shape(tuple(parameter.shape))  # pyright: ignore[reportOptionalCall]
    if saved is None:
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)
    if tuple(saved.shape) != shape:
        raise StateMismatchError(
            f"{state.name} of {label} has shape {tuple(saved.shape)} in the state dict and must "
            f"have {shape}; it was saved from another model, nothing was changed"
        )
    return saved.to(parameter.device, torch.float32).contiguous()


def _first_master(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The second plane of a weight that starts now: of the fp32 weight that was cast, if known."""
    known = residuals.second_plane(parameter, dtype)
    if known is not None:
        return known
    memory = local(parameter).detach()
    if not dtype.is_floating_point:
        return torch.zeros(memory.shape, dtype=dtype, device=memory.device)
    return memory.to(dtype).contiguous()

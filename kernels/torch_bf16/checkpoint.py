"""What the optimizer keeps for a parameter: its schema, how it is made, checked and taken over.

``state[p]`` holds ``step`` (fp32, 0-d, on the CPU, as in torch), one tensor per plane of each of
the rule's states (``exp_avg`` ...), and the planes of the weight beyond the parameter itself
(``remainder`` or ``master``). A state dict is torch's, with one more top-level entry,
``"torch_bf16"``, made of primitives: torch and its distributed checkpoints ignore it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import lost_bits
from .errors import StateMismatchError
from .formats import Format
from .recipe import RECIPES, Recipe
from .rounding import bf16_nearest
from .rules import Rule

__all__ = [
    "HEADER",
    "check_header",
    "check_hyperparameters",
    "check_whole",
    "complete_state",
    "header",
]

HEADER = "torch_bf16"
SCHEMA = 1

# What rules read from a parameter group, where the class has it.
_NEEDED = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")
_FORMAT_FIELDS = ("weights", "exp_avg", "exp_avg_sq")


def header(recipe: Recipe) -> dict[str, Any]:
    """The entry that says how a state dict is to be read."""
    fields = {name: getattr(recipe, name) for name in ("name", *_FORMAT_FIELDS, "seed")}
    return {"schema": SCHEMA, "recipe": fields}


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
        StateMismatchError: the entry is of a newer schema or of another recipe.
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
    if differing := [name for name in _FORMAT_FIELDS if other[name] != getattr(recipe, name)]:
        fields = {name: other[name] for name in _FORMAT_FIELDS}
        known = RECIPES.get(str(other["name"]))
        spelt = repr(other["name"])
        if known is None or fields != {name: getattr(known, name) for name in _FORMAT_FIELDS}:
            spelt = f"Recipe({spelt}, {', '.join(f'{k}={v!r}' for k, v in fields.items())})"
        raise StateMismatchError(
            f"the state dict was saved with recipe {other['name']!r} ("
            + ", ".join(f"{name}={other[name]!r}" for name in differing)
            + f") and this optimizer uses {recipe.name!r} ("
            + ", ".join(f"{name}={getattr(recipe, name)!r}" for name in differing)
            + "). Make the optimizer with the recipe it was saved with, e.g. "
            + f"{spelt}, and load again; nothing was changed"
        )
    return dataclasses.replace(recipe, seed=other["seed"])


def complete_state(
    state: Mapping[str, Any], parameter: Tensor, rule: Rule, recipe: Recipe, label: str
) -> dict[str, Any]:
    """A parameter's state in the recipe's formats, made, taken over from torch, or as it is.

    Tensors that already are as they must be are passed on, not copied. Moments in another floating
    dtype, such as those of ``torch.optim``, are rounded to nearest into their format.

    Args:
        state: what there is, possibly empty; not changed.
        parameter: bf16 or fp32.
        rule: the rule that will use it.
        recipe: the optimizer's recipe.
        label: how to call the parameter in an error.

    Returns:
        A new dict. Keys of ``state`` that the rule does not know are dropped.

    Raises:
        StateMismatchError: a tensor has another shape, or a master that the recipe has no place
        for.
    """
    weights = recipe.format_of("weights", parameter)
    foreign = {"remainder", "master"} & state.keys() - set(weights.plane_names(""))
    if foreign:
        raise StateMismatchError(
            f"the state of {label} has {', '.join(sorted(foreign))}, which recipe "
            f"{recipe.name!r} has no place for (weights of a {parameter.dtype} parameter: "
            f"{weights.name}); load it into a model and an optimizer of the dtype and recipe it "
            "was saved with"
        )
    complete: dict[str, Any] = {"step": _step(state, parameter, rule, label)}
    began = complete["step"].item() > 0
    for each in rule.states:
        # Momentum may be switched on at any time; moments of Adam are there from the first step on.
        if began and each.name not in state and each.name != "momentum_buffer":
            raise StateMismatchError(
                f"the state of {label} counts {complete['step'].item():.0f} steps and has no "
                f"{each.name}: it is damaged. Load it as it was saved; nothing was changed"
            )
        format_ = recipe.format_of(each.role, parameter)
        complete[each.name] = _moment(state.get(each.name), format_, parameter, each.name, label)
    for plane, key in zip(weights.planes[1:], weights.plane_names("")[1:], strict=True):
        saved = state.get(key)
        if saved is None:
            complete[key] = _first_master(parameter, plane.dtype)
        else:
            _check_shape(saved, parameter, key, label)
            if saved.dtype != plane.dtype:
                raise StateMismatchError(
                    f"{key} of {label} is {saved.dtype} and must be {plane.dtype}; it was cast on "
                    "its way here, load the state dict as it was saved"
                )
            complete[key] = saved.to(parameter.device).contiguous()
    return complete


def _step(state, parameter, rule, label) -> Tensor:
    step = state.get("step")
    if step is None:
        # torch's SGD keeps no step; a buffer shows that the first one was taken.
        began = any(state.get(each.name) is not None for each in rule.states)
        step = float(began)
    number = torch.as_tensor(step, dtype=torch.float32, device="cpu")
    if number.numel() != 1 or not 0 <= number.item() < float("inf"):
        raise StateMismatchError(
            f"step of {label} is {step!r} and must be a number of steps; the state is damaged, "
            "load it as it was saved. Nothing was changed"
        )
    return number.reshape(())


def _moment(saved, format_: Format, parameter, key, label) -> Tensor:
    dtype = format_.planes[0].dtype
    if saved is None:
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    _check_shape(saved, parameter, key, label)
    if not saved.is_floating_point():
        raise StateMismatchError(
            f"{key} of {label} is {saved.dtype} and must be floating-point; the state is damaged, "
            "load it as it was saved. Nothing was changed"
        )
    saved = saved.to(parameter.device).contiguous()
    if saved.dtype == dtype:
        return saved
    return bf16_nearest(saved.float()) if dtype == torch.bfloat16 else saved.to(dtype)


def _first_master(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The second plane of a weight that starts now: of the fp32 weight that was cast, if known."""
    known = lost_bits.second_plane(parameter, dtype)
    if known is not None:
        return known
    if dtype == torch.int16:
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    return parameter.detach().to(dtype).contiguous()


def _check_shape(saved, parameter, key, label) -> None:
    if not isinstance(saved, Tensor) or saved.shape != parameter.shape:
        found = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
        raise StateMismatchError(
            f"{key} of {label} has shape {found} in the state dict and the parameter has shape "
            f"{tuple(parameter.shape)}; it was saved from another model, nothing was changed"
        )

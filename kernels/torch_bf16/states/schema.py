"""The header of our optimizers' state dicts, and the checks before a state dict is loaded.

A state dict is torch's, with one more top-level entry, ``"torch_bf16"``, made of primitives, which
torch and its distributed checkpoints ignore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch_bf16.errors import CheckpointError, StateMismatchError
from torch_bf16.recipe import Recipe

__all__ = [
    "HEADER",
    "NARROW",
    "WRITTEN",
    "check_family",
    "check_header",
    "check_hyperparameters",
    "check_names",
    "check_state_dict",
    "header",
    "narrow_states",
    "readable",
    "unowned_states",
    "with_saved_seed",
]

HEADER = "torch_bf16"
NARROW = "narrow"
WRITTEN = "written"

_FAMILY = "family"
_SCHEMA = 1

# Options that older versions of torch do not save, or that no step of ours reads.
_DISPENSABLE = {
    *("maximize", "foreach", "fused", "capturable", "differentiable", "amsgrad"),
    *("decoupled_weight_decay", "scheduled_lr"),
}
_FORMAT_FIELDS = ("weights", "exp_avg", "exp_avg_sq")


def header(
    recipe: Recipe,
    names: list[list[str | None]],
    last_norm: float | None,
    written: bool,
    family: str | None,
) -> dict[str, Any]:
    """The entry that says how a state dict is to be read.

    Args:
        recipe: the optimizer's recipe.
        names: names of the parameters of each group, None where unknown.
        last_norm: the norm by which the next step of released gradients is clipped, if any.
        written: whether something else wrote weights with a remainder before the last step.
        family: what the states of rules mean, see :func:`check_family`.
    """
    fields = {name: getattr(recipe, name) for name in ("name", *_FORMAT_FIELDS, "seed")}
    entry: dict[str, Any] = {"schema": _SCHEMA, "recipe": fields, "names": names}
    if last_norm is not None:
        entry["last_norm"] = last_norm
    if written:
        entry[WRITTEN] = True
    if family is not None:
        entry[_FAMILY] = family
    return entry


def check_state_dict(state_dict: Any) -> None:
    """Refuse anything that is not an optimizer's state dict.

    Raises:
        StateMismatchError: one of its two parts is missing, or is not built as by torch.
    """
    whole = isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping)
    if not whole or not isinstance(state_dict.get("param_groups"), (list, tuple)):
        found = list(state_dict)[:8] if isinstance(state_dict, Mapping) else type(state_dict)
        raise StateMismatchError(
            "this is not an optimizer's state dict: it needs a dict 'state' and a list "
            f"'param_groups' and has {found}. Pass what optimizer.state_dict() returned"
        )
    for number, group in enumerate(state_dict["param_groups"]):
        keys = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(keys, (list, tuple)) or not all(isinstance(k, (int, str)) for k in keys):
            raise StateMismatchError(
                f"parameter group {number} of the state dict is damaged: it needs a list 'params' "
                f"of numbers or names and has {keys!r}. Load it as it was saved"
            )
        if not _are_names(names := group.get("param_names") or [], or_none=True):
            raise StateMismatchError(
                f"parameter group {number} of the state dict is damaged: its 'param_names' are "
                f"{names!r} and must be a list of names. Load it as it was saved"
            )
        for key in keys:
            state = state_dict["state"].get(key)
            if state is not None and not isinstance(state, Mapping):
                raise StateMismatchError(
                    f"the state of parameter {key!r} in the state dict is damaged: it is "
                    f"{type(state).__name__} and must be a dict. Load it as it was saved"
                )


def readable(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds for an optimizer, where there is none to load it into.

    Args:
        saved: has a mapping ``"state"``; what other libraries leave out or add there is no fault:
            without groups it gets none, and entries of ``"state"`` that are no dicts are left out.

    Raises:
        CheckpointError: it is not built as torch builds it, or the entry of ours is damaged.
    """
    states = {key: each for key, each in saved["state"].items() if isinstance(each, Mapping)}
    state_dict = {"param_groups": [], **saved, "state": states}
    try:
        check_state_dict(state_dict)
        check_header(state_dict.get(HEADER))
    except StateMismatchError as error:
        raise CheckpointError(f"the state of an optimizer cannot be read: {error}") from None
    return state_dict


def check_hyperparameters(saved: Mapping[str, Any], expected: Iterable[str], number: int) -> None:
    """Refuse a parameter group that was saved by an optimizer with other hyperparameters.

    Args:
        saved: the group in the state dict.
        expected: names of the hyperparameters of the live optimizer's group.
        number: number of the group.

    Raises:
        StateMismatchError: a hyperparameter that steps need is missing; torch would fail only at
            the next step.
    """
    if missing := [name for name in expected if name not in {*saved, *_DISPENSABLE}]:
        if saved.keys() == {"params"} and any(isinstance(key, str) for key in saved["params"]):
            raise StateMismatchError(
                f"parameter group {number} of the optimizer holds {saved['params'][0]!r}, and the "
                "state dict has its parameters in other groups, by name: torch finds the options "
                "of only one group then. Save it with StateDictOptions("
                "flatten_optimizer_state_dict=True), which resumes in any groups, or make the "
                "groups that were saved"
            )
        raise StateMismatchError(
            f"parameter group {number} of the state dict has no {', '.join(missing)}: it was saved "
            "from another class of optimizer or is damaged. Load it into an optimizer of the class "
            "it was saved from"
        )


def check_header(saved: Mapping[str, Any] | None) -> None:
    """Refuse a header that cannot be read.

    Args:
        saved: a state dict's ``"torch_bf16"`` entry, None for a state dict that is not ours.

    Raises:
        StateMismatchError: the entry is of a newer schema, or damaged.
    """
    if saved is None:
        return
    if not isinstance(saved, Mapping) or not isinstance(saved.get("schema"), int):
        raise _damaged(f"{saved!r}")
    if saved["schema"] != _SCHEMA:
        raise StateMismatchError(
            f"the state dict has schema {saved['schema']} and this version of torch_bf16 reads "
            f"schema {_SCHEMA}; use the version that wrote it, or a newer one"
        )
    other, names = saved.get("recipe", {}), saved.get("names") or []
    listed = isinstance(names, (list, tuple)) and all(
        _are_names(of_group, or_none=True) for of_group in names
    )
    if not isinstance(other, Mapping) or not listed:
        raise _damaged(
            f"its recipe is {other!r} and must be a dict, or its names are not lists of names"
        )
    if missing := {"name", "seed", *_FORMAT_FIELDS} - other.keys():
        raise _damaged(f"its recipe has no {', '.join(sorted(missing))}")
    if not isinstance(other["seed"], int):
        raise _damaged(f"its seed is {other['seed']!r} and must be an int")
    if not isinstance(norm := saved.get("last_norm"), (int, float, type(None))):
        raise _damaged(f"its last_norm is {norm!r} and must be a number")
    if not _are_names(narrow := saved.get(NARROW, [])):
        raise _damaged(f"its {NARROW!r} is {narrow!r} and must be a list of names")


def check_family(saved: Mapping[str, Any] | None, family: str | None, kind: str) -> None:
    """Refuse states that have the names of this optimizer's, and other meanings.

    Args:
        saved: a checked header, None for a state dict that is not ours.
        family: the optimizer's; None if the names of its states and options tell it from others.
        kind: name of the optimizer's class.

    Raises:
        StateMismatchError: both families are known and differ.
    """
    theirs = (saved or {}).get(_FAMILY)
    if None not in (theirs, family) and theirs != family:
        raise StateMismatchError(
            f"the state dict was saved from an optimizer of the {theirs} family and this {kind} is "
            f"of the {family} family: its states have the same names and mean something else. "
            "Resume with the class it was saved from, or start without its state"
        )


def with_saved_seed(recipe: Recipe, header: Mapping[str, Any] | None) -> Recipe:
    """The recipe to go on with after loading: the live one, with the seed of a checked header."""
    return recipe if header is None else replace(recipe, seed=header["recipe"]["seed"])


def _damaged(what: str) -> StateMismatchError:
    return StateMismatchError(
        f"the entry {HEADER!r} of the state dict is damaged: {what}. Delete it to load the rest as "
        "it is"
    )


def narrow_states(state_dict: Any) -> set[str]:
    """Names of the states that an optimizer's own step made in bf16 or fp16 in the saved run.

    Empty if the entry is damaged, which :func:`check_header` refuses.
    """
    saved = state_dict.get(HEADER) if isinstance(state_dict, Mapping) else None
    narrow = saved.get(NARROW, []) if isinstance(saved, Mapping) else []
    return {*narrow} if _are_names(narrow) else set()


def _are_names(value: Any, or_none: bool = False) -> bool:
    kinds = (str, type(None)) if or_none else str
    return isinstance(value, (list, tuple)) and all(isinstance(each, kinds) for each in value)


def check_names(saved: Sequence[Sequence[Any]], live: Sequence[Sequence[Any]]) -> None:
    """Refuse states in another order than the parameters, as far as names are known.

    Args:
        saved: bare names of each group in the state dict, None where unknown.
        live: bare names of each group of the optimizer.

    Raises:
        StateMismatchError: a group has the same names in another order.
    """
    for number, (theirs, ours) in enumerate(zip(saved, live, strict=False)):
        if None in ours or None in theirs or list(theirs) == list(ours):
            continue
        if sorted(theirs) == sorted(ours):
            first = next(n for n, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
            raise StateMismatchError(
                f"group {number} of the state dict has its parameters in another order: number "
                f"{first} is {theirs[first]!r} there and {ours[first]!r} here, and states go by "
                "number. Make the optimizer of the parameters in the order of "
                "model.named_parameters()"
            )


def unowned_states(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """States under keys that are not parameters; only classes without a fused rule have any."""
    parameters = {key for group in state_dict["param_groups"] for key in group["params"]}
    return {key: each for key, each in state_dict["state"].items() if key not in parameters}

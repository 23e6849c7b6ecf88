"""What the environment says of a run: a mode, and the options of its recipe.

So that a script that somebody else wrote trains in a mode without being changed. The plugins read
it, and integrations into other trainers can; functions of this package that are called do not.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Mapping
from typing import Any

from .recipe import RECIPES, Recipe, get_recipe

__all__ = [
    "OPTIONS",
    "misspelt_variables",
    "mode_from_environment",
    "monitor_from_environment",
    "options_from_environment",
]

_PREFIX = "BF16_"

OPTIONS: dict[str, str] = {
    f"{_PREFIX}{name.upper()}": name
    for name in (
        *(field.name for field in dataclasses.fields(Recipe) if field.name != "name"),
        "release_gradients",
        "release_max_norm",
        "release_norm",
    )
}
"""For each variable the option that it sets, where a script leaves that open."""

_KNOWN = (*OPTIONS, "BF16_MODE", "BF16_MONITOR", "BF16_AUTOLOAD")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def mode_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """The mode that ``BF16_MODE`` names, or None where it is empty or not set.

    Raises:
        ValueError: it names none.

    Example:
        >>> mode_from_environment({"BF16_MODE": "true-bf16-stochastic"})
        'bf16-stochastic'
    """
    value = environment.get("BF16_MODE", "").strip()
    if not value:
        return None
    if value.lower() not in RECIPES:
        raise ValueError(
            f"BF16_MODE={value!r} is not one of the modes of torch-bf16, {', '.join(RECIPES)}. "
            "Unset it for what the script names"
        )
    return get_recipe(value.lower()).name


def options_from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The options that ``BF16_WEIGHTS`` and its like set; an empty variable sets nothing.

    A variable whose name is nearly one of these is warned of.

    Raises:
        ValueError: the value of one cannot be read, or is none that the option can have.

    Example:
        >>> options_from_environment({"BF16_SEED": "7", "BF16_KEEP_FP32": "head, *.router"})
        {'keep_fp32': ('head', '*.router'), 'seed': 7}
    """
    for name, meant in misspelt_variables(environment).items():
        warnings.warn(f"{name} is set, and nothing reads it; {meant} is read", stacklevel=2)
    texts = {variable: environment.get(variable, "").strip() for variable in OPTIONS}
    return {
        name: _parse(variable, name, texts[variable])
        for variable, name in OPTIONS.items()
        if texts[variable]
    }


def monitor_from_environment(environment: Mapping[str, str] = os.environ) -> int:
    """How many steps ``BF16_MONITOR`` puts between two looks of a monitor; 0 is no monitor.

    Raises:
        ValueError: it is no such number.

    Example:
        >>> monitor_from_environment({})
        100
    """
    value = environment.get("BF16_MONITOR", "").strip() or "100"
    if not value.isdecimal():
        raise ValueError(
            f"BF16_MONITOR={value!r} must be the number of steps from one look of the monitor to "
            "the next, or 0 for no monitor"
        )
    return int(value)


def misspelt_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables whose names are nearly those of ours, and which one each may mean.

    Others that begin with ``BF16_`` may be somebody else's.

    Example:
        >>> misspelt_variables({"BF16_WIEGHTS": "bf16+8", "BF16_TRAINING": "1"})
        {'BF16_WIEGHTS': 'BF16_WEIGHTS'}
    """
    known = [name.removeprefix(_PREFIX) for name in _KNOWN]
    found = {}
    for name in environment:
        if name.startswith(_PREFIX) and name not in _KNOWN:
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1, 0.75)
            found.update((name, _PREFIX + each) for each in near)
    return found


def _parse(variable: str, name: str, text: str) -> Any:
    if name == "release_gradients":
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(f"{variable}={text!r} must be one of {', '.join(_TRUE + _FALSE)}")
        return text.lower() in _TRUE
    if name == "keep_fp32":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    read, number = {
        "seed": (int, "a whole number"),
        "release_max_norm": (float, "a number"),
    }.get(name, (str, ""))
    try:
        value = read(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} must be {number}") from None
    if not name.startswith("release_"):
        try:
            get_recipe("bf16-stochastic", **{name: value})
        except ValueError as error:
            raise ValueError(f"{variable}: {error}") from None
    return value

"""Settings of a run in environment variables: a mode, and the options of its recipe.

They let a script that somebody else wrote train in a mode without being changed. The plugins read
them, and integrations into other trainers can; functions of this package that are called do not.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any

from .argument_checks import check_max_norm, check_release_norm
from .errors import warn
from .recipe import RECIPES, Recipe, get_recipe

__all__ = [
    "OFF",
    "OPTIONS",
    "misspelt_variables",
    "mode_from_environment",
    "monitor_from_environment",
    "options_from_environment",
]

_PREFIX = "BF16_"
_RELEASE_CHECKS: dict[str, Callable[[Any], None]] = {
    "release_gradients": lambda value: None,
    "release_max_norm": check_max_norm,
    "release_norm": check_release_norm,
}

OPTIONS: dict[str, str] = {
    f"{_PREFIX}{name.upper()}": name
    for name in (
        *(field.name for field in dataclasses.fields(Recipe) if field.name != "name"),
        *_RELEASE_CHECKS,
    )
}
"""The option that each variable sets, unless the script sets it."""

_KNOWN = (*OPTIONS, "BF16_MODE", "BF16_MONITOR", "BF16_AUTOLOAD")
_ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off")
"""Values that switch something off, in lower case."""


def mode_from_environment(environment: Mapping[str, str] = os.environ) -> str | None:
    """The mode that ``BF16_MODE`` names, or None if it is empty or not set.

    Raises:
        ValueError: it does not name a mode.

    Example:
        >>> mode_from_environment({"BF16_MODE": "BF16-Stochastic"})
        'bf16-stochastic'
    """
    value = environment.get("BF16_MODE", "").strip()
    if not value:
        return None
    if value.lower() not in RECIPES:
        raise ValueError(
            f"BF16_MODE={value!r} is not one of the modes of torch-bf16, {', '.join(RECIPES)}. "
            "Unset it to train in the precision that the script names"
        )
    return value.lower()


def options_from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The options that the variables in :data:`OPTIONS` set; an empty variable sets nothing.

    Warns about a variable whose name is nearly that of one of ours.

    Raises:
        ValueError: a value cannot be parsed, or its option does not accept it.

    Example:
        >>> options_from_environment({"BF16_SEED": "7", "BF16_KEEP_FP32": "head, *.router"})
        {'keep_fp32': ('head', '*.router'), 'seed': 7}
    """
    for name, meant in misspelt_variables(environment).items():
        warn(f"{name} is set, and nothing reads it; {meant} is read")
    texts = {variable: environment.get(variable, "").strip() for variable in OPTIONS}
    return {
        name: _parse(variable, name, texts[variable])
        for variable, name in OPTIONS.items()
        if texts[variable]
    }


def monitor_from_environment(environment: Mapping[str, str] = os.environ) -> int:
    """The number of steps from one look of the monitor to the next, by ``BF16_MONITOR``.

    0 means no monitor.

    Raises:
        ValueError: the variable is not such a number.

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
    """Variables whose names are nearly those of ours, each with the one that it may mean.

    Other variables that begin with ``BF16_`` may be somebody else's.

    Example:
        >>> misspelt_variables({"BF16_WIEGHTS": "bf16+8", "BF16_TRAINING": "1"})
        {'BF16_WIEGHTS': 'BF16_WEIGHTS'}
    """
    known = [name.removeprefix(_PREFIX) for name in _KNOWN]
    misspelt = {}
    for name in environment:
        if name.startswith(_PREFIX) and name not in _KNOWN:
            near = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1, 0.75)
            misspelt.update((name, _PREFIX + match) for match in near)
    return misspelt


def _parse(variable: str, name: str, text: str) -> Any:
    read, expected = _READERS.get(name, (str, "a string"))
    try:
        value = read(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} must be {expected}") from None
    check = _RELEASE_CHECKS.get(name)
    try:
        if check:
            check(value)
        else:
            get_recipe("bf16-stochastic", **{name: value})
    except ValueError as error:
        raise ValueError(f"{variable}: {'release_' if check else ''}{error}") from None
    return value


def _read_switch(text: str) -> bool:
    if text.lower() not in (*_ON, *OFF):
        raise ValueError(text)
    return text.lower() in _ON


def _read_patterns(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "keep_fp32": (_read_patterns, "names or patterns with commas between them"),
    "release_gradients": (_read_switch, f"one of {', '.join(_ON + OFF)}"),
    "release_max_norm": (float, "a number"),
    "seed": (int, "a whole number"),
}

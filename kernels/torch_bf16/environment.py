"""What the environment says of a run: a mode, and the options of its recipe.

So that a script that somebody else wrote trains in a mode without being changed. The plugins read
it, and integrations into other trainers can; functions of this package that are called do not.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from .recipe import RECIPES, Recipe, get_recipe

__all__ = ["OPTIONS", "mode_from_environment", "options_from_environment"]

OPTIONS: dict[str, str] = {
    f"BF16_{name.upper()}": name
    for name in (
        *(field.name for field in dataclasses.fields(Recipe) if field.name != "name"),
        "release_gradients",
        "release_max_norm",
        "release_norm",
    )
}
"""For each variable the option that it sets, where a script leaves that open."""

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

    Raises:
        ValueError: the value of one cannot be read.

    Example:
        >>> options_from_environment({"BF16_SEED": "7", "BF16_KEEP_FP32": "head, *.router"})
        {'keep_fp32': ('head', '*.router'), 'seed': 7}
    """
    texts = {variable: environment.get(variable, "").strip() for variable in OPTIONS}
    return {
        name: _parsed(variable, name, texts[variable])
        for variable, name in OPTIONS.items()
        if texts[variable]
    }


def _parsed(variable: str, name: str, text: str) -> Any:
    if name == "release_gradients":
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ValueError(f"{variable}={text!r} must be one of {', '.join(_TRUE + _FALSE)}")
        return text.lower() in _TRUE
    if name == "keep_fp32":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return {"seed": int, "release_max_norm": float}.get(name, str)(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} must be a number") from None

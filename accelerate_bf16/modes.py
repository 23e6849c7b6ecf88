"""The names of the modes, as Accelerate shows and stores them, and the variables that set them."""

from __future__ import annotations

import codecs
import os
import sys
from typing import Any

from bf16_autoload import resembles_a_mode

__all__ = [
    "LAUNCHER_VARIABLE",
    "MODES",
    "MODE_VARIABLE",
    "REPLACEABLE",
    "ModeName",
    "canonical",
    "canonical_or_refuse",
    "environment_mode",
    "in_use",
    "mode_of",
    "named_mode",
    "overriding_mode",
]

MODES: tuple[str, ...] = ("bf16-stochastic", "bf16-fp32-master")
"""Values of ``mixed_precision``; each is the name of a recipe of ``torch_bf16``."""

LAUNCHER_VARIABLE = "ACCELERATE_MIXED_PRECISION"
"""Accelerate's own variable: the mode if a script names none."""

MODE_VARIABLE = "BF16_MODE"
"""Our variable: the mode even if a script names one of Accelerate's."""

REPLACEABLE: tuple[str, ...] = ("no", "bf16")
"""The modes of Accelerate in whose place :data:`MODE_VARIABLE` can put another one."""


def canonical(value: object) -> str | None:
    """The mode that a value of ``mixed_precision`` names, or None if it is not one of ours.

    Example:
        >>> canonical("BF16-Stochastic")
        'bf16-stochastic'
        >>> canonical("bf16") is None
        True
    """
    name = str(value).strip().lower()
    return name if name in MODES else None


def canonical_or_refuse(value: str, asked: str = LAUNCHER_VARIABLE) -> str | None:
    """Like :func:`canonical`, for a setting that Accelerate itself does not validate.

    Args:
        value: the value of the setting.
        asked: the name of the setting, for the message.

    Raises:
        ValueError: the value is nearly one of our names; Accelerate would silently train in fp32.

    Example:
        >>> canonical_or_refuse("bf16_stochastic")
        Traceback (most recent call last):
        ...
        ValueError: ACCELERATE_MIXED_PRECISION='bf16_stochastic' is not a mode of Accelerate, ...
    """
    mode = canonical(value)
    if mode is None and resembles_a_mode(value):
        raise ValueError(
            f"{asked}={value!r} is not a mode of Accelerate, which would silently train in fp32. "
            f"The modes of torch-bf16 are {', '.join(MODES)}"
        )
    return mode


def environment_mode() -> str | None:
    """The mode of ours that either environment variable names, or None.

    Raises:
        ValueError: the value of a variable is misspelt, or ``BF16_MODE`` would replace another
            mode than Accelerate's "no" and "bf16".
    """
    launched = os.environ.get(LAUNCHER_VARIABLE) or "no"
    mode, launched_mode = overriding_mode(), canonical_or_refuse(launched)
    if mode is None or launched_mode == mode:
        return launched_mode
    if launched.strip().lower() not in REPLACEABLE:
        raise ValueError(
            f"{MODE_VARIABLE}={mode} cannot take the place of {LAUNCHER_VARIABLE}={launched!r}: it "
            "takes that of 'no' and 'bf16'. Unset one of the two variables"
        )
    return mode


def overriding_mode() -> str | None:
    """The mode that ``BF16_MODE`` names, or None if it is empty or not set.

    Raises:
        ValueError: it names something else.
    """
    if not os.environ.get(MODE_VARIABLE, "").strip():
        return None  # without importing torch_bf16
    from torch_bf16 import plugin_api

    return plugin_api.mode_from_environment()


def mode_of(accelerator: Any) -> str | None:
    """The mode of an Accelerator, or None if it is not one of ours.

    Another Accelerator, as another Trainer creates one, may have given the state that all share
    another mode since.
    """
    return canonical(named_mode(accelerator))


def named_mode(accelerator: Any) -> str:
    """The mode, ours or not, in which an Accelerator was created."""
    own = vars(accelerator).get("_bf16_named_mode")  # missing if it is older than our import
    return accelerator.state._mixed_precision if own is None else own


def in_use() -> bool:
    """Whether this process has imported our optimizers, which happens only once a mode is used."""
    return "torch_bf16" in sys.modules


class ModeName(str):
    """A mode's name that also equals ``"bf16"``.

    Scripts compare ``accelerator.mixed_precision`` with ``"bf16"``, or look it up in a dictionary,
    to choose the dtype of models that they do not train. Under another name, text encoders would
    stay in fp32. Copies are the same object. In a set or as a dictionary's key it is found as
    ``"bf16"`` alone, because its hash is that of ``"bf16"``; pickles and files contain a plain
    string, the name.

    Example:
        >>> name = ModeName("bf16-stochastic")
        >>> name == "bf16-stochastic", name == "bf16", name != "bf16", name == "fp16"
        (True, True, False, False)
        >>> {"bf16": "bfloat16"}[name], str(name)
        ('bfloat16', 'bf16-stochastic')
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ModeName):
            return str.__eq__(self, other)
        return str(self) == other or other == "bf16"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("bf16")

    def __copy__(self) -> ModeName:
        return self

    def __deepcopy__(self, memo: Any) -> ModeName:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Which torch.load(weights_only=True) calls, and not str.
        return codecs.encode, (codecs.encode(str(self), "rot13"), "rot13")

"""Accelerators that outlive ``unregister()`` do not train in fp32 under the name of a mode."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NoReturn

from accelerate_bf16.modes import canonical, mode_of

__all__ = ["LIVING", "Living"]

_METHODS = ("prepare", "prepare_model", "prepare_optimizer")


class Living:
    """The Accelerators in our modes, which refuse to prepare while we are not registered."""

    def __init__(self) -> None:
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, accelerator: Any) -> None:
        """Note a new Accelerator in one of our modes."""
        self._accelerators.add(accelerator)

    def remove(self) -> None:
        """Let all refuse; ``Patches.keep`` calls this when the changes to Accelerate are undone."""
        for each in self._accelerators:
            for name in _METHODS:
                # On the instance: the class is as it was.
                setattr(each, name, functools.partial(_refuse, mode_of(each)))
        from accelerate.state import AcceleratorState

        # A new Accelerator takes its precision from there, and trains in what it says.
        state = AcceleratorState._shared_state
        if canonical(state.get("_mixed_precision")):
            state["_mixed_precision"] = "no"

    def restore(self) -> None:
        """Let all prepare again."""
        for each in self._accelerators:
            for name in _METHODS:
                if getattr(vars(each).get(name), "func", None) is _refuse:
                    delattr(each, name)


LIVING = Living()


def _refuse(mode: str | None, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"this Accelerator was made for mixed_precision={mode!r}, and accelerate_bf16.unregister() "
        "has taken that mode from Accelerate, which would train in fp32 instead. Call "
        "accelerate_bf16.register() first, or make a new Accelerator"
    )

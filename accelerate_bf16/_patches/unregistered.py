"""Accelerators that outlive ``unregister()`` do not train in fp32 under the name of a mode."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any, NoReturn

from accelerate_bf16.modes import canonical, mode_of

__all__ = ["LIVING", "Living"]

_METHODS = ("prepare", "prepare_model", "prepare_optimizer")

_TAKEN = "_bf16_taken_mode"
"""Where the state that all Accelerators share holds the mode that it had before."""


class Living:
    """The Accelerators in our modes, which refuse to prepare while we are not registered."""

    def __init__(self) -> None:
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, accelerator: Any) -> None:
        """Note a new Accelerator in one of our modes."""
        self._accelerators.add(accelerator)

    def remove(self) -> None:
        """Let all refuse; ``Patches.keep`` calls this when the changes to Accelerate are undone."""
        from accelerate.state import AcceleratorState

        state = AcceleratorState._shared_state
        mode = canonical(state.get("_mixed_precision"))
        if mode:
            # A new Accelerator takes its precision from there, and trains in what it says.
            state.update({"_mixed_precision": "no", _TAKEN: mode})
            for each in _unnamed():
                each._bf16_named_mode = mode
                self.add(each)
        for each in self._accelerators:
            for name in _METHODS:
                # On the instance: the class is as it was.
                setattr(each, name, functools.partial(_refuse, mode_of(each)))

    def restore(self) -> None:
        """Let all prepare again, and a new Accelerator take the mode that the process had."""
        from accelerate.state import AcceleratorState

        state = AcceleratorState._shared_state
        # Gone if the state was reset since.
        mode = state.pop(_TAKEN, None)
        if mode and state.get("_mixed_precision") == "no":
            for each in _unnamed():  # which were made in between, and train in fp32
                each._bf16_named_mode = "no"
            state["_mixed_precision"] = mode
        for each in self._accelerators:
            for name in _METHODS:
                if getattr(vars(each).get(name), "func", None) is _refuse:
                    delattr(each, name)


LIVING = Living()


def _unnamed() -> list[Any]:
    """The Accelerators that were made while nothing of ours noted their modes."""
    from accelerate import Accelerator

    made = [each for each in gc.get_objects() if issubclass(type(each), Accelerator)]
    return [each for each in made if "_bf16_named_mode" not in vars(each)]


def _refuse(mode: str | None, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"this Accelerator was made for mixed_precision={mode!r}, and accelerate_bf16.unregister() "
        "has taken that mode from Accelerate, which would train in fp32 instead. Call "
        "accelerate_bf16.register() first, or make a new Accelerator"
    )

"""How far a step came that ended with an error, and saying so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch_bf16.errors import UNTOUCHED, add_note, is_partial

from .launches import Launch

__all__ = ["Progress", "end_with"]

_logger = logging.getLogger("torch_bf16")


class Progress:
    """The launches that a step has carried out.

    Attributes:
        done: those that are complete.
        partial: those that failed after their kernel had begun to write.
    """

    def __init__(self) -> None:
        self.done: set[Launch] = set()
        self.partial: set[Launch] = set()

    def carry_out(self, launch: Launch, work: Callable[..., None], *arguments: Any) -> None:
        """Run a launch and note how far it came.

        Python raises an interrupt when the kernel returns, in which the time goes: it is done then,
        unless the launch has more to do.
        """
        self.done.add(launch)
        try:
            work(*arguments)
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            if interrupted and launch.in_one_call:
                raise
            self.done.discard(launch)
            if interrupted or is_partial(error):
                self.partial.add(launch)
            raise

    def tell(self, error: BaseException, prepared: Mapping[int, str]) -> None:
        """Add to an error what was updated before it.

        Args:
            error: what ended the step. An interrupt is left as it is, as programs read what is in
                some; a line is logged if it came halfway through a launch.
            prepared: by the number of a parameter, which of its states already holds the gradients
                of this step, although its weight is not updated.
        """
        if not isinstance(error, Exception) and not self.partial:
            return
        updated, partial = _members_of(self.done), _members_of(self.partial)
        what = f"{updated} parameters were updated and their steps counted, the others not"
        if partial:
            what = (
                f"{partial} parameters may be updated in part, {updated} were updated and their "
                "steps counted, the others not. Load the last checkpoint before going on"
            )
        elif not updated:
            what = UNTOUCHED
        for state in sorted({*prepared.values()}):
            what += (
                f", but {state} of {len(prepared)} parameters may hold this step's gradients "
                "already: go on with the next ones, or load a state dict to repeat the step"
            )
        if not isinstance(error, Exception):
            _logger.warning("%s ended a step: %s", type(error).__name__, what)
            return
        end_with(error, what)


def end_with(error: Exception, what: str) -> None:
    """Let an error end with a sentence about what was updated before it."""
    said = f"{error}".rstrip(".") or type(error).__name__
    error.args = (f"{said}. {what}",)
    # Some classes, such as OSError, make their message of something else.
    if not str(error).endswith(what):
        add_note(error, what)


def _members_of(launches: Iterable[Launch]) -> int:
    return len({row.number for launch in launches for row in launch.rows})

"""The exceptions that have no fitting built-in type, and what public doors add to messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "UNTOUCHED",
    "BackendUnavailableError",
    "CheckpointError",
    "StateMismatchError",
    "prefix_errors",
    "suffix_errors",
]

UNTOUCHED = "Nothing was updated"

_USERS = (ValueError, NotImplementedError)


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot work here; the message says why and what can."""


class CheckpointError(RuntimeError):
    """A checkpoint file is damaged, foreign or of another model, or it could not be written."""


class StateMismatchError(ValueError):
    """A state dict or a live parameter does not fit the optimizer; nothing has been changed."""


@contextmanager
def prefix_errors(subject: Callable[[], str]) -> Iterator[None]:
    """Begin the message of what is raised within by what it is about.

    Args:
        subject: called where something is raised; what the message says follows a blank.
    """
    try:
        yield
    except _USERS as error:
        error.args = (f"{subject()} {error}",)
        raise


class suffix_errors:
    """End the message of what is raised within by a sentence, at the one public door."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    # A generator for it takes three times as long, at every step.
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _USERS) and not str(error).endswith(self._sentence):
            error.args = (f"{str(error).rstrip('.')}. {self._sentence}",)

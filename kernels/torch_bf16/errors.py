"""The exceptions that have no fitting built-in type, and what public doors add to messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = [
    "BackendUnavailableError",
    "CheckpointError",
    "StateMismatchError",
    "prefix_errors",
    "suffix_errors",
]

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


@contextmanager
def suffix_errors(sentence: str) -> Iterator[None]:
    """End the message of what is raised within by a sentence, at the one public door."""
    try:
        yield
    except _USERS as error:
        said = str(error)
        if not said.endswith(sentence):
            error.args = (f"{said.rstrip('.')}. {sentence}",)
        raise

"""The exceptions that have no fitting built-in type, and what public doors add to messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "OLDEST_TORCH",
    "UNTOUCHED",
    "BackendUnavailableError",
    "CheckpointError",
    "StateMismatchError",
    "check_torch",
    "prefix_errors",
    "suffix_errors",
]

OLDEST_TORCH = (2, 7)
"""Below it, steps, hooks and shards go by other rules, which nothing here is tested with."""

UNTOUCHED = "Nothing was updated"

_USERS = (ValueError, NotImplementedError)


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot work here; the message says why and what can."""


class CheckpointError(RuntimeError):
    """A checkpoint file is damaged, foreign or of another model, or it could not be written."""


class StateMismatchError(ValueError):
    """A state dict or a live parameter does not fit the optimizer; nothing has been changed."""


def check_torch() -> None:
    """Refuse a torch that is too old, before anything else of it is imported.

    Raises:
        ImportError: it is.
    """
    found = str(torch.__version__)
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < OLDEST_TORCH:
        needed = f"torch>={'.'.join(map(str, OLDEST_TORCH))}"
        raise ImportError(
            f'torch_bf16 needs {needed} and found {found}. Run: pip install -U "{needed}"'
        )


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

"""Exceptions without a fitting built-in type, contexts around errors, and warnings."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "OLDEST_TORCH",
    "UNTOUCHED",
    "BackendUnavailableError",
    "CheckpointError",
    "Label",
    "StateMismatchError",
    "add_note",
    "check_torch",
    "described",
    "first_line",
    "full_name",
    "is_partial",
    "mark_partial",
    "partial_if_begun",
    "prefix_errors",
    "suffix_errors",
    "unchanged_by_errors",
    "version_numbers",
    "warn",
    "warn_once",
    "with_article",
]

OLDEST_TORCH = (2, 7)
"""Older versions differ in steps, hooks and shards, and nothing here is tested with them."""

UNTOUCHED = "Nothing was updated"

_USERS = (ValueError, NotImplementedError)

# Frames of these packages are not what a warning is about.
_NOT_PROGRAMS = frozenset(
    (
        *("torch", "torch_bf16", "lightning_bf16", "accelerate_bf16", "contextlib", "functools"),
        *("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers"),
    )
)

Label = Callable[[], str]
"""Returns the name of something for a message; called only if there is a message."""


class BackendUnavailableError(RuntimeError):
    """A backend was asked for by name and cannot run here; the message says why and which can."""


class CheckpointError(RuntimeError):
    """A checkpoint file is damaged, of another kind or of another model, or cannot be written."""


class StateMismatchError(ValueError):
    """A state dict or a live parameter does not fit the optimizer; nothing has been changed."""


def check_torch() -> None:
    """Raise if torch is too old, before anything else is imported from it.

    Raises:
        ImportError: it is too old.
    """
    found = str(torch.__version__)
    if version_numbers(found) < OLDEST_TORCH:
        needed = f"torch>={'.'.join(map(str, OLDEST_TORCH))}"
        raise ImportError(
            f'torch_bf16 needs {needed} and found {found}. Run: pip install -U "{needed}"'
        )


def version_numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, by which versions are compared here.

    Example:
        >>> version_numbers("2.13.0a0+cu124")
        (2, 13)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def first_line(error: BaseException, message: str | None = None) -> str:
    """The first line of an error's message, or the name of its class if the message is empty.

    Args:
        error: the exception.
        message: the part of its message to use; None for all of it.
    """
    text = str(error) if message is None else message
    return (text.strip().splitlines() or [type(error).__name__])[0]


def full_name(kind: type) -> str:
    """The name of a class with its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def with_article(each: object) -> str:
    """The name of an object's class for a message, with "a" or "an" before it; or None."""
    if each is None:
        return "None"
    name = type(each).__name__
    # SGD and RMSprop begin with the name of a letter; SAM and LAMB are read as words.
    spelt = name[:2].isupper() and not (name.isupper() and set(name) & set("AEIOU"))
    vowel = name[0] in "AEFHILMNORSX" if spelt else name[0] in "AEIOUaeiou"
    # As in UserModel, Unet and OneCycleLR.
    vowel = vowel and not re.match(r"(?i)use|unet|uni(?!n)|one|eu", name)
    return f"{'an' if vowel else 'a'} {name}"


def described(error: BaseException) -> str:
    """An error of other code for a message: its class, and 500 characters of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def add_note(error: BaseException, note: str) -> None:
    """As ``error.add_note(note)``, which Python 3.10 lacks."""
    error.__dict__.setdefault("__notes__", []).append(note)


def mark_partial(error: BaseException) -> None:
    """Note on an error that some of the tensors which were to be updated are, and others are not.

    A mark, so that the error keeps its class: programs catch torch's for memory.
    """
    error.__dict__["torch_bf16_partial"] = True


class partial_if_begun:
    """Within the context, an error after :attr:`begun` was set is marked as partial.

    Attributes:
        begun: whether something may have been written.
    """

    def __init__(self) -> None:
        self.begun = False

    def __enter__(self) -> partial_if_begun:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.begun:
            mark_partial(error)


def is_partial(error: BaseException) -> bool:
    """Whether :func:`mark_partial` was called with the error."""
    return "torch_bf16_partial" in error.__dict__


@contextmanager
def prefix_errors(label: Label) -> Iterator[None]:
    """Prefix the message of a user error raised in the context with what it is about.

    Args:
        label: returns the prefix; a space and the message follow.
    """
    try:
        yield
    except _USERS as error:
        error.args = (f"{label()} {error}",)
        raise


class suffix_errors:
    """Append a sentence, once, to the message of a user error raised in the context."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    # Not a generator, which would take three times as long: every step enters it.
    def __enter__(self) -> suffix_errors:
        return self

    def cancel(self) -> None:
        """Append nothing any more: the sentence has stopped being true."""
        self._sentence = ""

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _USERS) and not str(error).endswith(self._sentence):
            error.args = (f"{str(error).rstrip('.')}. {self._sentence}",)


@contextmanager
def unchanged_by_errors(groups: list[dict[str, Any]], group: Any) -> Iterator[None]:
    """Undo what adding a parameter group has done if it is refused.

    torch fills the very dict that it is given, which the user may correct as the error says.

    Args:
        groups: the optimizer's parameter groups.
        group: the dict that is being added.
    """
    count, before = len(groups), dict(group) if isinstance(group, dict) else {}
    try:
        yield
    except Exception:
        del groups[count:]
        if isinstance(group, dict):
            group.clear()
            group.update(before)
        raise


def warn(message: str) -> None:
    """Warn a user, and name the line of the program that led here.

    Python's filters go by that line: those for ``torch_bf16`` would silence all that it has to say,
    and Python would show nothing for a second line. A scheduler wraps ``step()`` in its module,
    whose warnings Accelerate silences.

    Args:
        message: what the program does, what that costs, and what works instead.
    """
    frame, level = sys._getframe(1), 2
    # A program that is run by exec() may have no name.
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _NOT_PROGRAMS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_said: set[str] = set()


def warn_once(message: str, key: str | None = None) -> None:
    """:func:`warn` of something once in a process.

    Args:
        message: as for :func:`warn`.
        key: what tells it from other warnings; None for the message itself.
    """
    if (key or message) not in _said:
        _said.add(key or message)
        warn(message)

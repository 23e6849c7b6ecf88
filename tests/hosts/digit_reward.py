"""A reward that TRL's scripts find by its path."""

from __future__ import annotations

from typing import Any


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(str.isdigit, each)) / max(1, len(each)) for each in completions]

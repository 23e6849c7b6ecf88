"""The options of released gradients, checked before anything is trained."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_bf16.argument_checks import check_max_norm, check_release_norm

__all__ = ["ReleaseOptions", "release_options"]

_PREFIX = "release_"


@dataclasses.dataclass(frozen=True)
class ReleaseOptions:
    """How gradients are released; see :func:`torch_bf16.release_gradients`.

    Raises:
        ValueError: an option is out of range; the message begins with its name.
    """

    max_norm: float | None = None
    norm: str = "parameter"
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        check_max_norm(self.max_norm)
        check_release_norm(self.norm)
        steps: Any = self.accumulation_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(
                f"accumulation_steps={steps!r} must be an int of at least 1: how many backward "
                "passes make one step"
            )


def release_options(options: dict[str, Any]) -> ReleaseOptions | None:
    """Take the options about released gradients out of a plugin's options.

    Args:
        options: ``release_gradients``, which must be True for the others to mean anything, and
            ``release_max_norm``, ``release_norm`` and ``release_accumulation_steps``, those of
            :func:`torch_bf16.release_gradients`. They are removed; None counts as not set, and
            other options stay.

    Returns:
        The arguments ``max_norm``, ``norm`` and ``accumulation_steps`` as attributes, or None if
        gradients are not to be released.

    Raises:
        ValueError: an option is out of range, or is set although gradients are not released.

    Example:
        >>> given = {"release_gradients": True, "release_max_norm": 1.0, "seed": 7}
        >>> release_options(given).max_norm, given
        (1.0, {'seed': 7})
    """
    release = options.pop("release_gradients", None)
    names = [each.name for each in dataclasses.fields(ReleaseOptions)]
    removed = {name: options.pop(_PREFIX + name, None) for name in names}
    arguments = {name: value for name, value in removed.items() if value is not None}
    if not (release is None or isinstance(release, bool)):
        raise ValueError(f"release_gradients={release!r} must be True, False or None")
    if not release:
        for name, value in arguments.items():
            raise ValueError(
                f"{_PREFIX}{name}={value!r} is for released gradients, and release_gradients=True "
                "is not set. Set it, or leave clipping and accumulation to what does them for "
                "other gradients"
            )
        return None
    try:
        return ReleaseOptions(**arguments)
    except ValueError as error:
        raise ValueError(f"{_PREFIX}{error}") from None

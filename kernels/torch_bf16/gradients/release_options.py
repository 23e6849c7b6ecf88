"""What plugins are asked for of released gradients, checked before anything is trained."""

from __future__ import annotations

from typing import Any

from torch_bf16.argument_checks import check_max_norm

from .released_steps import ReleaseOptions

__all__ = ["check_release", "release_options"]

_NORMS = ("parameter", "last_step")
_PREFIX = "release_"


def release_options(options: dict[str, Any]) -> ReleaseOptions | None:
    """Take what is said of released gradients out of a plugin's options.

    Args:
        options: ``release_gradients``, which must be True for the others to mean anything, and
            ``release_max_norm``, ``release_norm`` and ``release_accumulation_steps``, those of
            :func:`torch_bf16.release_gradients`. They are removed; None stands for what was not
            given, and other options stay.

    Returns:
        The arguments ``max_norm``, ``norm`` and ``accumulation_steps`` as attributes, or None where
        gradients are not to be released.

    Raises:
        ValueError: one is out of range, or gradients that are not released would be clipped.

    Example:
        >>> given = {"release_gradients": True, "release_max_norm": 1.0, "seed": 7}
        >>> release_options(given).max_norm, given
        (1.0, {'seed': 7})
    """
    release = options.pop("release_gradients", None)
    names = ("max_norm", "norm", "accumulation_steps")
    taken = {name: options.pop(_PREFIX + name, None) for name in names}
    given = {name: value for name, value in taken.items() if value is not None}
    if not (release is None or isinstance(release, bool)):
        raise ValueError(f"release_gradients={release!r} must be True, False or None")
    if not release:
        for name, value in given.items():
            raise ValueError(
                f"{_PREFIX}{name}={value!r} is for released gradients, and release_gradients=True "
                "was not asked for. Ask for it, or leave that to what clips and accumulates other "
                "gradients"
            )
        return None
    found = ReleaseOptions(**given)
    try:
        check_release(found)
    except ValueError as error:
        raise ValueError(f"{_PREFIX}{error}") from None
    return found


def check_release(options: ReleaseOptions) -> None:
    """Refuse options that cannot be meant.

    Raises:
        ValueError: one is out of range; the message begins with its name.
    """
    check_max_norm(options.max_norm)
    if options.norm not in _NORMS:
        raise ValueError(f"norm={options.norm!r} is unknown; use one of {', '.join(_NORMS)}")
    steps: Any = options.accumulation_steps
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(
            f"accumulation_steps={steps!r} must be an int of at least 1: how many backward passes "
            "make one step"
        )

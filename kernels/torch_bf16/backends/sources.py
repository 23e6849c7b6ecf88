"""A hash of the sources that a step's bits depend on: results of other sources are not reused."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator
from importlib.resources import files
from typing import Any

__all__ = ["source_hash"]

_ROOMS = ("backends", "formats", "numerics", "rules")


@functools.cache
def source_hash(*without: str) -> str:
    """The hash of the sources, and of the digests that kernels are compared with.

    Args:
        *without: folders of ``backends`` to leave out.
    """
    digest = hashlib.blake2b(digest_size=8)
    for room in _ROOMS:
        # A resource rather than a path: the package may be in a zip file.
        folder = files("torch_bf16").joinpath(room)
        for source in _sources(folder, without if room == "backends" else ()):
            digest.update(source)
    return digest.hexdigest()


def _sources(folder: Any, without: Collection[str]) -> Iterator[bytes]:
    """The contents of files, in the order of their names: a folder has none."""
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        # Without Numba's machine code, hundreds of files.
        if each.is_dir() and each.name not in ("__pycache__", *without):
            yield from _sources(each, ())
        elif each.name.endswith((".py", ".txt")):
            yield each.read_bytes()

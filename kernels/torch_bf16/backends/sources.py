"""A hash of the sources that a step's bits depend on: results of other sources are not reused."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

__all__ = ["source_hash"]

_PACKAGE = Path(__file__).parents[1]
_ROOMS = ("backends", "formats", "numerics", "rules")


@functools.cache
def source_hash(*without: str) -> str:
    """The hash of the sources, and of the digests that kernels are compared with.

    Args:
        *without: folders of ``backends`` to leave out.
    """
    left_out = {_PACKAGE / "backends" / name for name in without}
    digest = hashlib.blake2b(digest_size=8)
    for room in _ROOMS:
        for folder, folders, names in os.walk(_PACKAGE / room):
            # Without Numba's machine code, hundreds of files. Names in order: a walk has none.
            folders[:] = sorted(
                each
                for each in folders
                if each != "__pycache__" and Path(folder, each) not in left_out
            )
            for name in sorted(names):
                if name.endswith((".py", ".txt")):
                    digest.update(Path(folder, name).read_bytes())
    return digest.hexdigest()

"""Memory that processes share, as of a model that Hogwild or A3C trains in several at once."""

from __future__ import annotations

import multiprocessing

from torch import Tensor

__all__ = ["share_like"]


def share_like(new: Tensor, old: Tensor) -> Tensor:
    """Share a tensor with other processes if the one that it replaces is shared by them.

    Otherwise each process would train weights of its own, and the common ones would never change.
    In a process that another one has started nothing is shared: launchers send models there, which
    become replicas, and no other process could know the new memory.

    Args:
        new: the tensor that takes the place of ``old``; moved into shared memory in place.
        old: a tensor, which ``share_memory_()`` may have moved there.

    Returns:
        ``new``.

    Example:
        >>> share_like(torch.zeros(2), torch.zeros(2).share_memory_()).is_shared()
        True
    """
    if multiprocessing.parent_process() is not None:
        return new
    # All memory of GPUs counts as shared, and so does that of a file.
    plain = type(new) is Tensor and type(old) is Tensor and new.is_cpu and old.is_cpu
    if plain and old.is_shared() and old.untyped_storage().filename is None:
        new.share_memory_()
    return new

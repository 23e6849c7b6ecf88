"""Programs that look up optimizers by name find one class of that name: torch's.

jsonargparse (``--optimizer AdamW`` of LightningCLI) and class_resolver (pykeen) walk through
``Optimizer.__subclasses__()`` and refuse a name that two classes have. Ours are subclasses of
torch's, with the same names, so they are left out of these lists. A name then means torch's class,
which a mode converts; ``torch_bf16.AdamW`` still means ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_bf16.torch_patches import is_enabled

__all__ = ["leave_out_namesakes", "restore"]

_Optimizer: Any = torch.optim.Optimizer


def leave_out_namesakes() -> None:
    """Leave our classes that have the name of torch's out of ``Optimizer.__subclasses__()``.

    For the whole process, until :func:`restore`. Importing this package calls it, and
    :func:`convert`.

    Example:
        >>> leave_out_namesakes()
        >>> torch_bf16.AdamW in torch.optim.AdamW.__subclasses__()
        False
        >>> issubclass(torch_bf16.AdamW, torch.optim.AdamW)
        True
    """
    # The first cast refuses a variable that names an unknown patch; an import must not fail on it.
    with contextlib.suppress(ValueError):
        if "__subclasses__" not in vars(_Optimizer) and is_enabled("optimizer_subclasses"):
            _Optimizer.__subclasses__ = classmethod(lambda cls: [*_listed(cls)])


def restore() -> None:
    """Restore ``Optimizer.__subclasses__``, until the next :func:`convert`."""
    if "__subclasses__" in vars(_Optimizer):
        del _Optimizer.__subclasses__


def _listed(cls: type) -> Iterator[type]:
    for each in type.__subclasses__(cls):
        if getattr(vars(each).get("torch_class"), "__name__", None) == each.__name__:
            # A user's own subclass of ours has no other parent in the lists.
            yield from _listed(each)
        else:
            yield each


leave_out_namesakes()

"""Programs that look up optimizers by name find one class of that name: torch's.

jsonargparse (``--optimizer AdamW`` of LightningCLI) and class_resolver (pykeen) walk through
``Optimizer.__subclasses__()`` and refuse a name that two classes have. Ours are subclasses of
torch's, with the same names, so they are left out of these lists. A name then means torch's class,
which a mode converts; ``torch_bf16.AdamW`` still means ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_bf16.torch_patches import Replacement

__all__ = ["leave_out_namesakes"]


def leave_out_namesakes() -> None:
    """Leave our classes that have the name of torch's out of ``Optimizer.__subclasses__()``.

    For the whole process. Importing this package calls it, and :func:`convert`.

    Example:
        >>> leave_out_namesakes()
        >>> torch_bf16.AdamW in torch.optim.AdamW.__subclasses__()
        False
        >>> issubclass(torch_bf16.AdamW, torch.optim.AdamW)
        True
    """
    # The first cast refuses a variable that names an unknown patch; an import must not fail on it.
    with contextlib.suppress(ValueError):
        _SUBCLASSES.apply()


def _listing(original: Any) -> classmethod[Any, Any, Any]:
    # A list that another library has replaced is a class method, too.
    subclasses = getattr(original, "__func__", type.__subclasses__)
    return classmethod(lambda cls: [*_listed(cls, subclasses)])


def _listed(cls: type, subclasses: Callable[[type], list[type]]) -> Iterator[type]:
    for each in subclasses(cls):
        if getattr(vars(each).get("torch_class"), "__name__", None) == each.__name__:
            # A user's own subclass of ours has no other parent in the lists.
            yield from _listed(each, subclasses)
        else:
            yield each


_SUBCLASSES = Replacement("optimizer_subclasses", torch.optim.Optimizer, "__subclasses__", _listing)
leave_out_namesakes()

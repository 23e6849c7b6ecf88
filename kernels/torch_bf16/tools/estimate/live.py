"""Count the bytes of living tensors where no allocator does: on CPUs, of meta and fake tensors."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that operations create while the mode is active.

    Attributes:
        now: bytes that are alive now.
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {id(each) for each in self._storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for each in self._storages(result):
            # A view, or the result of an in-place operation, is not new memory.
            if id(each) not in before and each not in self._known:
                self._known.add(each)
                size = each.nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(each, self._free, size)
        return result

    def _free(self, size: int) -> None:
        self.now -= size

    @staticmethod
    def _storages(tree: Any) -> list[Any]:
        return [each.untyped_storage() for each in tree_leaves(tree) if isinstance(each, Tensor)]

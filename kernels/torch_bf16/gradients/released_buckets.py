"""DDP's buckets: whose released gradients are in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_bf16.memory import without_gaps

from .ddp_hook import Reducer, hook_holder
from .ddp_sums import Fp32Reduction
from .hooked_parameters import released
from .reduce_scatter import all_reduce_mean

__all__ = ["Bucket", "announce", "announce_buckets"]


class Bucket:
    """The released gradients of one optimizer in a bucket that DDP reduces.

    Attributes:
        parameters: the parameters of these gradients.
    """

    def __init__(self, bucket: Any, future: Any) -> None:
        self.parameters: list[Tensor] = []
        self._views: list[Tensor] = []
        self._buffer: Tensor = bucket.buffer()
        self._future = future

    def add(self, parameter: Tensor, view: Tensor) -> None:
        """Add a parameter, with its part of the bucket."""
        self.parameters.append(parameter)
        self._views.append(view)

    def keep(self, wanted: Callable[[Tensor], bool]) -> None:
        """Keep only the wanted parameters; DDP handles the rest."""
        pairs = zip(self.parameters, self._views, strict=True)
        kept = [(parameter, view) for parameter, view in pairs if wanted(parameter)]
        self.parameters = [parameter for parameter, _ in kept]
        self._views = [view for _, view in kept]

    def done(self) -> bool:
        """Whether the host would not have to wait in :meth:`give_gradients`."""
        return self._future.done()

    def give_gradients(self) -> None:
        """Wait, and give each parameter its gradient: a view of the reduced bucket."""
        reduced = self._future.wait()
        numbers = reduced
        if self.parameters and self.parameters[0].is_complex() and not reduced.is_complex():
            # DDP shows such a bucket as pairs of real numbers, and counts complex ones in views.
            numbers = torch.view_as_complex(reduced.view(-1, 2))
        start = numbers.storage_offset() - self._buffer.storage_offset()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            place = start + view.storage_offset()
            parameter.grad = numbers.as_strided(view.shape, view.stride(), place)


def announce(bucket: Any, future: Any) -> Any:
    """Tell every optimizer that has released gradients in a bucket that DDP is reducing it.

    Args:
        bucket: the bucket of DDP's communication hook.
        future: the future of the reduced bucket.

    Returns:
        ``future``.
    """
    by_release: dict[Any, Bucket] = {}
    for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if (hooks := released.get(id(parameter))) is not None:
            one = by_release.setdefault(hooks.owner, Bucket(bucket, future))
            one.add(parameter, _as_written(view, parameter))
    for release, released_bucket in by_release.items():
        release.reduced(released_bucket)
    return future


def _as_written(view: Tensor, parameter: Tensor) -> Tensor:
    """A parameter's part of a bucket in the order in which DDP writes it.

    That is the order of the parameter's memory, such as channels_last, if it has no gaps; the
    bucket shows each part as if it were contiguous.
    """
    if not without_gaps(parameter):
        return view
    return view.as_strided(parameter.shape, parameter.stride())


class _Announcements(Reducer):
    """Reduces as DDP itself does, and announces the buckets."""

    purpose = "released gradients (call release_gradients last)"

    def reduce(self, bucket: Any) -> Any:
        """Begin to take the mean over all ranks."""
        return announce(bucket, all_reduce_mean(bucket.buffer(), self._group))


def announce_buckets(module: DistributedDataParallel) -> str | None:
    """Let a DDP module announce its buckets; returns None, or the reason why it cannot."""
    if module.find_unused_parameters or module.static_graph:
        return (
            "DDP finds unused parameters, so it knows only at the end of a pass which gradients "
            "there are"
        )
    if getattr(module, "mixed_precision", None) is not None:
        return "DDP casts gradients by its own mixed_precision"
    if Fp32Reduction.registered(module) is not None:
        return "sums of micro-batches in fp32 bypass DDP's buckets; 'bf16_stochastic' does not"
    if (holder := hook_holder(module)) is None:
        _Announcements(module).register(module)
    elif Reducer.registered(module) is None:
        return f"its DDP module has a communication hook already, that of {holder}"
    return None

"""DDP's communication hook: who has registered it, and whose released gradients are in a bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .hooked_parameters import released
from .reduce_scatter import all_reduce_mean

__all__ = ["Bucket", "announce", "announce_buckets", "hook_holder"]


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
        start = reduced.storage_offset() - self._buffer.storage_offset()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            place = start + view.storage_offset()
            parameter.grad = reduced.as_strided(view.shape, view.stride(), place)


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
            by_release.setdefault(hooks.owner, Bucket(bucket, future)).add(parameter, view)
    for release, released_bucket in by_release.items():
        release.reduced(released_bucket)
    return future


def hook_holder(module: DistributedDataParallel) -> str | None:
    """Who has registered the only communication hook that a DDP module takes; None if nobody."""
    if getattr(module, "_torch_bf16_reduction", None) is not None:
        return "fp32 sums of micro-batches (accumulate='fp32'; 'bf16_stochastic' has none)"
    hooks = getattr(module, "_comm_hooks", None)
    if not hooks:
        return None
    hook = hooks[0][0]
    if hook is _reduce:
        return "released gradients (call release_gradients last)"
    if hook.__module__.startswith("torch_bf16."):
        return "reduce='bf16_wire'"
    return f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__name__)}"


def announce_buckets(module: DistributedDataParallel) -> str | None:
    """Let a DDP module announce its buckets; returns None, or the reason why it cannot."""
    if module.find_unused_parameters or module.static_graph:
        return (
            "DDP finds unused parameters, so it knows only at the end of a pass which gradients "
            "there are"
        )
    if getattr(module, "mixed_precision", None) is not None:
        return "DDP casts gradients by its own mixed_precision"
    if getattr(module, "_torch_bf16_reduction", None) is not None:
        return "sums of micro-batches in fp32 bypass DDP's buckets; 'bf16_stochastic' does not"
    hooks = getattr(module, "_comm_hooks", None)
    if not hooks:
        module.register_comm_hook(module.process_group, _reduce)
    elif not any(each.__module__.startswith("torch_bf16.") for each, _ in hooks):
        return f"its DDP module has a communication hook already, that of {hook_holder(module)}"
    return None


# DDP compares annotations with its own types, and these are strings here.
def _reduce(state, bucket):
    """DDP's communication hook: its own reduction."""
    return announce(bucket, all_reduce_mean(bucket.buffer(), state))

"""The DDP modules in a model, and their communication hook: each accepts only one, ever."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Reducer", "ddp_modules", "hook_holder"]


def ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """The DDP modules in a model, among them itself if it is one."""
    return [each for each in model.modules() if isinstance(each, DistributedDataParallel)]


class Reducer:
    """Reduces the buckets of a DDP module: ``reduce(bucket)`` returns the future of one.

    Attributes:
        purpose: what for, as messages call it.
    """

    purpose: ClassVar[str]

    def __init__(self, module: DistributedDataParallel) -> None:
        self._group: Any = module.process_group

    def __reduce__(self) -> Any:
        # A process group cannot be copied, and DDP gives a copy of a module no hook.
        return object.__new__, (type(self),)

    def register(self, module: DistributedDataParallel) -> None:
        """Reduce the buckets of a module that has no hook yet."""
        module.register_comm_hook(self, _reduce)

    @classmethod
    def registered(cls, module: DistributedDataParallel) -> Any:
        """The reducer of this class that a module has; None if it has none."""
        _, state = _hook_of(module)
        return state if isinstance(state, cls) else None


def hook_holder(module: DistributedDataParallel) -> str | None:
    """Who has registered a module's hook, for messages; None if nobody has."""
    hook, state = _hook_of(module)
    if hook is None:
        # torch's own in C++ (_register_builtin_comm_hook) are in no list, only in what DDP logs.
        return module._get_ddp_logging_data().get("comm_hook")
    if isinstance(state, Reducer):
        return state.purpose
    return f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__name__)}"


def _hook_of(module: DistributedDataParallel) -> tuple[Any, Any]:
    hook, state = (getattr(module, "_comm_hooks", None) or [(None, None)])[0]
    copied = isinstance(state, Reducer) and not vars(state)
    return (None, None) if copied else (hook, state)


# DDP compares annotations with its own types, and these would be strings here.
def _reduce(state, bucket):
    return state.reduce(bucket)

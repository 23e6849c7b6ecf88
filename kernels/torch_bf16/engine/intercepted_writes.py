"""Shows an observer the writes to a parameter that torch does not count, or counts too late.

These are writes through the tensor that ``p.data`` returns, assignments to ``p.data``, and
``p.copy_()``, whose numbers may be those of before; and DDP's, which sends one rank's weights to
all when it wraps a model and when ``join()`` ends. The first three run for any parameter of the
class, so they do nothing but look it up where nobody observes it.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import distributed

from torch_bf16.errors import warn_once
from torch_bf16.parameters import parameters_in
from torch_bf16.torch_patches import Replacement

__all__ = ["Observer", "intercept", "observe"]

# What DDP calls to send one rank's weights to all.
_SYNC = "_sync_module_states"


class Observer(Protocol):
    """What is to see the writes to one parameter, as a ``DataWatch`` does."""

    def touch(self, alias: Tensor | None = None) -> None:
        """Called before a write, or before ``alias``, which can write the parameter, is given."""

    def lower_bytes(self) -> Tensor | None:
        """The lower bytes of the parameter's numbers; None if it is not in bf16."""


# Those of all optimizers over a parameter, by its id: torch.utils.swap_tensors refuses tensors that
# have weak references.
_observers: WeakValueDictionary[int, WeakSet[Observer]] = WeakValueDictionary()


def observe(parameter: Tensor, observer: Observer) -> object:
    """Let an observer see the writes to a parameter.

    Returns:
        What the observer has to keep for as long as it observes.
    """
    others = _observers.setdefault(id(parameter), WeakSet())
    others.add(observer)
    return others


def intercept(kind: type) -> None:
    """Show observers what reads and assigns the data of parameters of a class, or copies to them.

    Args:
        kind: ``nn.Parameter``, or DTensor's class.
    """
    for each in _replacements(kind):
        each.apply()


@functools.cache
def _replacements(kind: type) -> tuple[Replacement, ...]:
    replacements = [
        Replacement("parameter_data", kind, "data", _intercepting_data),
        Replacement("parameter_data", kind, "copy_", _intercepting_copies),
    ]
    if kind is nn.Parameter and hasattr(distributed, _SYNC):
        replacements.append(Replacement("parameter_data", distributed, _SYNC, _intercepting_syncs))
    return tuple(replacements)


def _intercepting_data(data: Any) -> property:
    def read(parameter: Tensor) -> Tensor:
        alias = data.__get__(parameter)
        for each in _observers.get(id(parameter), ()):
            each.touch(alias)
        return alias

    def assign(parameter: Tensor, value: Tensor) -> None:
        for each in _observers.get(id(parameter), ()):
            each.touch()
        data.__set__(parameter, value)

    return property(read, assign)


def _intercepting_copies(original: Any) -> Any:
    def copy_(parameter: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        for each in _observers.get(id(parameter), ()):
            each.touch()
        return original(parameter, *args, **kwargs)

    return copy_


def _intercepting_syncs(original: Any) -> Any:
    def sync_module_states(
        module: nn.Module,
        process_group: Any,
        broadcast_bucket_size: int,
        src: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        observers = [each for p in parameters_in(module) for each in _observers.get(id(p), ())]
        before = []
        for each in observers:
            each.touch()
            before.append(each.lower_bytes())
        original(module, process_group, broadcast_bucket_size, src, *args, **kwargs)
        pairs = zip(observers, before, strict=True)
        replaced = sum(then is not None and not _has(each, then) for each, then in pairs)
        if replaced:
            source = dist.get_global_rank(process_group, src)
            warn_once(
                f"DistributedDataParallel has given this rank the weights of rank {source}, which "
                f"differ in {replaced} parameters that an optimizer has stepped here, and not that "
                "rank's optimizer states, as after join() on a rank whose inputs ended early: "
                "masters, moments and noise are still its own, so that replicas drift apart if "
                "they train on. Give all ranks the states of one, on all ranks: states = ["
                "optimizer.state_dict()]; torch.distributed.broadcast_object_list(states, src="
                f"{source}); optimizer.load_state_dict(states[0])",
                key="weights of another rank",
            )

    return sync_module_states


def _has(observer: Observer, then: Tensor) -> bool:
    now = observer.lower_bytes()
    return now is not None and torch.equal(now, then)

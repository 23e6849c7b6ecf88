"""Hooks on the parameters of an optimizer, which come and go with its groups, and with itself.

Python's garbage collector does not see what holds a tensor's hooks, which are in C++: an object
that has hooks on a parameter and holds it, too, is never freed, with all that it holds. So hooks
do not keep their owner alive (:func:`weakly`), and are removed once it is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from torch_bf16.living import LivingSet
from torch_bf16.parameters import parameters_of
from torch_bf16.sharding import is_dtensor, places

__all__ = ["HookedParameters", "released", "remove_with", "summed", "weakly"]

# By id of the parameter: torch converts no sharded parameter that has a weak reference.
summed: WeakValueDictionary[int, HookedParameters] = WeakValueDictionary()
"""The parameters whose gradients are summed in a format, each with the hooks that do so."""
released: WeakValueDictionary[int, HookedParameters] = WeakValueDictionary()
"""The parameters that are stepped within the backward pass, each with the hooks that do so."""
_all: LivingSet[HookedParameters] = LivingSet()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls a method of an object which it does not keep alive.

    Args:
        method: a bound method; once its object is gone, the hook does nothing.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        live = reference()
        return None if live is None else live(*arguments)

    return call


def remove_with(owner: Any, hooks: list[Any]) -> None:
    """Remove hooks when their owner is freed.

    Args:
        owner: not kept alive.
        hooks: their handles; those that are added later count, too.
    """
    weakref.finalize(owner, _remove_all, hooks).atexit = False


def _remove_all(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


class HookedParameters:
    """The parameters of an optimizer that have hooks, which keep them alive.

    Args:
        optimizer: not kept alive.
        owner: has ``hook(parameter)``, which registers hooks that do not keep it alive, and returns
            their handles, and ``make_groups()``, called when parameters have left this one.
        registry: :data:`summed` or :data:`released`.
        convertible: whether hooks that outlast a conversion of the parameter still work then.
        restore: gives a parameter back as it was before it was hooked; called once nothing that has
            such a function is left on it, also when the owner is freed.

    Attributes:
        owner: see above.
        by_id: the hooked parameters, because it takes torch a microsecond to hash a tensor.
    """

    def __init__(
        self,
        optimizer: Any,
        owner: Any,
        registry: Any,
        *,
        convertible: bool,
        restore: Callable[[Any], None] | None = None,
    ) -> None:
        self.owner = owner
        self.by_id: dict[int, Any] = {}
        self._optimizer = weakref.ref(optimizer)
        self._registry = registry
        self._convertible = convertible
        self._restore = restore
        self._hooks: dict[int, tuple[list[Any], weakref.ref[Any] | None]] = {}
        self._shared = False  # whether others have had some of the parameters
        _all.add(self)
        finalizer = weakref.finalize(self, _unhook, registry, self._hooks, self.by_id, restore)
        finalizer.atexit = False

    def update(self) -> dict[int, Any]:
        """Hook the parameters that are new, or no longer frozen: a frozen one takes no hook.

        Returns:
            All parameters in groups, in order, by id.
        """
        in_groups = self.drop_strangers()
        new = {k: p for k, p in in_groups.items() if k not in self.by_id and p.requires_grad}
        # torch converts a sharded parameter by swap_tensors, which loses all hooks but those that
        # FSDP2 calls itself. A weak reference makes it refuse.
        lasts = self._convertible and any(map(is_dtensor, new.values()))
        lasting = {id(parameter) for parameter, *_ in places()} if lasts else ()
        for key, parameter in new.items():
            if (other := self._registry.get(key)) is not None:
                # Its optimizer may have given the parameter away since its last step.
                other.drop_strangers()
                self._shared = other._shared = True
            guard = None if key in lasting else weakref.ref(parameter)
            self._hooks[key] = self.owner.hook(parameter), guard
            self.by_id[key], self._registry[key] = parameter, self
        return in_groups

    def claim(self) -> None:
        """Be the registered one, instead of others that were made later, or stepped before."""
        if self._shared:
            self._registry.update(dict.fromkeys(self.by_id, self))

    def drop_strangers(self) -> dict[int, Any]:
        """Unhook parameters that are in no group any more; returns those in groups, as above."""
        in_groups = {id(p): p for p in parameters_of(self._optimizer())}
        if strangers := self.by_id.keys() - in_groups.keys():
            self.drop(strangers)
            self.owner.make_groups()
        return in_groups

    def drop(self, keys: Iterable[int]) -> None:
        """Unhook parameters, by id."""
        peers = [each for each in _all if each is not self and each._registry is self._registry]
        peers = [each for each in peers if each._optimizer() is not None]
        for key in [*keys]:
            parameter, (hooks, _) = self.by_id.pop(key), self._hooks.pop(key)
            for hook in hooks:
                hook.remove()
            # Optimizers may share a parameter.
            others = [each for each in peers if key in each.by_id]
            if self._registry.get(key) is self:
                del self._registry[key]
                if others:
                    self._registry[key] = others[0]
            if self._restore is not None and not _restored_later(others):
                self._restore(parameter)


def _restored_later(others: Iterable[HookedParameters]) -> bool:
    return any(each._restore is not None for each in others)


def _unhook(
    registry: Any,
    hooked: dict[int, tuple[list[Any], Any]],
    by_id: dict[int, Any],
    restore: Callable[[Any], None] | None,
) -> None:
    """Remove the hooks of an owner that is gone, in whatever thread collects garbage."""
    left = [each for each in _all if each._registry is registry]
    for key, (hooks, _) in hooked.items():
        _remove_all(hooks)
        # Optimizers may share a parameter.
        others = [each for each in left if key in each.by_id]
        for each in others:
            registry.setdefault(key, each)
        if restore is not None and not _restored_later(others):
            restore(by_id[key])

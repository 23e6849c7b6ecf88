"""Hooks on the nodes that accumulate gradients, which a change of dtype would cut off.

A parameter whose dtype changes gets a new node from torch, and hooks of the old one are never
called again. Data parallelism written by hand (Megatron's, picotron's) reduces gradients in them:
without them, replicas would drift apart without an error. Hooks of the parameter itself stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["NodeHooks", "has_node_hooks"]

_Hooks = Callable[[], Mapping[int, Callable[..., Any]] | None]
"""A weak reference to the hooks of a node, which end with it."""


class NodeHooks(NamedTuple):
    """The hooks on the node of one parameter, as they were before its dtype changed."""

    parameter: Tensor
    node: Node
    before: _Hooks
    after: _Hooks
    known: frozenset[int]

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> list[NodeHooks]:
        """The hooks on the nodes of those parameters that have any."""
        if torch.is_inference_mode_enabled():
            return []  # no gradient will ever reach what is cast here
        found = (_hooks(p) for p in parameters if not p.is_inference())
        return [each for each in found if each is not None]

    def pass_on(self) -> None:
        """Let the parameter's present node call the hooks, as long as the former one is held."""
        node = _node(self.parameter)
        if node is self.node:
            return
        before, after = self.before, self.after
        # Where torch swaps tensors, as for DTensors, it lets the former node raise an error.
        poison = (before() or {}).keys() - self.known

        # They read the mappings at each call, so that handles of the hooks still remove them.
        def call_before(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            for key, hook in tuple((before() or {}).items()):
                changed = None if key in poison else hook(gradients)
                if changed is not None:
                    gradients = changed if isinstance(changed, tuple) else (changed,)
            return gradients

        def call_after(*arguments: Any) -> None:
            for hook in tuple((after() or {}).values()):
                hook(*arguments)

        node.register_prehook(call_before)
        node.register_hook(call_after)
        # torch does not hold the node of a parameter: whoever registered hooks does, and so holds
        # this one. Among the hooks, unlike in the node's metadata, Python finds cycles.
        self.node.register_hook(functools.partial(_nothing, node))


def has_node_hooks(parameter: Tensor) -> bool:
    """Whether the node that accumulates a parameter's gradients has hooks, registered in Python."""
    return _hooks(parameter) is not None


def _node(parameter: Tensor) -> Node:
    trained = parameter.requires_grad
    if not trained:
        # It may be trained later on, by the node that it has now.
        parameter.requires_grad_(True)
    try:
        return get_gradient_edge(parameter).node
    finally:
        if not trained:
            parameter.requires_grad_(False)


def _hooks(parameter: Tensor) -> NodeHooks | None:
    node = _node(parameter)
    handles = node.register_prehook(_nothing), node.register_hook(_nothing)
    # The only way to hooks that others have registered.
    before, after = (handle.hooks_dict_ref for handle in handles)
    for handle in handles:
        handle.remove()
    if not before() and not after():
        return None
    return NodeHooks(parameter, node, before, after, frozenset(before() or ()))


def _nothing(*_: Any) -> None:
    """A hook that only has to exist."""

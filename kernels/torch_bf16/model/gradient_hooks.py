"""Hooks on the nodes that accumulate gradients, which a change of dtype would cut off.

A parameter whose dtype changes gets a new node from torch, and hooks of the old one are never
called again. Data parallelism written by hand (Megatron's, picotron's) reduces gradients in them:
without them, replicas would drift apart without an error. Hooks of the parameter itself stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["NodeHooks"]

_SUCCESSOR = "torch_bf16.successor"


class NodeHooks(NamedTuple):
    """The hooks on the node of one parameter, as they were before its dtype changed."""

    parameter: Tensor
    node: Node
    before: Mapping[int, Callable[..., Any]]
    after: Mapping[int, Callable[..., Any]]

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> list[NodeHooks]:
        """The hooks on the nodes of those parameters that have any."""
        found = (_hooks(p) for p in parameters if p.requires_grad)
        return [each for each in found if each is not None]

    def pass_on(self) -> None:
        """Let the parameter's present node call the hooks, as long as the former one is held."""
        node = get_gradient_edge(self.parameter).node
        if node is self.node:
            return
        before, after = self.before, self.after

        # They read the mappings at each call, so that handles of the hooks still remove them.
        def call_before(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            for hook in tuple(before.values()):
                changed = hook(gradients)
                if changed is not None:
                    gradients = changed if isinstance(changed, tuple) else (changed,)
            return gradients

        def call_after(*arguments: Any) -> None:
            for hook in tuple(after.values()):
                hook(*arguments)

        node.register_prehook(call_before)
        node.register_hook(call_after)
        # torch does not hold the node of a parameter: whoever registered hooks does.
        self.node.metadata[_SUCCESSOR] = node  # pyright: ignore[reportIndexIssue]


def _hooks(parameter: Tensor) -> NodeHooks | None:
    node = get_gradient_edge(parameter).node
    handles = node.register_prehook(_nothing), node.register_hook(_nothing)
    # The only way to hooks that others have registered.
    before, after = (handle.hooks_dict_ref() or {} for handle in handles)
    for handle in handles:
        handle.remove()
    return NodeHooks(parameter, node, before, after) if before or after else None


def _nothing(*_: Any) -> None:
    """A hook that only has to exist."""

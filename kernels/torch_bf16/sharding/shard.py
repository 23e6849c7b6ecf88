"""A rank's part of a parameter: one interface for all ways of sharding.

:class:`Shard` is the interface, and its implementation for parameters that are not sharded.
:mod:`.dtensor` implements it for ``fully_shard`` (FSDP2) and tensor parallelism, :mod:`.fsdp1` for
``FullyShardedDataParallel``, :mod:`.deepspeed` for ZeRO's flat tensors, which hold parts of many
parameters. A shard is made when a step is planned, and kept from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, ClassVar

from torch import Tensor

from torch_bf16.memory import TransposedOrder

from .local import is_dtensor, local, place_like, version_of, whole
from .span import Span

__all__ = ["Shard"]


class Shard:
    """This rank's part of a parameter.

    Args:
        parameter: a bf16 or fp32 parameter; :mod:`.complex` is for complex64 ones.
        name: the name that keys its noise; empty if no noise is drawn.

    Attributes:
        sharded: whether ranks hold parts of the parameter.
        replaces_parameter: whether another object has taken the place of the module's parameter.
        can_gather: whether all ranks that hold parts participate in a step, so that they can
            gather.
        in_row: whether its memory is a stretch of a row of many parameters: states may come as that
            stretch, and a rank that holds no element has no gradient, but its group's sums still
            wait for it.
        loads_states_first: whether a checkpoint's states are loaded before their weights.
        mixed: why it cannot hold numbers of several formats, if it is made of several tensors.
        offload_obstacle: why its states cannot be in host memory while it is not; empty if they
            can.
    """

    sharded: ClassVar[bool] = False
    replaces_parameter: ClassVar[bool] = False
    can_gather: ClassVar[bool] = True
    in_row: ClassVar[bool] = False
    loads_states_first: ClassVar[bool] = False
    mixed: ClassVar[str] = ""
    offload_obstacle: ClassVar[str] = ""

    def __init__(self, parameter: Tensor, name: str = "") -> None:
        self.parameter, self.name = parameter, name

    @property
    def memory(self) -> Tensor:
        """This rank's part as it lies in memory, detached."""
        return local(self.parameter).detach()

    @cached_property
    def span(self) -> Span:
        """The elements of the whole tensor that the memory holds.

        Raises:
            NotImplementedError: they are not equally long runs at equal distances.
        """
        return Span.of_whole(self.name, self.shape)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.parameter.shape)

    @property
    def order(self) -> TransposedOrder | None:
        """How the memory lies if it is the whole tensor, transposed; None otherwise."""
        memory = self.memory
        order = TransposedOrder.of(memory)
        return order if order is not None and tuple(memory.shape) == self.shape else None

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def spans(self) -> Sequence[Span]:
        """One :attr:`span` for each whole tensor of which the memory holds a part."""
        return (self.span,)

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the whole tensors; the same on every rank."""
        return (self.shape,)

    def obstacle(self) -> str | None:
        """Why the parameter cannot be trained, or None if it can."""
        return None

    def gradient(self) -> Tensor:
        """This rank's part of the gradient, placed like the parameter; may communicate."""
        return local(self.parameter.grad)  # pyright: ignore[reportArgumentType]

    def obstacle_of_gradient(self, gradient: Tensor) -> str | None:
        """Why a gradient on the same device and of the same shape does not fit, or None."""
        if is_dtensor(gradient):
            return "its gradient is a DTensor. Give it a gradient of this rank's elements"
        return None

    def check_blocks(self, block: int) -> None:
        """Raise if the parameter is cut within the blocks of a format; all ranks raise, or none.

        Raises:
            NotImplementedError: it is; the message says what works.
        """

    def take(self, saved: Tensor) -> Tensor:
        """This rank's part of a tensor that belongs to the parameter; may communicate.

        Args:
            saved: a whole tensor, or one placed in any way; a plane of scales has as many rows as
                the parameter and fewer columns.
        """
        return whole(saved)

    def place(self, memory: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor placed like the parameter; see :func:`.local.place_like`."""
        return place_like(self.parameter, memory, shape)

    def gather(self, memory: Tensor) -> Tensor:
        """The whole tensor, from the parts that ranks hold; all of them must call this.

        Args:
            memory: this rank's part, contiguous, of a dtype that collectives support.

        Returns:
            ``memory`` itself if it is the whole tensor, otherwise a new tensor.
        """
        return memory

    def holders(self) -> Mapping[int, Span]:
        """The parts of all ranks that hold any of the parameter, this one too, by global rank.

        The same on every rank, except that replicas have their own; empty if this rank holds all.

        Raises:
            NotImplementedError: ranks hold parts, and cannot know which; the message, which begins
                with "is", says what works.
        """
        return {}

    def exchange_group(self) -> Any:
        """The process group of all :meth:`holders`; all of them must call this."""
        (group,) = self.groups()
        return group

    def unexpand(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Undo the expansion of a smaller tensor to the whole shape; may communicate.

        Args:
            part: the whole expanded tensor, or a checkpoint's numbers for this rank's elements.
            shape: shape of the smaller tensor: 1 in dimensions in which it was expanded.
        """
        if tuple(part.shape) != self.shape:
            return part
        # A copy, because a view would keep the whole tensor.
        return part[tuple(map(slice, shape))].clone()

    def groups(self) -> list[Any]:
        """The process groups whose ranks hold other elements: sums go over each of them."""
        return []

    def version(self) -> int:
        """A number that a write to the parameter raises."""
        return version_of(self.parameter)

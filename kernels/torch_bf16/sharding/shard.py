"""What a rank holds of a parameter: one object answers for all ways of sharding.

:class:`Shard` is the contract, and what holds of a parameter that nobody has sharded.
:mod:`.dtensor` has it for ``fully_shard`` (FSDP2) and tensor parallelism, :mod:`.fsdp1` for
``FullyShardedDataParallel``, :mod:`.deepspeed` for ZeRO's flat tensors, which hold parts of many. A
shard is made when a step is planned, and asked from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, ClassVar

from torch import Tensor

from .local import is_dtensor, local, place_like, version_of, whole
from .span import Span

__all__ = ["Shard"]


class Shard:
    """What this rank holds of a parameter.

    Args:
        parameter: bf16 or fp32.
        name: what keys its noise; empty where no noise is drawn.

    Attributes:
        sharded: whether ranks hold parts of it.
        replaces_parameter: whether another object has taken the place of the module's own.
        can_gather: whether all ranks that hold parts take part in a step, so that they can gather.
        in_row: whether its memory is a stretch of a row of many parameters: states may come as that
            stretch, and a rank that holds none of it has no gradient and is waited for all the same
            where its group sums something up.
        loads_states_first: whether a checkpoint's states come before the weights that they are of.
        mixed: why it cannot hold numbers of several formats, if it is made of several tensors.
        offload_obstacle: why its states cannot be in host memory while it is not, or nothing.
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
        """This rank's part, as it is in memory, detached."""
        return local(self.parameter).detach()

    @cached_property
    def span(self) -> Span:
        """Which elements of the whole tensor the memory holds.

        Raises:
            NotImplementedError: they are not equally long runs at equal distances.
        """
        return Span.of_whole(self.name, self.shape)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.parameter.shape)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def spans(self) -> Sequence[Span]:
        """The same as :attr:`span`, of each of the whole tensors that the memory holds parts of."""
        return (self.span,)

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the whole tensors; the same on every rank."""
        return (self.shape,)

    def obstacle(self) -> str | None:
        """Why it cannot be trained, or None where it can."""
        return None

    def gradient(self) -> Tensor:
        """This rank's part of the gradient, brought into place, which may communicate."""
        return local(self.parameter.grad)  # pyright: ignore[reportArgumentType]

    def obstacle_of_gradient(self, gradient: Tensor) -> str | None:
        """Why a gradient on the same device and of the same shape does not fit, or None."""
        if is_dtensor(gradient):
            return "its gradient is a DTensor. Give it a gradient of this rank's elements"
        return None

    def check_blocks(self, block: int) -> None:
        """Refuse a parameter that is cut within the blocks of a format; every rank agrees.

        Raises:
            NotImplementedError: it is; the message says what works.
        """

    def take(self, saved: Tensor) -> Tensor:
        """This rank's part of a tensor that belongs to the parameter, communicating if need be.

        Args:
            saved: whole, or placed in any way; a plane of scales has as many rows and fewer
                columns than the parameter.
        """
        return whole(saved)

    def place(self, memory: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor placed like the parameter, as :func:`.local.place_like` has it."""
        return place_like(self.parameter, memory, shape)

    def gather(self, memory: Tensor) -> Tensor:
        """The whole tensor from the parts that ranks hold; communicates on all of them.

        Args:
            memory: this rank's part, contiguous, of a dtype that collectives know.

        Returns:
            ``memory`` itself where it is all, else a new tensor.
        """
        return memory

    def holders(self) -> Mapping[int, Span]:
        """What each rank holds of it that takes its step: by global rank, this one's too.

        The same on every rank, replicas apart; empty where this rank holds all.

        Raises:
            NotImplementedError: ranks hold parts, and cannot know which; the message, which begins
                with "is", says what works.
        """
        return {}

    def exchange_group(self) -> Any:
        """The process group of all :meth:`holders`; making it may communicate on all of them."""
        (group,) = self.groups()
        return group

    def unexpand(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor of some shape that was saved expanded to the whole one; may communicate.

        Args:
            part: all of it expanded, or what a checkpoint has for this rank's elements.
            shape: 1 where the whole shape may have more.
        """
        return part[tuple(map(slice, shape))] if tuple(part.shape) == self.shape else part

    def groups(self) -> list[Any]:
        """The process groups whose ranks hold other elements: sums go over each of them."""
        return []

    def version(self) -> int:
        """A number that a write to the parameter raises."""
        return version_of(self.parameter)

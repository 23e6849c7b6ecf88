"""One step of an optimizer's own code over all its parameters, some at a time."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_bf16.engine import data_writes
from torch_bf16.engine.progress import end_with
from torch_bf16.errors import UNTOUCHED, is_partial, warn
from torch_bf16.optim.planning import keep_states
from torch_bf16.sharding import world_size
from torch_bf16.states.recoding import Changes
from torch_bf16.states.views import COUNTER, MASTERS

from .advice import refusal
from .capabilities import Traits, is_elementwise
from .idle_parameters import IdleCopy, may_move
from .list_options import has_numbers
from .runner import Runner
from .working_copy import WorkingCopy

if TYPE_CHECKING:
    from .optimizer import ForeignOptimizer

__all__ = ["NARROW", "OwnStep", "why_whole"]

NARROW = (torch.bfloat16, torch.float16)

_DRAWS = (
    "a parameter is sharded, and the optimizer's own step draws random numbers, which would differ "
    "between ranks: train it with DDP, seeded alike on every rank, or use another optimizer"
)

_DIFFERENTIATES = (
    "it differentiates gradients, as after backward(create_graph=True), and each step gets copies "
    "of them without their graph"
)

_logger = logging.getLogger("torch_bf16")

# The weights and states of some members after a step; no state for one without a gradient that the
# step left alone.
Computed = tuple[list[nn.Parameter], list[dict[str, Any] | None]]


def why_whole(traits: Traits) -> str:
    """Why a step must see whole tensors, or all of them."""
    return "couples all parameters" if traits.couples else "is not known to be elementwise"


def _wrapped_state(states: Sequence[dict[str, Any]]) -> str | None:
    """Why states cannot be stored, if one is a tensor of a class of its own."""
    for key, each in (pair for state in states for pair in state.items()):
        if isinstance(each, Tensor) and type(each) not in (Tensor, nn.Parameter):
            return (
                f"it keeps its state {key!r} in a tensor of the class {type(each).__name__}, whose "
                "numbers no recipe can store"
            )
    return None


class OwnStep:
    """A step of the class's own code on fp32 copies.

    Args:
        optimizer: the optimizer; its states, options and weights are written.
        members: working copies of the parameters to step.
    """

    def __init__(self, optimizer: ForeignOptimizer, members: Sequence[WorkingCopy]) -> None:
        self._optimizer, self._members = optimizer, members
        self._kind, self._engine = optimizer.torch_class, optimizer._engine
        self._traits = optimizer._engine.traits
        self._runner = self._new_runner()
        self._updated = 0
        # Numbers by the places of parameters, or in another order: only the class knows.
        if any(has_numbers(each, optimizer.defaults) for each in optimizer.param_groups):
            self._traits.couples = True

    def take(self, scale: float) -> None:
        """Step on gradients times ``scale``.

        The first steps show whether a call for some parameters does the same as one for all.
        """
        try:
            self._take(scale)
        except Exception as error:
            if self._updated or is_partial(error):
                others = "others perhaps in part" if is_partial(error) else "the others not"
                end_with(
                    error,
                    f"{self._updated} of {len(self._members)} parameters were updated, {others}. "
                    "Load the last checkpoint before going on",
                )
            raise

    def _take(self, scale: float) -> None:
        first = not any(each.step for each in self._members)
        buckets, computed = [*self._buckets(self._members)], None
        if buckets and self._traits.left_to_observe:
            if len(buckets) > 1:
                buckets = self._sample_first()
            buckets, computed = self._looked_at(buckets, scale)
            self._traits.left_to_observe -= 1
        if first:
            self._warn_of_gathering()
        for bucket in buckets:
            if computed is None:
                # A bucket before may have shown that the step does nothing to such a member.
                bucket = [
                    each
                    for each in bucket
                    if not each.is_idle or may_move(self._optimizer, each.group, each.parameter)
                ]
            if bucket:
                self._store(bucket, computed or self._compute(bucket, scale))
            computed = None
        self._finish()
        if self._traits.named and not self._traits.left_to_observe:
            self._warn_of_roles()

    def rewrite(self, method: str) -> None:
        """Run a method that rewrites weights between steps."""
        for bucket in [*self._buckets(self._members)] or [[]]:
            self._store(bucket, self._compute(bucket, None, method))
        self._finish()

    def _new_runner(self) -> Runner:
        return Runner(self._optimizer, {each.group for each in self._members})

    def _looked_at(
        self, buckets: list[list[WorkingCopy]], scale: float
    ) -> tuple[list[list[WorkingCopy]], Computed]:
        """Observe a step on the first bucket; returns the buckets and the first one's result."""
        groups = self._optimizer.param_groups
        by_elements = (
            is_elementwise(self._kind, groups[each.group], self._traits) for each in self._members
        )
        follow = not self._traits.couples and not all(by_elements)
        runner, undoable = self._runner, follow or len(buckets) > 1
        computed = self._compute(buckets[0], scale, follow=follow, undoable=undoable)
        if runner.couples:
            self._traits.couples = True
            if len(buckets) > 1:
                runner.rewind()
                self._runner = self._new_runner()
                buckets = [[*self._members]]
                computed = self._compute(buckets[0], scale)
        if why := self._runner.why_not(computed[0]):
            self._runner.rewind()
            runner.rewind()
            raise NotImplementedError(f"{refusal(self._kind, why)}. {UNTOUCHED}")
        return buckets, computed

    def _sample_first(self) -> list[list[WorkingCopy]]:
        """Buckets, the first with two members of each group, number of dimensions and idleness.

        Steps differ by these.
        """
        kinds: dict[tuple[int, int, bool], list[WorkingCopy]] = defaultdict(list)
        for each in sorted(self._members, key=lambda each: each.bytes):
            kinds[each.group, len(each.shard.shape), each.is_idle].append(each)
        chosen = {id(each) for kind in kinds.values() for each in kind[:2]}
        sample = [each for each in self._members if id(each) in chosen]
        others = [each for each in self._members if id(each) not in chosen]
        return [sample, *self._buckets(others)]

    def _buckets(self, members: Sequence[WorkingCopy]) -> Iterator[list[WorkingCopy]]:
        """Buckets of members whose fp32 copies fit in ``bucket_bytes``."""
        bucket, size = [], 0
        for each in members:
            more = each.bytes
            if bucket and size + more > self._optimizer.bucket_bytes and not self._traits.couples:
                yield bucket
                bucket, size = [], 0
            bucket.append(each)
            size += more
        if bucket:
            yield bucket

    def _compute(
        self,
        bucket: Sequence[WorkingCopy],
        scale: float | None,
        method: str = "step",
        follow: bool = False,
        undoable: bool = False,
    ) -> Computed:
        """The weights and states that a method of the class computes.

        No weight is written. The call may write in place in the optimizer's attributes and options,
        and in states that are stored in fp32; for ``follow`` and ``undoable`` see
        :meth:`.Runner.run`.
        """
        copies = [each.make(scale) for each in bucket]
        before = [each.decode_states() for each in bucket]
        looked_at = scale is not None and world_size() == 1
        idle = {
            n: IdleCopy(each.group, copies[n], before[n])
            for n, each in enumerate(bucket)
            if looked_at and each.is_idle
        }
        keys_before = [{*state} for state in before]
        groups = [each.group for each in bucket]
        try:
            members = [*zip(groups, copies, before, strict=True)]
            originals = [each.parameter for each in bucket]
            states = self._runner.run(members, originals, method, follow, undoable)
        except RuntimeError as error:
            gradients = (each.parameter.grad for each in bucket)
            graphs = any(each is not None and each.requires_grad for each in gradients)
            # torch's words, or those of a class that looks before it differentiates.
            missing = any(each in str(error) for each in ("does not require grad", "grad_fn"))
            if graphs and missing:
                raise self._refusal(refusal(self._kind, _DIFFERENTIATES)) from error
            raise
        if wrapped := _wrapped_state(states):
            self._runner.rewind()
            raise self._refusal(refusal(self._kind, wrapped))
        if self._runner.draws and any(each.shard.groups() for each in bucket):
            self._runner.rewind()
            raise self._refusal(_DRAWS)
        for keys, state in zip(keys_before, states, strict=True):
            new = ((key, each) for key, each in state.items() if key not in keys)
            self._traits.narrow |= {k for k, each in new if getattr(each, "dtype", None) in NARROW}
        computed: Computed = copies, [*states]
        for n, each in idle.items():
            moved = each.is_moved(copies[n], states[n])
            self._traits.idle[each.kind] = self._traits.idle.get(each.kind, False) or moved
            if not moved:
                computed[1][n] = None
        return computed

    def _refusal(self, why: str) -> NotImplementedError:
        # After others were updated, the error ends with their number.
        return NotImplementedError(why if self._updated else f"{why}. {UNTOUCHED}")

    def _store(self, bucket: Sequence[WorkingCopy], computed: Computed) -> None:
        """Encode the computed weights and states of a bucket."""
        optimizer = self._optimizer
        pairs = zip(bucket, computed[1], strict=True)
        moved = [each for each, state in pairs if state is not None]
        if idle := [each for each in moved if each.is_idle]:
            keep_states(optimizer, idle, Changes())
        encoder = self._engine.encoder
        try:
            for each, made, state in zip(bucket, *computed, strict=True):
                if state is not None:
                    each.encode(made.detach(), state, encoder)
            encoder.run(optimizer.recipe.seed, optimizer.backend)
        except BaseException:
            # Memory may be short: the next step must not encode these results beside its own.
            encoder.discard()
            raise
        for each in moved:
            # Only now, because new planes hold nothing before.
            optimizer.state[each.parameter] = each.state
            # The kernels write through addresses, which autograd does not see.
            torch.autograd.graph.increment_version(each.parameter)
            each.snapshot.version = each.shard.version()
        self._updated += len(moved)
        # At once: if something fails later, these must not look like somebody else's writes.
        data_writes.note_step(each.snapshot.data for each in moved)

    def _finish(self) -> None:
        self._runner.finish()
        self._traits.indexes = self._runner.indexes
        self._engine.encoder.finish()

    def _warn_of_gathering(self) -> None:
        sizes = [each.bytes for each in self._members if each.gathers]
        if not sizes:
            return
        total = sum(sizes)
        at_a_time = max(*sizes, min(total, self._optimizer.bucket_bytes))
        _logger.warning(
            "%s %s: every rank gathers whole tensors for its step, %.2f GB of fp32 copies at a "
            "time; convert(..., elementwise=True) if it updates each element by its own numbers "
            "alone",
            *(self._kind.__name__, why_whole(self._traits)),
            (total if self._traits.couples else at_a_time) / 1e9,
        )

    def _warn_of_roles(self) -> None:
        named, self._traits.named = self._traits.named, set()
        states = self._optimizer.state.items()
        # Others are entries of the optimizer as a whole.
        made = {key for each, state in states if isinstance(each, Tensor) for key in state}
        unknown = named - made
        if unknown:
            # A warning, not an error: a state may be made after the first steps.
            warn(
                f"roles name {', '.join(sorted(unknown))}, and {self._kind.__name__} has made no "
                "such state in its first steps, but "
                f"{', '.join(sorted(made - {COUNTER, *MASTERS})) or 'none'}",
            )

"""DDP's buckets: bf16 on the wire, an fp32 sum in the order of the ranks, one rounding.

Each rank owns a share of a bucket: it receives all ranks' numbers for it, adds them up, and sends
all others the mean, rounded stochastically. So every replica has the same bits, and as noise is
keyed by parameter and element, the bits do not depend on how parameters are put into buckets.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from torch_bf16.engine.batch import Batch, Task, alike
from torch_bf16.formats import BF16_STOCHASTIC
from torch_bf16.memory import TransposedOrder
from torch_bf16.numerics.counter_rng import REDUCTION, stream_base, sum_base, tensor_key
from torch_bf16.parameters import parameters_in, parameters_of
from torch_bf16.rules import STORE
from torch_bf16.sharding import Span, all_gather, bare_name

from .ddp_hook import Reducer, hook_holder
from .reduce_scatter import all_reduce_mean, check_all_to_all, sum_of_ranks
from .released_buckets import announce
from .step_numbers import StepNumbers

__all__ = ["BucketReduction"]


class _Setting(NamedTuple):
    """What of an optimizer the shares of buckets depend on."""

    seed: int = 0
    backend: str | None = None
    groups: int = 0


class _Owner:
    """An optimizer, and how often each of its parameters was reduced for its next step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._steps = StepNumbers()
        self._counts: dict[Tensor, int] = {}
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_post_hook(self._after_step)

    @property
    def optimizer(self) -> Any:
        """The optimizer, or None if it is gone."""
        return self._optimizer()

    @property
    def setting(self) -> _Setting:
        """Its seed, its backend, and the number of its groups."""
        optimizer = self.optimizer
        if optimizer is None:
            return _Setting()
        return _Setting(optimizer.recipe.seed, optimizer.backend, len(optimizer.param_groups))

    def draw(self, parameter: Tensor) -> tuple[int, int]:
        """The step that a gradient is for, and its number among the reductions for that step."""
        steps = {} if self.optimizer is None else self._steps.read(self.optimizer.state)
        # A parameter that has not stepped yet, or is another optimizer's, uses the latest step.
        step = steps.get(parameter) or max(steps.values(), default=0)
        count = self._counts[parameter] = self._counts.get(parameter, 0) + 1
        return step + 1, count

    def _after_step(self, *_: Any) -> None:
        self._steps.ask(self.optimizer.state)
        self._counts.clear()


@dataclass(frozen=True, slots=True)
class _Share:
    """This rank's share of a bucket.

    Attributes:
        setting: the settings that it was made for.
        owners: the owner of each of the bucket's parameters.
        spans: the elements of parameters that lie in the share, with the parameters' numbers.
        bases: int64 ``[spans, 2]``, the starting point of each span's noise.
        batches: round the spans, each those at some places in the list.
    """

    setting: tuple[Any, ...]
    owners: list[_Owner]
    spans: list[tuple[int, Span]]
    bases: np.ndarray
    batches: list[tuple[list[int], Batch]]


class BucketReduction(Reducer):
    """Reduces the bf16 gradients of one DDP module, and others as DDP itself does."""

    purpose = "reduce='bf16_wire'"

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__(module)
        named = module.named_parameters()
        self._names: dict[Tensor, str] = {p: bare_name(name) for name, p in named}
        self._owners: list[_Owner] = []
        self._shares: dict[int, _Share] = {}

    @classmethod
    def check(cls, module: DistributedDataParallel) -> None:
        """Raise if a module's gradients cannot be reduced in this way.

        Raises:
            ValueError: the module has a communication hook.
            NotImplementedError: the backend has no all-to-all.
        """
        if cls.registered(module) is not None:
            return
        if holder := hook_holder(module):
            raise ValueError(
                "gradients cannot be reduced with bf16 on the wire: a DDP module takes one "
                f"communication hook, and this one has that of {holder}. Leave one of the two out"
            )
        check_all_to_all(module.process_group, next(parameters_in(module)).device)

    @classmethod
    def follow(cls, module: DistributedDataParallel, optimizer: Any) -> None:
        """Reduce the gradients of an optimizer's parameters in this way from now on.

        Args:
            module: has passed :meth:`check`.
            optimizer: not kept alive.
        """
        reduction = cls.registered(module)
        if reduction is None:
            reduction = cls(module)
            reduction.register(module)
        if all(each.optimizer is not optimizer for each in reduction._owners):
            reduction._owners.append(_Owner(optimizer))

    def reduce(self, bucket: Any) -> Any:
        """Begin to take the mean over all ranks."""
        buffer, ranks = bucket.buffer(), dist.get_world_size(self._group)
        if buffer.dtype != torch.bfloat16 or ranks == 1:
            return announce(bucket, all_reduce_mean(buffer, self._group))
        number, parameters, numel = bucket.index(), bucket.parameters(), buffer.numel()
        sent = functional.pad(buffer, (0, -numel % ranks)) if numel % ranks else buffer
        received = torch.empty_like(sent)
        work: Any = dist.all_to_all_single(received, sent, group=self._group, async_op=True)

        def finish(_: Any) -> Tensor:
            if received.is_cuda:
                # It was allocated on another stream than the one that runs this.
                received.record_stream(torch.cuda.current_stream(received.device))
            mean = sum_of_ranks(received, ranks).div_(ranks)
            rounded = self._round(mean, number, parameters)
            all_gather(sent, rounded, self._group)
            return sent[:numel]

        future = work.get_future()
        if not future.done():
            # NCCL's future is done once the call is launched. With other backends, another thread
            # would run ``finish``, and gather in another order than other ranks; so wait.
            future.wait()
        return announce(bucket, future.then(finish))

    def _round(self, mean: Tensor, bucket: int, parameters: list[Tensor]) -> Tensor:
        """This rank's share of a bucket in bf16."""
        # Zeros, because no parameter fills the end of the last share.
        rounded = torch.zeros_like(mean, dtype=torch.bfloat16)
        owners = tuple(each.setting for each in self._owners)
        setting = mean.numel(), owners, *map(id, parameters)
        share = self._shares.get(bucket)
        if share is None or share.setting != setting:
            share = self._shares[bucket] = self._share(setting, parameters, rounded)
        # Also for parameters that another rank rounds: the next buckets may differ.
        draws = [owner.draw(p) for owner, p in zip(share.owners, parameters, strict=True)]
        if not share.spans:
            return rounded
        steps, counts = np.array([draws[number] for number, _ in share.spans], np.int64).T
        words = sum_base((share.bases[:, 0], share.bases[:, 1]), steps)
        bases = np.stack(words, axis=1).astype(np.uint32)[:, None]
        for places, batch in share.batches:
            spans = [share.spans[place][1] for place in places]
            batch.move([((span.of(rounded),),) for span in spans])
            with torch.no_grad():
                means = [span.of(mean) for span in spans]
                batch.run_alike(means, counts[places].tolist(), bases=bases[places])
            # The batch would keep the memory alive until the next pass.
            batch.move(None)
        return rounded

    def _share(self, setting: tuple[Any, ...], parameters: list[Tensor], rounded: Tensor) -> _Share:
        # Of several the last counts, as where exact weights are read.
        owner_of = {p: each for each in self._owners for p in parameters_of(each.optimizer)}
        owners = [owner_of.get(p, self._owners[0]) for p in parameters]
        first = rounded.numel() * dist.get_rank(self._group)
        # DDP lays out a bucket by the order of each parameter's memory.
        orders = [*map(TransposedOrder.of, parameters)]
        spans: list[tuple[int, Span]] = []
        end = 0
        for number, parameter in enumerate(parameters):
            start, end = end, end + parameter.numel()
            low, high = max(start, first), min(end, first + rounded.numel())
            if low < high:
                name, shape, n = self._names[parameter], tuple(parameter.shape), high - low
                span = Span(name, shape, low - first, n, low - start, n, n)
                spans.append((number, span))
        words = [
            stream_base(owners[number].setting.seed, tensor_key(span.name), REDUCTION.stream)
            for number, span in spans
        ]
        rows = []
        for place, (number, span) in enumerate(spans):
            planes, order = ((span.of(rounded),),), orders[number]
            task = Task(span, STORE, (BF16_STOCHASTIC,), planes, torch.float32, order=order)
            rows.append((place, task))
        backend, batches = self._owners[0].setting.backend, []
        for some in alike(rows, lambda row: row[1].variant):
            places, tasks = [place for place, _ in some], [task for _, task in some]
            batches.append((places, Batch(tasks, 0, backend)))
        return _Share(setting, owners, spans, np.array(words, np.int64), batches)

"""A bus between the CPU and itself, whose streams run in the worst order that was not forbidden.

What is queued runs when something waits for it and not before; of several streams that could go on,
the first in ``order`` does. A wait that is missing lets a kernel read what has not come yet, or a
copy overwrite or take what is still in use: wrong bits, each in one of the orders.
"""

from __future__ import annotations

from collections import deque

import pytest
import torch

from torch_bf16.backends import bus as buses
from torch_bf16.backends import staging
from torch_bf16.states import home

ORDERS = [("up", "compute", "down"), ("down", "up", "compute"), ("compute", "down", "up")]


class SlowBus:
    """See :class:`torch_bf16.backends.bus.Bus`.

    Args:
        order: of the streams.
        without: which stream's waits are left out, to see that they are needed.

    Attributes:
        log: what has run, in order.
        finishes: how often the host waited.
    """

    up, down, compute = "up", "down", "compute"

    def __init__(self, order=ORDERS[0], without=None):
        self._order, self._without = order, without
        self._queues = {name: deque() for name in ORDERS[0]}
        self._queued = dict.fromkeys(ORDERS[0], 0)
        self._ran = dict.fromkeys(ORDERS[0], 0)
        self._host = {}
        self.log, self.finishes = [], 0

    def holds(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._host

    def _note(self, tensor):
        # Held, so that no other tensor gets the address.
        self._host[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    def zeros(self, shape, dtype):
        return self._note(torch.zeros(shape, dtype=dtype))

    def to_host(self, tensor):
        if self.holds(tensor) and tensor.is_contiguous():
            return tensor
        return self._note(tensor.clone(memory_format=torch.contiguous_format))

    def _queue(self, stream, work):
        self._queued[stream] += 1
        self._queues[stream].append(work)

    def run(self, stream, work):
        self._queue(stream, work)

    def record(self, stream):
        return stream, self._queued[stream]

    def wait(self, stream, event):
        if stream != self._without:
            self._queue(stream, event)

    def finish(self, event):
        self.finishes += 1
        self.advance(event)

    def advance(self, event):
        """Run until an event has happened."""
        stream, count = event
        while self._ran[stream] < count:
            next(each for each in self._order if self._next(each))

    def _next(self, stream):
        """Go on in a stream, if it may; whether it did."""
        if not self._queues[stream]:
            return False
        work = self._queues[stream][0]
        if isinstance(work, tuple):
            other, count = work
            if self._ran[other] < count:
                return False
        else:
            with torch.no_grad():
                work()
            self.log.append(stream)
        self._queues[stream].popleft()
        self._ran[stream] += 1
        return True


def use(patch: pytest.MonkeyPatch, order=ORDERS[0], *, without=None, buffer=1 << 13) -> SlowBus:
    """Let states of any size go over such a bus, through buffers of that many bytes."""
    bus = SlowBus(order, without)
    patch.setattr(home, "SMALLEST", 0)
    patch.setattr(home, "bus_of", lambda device: bus)
    patch.setattr(staging, "bus_of", lambda device: bus)
    patch.setattr(staging, "in_host_memory", lambda tensor, device: bus.holds(tensor))
    patch.setattr(staging, "BUFFER_BYTES", buffer)
    patch.setattr(staging, "_stagings", type(staging._stagings)())
    call = staging.StagedKernel.__call__

    def called(kernel, inputs):
        call(kernel, inputs)
        # A kernel's call returns when it is in the current stream: as if it had run, to whoever
        # computes there.
        bus.advance(bus.record(bus.compute))

    patch.setattr(staging.StagedKernel, "__call__", called)
    assert buses.bus_of(torch.device("cpu")) is None
    return bus

"""Kernels over planes that live in host memory, which pass through two buffers on the device.

A bucket is cut into loads that fit a buffer. While one load is computed, the next is copied up and
the previous one down; weights and gradients, in the device's memory, are read and written in place.
A tensor may be cut between any two blocks, because noise is keyed by the element.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from torch_bf16.errors import partial_if_begun
from torch_bf16.locks import fork_safe_lock

from .backend import Backend, Kernel
from .bucket import Bucket
from .bus import Bus, bus_of, in_host_memory
from .inputs import KernelInputs, ScalarRows

__all__ = ["BUFFERS", "BUFFER_BYTES", "StagedKernel", "fetch", "holding", "load"]

BUFFER_BYTES = 64 << 20
"""A copy of this size takes a millisecond: launches and events are negligible beside it."""

BUFFERS = 2
"""A kernel takes a twentieth of the time of its copies: a third buffer would hide no more."""

# Planes in a buffer start at multiples of so many bytes, and tensors are cut at multiples of so
# many elements: whole blocks, at addresses that vectors can be read from.
_ALIGNED = 256


@dataclass
class _Slot:
    """One of the buffers.

    Attributes:
        buffer: uint8, on the device.
        free: an event that completes once the last contents are back in host memory.
    """

    buffer: Tensor
    free: Any


class Staging:
    """The buffers of a device, which all its kernels share, and the copies under way.

    A context manager: when the outermost context ends, planes in host memory hold what the kernels
    computed. Within a backward pass they do so when the pass ends.
    """

    def __init__(self, bus: Bus, device: torch.device) -> None:
        self._bus = bus
        self._slots = [
            _Slot(
                torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device),
                # The memory's previous contents may be read until then.
                bus.record(bus.compute),
            )
            for _ in range(BUFFERS)
        ]
        self._turn = 0
        self._lock = fork_safe_lock()
        self._depth = 0
        self._under_way: Any = None
        self._pass = -1

    def __enter__(self) -> Staging:
        self._lock.acquire()
        try:
            # A backward pass that failed has not run its callback.
            if self._depth == 0 and self._pass != torch._C._current_graph_task_id():
                self.finish()
        except BaseException:
            self._lock.release()
            raise
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        try:
            if self._depth == 0 and self._under_way is not None:
                running = torch._C._current_graph_task_id()
                if running < 0:
                    self.finish()
                elif running != self._pass:
                    self._pass = running
                    engine: Any = torch.autograd.Variable._execution_engine
                    engine.queue_callback(self.finish)
        finally:
            self._lock.release()

    def finish(self) -> None:
        """Let the host wait for all copies under way."""
        with self._lock:
            event, self._under_way, self._pass = self._under_way, None, -1
            if event is not None:
                self._bus.finish(event)

    def fetch(self, planes: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copy planes to the device in the current stream, once all copies under way are done."""
        self.finish()
        copies = [plane.to(device, non_blocking=True) for plane in planes]
        # Keeps later copies from overwriting the host's planes before they are read.
        bus = self._bus
        bus.wait(bus.down, bus.record(bus.compute))
        self._under_way = bus.record(bus.down)
        return copies

    def next_slot(self) -> _Slot:
        """The next buffer, in turn."""
        self._turn = (self._turn + 1) % len(self._slots)
        return self._slots[self._turn]

    def run(
        self,
        slot: _Slot,
        moves: Sequence[tuple[Tensor, Tensor]],
        work: Callable[[], None],
        reads: bool = False,
    ) -> None:
        """Queue the copies to a slot, the kernel, and the copies back.

        Args:
            slot: the slot whose buffer holds the copies.
            moves: pairs of a plane in host memory and its copy in the buffer.
            work: launches the kernel.
            reads: whether the kernel writes nothing, so that nothing is copied back.
        """
        if not moves:
            work()
            return
        bus, compute = self._bus, self._bus.compute
        bus.wait(bus.up, slot.free)
        bus.run(bus.up, lambda: _copy((staged, host) for host, staged in moves))
        bus.wait(compute, bus.record(bus.up))
        bus.run(compute, work)
        if reads:
            slot.free = bus.record(compute)
            return
        bus.wait(bus.down, bus.record(compute))
        bus.run(bus.down, lambda: _copy(moves))
        slot.free = self._under_way = bus.record(bus.down)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for to, from_ in pairs:
        to.copy_(from_, non_blocking=True)


# Buffers live as long as a kernel uses them.
_stagings: WeakValueDictionary[torch.device, Staging] = WeakValueDictionary()
_lock = fork_safe_lock()
_NOTHING = contextlib.nullcontext()


def _staging_of(device: torch.device) -> Staging:
    with _lock:
        staging = _stagings.get(device)
        if staging is None:
            bus: Any = bus_of(device)
            staging = _stagings[device] = Staging(bus, device)
    return staging


def holding(devices: Iterable[torch.device]) -> contextlib.AbstractContextManager[Any]:
    """A context around kernels in which the host waits only once, at its end."""
    if not _stagings:
        return _NOTHING
    stack = contextlib.ExitStack()
    for device in devices:
        stack.enter_context(_stagings.get(device, _NOTHING))
    return stack


def fetch(planes: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Planes on a device, as its kernels left them; planes already there are not copied."""
    staging = _stagings.get(device)
    if staging is None:
        return [plane.to(device) for plane in planes]
    with staging:
        return staging.fetch(planes, device)


def load(bucket: Bucket, backend: Backend) -> Kernel:
    """The backend's kernel for a bucket, staged if any of its planes are in host memory."""
    device = bucket.variant.device
    every = (plane for each in bucket.planes for planes in each for plane in planes)
    if not any(in_host_memory(plane, device) for plane in every):
        return backend.load(bucket)
    return StagedKernel(bucket, backend, _staging_of(device))


class _Piece(NamedTuple):
    """A part of tensor number ``row`` of a bucket: ``numel`` elements from ``start`` on."""

    row: int
    start: int
    numel: int


class _Load:
    """Pieces whose planes share a buffer.

    Args:
        bucket: the bucket that the pieces are of.
        pieces: at least one.
        backend: the backend that updates the pieces.
        slot: the buffer.
    """

    def __init__(
        self, bucket: Bucket, pieces: Sequence[_Piece], backend: Backend, slot: _Slot
    ) -> None:
        self.slot, self._pieces = slot, pieces
        self._rows = np.array([piece.row for piece in pieces], np.int64)
        self._moves: list[list[tuple[Tensor, Tensor]]] = []
        self._used = 0
        planes = [self._stage(bucket, piece) for piece in pieces]
        self.kernel = backend.load(_cut(bucket, self._rows, pieces, planes))

    def _stage(self, bucket: Bucket, piece: _Piece) -> tuple[tuple[Tensor, ...], ...]:
        """The piece's planes; those in host memory are replaced by their place in the buffer."""
        device, moves = bucket.variant.device, []
        numbers = []
        for format_, planes in zip(bucket.variant.formats, bucket.planes[piece.row], strict=True):
            parts = []
            for plane, tensor in zip(format_.planes, planes, strict=True):
                first, last = (n // plane.block for n in (piece.start, piece.start + piece.numel))
                part = tensor.view(-1)[first:last]
                if in_host_memory(tensor, device):
                    end = self._used + part.nbytes
                    staged = self.slot.buffer[self._used : end].view(part.dtype)
                    self._used = -(-end // _ALIGNED) * _ALIGNED
                    moves.append((part, staged))
                    part = staged
                parts.append(part)
            numbers.append(tuple(parts))
        self._moves.append(moves)
        return tuple(numbers)

    def inputs(self, inputs: KernelInputs) -> tuple[KernelInputs, list[tuple[Tensor, Tensor]]]:
        """The pieces' part of the bucket's inputs, and the moves of pieces with a gradient."""
        gradients = [
            None if (whole := inputs.gradients[row]) is None else whole.view(-1)[start : start + n]
            for row, start, n in self._pieces
        ]
        pairs = zip(gradients, self._moves, strict=True)
        moves = [move for gradient, own in pairs if gradient is not None for move in own]
        scalars, bases = inputs.scalars, inputs.bases
        steps = None if scalars.steps is None else scalars.steps[self._rows]
        rows = ScalarRows(steps, scalars.rows[self._rows], scalars.table)
        return KernelInputs(gradients, rows, None if bases is None else bases[self._rows]), moves


def _cut(
    bucket: Bucket, rows: np.ndarray, pieces: Sequence[_Piece], planes: Sequence[Any]
) -> Bucket:
    """A bucket of pieces of another bucket's tensors."""
    starts = np.array([piece.start for piece in pieces], np.int64)
    numels = np.array([piece.numel for piece in pieces], np.int64)
    widths, pitches = bucket.widths[rows], bucket.pitches[rows]
    if bucket.variant.indices == "transposed":
        offsets = bucket.offsets[rows] + starts
    else:
        offsets = bucket.offsets[rows] + starts // widths * pitches + starts % widths
        # A piece that is not whole runs lies within one run.
        widths = np.maximum(np.minimum(widths, numels), 1)
    return Bucket(
        bucket.variant,
        planes,
        numels,
        offsets,
        widths,
        pitches,
        bucket.bases[rows],
        None if bucket.totals is None else bucket.totals.rows(rows),
    )


def _cut_into_loads(bucket: Bucket) -> Iterator[list[_Piece]]:
    """All elements of a bucket in pieces, listed by the buffer load that they make up."""
    device, pieces, room = bucket.variant.device, [], BUFFER_BYTES
    for row, of_tensor in enumerate(bucket.planes):
        size, planes = 0.0, 0
        for format_, tensors in zip(bucket.variant.formats, of_tensor, strict=True):
            for plane, tensor in zip(format_.planes, tensors, strict=True):
                if in_host_memory(tensor, device):
                    size, planes = size + plane.dtype.itemsize / plane.block, planes + 1
        numel, start = int(bucket.numels[row]), 0
        # A matrix in transposed order may be cut anywhere.
        width = int(bucket.widths[row]) if bucket.variant.indices != "transposed" else numel
        while start < numel:
            fitting = numel if not planes else int((room - planes * _ALIGNED) / size)
            n = _stretch(start, numel, width, fitting)
            if n > 0:
                pieces.append(_Piece(row, start, n))
                start += n
                room -= int(n * size) + planes * _ALIGNED
            if start < numel:
                yield pieces
                pieces, room = [], BUFFER_BYTES
    if pieces:
        yield pieces


def _stretch(start: int, numel: int, width: int, fitting: int) -> int:
    """How many elements from ``start`` on make a piece: whole runs, or a part of one run."""
    left = width - start % width
    if left == width and fitting >= width:
        return min(numel - start, fitting // width * width)
    return left if fitting >= left else max(fitting, 0) // _ALIGNED * _ALIGNED


class StagedKernel:
    """A backend's kernel for a bucket with some planes in host memory.

    Args:
        bucket: the tensors to update.
        backend: the backend that updates them.
        staging: the buffers that planes in host memory pass through.
    """

    def __init__(self, bucket: Bucket, backend: Backend, staging: Staging) -> None:
        self._bucket, self._backend, self._staging = bucket, backend, staging

    @functools.cached_property
    def _loads(self) -> list[_Load]:
        # Only when needed, because some weights that are not contiguous are stepped as copies.
        bucket, backend, staging = self._bucket, self._backend, self._staging
        return [
            _Load(bucket, pieces, backend, staging.next_slot())
            for pieces in _cut_into_loads(bucket)
        ]

    def __call__(self, inputs: KernelInputs) -> None:
        """Update every tensor of the bucket, in place."""
        self._run(inputs, reads=False)

    def measure(self, inputs: KernelInputs) -> None:
        """Add the statistic of each tensor to the bucket's sums."""
        self._run(inputs, reads=True)

    def _run(self, inputs: KernelInputs, *, reads: bool) -> None:
        with partial_if_begun() as writes, self._staging as staging:
            for each in self._loads:
                part, moves = each.inputs(inputs)
                if any(gradient is not None for gradient in part.gradients):
                    kernel = each.kernel.measure if reads else each.kernel
                    writes.begun |= not reads
                    staging.run(each.slot, moves, functools.partial(kernel, part), reads)

    def compile(self, n_scalars: int) -> None:
        """Compile everything that the first call would compile."""
        for each in self._loads:
            each.kernel.compile(n_scalars)

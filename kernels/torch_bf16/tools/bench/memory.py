"""Memory of an optimizer: what it holds, what a step moves, its peak, and what fits together."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_bf16.tools.foreign_states import extra_bits

from .entries import Entry
from .models import Shapes
from .time_limit import quiet

__all__ = [
    "available_bytes",
    "group_entries",
    "held_by_role",
    "held_bytes",
    "moved_bytes",
    "needed_bytes",
    "peak_bytes",
    "peak_growth",
]

_CGROUP = Path("/sys/fs/cgroup")


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and states, as allocated on the device; shared bytes once."""
    parameters = _parameters(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    devices = {p.device for p in parameters}
    states = [each for each in _states(optimizer) if each.device in devices]
    return _sizes([*parameters, *gradients, *states])


def held_by_role(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> dict[str, int]:
    """The same bytes by role; shared ones count for the first role that has them.

    Args:
        optimizer: the optimizer whose states count.
        parameters: the parameters of the whole model, with frozen ones.

    Returns:
        Bytes of ``"weights"``, ``"gradients"``, ``"moments"`` and ``"master"``, which is all that
        an optimizer keeps of weights beyond the parameter: masters, remainders, Kahan's sums.
    """
    weights = list(parameters)
    gradients = [p.grad for p in weights if p.grad is not None]
    roles = {"weights": weights, "gradients": gradients, "moments": [], "master": []}
    for state in optimizer.state.values():
        for name, value in dict(state).items():
            roles["master" if extra_bits(name) else "moments"] += _tensors([value])
    found, before = {}, []
    for role, tensors in roles.items():
        found[role] = _sizes(before + tensors) - _sizes(before)
        before += tensors
    return found


def moved_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that a step must move: it reads gradients, and reads and writes weights and states."""
    parameters = _parameters(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    return _sizes(gradients) + 2 * _sizes([*parameters, *_states(optimizer)])


def peak_bytes(entry: Entry, shapes: Shapes, threads: int, seconds: float = 600) -> int | None:
    """Growth of a fresh process's peak memory while an entry is made and takes three CPU steps.

    Args:
        entry: the entry to measure.
        shapes: the shapes of the parameters.
        threads: the number of threads, torch's and ours.
        seconds: how long to wait for the process.

    Returns:
        Bytes, or None if the system does not tell or the process does not finish.
    """
    # What torch.compile makes depends on the shapes, so the first run needs the real ones.
    first = shapes if entry.compiles else [(300, 1024), (1024,)]
    return peak_growth(_three_steps, (entry, first), (entry, shapes), threads, seconds)


def peak_growth(
    work: Callable[..., None],
    first: tuple[Any, ...],
    arguments: tuple[Any, ...],
    threads: int,
    seconds: float,
) -> int | None:
    """Growth of a fresh process's peak memory during ``work(*arguments)``.

    Args:
        work: a function of a module, so that another process can import it.
        first: arguments of a first call, so that compiling, thread pools and code that is read from
            disk do not count.
        arguments: arguments of the call that is measured.
        threads: the number of torch's threads.
        seconds: how long to wait for the process.

    Returns:
        Bytes, or None if the system does not tell or the process does not finish.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak, args=(sender, work, first, arguments, threads))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device now; None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = _field("/proc/meminfo", "MemAvailable")
    with suppress(OSError, ValueError):
        limit, used, stat = (
            (_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        # What is cached of files counts as used, and is given up when memory is wanted.
        cached = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        room = int(limit) - int(used) + (int(cached[1]) if cached else 0)
        found = room if found is None else min(found, room)
    return found


def needed_bytes(entry: Entry, shapes: Shapes) -> int:
    """An estimate of an entry's peak in bytes, rather too large."""
    numels = [math.prod(shape) for shape in shapes]
    return int(entry.estimate * sum(numels) + entry.scratch * max(numels))


def group_entries(
    entries: Sequence[Entry],
    need: Callable[[Entry], int],
    available: int | None,
    most: int | None = None,
) -> list[list[Entry]]:
    """Group entries that fit into memory together, with the baseline in every group.

    Args:
        entries: the baseline first. Each fits alone.
        need: an entry's peak in bytes.
        available: bytes of memory; None for no bound.
        most: entries in a group; None for no bound.

    Returns:
        Groups in the order of the entries. An entry that does not fit beside the baseline is a
        group of its own.
    """
    baseline, *others = entries
    room = math.inf if available is None else available
    seats = math.inf if most is None else most

    def total(group):
        return sum(map(need, group))

    groups: list[list[Entry]] = []
    alone: list[list[Entry]] = []
    for each in others:
        if need(baseline) + need(each) > room:
            alone.append([each])
        elif groups and len(groups[-1]) < seats and total(groups[-1]) + need(each) <= room:
            groups[-1].append(each)
        else:
            groups.append([baseline, each])
    return [*(groups or [[baseline]]), *alone]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(_tensors([dict(state) for state in optimizer.state.values()]))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors in a state: libraries nest them and wrap them in classes of their own."""
    # A tensor subclass has this method, which names the tensors that it is made of.
    if flatten := getattr(value, "__tensor_flatten__", None):
        yield from _tensors([getattr(value, name) for name in flatten()[0]])
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors(list(vars(value).values()))


def _sizes(tensors: Sequence[Tensor]) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _send_peak(sender: Any, work: Callable[..., None], *arguments: Any) -> None:
    with quiet():
        sender.send(_own_peak(work, *arguments))


def _own_peak(
    work: Callable[..., None], first: tuple[Any, ...], arguments: tuple[Any, ...], threads: int
) -> int | None:
    torch.set_num_threads(threads)
    _give_back_what_is_freed()
    work(*first)
    before = _field("/proc/self/status", "VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    work(*arguments)
    peak = _field("/proc/self/status", "VmHWM")
    return None if before is None or peak is None else peak - before


def _give_back_what_is_freed() -> None:
    """Have glibc map every tensor from 64 KiB on its own, so that none lies in another's gaps."""
    m_mmap_threshold = -3
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)


def _three_steps(entry: Entry, shapes: Shapes) -> None:
    optimizer = entry.make(shapes, torch.device("cpu"))
    for _ in range(3):
        optimizer.step()
    del optimizer
    gc.collect()


def _field(file: str, name: str) -> int | None:
    """Bytes from a line ``name: 1234 kB``."""
    with suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None

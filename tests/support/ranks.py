"""Functions run by several processes at once, as the ranks of a gloo group.

A case of a distributed test is one call: ``ranks(4, function, *arguments)`` runs the function on
four ranks and returns what it returned on each. The processes stay for the next call, which saves
the imports and what was compiled; the group is a new one each time. After a call that failed they
are replaced, because one may still be in a collective: no case sees another's failure.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forkserver import forkserver
from tensor_pickles import dumps, loads

# Calls from one look for garbage to the next: groups that a function made are part of it, and each
# has a thread that looks for messages a hundred times a second.
_COLLECTED = 8
# Threads of a process, three for each group, of which torch keeps some for good: those of ten idle
# processes took a fifth of two cores.
_CROWD = 40


class RankError(AssertionError):
    """A call failed on some rank.

    Attributes:
        outcomes: of each rank, its traceback, what ended it, or the word ``returned``.
    """

    def __init__(self, outcomes: list[str]) -> None:
        super().__init__("\n".join(f"rank {n}: {each}" for n, each in enumerate(outcomes)))
        self.outcomes = outcomes


class Ranks:
    """Processes that wait for functions to run.

    Args:
        folder: where they meet and write what they print.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = forkserver()
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._calls = 0

    def __call__(
        self,
        world: int,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float = 120,
        timeout: float = 60,
        grace: float = 5,
        device: str = "cpu",
    ) -> list[Any]:
        """What a function returned on each rank.

        Args:
            world: number of ranks.
            function: importable by its name; it finds a default process group.
            *arguments: the same for every rank.
            seconds: after which ranks that still run are killed.
            timeout: of the group's collectives, in seconds.
            grace: seconds that the others have after the first failure.
            device: ``"cuda"`` gives each rank the GPU of its number, and the group NCCL.

        Raises:
            RankError: it failed on some rank, or did not end in time.
        """
        __tracebackhide__ = True
        try:
            while len(self._processes) < world:
                self._start()
            self._calls += 1
            store = str(self._folder / f"store{self._calls}")
            call = dumps((world, store, timeout, device, function, arguments))
            for pipe in self._pipes[:world]:
                pipe.send_bytes(call)
            replies = self._replies(world, seconds, grace)
            if not all(returned for returned, _ in replies):
                raise RankError(["returned" if ok else text for ok, text in replies])
        except BaseException:
            self.close()
            raise
        return [result for _, result in replies]

    def close_if_crowded(self) -> None:
        """Kill processes that have become expensive while they do nothing."""
        if any(_threads(each.pid) > _CROWD for each in self._processes):
            self.close()

    def close(self) -> None:
        """Kill the processes; a call starts new ones."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        rank = len(self._processes)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(rank, theirs, self._log(rank)), daemon=True
        )
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def _replies(self, world: int, seconds: float, grace: float) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + seconds
        replies: dict[int, tuple[bool, Any]] = {}
        while len(replies) < world:
            waiting = {self._pipes[n]: n for n in range(world) if n not in replies}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    replies[rank] = loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(10)
                    replies[rank] = False, f"ended with {self._processes[rank].exitcode}"
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + grace)
            if not ready:
                replies |= {rank: (False, self._hung(rank)) for rank in waiting.values()}
        return [replies[rank] for rank in range(world)]

    def _hung(self, rank: int) -> str:
        """What a rank that does not end is doing."""
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        return f"did not end; it printed\n{self._log(rank).read_text()[-3000:]}"


def _threads(process: int | None) -> int:
    with suppress(OSError):  # no such folder but on Linux
        return len(os.listdir(f"/proc/{process}/task"))
    return 0


def _serve(rank: int, pipe: Connection, log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # What it was forked with stays: each full collection would look through, and copy, all of it.
    gc.freeze()
    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    returned, calls = True, 0
    while returned:
        call = pipe.recv_bytes()
        try:
            reply = True, _run(rank, *loads(call))
            message = dumps(reply)
        except BaseException:
            returned, message = False, dumps((False, traceback.format_exc()))
        pipe.send_bytes(message)
        calls += 1
        if calls % _COLLECTED == 0:
            gc.collect()
    # Not by the usual way, which waits for groups: that closes the sockets at which others wait.
    os._exit(1)


def _run(
    rank: int,
    world: int,
    store: str,
    timeout: float,
    device: str,
    function: Any,
    arguments: Any,
) -> Any:
    import torch
    import torch.distributed as dist
    from seeds import seed

    random.seed(0)
    if device == "cuda":
        torch.cuda.set_device(rank)
    seed(0)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    result = function(*arguments)
    dist.barrier()
    if torch.__version__ < "2.8":
        # It joins gloo's threads without letting go of the GIL, for which they may wait
        # (https://github.com/pytorch/pytorch/pull/154976).
        from torch_bf16.sharding.exit import _settle

        _settle()
    dist.destroy_process_group()
    _forget_shardings()
    return result


def _forget_shardings() -> None:
    """torch's cache of them holds meshes, and with them the names of groups that are gone."""
    from torch.distributed.tensor import DTensor, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # torch 2.8 and older
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)

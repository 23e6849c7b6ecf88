"""What ``torch.cuda`` says of the devices of ``hollow_cuda.py``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

COUNT = 2
BYTES = 16 << 30
PROPERTIES = {
    "name": "hollow",
    "major": 9,
    "minor": 0,
    "gcnArchName": "hollow",
    "total_memory": BYTES,
    "multi_processor_count": 4,
    "L2_cache_size": 1 << 20,
    "uuid": None,
}


class Api:
    """Puts answers where ``torch.cuda`` would ask a driver.

    Args:
        library: the device.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        import torch

        self._library, cuda, self._sync_debug_mode = library, torch.cuda, 0
        for name in ("allocated", "peak"):
            getattr(library, f"hollow_{name}").restype = ctypes.c_int64
        library.hollow_end_capture.restype = ctypes.c_void_p
        library.hollow_replay.restype = ctypes.c_char_p
        library.hollow_capture.restype = library.hollow_exempt.restype = ctypes.c_bool
        answers = {
            "_lazy_init": None,
            "is_available": True,
            "is_initialized": True,
            "device_count": COUNT,
            "is_bf16_supported": True,
            "get_device_name": PROPERTIES["name"],
            "get_device_capability": (PROPERTIES["major"], PROPERTIES["minor"]),
            "get_device_properties": SimpleNamespace(**PROPERTIES),
            "empty_cache": None,
            "graph_pool_handle": (0, 0),
        }
        for name, answer in answers.items():
            setattr(cuda, name, lambda *_, answer=answer, **options: answer)
        cuda.synchronize = lambda device=None: library.hollow_synchronize()
        cuda.current_device = lambda: self._exchange(-1)
        cuda.set_device = lambda device: self._exchange(self._index(device))
        cuda._exchange_device = cuda._maybe_exchange_device = self._exchange
        cuda.get_rng_state = lambda device=None: torch.get_rng_state()
        cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        self._answer_about_memory(cuda)
        self._answer_about_streams(cuda)
        self._let_gloo_be_nccl()
        torch._C._host_emptyCache = lambda: None
        cuda.get_sync_debug_mode = lambda: self._sync_debug_mode
        cuda.set_sync_debug_mode = self._set_sync_debug_mode

    def _exchange(self, device: int) -> int:
        return self._library.hollow_exchange_device(device)

    def _index(self, device: Any) -> int:
        import torch

        if device is None or isinstance(device, int):
            return self._exchange(-1) if device is None else device
        index = torch.device(device).index
        return self._exchange(-1) if index is None else index

    def _answer_about_memory(self, cuda: Any) -> None:
        def asking(what: str) -> Callable[..., Any]:
            ask = getattr(self._library, f"hollow_{what}")
            return lambda device=None: ask(self._index(device))

        cuda.memory_allocated = cuda.memory_reserved = asking("allocated")
        cuda.max_memory_allocated = cuda.max_memory_reserved = asking("peak")
        cuda.reset_peak_memory_stats = asking("reset_peak")
        cuda.mem_get_info = lambda device=None: (BYTES - cuda.memory_allocated(device), BYTES)

    def _answer_about_streams(self, cuda: Any) -> None:
        local = threading.local()

        def current(device: Any = None) -> Stream:
            place = self._index(device)
            return getattr(local, "streams", {}).get(place) or default(place)

        @functools.cache
        def default_of(place: int) -> Stream:
            stream = Stream(place)
            stream.cuda_stream = 0
            return stream

        def default(device: Any = None) -> Stream:
            return default_of(self._index(device))

        @contextlib.contextmanager
        def entered(stream: Stream | None) -> Iterator[None]:
            if stream is None:
                yield
                return
            place, before = stream.device.index, dict(getattr(local, "streams", {}))
            device = self._exchange(place)
            local.streams = {**before, place: stream}
            try:
                yield
            finally:
                local.streams = before
                self._exchange(device)

        cuda.current_stream, cuda.default_stream, cuda.stream = current, default, entered
        cuda.Stream, cuda.Event = Stream, Event
        Graph.library = self._library
        cuda.CUDAGraph = Graph
        cuda.is_current_stream_capturing = lambda: Graph.captured is not None

    def _let_gloo_be_nccl(self) -> None:
        import torch.distributed as dist

        start = dist.init_process_group

        def start_gloo(backend: str | None = None, *args: object, **options: object) -> None:
            start("cpu:gloo,cuda:gloo" if backend == "nccl" else backend, *args, **options)

        dist.init_process_group = start_gloo

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        names = ("default", "warn", "error")
        self._sync_debug_mode = names.index(mode) if isinstance(mode, str) else mode
        self._library.hollow_forbid_waits(self._sync_debug_mode == names.index("error"))


class Stream:
    """All work is done at once, in whatever stream."""

    def __init__(self, device: Any = None, priority: int = 0, **options: object) -> None:
        import torch

        index = device if isinstance(device, int) else device and torch.device(device).index
        here = torch.cuda.current_device() if index is None else index
        self.device, self.device_index = torch.device("cuda", here), here
        self.device_type, self.priority = 1, priority
        self.cuda_stream = self.stream_id = id(self)

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, **options: object) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._at - self._at)


class Graph:
    """Operations and launches that were captured."""

    captured: Graph | None = None
    library: ctypes.CDLL

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph, self._launches = None, []

    def capture_begin(self, *pool: object, **options: object) -> None:
        Graph.captured = self
        self.library.hollow_begin_capture()

    def capture_end(self) -> None:
        Graph.captured = None
        self._graph = ctypes.c_void_p(self.library.hollow_end_capture())

    def launch(self, kernel: Callable[[], None]) -> None:
        """Capture a launch that is not an operation of torch's."""
        self._launches.append(ctypes.CFUNCTYPE(None)(kernel))
        self.library.hollow_capture(self._launches[-1])

    def replay(self) -> None:
        if said := self.library.hollow_replay(self._graph):
            raise RuntimeError(said.decode())

    def reset(self) -> None:
        if self._graph:
            self.library.hollow_forget(self._graph)
        self._graph, self._launches = None, []

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def __del__(self) -> None:
        self.reset()

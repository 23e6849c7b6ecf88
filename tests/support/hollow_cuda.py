"""A CUDA device without a GPU, for processes of their own: torch's CPU build believes in two.

Their memory is the host's, where Triton's interpreter can run kernels. See ``hollow_cuda.cpp``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
COUNT = 2


def build(folder: Path) -> Path:
    """Compile the device for this torch, which need not be imported."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    library = folder / "hollow_cuda.so"
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-I{torch / 'include'}"]
    links = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    compiler = os.environ.get("CXX", "c++")
    done = subprocess.run(
        [compiler, *flags, str(SOURCE), "-o", str(library), *links],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return library


class Device:
    """The devices of this process.

    Args:
        library: what :func:`build` has made; loaded before torch, which asks only once whether
            there is CUDA.
    """

    def __init__(self, library: Path) -> None:
        assert "torch" not in sys.modules
        self._library = ctypes.CDLL(str(library))
        self._library.hollow_start()
        self._on_wait = None
        self._patch()

    @contextlib.contextmanager
    def observed(self, waited: Callable[[str], None] | None) -> Iterator[None]:
        """Call a function, or none, where a GPU would wait within the context."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        before, self._on_wait = self._on_wait, waited and kind(lambda what: waited(what.decode()))
        self._library.hollow_on_wait(self._on_wait)
        try:
            yield
        finally:
            self._on_wait = before
            self._library.hollow_on_wait(before)

    def let_triton_interpret(self) -> None:
        """Let the Triton backend run here; what its interpreter copies is no wait of a GPU's."""
        os.environ["TRITON_INTERPRET"] = "1"
        from triton.runtime import interpreter

        from torch_bf16.backends import triton

        # It says that an interpreter cannot read the memory of a device.
        triton.interprets = lambda: False
        launch = interpreter.GridExecutor.__call__

        def unobserved(*args: object, **options: object) -> None:
            with self.observed(None):
                launch(*args, **options)

        interpreter.GridExecutor.__call__ = unobserved

    def _exchange(self, device: int) -> int:
        return self._library.hollow_exchange_device(device)

    def _patch(self) -> None:
        import torch

        cuda, stream = torch.cuda, _Stream()
        answers = {
            "_lazy_init": None,
            "is_available": True,
            "is_initialized": True,
            "device_count": COUNT,
            "is_current_stream_capturing": False,
            "is_bf16_supported": True,
            "current_stream": stream,
            "default_stream": stream,
            "stream": contextlib.nullcontext(),
            "get_device_name": "hollow",
        }
        for name, answer in answers.items():
            setattr(cuda, name, lambda *_, answer=answer, **options: answer)
        cuda.current_device = lambda: self._exchange(-1)
        cuda._exchange_device = cuda._maybe_exchange_device = self._exchange
        cuda.get_rng_state = lambda device=None: torch.get_rng_state()
        cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        cuda.Stream, cuda.Event = _Stream, _Event
        clone = torch.UntypedStorage.clone

        def clone_there(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            if not storage.is_cuda:
                return clone(storage)
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
            return tensor.set_(storage, 0, (storage.nbytes(),)).clone().untyped_storage()

        torch.UntypedStorage.clone = clone_there
        move = torch.UntypedStorage.to

        def move_there(
            storage: torch.UntypedStorage, *, device: torch.device, non_blocking: bool = False
        ) -> torch.UntypedStorage:
            if torch.device(device).type != "cuda":
                return move(storage, device=device, non_blocking=non_blocking)
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
            tensor.set_(storage, 0, (storage.nbytes(),))
            return tensor.to(device, non_blocking=non_blocking).untyped_storage()

        torch.UntypedStorage.to = move_there


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: object, **options: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...


class _Event:
    """All work is done at once."""

    def __init__(self, **options: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

"""A CUDA device without a GPU, for processes of their own: torch's CPU build believes in two.

Their memory is the host's, where Triton's interpreter can run kernels. See ``hollow_cuda.cpp``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hollow_api import Api, Graph

SOURCE = Path(__file__).with_suffix(".cpp")


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
        Api(self._library)
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
        import numpy
        from triton.runtime import interpreter

        from torch_bf16 import backends
        from torch_bf16.backends import triton

        # It says that an interpreter cannot read the memory of a device.
        triton.interprets = lambda: False
        # In the interpreter a trial takes minutes.
        for name in ("fault_of", "fault_of_squares"):
            setattr(backends, name, _untried(getattr(backends, name)))
        launch = interpreter.GridExecutor.__call__

        def exempt(*args: object, **options: object) -> None:
            before = self._library.hollow_exempt(True)
            try:
                # No GPU says that a number has overflowed.
                with numpy.errstate(all="ignore"):
                    launch(*args, **options)
            finally:
                self._library.hollow_exempt(before)

        def launch_or_capture(*args: object, **options: object) -> None:
            if Graph.captured is None:
                exempt(*args, **options)
            else:
                Graph.captured.launch(functools.partial(exempt, *args, **options))

        interpreter.GridExecutor.__call__ = launch_or_capture

    def _patch(self) -> None:
        import torch

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
        resize = torch.UntypedStorage.resize_

        def resize_there(storage: torch.UntypedStorage, bytes: int) -> torch.UntypedStorage:
            if not storage.is_cuda:
                return resize(storage, bytes)
            tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
            torch.ops.hollow.resize_storage(tensor.set_(storage, 0, (0,)), bytes)
            return storage

        torch.UntypedStorage.resize_ = resize_there


def _untried(fault_of: Callable[..., str | None]) -> Callable[..., str | None]:
    def fault(backend: object, *what: object) -> str | None:
        return None if backend.name == "triton" else fault_of(backend, *what)

    return fault

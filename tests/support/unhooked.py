"""Programs in processes forked from one that has imported torch without our hook, and no host.

``import lightning`` takes 13 s of a processor in a fresh interpreter, nearly all of it for torch,
its compiler and torchmetrics. Here what a host imports is imported once, and a program finds what a
fresh interpreter has after ``import torch``, which runs the hook as the program's environment says.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from forked_scripts import outside_tests

_TIMEOUT = 240
# What every host has torch import.
_IMPORTS = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
_OURS = {"accelerate_bf16", "bf16_autoload", "lightning_bf16", "torch_bf16"}


class Unhooked:
    """The process that others are forked from.

    Args:
        imports: packages of others that the hosts import; those that are not installed are left
            out.
        hosts: packages that are not imported by then.
    """

    def __init__(self, imports: Sequence[str], hosts: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
            self._pool = ProcessPoolExecutor(1, context, _import, (imports, hosts))
            self._pool.submit(int).result(timeout=_TIMEOUT)

    def run(
        self,
        program: str | Path,
        *options: str,
        given: str = "",
        folder: Path | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """How a program ended and what it printed.

        Args:
            program: a text, as for ``python -c``, or a file.
            *options: its arguments.
            given: its standard input.
            folder: the working directory.
            **environment: all its variables.
        """
        late = 2 * _TIMEOUT
        call = self._pool.submit(_run, program, options, given, folder, environment)
        return call.result(timeout=late)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _import(imports: Sequence[str], hosts: Sequence[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Packages go without a host that they would import: torchmetrics imports transformers, and
        # version 5.17 of that accelerate.
        for name in hosts:
            patch.setitem(sys.modules, name, None)
        for name in (*_IMPORTS, *imports):
            if importlib.util.find_spec(name.partition(".")[0]):
                importlib.import_module(name)
    assert not _OURS & sys.modules.keys()
    outside_tests()
    gc.collect()
    gc.freeze()


def _run(
    program: str | Path,
    options: tuple[str, ...],
    given: str,
    folder: Path | None,
    environment: dict[str, str],
) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        process = multiprocessing.get_context("fork").Process(
            target=_start, args=(program, options, given, folder, environment, out.name, err.name)
        )
        process.start()
        process.join(_TIMEOUT)
        code = process.exitcode
        process.kill()
        process.join()
        said = err.read()
        if code is None:
            code, said = -1, f"{said}\nran longer than {_TIMEOUT} s"
        return subprocess.CompletedProcess([program, *options], code, out.read(), said)


def _start(
    program: str | Path,
    options: tuple[str, ...],
    given: str,
    folder: Path | None,
    environment: dict[str, str],
    *streams: str,
) -> None:
    import torch

    for number, name in enumerate(streams, 1):
        with open(name, "w") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = io.StringIO(given)
    if folder is not None:
        os.chdir(folder)
    # The last line of ``import torch``.
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    if isinstance(program, Path):
        sys.argv = [str(program), *options]
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        sys.argv = ["-c", *options]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))

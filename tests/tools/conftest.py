"""A user's module in the folder that a command is started from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from forkserver import forkserver

from torch_bf16.tools import system_memory
from torch_bf16.tools.bench import rounds
from torch_bf16.tools.selftest import certificates


@pytest.fixture(autouse=True, scope="session")
def _small_copies() -> Iterator[None]:
    """Benchmarks copy a quarter of a gigabyte beside each step; no test needs to know how fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rounds._COPY_BYTES, "cpu", 1 << 20)
        yield


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the tools that need no imports of their own."""
    context = SimpleNamespace(get_context=lambda way: forkserver())
    for each in (certificates, system_memory):
        monkeypatch.setattr(each, "multiprocessing", context)


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Writes a module by name and text into the current folder; forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    names = []

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)

    yield write
    for name in names:
        sys.modules.pop(name, None)

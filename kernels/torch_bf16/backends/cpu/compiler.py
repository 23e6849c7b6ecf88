"""Compiling the parts of a variant's kernel, under names that depend on the sources."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from torch_bf16.backends.sources import source_hash
from torch_bf16.rules import arithmetic

from .bits import inlined

__all__ = ["ARITHMETIC", "Compiler", "named_by_sources", "tuple_of", "with_parts"]

_ZERO, _PLUS_ONE, _MINUS_ONE = np.float32(0), np.float32(1), np.float32(-1)


@inlined
def _sqrt(x):
    return np.sqrt(x)


@inlined
def _div(a, b):
    return a / b


@inlined
def _sign(x):
    return _PLUS_ONE if x > _ZERO else (_MINUS_ONE if x < _ZERO else x - x)


ARITHMETIC = {
    "sqrt": _sqrt,
    "div": _div,
    "maximum": inlined(arithmetic.maximum),
    "minimum": inlined(arithmetic.minimum),
    "sign": _sign,
}
"""Numba's primitives, for :func:`torch_bf16.rules.lift`."""


class Compiler:
    """Compiles the parts of one kernel, each under a symbol of its own.

    If a part is not inlined, a kernel from the cache is linked to it by its symbol. Numba numbers
    symbols per process, so kernels compiled in two processes could otherwise share a symbol.

    Args:
        kernel: the kernel's name, which becomes part of the symbols.
    """

    def __init__(self, kernel: str) -> None:
        self._suffix = named_by_sources(kernel)
        self._numbers = count()

    def compile(self, function) -> Any:
        """Compile ``function`` as a part of the kernel."""
        function.__qualname__ = f"{function.__name__}_{next(self._numbers)}_{self._suffix}"
        return inlined(function)

    def write(self, header: str, lines: list[str], names: dict[str, Any]) -> Any:
        """Compile a part from source: the header of its function, its lines, and its globals."""
        scope = {"uint32": np.uint32, "uintp": np.uintp, **names}
        exec("\n    ".join([f"def {header}:", *lines]), scope)
        return self.compile(scope[header[: header.index("(")]])

    def take(self, length):
        """``take(row)``: the first ``length`` elements as a tuple, for registers."""
        return self.write(
            "take(row)", [f"return {tuple_of(f'row[{i}]' for i in range(length))}"], {}
        )


def tuple_of(expressions: Iterable[str]) -> str:
    """The source of a tuple."""
    return f"({''.join(f'{each}, ' for each in expressions)})"


def named_by_sources(name: str) -> str:
    """The name under which a kernel is kept on disk: other sources have other names."""
    return f"{name}_{source_hash('triton', 'certificates')}"


def with_parts(parts: ModuleType, function: FunctionType) -> FunctionType:
    """``function`` with other ``parts`` than those of its module."""
    return FunctionType(
        function.__code__, {**function.__globals__, "parts": parts}, function.__name__
    )

"""Machine code in Numba's cache: compiled once per machine and set of sources, later read."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

from .compile_lock import compile_lock
from .compiler import named_by_sources

__all__ = ["compile_cached"]


def compile_cached(function: Any, name: str, signature: Any, **options: Any) -> Any:
    """Compile a function for a signature, or read it from Numba's cache.

    Args:
        function: the function, which gets another ``__qualname__``.
        name: what the function is known by. Numba's cache is keyed by it and the age of the source
            file. The cache knows neither the parts that reach the function as globals nor their
            sources, so this name and the hash of the sources stand for both.
        signature: Numba's, of the function.
        **options: options of Numba's compiler.

    Returns:
        Numba's dispatcher, with one overload. The machine code lives as long as it does.
    """
    function.__qualname__ = named_by_sources(name)
    with compile_lock(function.__qualname__):
        for cache in (True, True, False):
            try:
                dispatcher = _compiled(function, signature, cache=cache, **options)
                break
            except Exception:
                # A cache that is damaged, by a full disk, say, raises anything: clear it, and do
                # without if that does not help. A function that cannot be compiled raises again.
                if not cache:
                    raise
                with contextlib.suppress(Exception):
                    FunctionCache(function).flush()
        stats = dispatcher.stats
        if stats.cache_path is not None and stats.cache_misses:
            with contextlib.suppress(OSError):
                _remove_other_sources(Path(stats.cache_path), function, name)
    return dispatcher


def _compiled(function: Any, signature: Any, **options: Any) -> Any:
    dispatcher: Any = numba.njit(**options)(function)
    try:
        dispatcher.compile(signature)
    except Exception:
        # It may only be that what was compiled cannot be written.
        if not dispatcher.overloads:
            raise
    dispatcher.disable_compile()
    return dispatcher


def _remove_other_sources(folder: Path, function: Any, name: str) -> None:
    """Remove the machine code of this function's other sources.

    A process that still runs those finds nothing when it looks there, and compiles.
    """
    module = Path(function.__code__.co_filename).stem
    named = re.compile(rf"{re.escape(f'{module}.{name}')}_[0-9a-f]{{16}}-.*\.nb[ci]")
    kept = f"{module}.{function.__qualname__}-"
    for file in folder.iterdir():
        if named.fullmatch(file.name) and not file.name.startswith(kept):
            file.unlink(missing_ok=True)

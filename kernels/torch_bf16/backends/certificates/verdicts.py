"""Verdicts on disk: a kernel is tried once on each machine, even if the trial kills its process.

A process that dies while it still compiles does not count against the kernel: compiling takes
seconds, a trial milliseconds. It takes two deaths, because a single one proves nothing: a cluster
ends jobs, and launchers kill all ranks when one has failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch_bf16.backends.file_lock import locked

__all__ = ["all_verdicts", "file_of", "folder", "verdict"]

_ATTEMPT = b"under way\n"
_DEATHS = 2
"""How many processes must be killed during an attempt before the kernel is blamed."""


def folder() -> Path | None:
    """The folder of verdicts: ``$TORCH_BF16_CACHE``, or else one in the user's cache folder.

    None if it cannot be written.
    """
    try:
        if chosen := os.environ.get("TORCH_BF16_CACHE"):
            place = Path(chosen).expanduser()
        else:
            place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-bf16"
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return place if os.access(place, os.W_OK) else None


def file_of(key: Sequence[str]) -> Path | None:
    """The file for the verdict on a key; None if there is no folder for it."""
    place = folder()
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    return None if place is None else place / f"{name}.json"


def verdict(key: Sequence[str], load: Callable[[], Callable[[], str | None]]) -> str | None:
    """The fault that an attempt found on this machine, now or earlier; None if it found none.

    Two processes that attempt the same key at once both run it, and neither waits.

    Args:
        key: everything that the verdict depends on.
        load: compiles the kernels and returns the attempt, a function that returns the fault and
            may kill the process. An exception from either is not a verdict.
    """
    path = file_of(key)
    if path is None:
        return load()()
    known, fault = _read(path)
    if known:
        return fault
    attempt = load()
    with _claim(path.with_suffix(".attempt")) as killed:
        known, fault = _read(path)
        if not known:
            fault = (
                f"{_DEATHS} processes that tried it were killed; remove {path} to try again"
                if killed
                else attempt()
            )
            _write(path, key, fault)
    return fault


def all_verdicts() -> list[tuple[list[str], str | None]]:
    """All verdicts of this machine, each as its key (backend and variant first) and its fault.

    Verdicts of other versions are included.
    """
    place, entries = folder(), []
    for path in sorted(place.glob("*.json")) if place else ():
        try:
            entry = json.loads(path.read_text())
            entries.append((list(entry["key"]), entry["fault"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged; rewritten when it is needed
    return entries


def _read(path: Path) -> tuple[bool, str | None]:
    try:
        return True, json.loads(path.read_text())["fault"]
    except (OSError, ValueError, KeyError, TypeError):
        return False, None


def _write(path: Path, key: Sequence[str], fault: str | None) -> None:
    # A folder that has become full or read-only only means that the next process tries again.
    with contextlib.suppress(OSError):
        # As readable to other users as the umask says, which a file of `tempfile` never is.
        name = path.with_name(f"{uuid.uuid4().hex}.new")
        try:
            with open(name, "x") as file:
                json.dump({"key": list(key), "fault": fault}, file, indent=1)
            os.replace(name, path)
        except BaseException:
            name.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Leave a line in a file if the process is killed; yield whether earlier lines are enough.

    Enough to blame the kernel, that is. A lock tells killed attempts from
    attempts under way: it ends with the process that holds it.
    """
    with locked(path) as file:
        killed = False
        if file is not None:
            with contextlib.suppress(OSError):
                killed = os.fstat(file.fileno()).st_size >= _DEATHS * len(_ATTEMPT)
                file.write(_ATTEMPT)
        try:
            yield killed
        finally:
            if file is not None:
                # Emptied first: another process may have opened the file, and locks it next.
                with contextlib.suppress(OSError):
                    file.truncate(0)
                    path.unlink(missing_ok=True)

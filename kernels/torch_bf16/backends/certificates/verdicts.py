"""Verdicts on disk, so that each machine tries a kernel once and is killed by it once.

What ends a process while it still compiles blames nobody: that takes seconds, a trial milliseconds.
Of several ranks one may be killed twice: launchers end all of them when one has failed, so that
one death blames nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:
    # Without locks an attempt that is under way cannot be told from one that was killed.
    fcntl = None

__all__ = ["all_verdicts", "file_of", "folder", "verdict"]

_ATTEMPT = b"under way\n"


def folder() -> Path | None:
    """Where verdicts are kept: ``$TORCH_BF16_CACHE``, else below the user's cache; None if nowhere.

    None where it cannot be written.
    """
    try:
        if chosen := os.environ.get("TORCH_BF16_CACHE"):
            place = Path(chosen)
        else:
            place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-bf16"
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return place if os.access(place, os.W_OK) else None


def file_of(key: Sequence[str]) -> Path | None:
    """Where the verdict on a key is kept; None if nowhere."""
    place = folder()
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    return None if place is None else place / f"{name}.json"


def verdict(key: Sequence[str], load: Callable[[], Callable[[], str | None]]) -> str | None:
    """The fault that an attempt found once on this machine, or None where there was none.

    Two processes that attempt the same at once both do, and neither waits.

    Args:
        key: all that the verdict depends on.
        load: compiles what is to be tried and gives the attempt, which finds the fault and may end
            the process. What either raises is not a verdict.
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
                f"a process that tried it before was killed; remove {path} to try again"
                if killed
                else attempt()
            )
            _write(path, key, fault)
    return fault


def all_verdicts() -> list[tuple[list[str], str | None]]:
    """All verdicts of this machine: what each depends on, backend and variant first, and its fault.

    Those of other versions are among them.
    """
    place, found = folder(), []
    for path in sorted(place.glob("*.json")) if place else ():
        try:
            entry = json.loads(path.read_text())
            found.append((list(entry["key"]), entry["fault"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, and made again when it is needed
    return found


def _read(path: Path) -> tuple[bool, str | None]:
    try:
        return True, json.loads(path.read_text())["fault"]
    except (OSError, ValueError, KeyError, TypeError):
        return False, None


def _write(path: Path, key: Sequence[str], fault: str | None) -> None:
    # A folder that has become full or read-only only means that the next process tries again.
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
        with open(handle, "w") as file:
            json.dump({"key": list(key), "fault": fault}, file, indent=1)
        os.replace(name, path)


def _deaths() -> int:
    """How many processes have to be killed in an attempt before what they tried is blamed."""
    return 2 if os.environ.get("WORLD_SIZE", "1") != "1" else 1


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Leave a line behind should the process be killed; whether enough of those were that left one.

    A lock tells them from attempts that are under way: it ends with the process that holds it.
    """
    with contextlib.ExitStack() as stack:
        file, killed = None, False
        with contextlib.suppress(OSError):
            if fcntl is not None:
                opened = stack.enter_context(open(path, "ab"))
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file = opened
                killed = os.fstat(file.fileno()).st_size >= _deaths() * len(_ATTEMPT)
                file.write(_ATTEMPT)
                file.flush()
        try:
            yield killed
        finally:
            if file is not None:
                # Emptied first: another process may have opened it, and locks it next.
                with contextlib.suppress(OSError):
                    file.truncate(0)
                    path.unlink(missing_ok=True)

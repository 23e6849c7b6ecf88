"""Find what would be refused, fall back or be slow on this machine, before a run meets it."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bf16_autoload import resembles_a_mode
from torch_bf16.argument_checks import check_backend
from torch_bf16.backends import choose, explain
from torch_bf16.backends.certificates import all_verdicts, facts_of, file_of, folder
from torch_bf16.backends.triton import interprets
from torch_bf16.environment import (
    OPTIONS,
    misspelt_variables,
    mode_from_environment,
    monitor_from_environment,
    options_from_environment,
)
from torch_bf16.errors import BackendUnavailableError
from torch_bf16.gradients.release_options import release_options
from torch_bf16.model.slow_products import SLOW, bf16_product_ratio
from torch_bf16.recipe import RECIPES
from torch_bf16.tools.arguments import is_there
from torch_bf16.torch_patches import PATCHES, SWITCH, is_enabled

from .hosts import hook, host_rows, is_older, needed

__all__ = ["Obstacle", "devices", "disabled_patches", "obstacles", "verdicts"]


@dataclass(frozen=True)
class Obstacle:
    """Something on this machine that would stop a run, slow it down or surprise its user.

    Attributes:
        kind: ``"refused"``, ``"slow"`` or ``"note"``.
        what: what happens, and why.
        instead: what works instead.
    """

    kind: str
    what: str
    instead: str


def obstacles() -> list[Obstacle]:
    """All obstacles on this machine, refusals first."""
    found = [
        *(*_versions(), *_environment(), *_backends(), *_verdicts()),
        *(*_hardware(), *_caches(), *_forks()),
    ]
    order = ("refused", "slow", "note")
    return sorted(found, key=lambda each: order.index(each.kind))


def verdicts() -> list[tuple[list[str], str | None]]:
    """Verdicts that hold here; those of other versions are history, and a folder may be shared."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    current = [
        (name, facts_of(choose(device, name), device))
        for device in (torch.device("cpu"), *(torch.device("cuda", each) for each in gpus))
        for name, reason in explain(device).items()
        if reason is None
    ]
    return [(key, fault) for key, fault in all_verdicts() if (key[0], key[2:]) in current]


def _versions() -> Iterator[Obstacle]:
    oldest = needed("torch")
    if oldest and is_older(torch.__version__, oldest):
        yield Obstacle(
            "refused",
            f"torch {torch.__version__} is older than {oldest}",
            f"pip install -U 'torch>={oldest}'",
        )
    for each in host_rows():
        version, name = each["version"], each["name"]
        if version is None:
            continue
        if each["oldest"] and is_older(version, each["oldest"]):
            yield Obstacle(
                "refused",
                f"{name} {version} is older than {each['oldest']}",
                f"pip install -U '{name}>={each['oldest']}'",
            )
        elif is_older(each["newest_tested"], version):
            yield Obstacle(
                "note",
                f"{name} {version} is newer than {each['newest_tested']}, the newest one tested",
                "report what differs",
            )
    found = hook()
    if not found.works:
        what = f"hosts do not know the modes without an import: {found.why}"
        yield Obstacle("refused", what, found.instead)


def _environment() -> Iterator[Obstacle]:
    refused = False
    for variable, read in _READERS.items():
        try:
            # One at a time, so that one faulty variable does not hide another.
            read({variable: os.environ.get(variable, "")})
        except ValueError as error:
            refused = refused or variable in OPTIONS
            yield Obstacle("refused", str(error), f"change {variable}, or unset it")
    try:
        if not refused:
            given = {name: os.environ[name] for name in OPTIONS if name in os.environ}
            release_options(options_from_environment(given))
    except ValueError as error:
        yield Obstacle("refused", str(error), "BF16_RELEASE_GRADIENTS=1, or unset it")
    for name, meant in misspelt_variables().items():
        yield Obstacle("note", f"{name} is set, and nothing reads it", f"{meant} is read")
    try:
        disabled = disabled_patches()
    except ValueError as error:
        yield Obstacle("refused", str(error), f"unset {SWITCH}")
    else:
        for name in disabled:
            yield Obstacle(
                "note", f"{SWITCH} turns {name} off: {PATCHES[name].without}", f"unset {SWITCH}"
            )
    if interprets():
        yield Obstacle("slow", "Triton's kernels run in its interpreter", "unset TRITON_INTERPRET")


def _read_backend(environment: Mapping[str, str]) -> None:
    if name := environment["TORCH_BF16_BACKEND"]:
        try:
            check_backend(name)
        except ValueError as error:
            raise ValueError(f"TORCH_BF16_BACKEND: {error}") from None


def _read_launcher(environment: Mapping[str, str]) -> None:
    value = environment["ACCELERATE_MIXED_PRECISION"].strip().lower()
    if resembles_a_mode(value) and value not in RECIPES:
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION={value} names no mode; use one of {', '.join(RECIPES)}"
        )


_READERS: Mapping[str, Callable[[dict[str, str]], Any]] = {
    **dict.fromkeys(OPTIONS, options_from_environment),
    "BF16_MODE": mode_from_environment,
    "BF16_MONITOR": monitor_from_environment,
    "TORCH_BF16_BACKEND": _read_backend,
    "ACCELERATE_MIXED_PRECISION": _read_launcher,
}


def _backends() -> Iterator[Obstacle]:
    for device in devices():
        try:
            chosen = choose(device).name
        except BackendUnavailableError as error:
            # Most models of a machine with a GPU are trained there.
            elsewhere = device.type == "cpu" and _named_runs_on_a_gpu()
            yield Obstacle(
                "note" if elsewhere else "refused",
                str(error),
                "train on the GPU, or unset TORCH_BF16_BACKEND"
                if elsewhere
                else "unset TORCH_BF16_BACKEND",
            )
            continue
        # Already reported for the variable.
        except ValueError:
            continue
        reason = explain(device)["triton" if device.type == "cuda" else "cpu"]
        if chosen == "eager" and reason:
            yield Obstacle(
                "slow",
                f"steps on {device} are eager, many times slower: {reason}",
                "remove that cause",
            )
    if torch.cuda.is_available() and not torch.version.hip and not _compiler():
        yield Obstacle(
            "refused",
            "Triton compiles its launcher with a C compiler, and none was found (CC, gcc, clang)",
            "apt install gcc, or set CC; until then steps are eager",
        )
    elif torch.cuda.is_available() and not _headers():
        yield Obstacle(
            "refused",
            f"Triton needs Python.h, which is not in {sysconfig.get_path('include')}",
            "apt install python3-dev; until then steps are eager",
        )


def _named_runs_on_a_gpu() -> bool:
    name = os.environ["TORCH_BF16_BACKEND"]
    return any(explain(each)[name] is None for each in devices() if each.type == "cuda")


def _verdicts() -> Iterator[Obstacle]:
    for key, fault in verdicts():
        if fault is not None:
            yield Obstacle(
                "slow",
                f"the {key[0]} backend is not used for {key[1]}: {fault}",
                f"a slower one takes its place; delete {file_of(key)} to try it again",
            )


def _hardware() -> Iterator[Obstacle]:
    for device in devices():
        if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            yield Obstacle(
                "slow",
                f"{torch.cuda.get_device_name(device)} has no arithmetic in bf16 and emulates it",
                "memory is saved all the same; fp32 or fp16 computes faster",
            )
    if not torch.cuda.is_available() and (ratio := bf16_product_ratio()) > SLOW:
        yield Obstacle(
            "slow",
            f"this CPU takes {ratio:.1f} times as long for a bf16 matrix product as for an fp32 "
            "one (bf16 needs AVX512-BF16, AMX or their like)",
            "compute='fp32' (BF16_COMPUTE=fp32), which computes in fp32 over the same bf16 weights",
        )


def _caches() -> Iterator[Obstacle]:
    if folder() is None:
        chosen = os.environ.get("TORCH_BF16_CACHE")
        where = f"TORCH_BF16_CACHE={chosen}" if chosen else "the user's cache"
        yield Obstacle(
            "slow",
            f"{where} cannot be written: each process proves its kernels again",
            "set TORCH_BF16_CACHE to a folder that can be written",
        )
    if explain(torch.device("cpu"))["cpu"] is None and not _numba_writes():
        yield Obstacle(
            "slow",
            "Numba finds no folder to keep compiled kernels in: each process compiles them again",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )


def _forks() -> Iterator[Obstacle]:
    # GNU's runtime; LLVM's and Intel's start a pool of their own in the child.
    if torch.get_num_threads() > 1 and "libgomp" in _loaded_libraries():
        yield Obstacle(
            "note",
            "torch runs on GNU's OpenMP: in a process forked after torch has used several threads "
            "(ddp_fork, ddp_notebook, notebook_launcher), torch's own operations hang",
            "strategy='ddp_spawn', torchrun, or OMP_NUM_THREADS=1",
        )


def disabled_patches() -> list[str]:
    """The patches of torch that the environment turns off.

    Raises:
        ValueError: it names a patch that does not exist.
    """
    return [name for name in PATCHES if not is_enabled(name)]


def devices() -> list[torch.device]:
    """The kinds of devices that torch sees."""
    return [torch.device("cpu")] + [torch.device("cuda")] * torch.cuda.is_available()


def _compiler() -> str | None:
    named = os.environ.get("CC")
    return shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")


def _headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def _loaded_libraries() -> str:
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:
        return ""


def _numba_writes() -> bool:
    """Whether Numba can write to one of the folders in which it would keep kernels."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        return _writable(Path(named))
    source = Path(__file__).parents[2] / "backends" / "cpu"
    return _writable(source / "__pycache__") or _writable(_cache(), "numba")


def _cache() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None  # the user has no home


def _writable(path: Path | None, *parts: str) -> bool:
    """Whether a folder can be written, or made."""
    if path is None:
        return False
    path = path.joinpath(*parts)
    try:
        while not is_there(path) and path != path.parent:
            path = path.parent
        return path.is_dir() and os.access(path, os.W_OK)
    except OSError:
        return False  # a folder on the way is closed

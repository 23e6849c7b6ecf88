"""Kernels that other processes compiled and left in Numba's cache."""

import fcntl
import os
import shutil
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from forkserver import forked, forkserver
from numba.core.caching import FunctionCache

import torch_bf16
from torch_bf16.backends import file_lock, sources
from torch_bf16.backends.cpu import compile_lock
from torch_bf16.backends.cpu.compiler import named_by_sources
from torch_bf16.backends.cpu.job import compile_job, new_job, unpack
from torch_bf16.backends.sources import source_hash


def cache_in(folder):
    os.environ["NUMBA_CACHE_DIR"] = folder
    numba.core.config.reload_config()


def weights(name, backend):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5000, 2).bfloat16())
    parameter.grad = torch.randn(5000, 2).bfloat16()
    optimizer = getattr(torch_bf16, name)([parameter], lr=0.1, weight_decay=0.1, backend=backend)
    for _ in range(2):
        optimizer.step()
    return parameter.detach().view(torch.int16)


def step_as_eager(folder, names):
    cache_in(folder)
    for name in names:
        assert torch.equal(weights(name, "cpu"), weights(name, "eager")), name


def test_kernels_cached_by_several_processes_are_not_taken_for_one_another(tmp_path):
    # Both rules have the same states, scalars and codecs: only the names of their parts differ.
    for names in (["Adam"], ["AdamW"], ["Adam", "AdamW"], ["AdamW", "Adam"]):
        with forked(step_as_eager, str(tmp_path), names) as process:
            process.join(120)
            assert process.exitcode == 0, names
    cached = [file.name for file in tmp_path.rglob("*.nbi")]
    assert sum("run_adam_bf16_stochastic" in name for name in cached) == 1
    assert sum("run_adamw_bf16_stochastic" in name for name in cached) == 1


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("numerics/counter_rng.py", True),
        ("formats/blocks.py", True),
        ("rules/adam.py", True),
        ("backends/bucket.py", True),
        ("backends/cpu/codecs.py", True),
        ("backends/triton/codecs.py", False),
    ],
)
def test_a_kernel_from_other_sources_has_another_name(file, counts, monkeypatch, tmp_path):
    copy = tmp_path / "package"
    shutil.copytree(Path(torch_bf16.__file__).parent, copy)
    monkeypatch.setattr(sources, "files", lambda package: copy)
    sources.source_hash.cache_clear()
    before = named_by_sources("run"), sources.source_hash()
    with (copy / file).open("a") as source:
        source.write("# changed")
    sources.source_hash.cache_clear()
    after = named_by_sources("run"), sources.source_hash()
    sources.source_hash.cache_clear()
    assert [a != b for a, b in zip(before, after, strict=True)] == [counts, True]


def step_from(archive, sources_outside):
    for name in [each for each in sys.modules if each.partition(".")[0] == "torch_bf16"]:
        del sys.modules[name]
    sys.path.insert(0, archive)
    import torch_bf16 as zipped
    from torch_bf16.backends.certificates import digests
    from torch_bf16.backends.sources import source_hash

    assert zipped.__file__.startswith(archive)
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    zipped.AdamW([parameter], lr=0.5, weight_decay=0, backend="cpu").step()
    assert parameter.tolist() == [0.5] * 3
    assert source_hash() == sources_outside
    assert digests._shipped()


def test_a_package_in_a_zip_file_steps_and_knows_its_sources(tmp_path):
    package = Path(torch_bf16.__file__).parent
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in package.rglob("*.*"):
            if file.suffix in (".py", ".txt"):
                archive.write(file, Path("torch_bf16") / file.relative_to(package))
    with forked(step_from, str(tmp_path / "all.zip"), source_hash()) as process:
        process.join(120)
        assert process.exitcode == 0


KINDS = ((np.int64, 1),)
unpacked = unpack(KINDS)


def writes_a_seven(job):
    _, written = unpacked(job)
    written[0] = 7


def sevens():
    """What a kernel writes, and whether it was read from the cache."""
    work, written = compile_job(writes_a_seven, "writes_a_seven"), np.zeros(1, np.int64)
    work(new_job(KINDS, [written], 1).ctypes.data)
    return written[0], sum(work.compiled.stats.cache_hits.values())


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [0, 100])
def test_what_is_damaged_in_the_cache_is_made_again(monkeypatch, tmp_path, suffix, left):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert [sevens(), sevens()] == [(7, 0), (7, 1)]
    (file,) = tmp_path.rglob(f"*{suffix}")
    os.truncate(file, left)
    assert [sevens(), sevens()] == [(7, 0), (7, 1)]


def test_what_was_compiled_and_cannot_be_written_is_not_compiled_again(monkeypatch, tmp_path):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(FunctionCache, "save_overload", full)
    # It would have no place in the cache if it had been compiled without one.
    assert compile_job(writes_a_seven, "writes_a_seven").compiled.stats.cache_path is not None


def test_what_other_sources_compiled_to_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    sevens()
    kept, old = {*tmp_path.rglob("*.nb[ci]")}, source_hash("triton", "certificates")
    for file in kept:
        shutil.copy(file, file.with_name(file.name.replace(old, "0123456789abcdef")))
        other = file.with_name(file.name.replace(old, f"{old}_{old}"))
        shutil.copy(file, other)
        kept = kept | {other}
        file.unlink()
    assert sevens() == (7, 0)
    assert {*tmp_path.rglob("*.nb[ci]")} == kept


def compile_at_once(folder, barrier, results):
    cache_in(folder)
    from torch_bf16.backends.cpu.squares import compile_squares

    barrier.wait(60)
    compiled = compile_squares(torch.float32).compiled
    results.put(sum(compiled.stats.cache_hits.values()))


def test_of_processes_that_need_a_kernel_at_once_one_compiles_it(tmp_path):
    context = forkserver()
    barrier, results = context.Barrier(3), context.Queue()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(forked(compile_at_once, str(tmp_path), barrier, results))
        assert sorted(results.get(timeout=120) for _ in range(3)) == [0, 1, 1]


@pytest.fixture
def clock(monkeypatch):
    """The time that waiting takes, which passes at once."""
    passed = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        passed.seconds += seconds

    monkeypatch.setattr(
        file_lock, "time", SimpleNamespace(monotonic=lambda: passed.seconds, sleep=sleep)
    )
    return passed


def test_who_has_waited_long_enough_compiles_as_well(clock):
    with open(compile_lock._file("slow"), "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with compile_lock.compile_lock("slow"):
            assert clock.seconds == pytest.approx(compile_lock._LONGEST, abs=0.1)


def test_where_nothing_can_be_locked_nobody_waits(monkeypatch, tmp_path, clock):
    monkeypatch.setattr(compile_lock, "_file", lambda name: tmp_path / "none" / name)
    with compile_lock.compile_lock("kernel"), compile_lock.compile_lock("kernel"):
        assert clock.seconds == 0

"""What would turn the gpu tests red for the wrong reason, tried with stubs."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import gpu_marks as gpu
import pytest
import torch

from torch_bf16.tools.selftest.steps import waiting_is_an_error


@pytest.fixture
def mode(monkeypatch):
    """torch's mode, which warns once, and only after it has been set."""
    state = {"mode": 0, "warned": False}

    def set_mode(mode):
        state["mode"] = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
        if not state["warned"]:
            state["warned"] = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state["mode"])
    return state


def test_the_stub_behaves_as_torch_does(mode):
    with pytest.raises(UserWarning, match="prototype"):
        torch.cuda.set_sync_debug_mode("error")
    assert mode["mode"] == 2


@pytest.mark.parametrize("before", [0, 1])
def test_sync_debug_mode_ends_as_it_was_and_its_warning_is_no_error(mode, before):
    mode["mode"] = before
    with waiting_is_an_error():
        assert mode["mode"] == 2
    assert mode["mode"] == before


def test_sync_debug_mode_ends_as_it_was_after_an_error(mode):
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        raise RuntimeError("called a synchronizing CUDA operation")
    assert mode["mode"] == 0


def test_host_tests_see_no_gpu():
    assert {os.environ[name] for name in gpu.HIDE} == {""}
    assert torch.cuda.device_count() == 0


@pytest.mark.parametrize("expression", ["", "not gpu", "slow"])
def test_runs_without_the_gpu_tests_hide_gpus(expression):
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    gpu.hide_gpus(expression, environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def test_a_run_of_the_gpu_tests_sees_what_its_caller_shows():
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    gpu.hide_gpus("gpu", environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "1"}


# A file that has the mark is taken for one of the gpu tests.
TRIED = """
import os, pathlib, pytest, torch

@pytest.mark.{mark}
def test_cache():
    pathlib.Path('seen').write_text(os.environ['TORCH_BF16_CACHE'])

lost = []

def synchronize():
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize

@pytest.mark.{mark}
@pytest.mark.parametrize("number", range(3))
def test_it(number):
    lost.extend([number] if number == 1 else [])
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def gpu_run(tmp_path_factory):
    """The folder of a run of gpu tests, one of which loses the GPU, and what it printed."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "test_it.py").write_text(TRIED.format(mark="gpu"))
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-n1"]
    options = ["-c", str(tests.parent / "pyproject.toml"), "-p", "conftest", "--rootdir", "."]
    done = subprocess.run(
        [*command, *options, "test_it.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tests), "TORCH_BF16_CACHE": str(folder)},
        capture_output=True,
        text=True,
    )
    return folder, done.stdout


def test_a_run_of_the_gpu_tests_leaves_no_verdict(gpu_run):
    folder, said = gpu_run
    assert (folder / "seen").exists(), said
    seen = Path((folder / "seen").read_text())
    assert seen != folder
    assert not seen.exists()


def test_a_test_that_loses_the_gpu_takes_no_other_along(gpu_run):
    _, said = gpu_run
    assert said.count("PASSED") == 3, said
    assert "illegal memory access" in said
    failed = [line for line in said.splitlines() if " FAILED " in line]
    assert failed, said
    assert all("test_it[1]" in line for line in failed), said


@pytest.fixture
def sanitizer(tmp_path):
    """A stand-in that ends with a status, says something, and notes how it was called."""

    def make(status, said=""):
        program = tmp_path / "compute-sanitizer"
        log = tmp_path / "log"
        program.write_text(
            f'#!{sys.executable}\nimport os, sys\nopen("{log}", "w").write('
            f'"|".join([*sys.argv[1:], os.environ["PYTORCH_CUDA_ALLOC_CONF"]]))\n'
            f"print({said!r})\nsys.exit({status})\n"
        )
        program.chmod(0o755)
        return str(program), log

    return make


def test_the_sanitizer_is_told_of_benign_errors_and_sees_whole_allocations(sanitizer, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    program, log = sanitizer(0)
    gpu.sanitize(program, "memcheck", ["python", "-c", "pass"])
    told = Path(log).read_text().split("|")
    assert told[:2] == ["--tool", "memcheck"]
    assert told[4:6] == ["--report-api-errors", "no"]
    assert told[-4:] == ["python", "-c", "pass", ""]


def test_what_the_sanitizer_finds_fails_a_test(sanitizer):
    with pytest.raises(AssertionError, match="Invalid __global__ read"):
        gpu.sanitize(sanitizer(7, "Invalid __global__ read")[0], "memcheck", ["true"])


def test_a_sanitizer_that_cannot_reach_the_device_skips_a_test(sanitizer):
    with pytest.raises(pytest.skip.Exception, match="cannot reach the device"):
        gpu.sanitize(sanitizer(1, "Error: Device not supported")[0], "memcheck", ["true"])


def test_a_sanitizer_that_takes_too_long_skips_a_test(monkeypatch):
    def run(*_, timeout, **options):
        raise subprocess.TimeoutExpired("compute-sanitizer", timeout)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    with pytest.raises(pytest.skip.Exception, match="did not end within 240 s"):
        gpu.sanitize("compute-sanitizer", "racecheck", ["true"])


def test_the_sanitizer_gives_up_before_pytest_does(request):
    assert float(request.config.getini("timeout")) > gpu.SANITIZER_SECONDS

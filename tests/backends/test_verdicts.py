"""Verdicts: what is remembered of a kernel's trial, and what blames a kernel and what does not."""

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from forkserver import forked, forkserver
from planted_faults import Breaking, Deadly, Failing, Planted, trained

from torch_bf16 import backends
from torch_bf16.backends import Variant, choose
from torch_bf16.backends.certificates import certificate, trial, verdicts
from torch_bf16.backends.cpu import kernel, squares
from torch_bf16.formats import BF16_NEAREST, BF16_STOCHASTIC
from torch_bf16.rules import ADAMW

CPU = torch.device("cpu")
VARIANT = Variant(ADAMW, (BF16_STOCHASTIC, BF16_NEAREST, BF16_STOCHASTIC), torch.bfloat16, CPU)

pytestmark = pytest.mark.usefixtures("fresh")


class _Counting(Planted):
    """Right, and counts how often it was tried."""

    loads = 0

    def load(self, bucket):
        self.loads += 1
        return super().load(bucket)


def test_a_verdict_outlives_its_process_and_is_of_its_versions(fresh, monkeypatch):
    backend = _Counting("nowhere")
    assert certificate.fault_of(backend, VARIANT) is None
    tried = backend.loads
    assert tried == 2
    monkeypatch.setattr(certificate, "_known", {})
    assert certificate.fault_of(backend, VARIANT) is None
    assert backend.loads == tried
    monkeypatch.setattr(certificate, "_known", {})
    monkeypatch.setattr(backend, "place", "nowhere, newer driver")
    assert certificate.fault_of(backend, VARIANT) is None
    assert backend.loads == 2 * tried
    assert sorted(path.suffix for path in fresh.iterdir()) == [".json", ".json"]


def test_a_folder_that_cannot_be_written_means_a_trial_for_each_process(monkeypatch):
    monkeypatch.setenv("TORCH_BF16_CACHE", "/dev/null/verdicts")
    backend = _Counting("nowhere")
    for _ in range(2):
        monkeypatch.setattr(certificate, "_known", {})
        assert certificate.fault_of(backend, VARIANT) is None
    assert backend.loads == 4


def test_a_full_disk_is_left_without_halves_of_files(fresh, monkeypatch):
    def fail(*arguments, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verdicts.json, "dump", fail)
    assert verdicts.verdict(["a"], lambda: lambda: None) is None
    assert not [*fresh.glob("*.new")]


def test_a_verdict_is_as_readable_as_the_umask_says(fresh):
    before = os.umask(0o027)
    try:
        verdicts.verdict(["a"], lambda: lambda: None)
    finally:
        os.umask(before)
    (path,) = fresh.iterdir()
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_damaged_verdict_is_made_again(fresh):
    assert verdicts.verdict(["a"], lambda: lambda: "wrong") == "wrong"
    (path,) = fresh.glob("*.json")
    for damage in ("", "{", "[]", "{}"):
        path.write_text(damage)
        assert verdicts.verdict(["a"], lambda: lambda: None) is None


def _die(folder, number):
    os.environ["TORCH_BF16_CACHE"] = folder
    verdicts.verdict(["deadly"], lambda: lambda: os.kill(os.getpid(), number))


def _killed(folder, number=signal.SIGKILL):
    """A process that a signal ends while it tries."""
    with forked(_die, str(folder), number) as process:
        process.join(60)
        assert process.exitcode == -number


def test_one_process_that_was_killed_does_not_blame_what_it_tried(fresh):
    """Clusters end jobs so, and launchers ranks when another one has failed."""
    _killed(fresh, signal.SIGTERM)
    assert verdicts.verdict(["deadly"], lambda: lambda: None) is None
    assert [path.suffix for path in fresh.iterdir()] == [".json"]


def test_an_attempt_that_ended_without_a_verdict_is_nobodys_death(fresh):
    with contextlib.ExitStack() as stack:
        with verdicts._claim(fresh / "x.attempt"):
            # By another process, which will have the lock once the file is gone.
            opened = stack.enter_context(open(fresh / "x.attempt", "ab"))
            assert os.fstat(opened.fileno()).st_size > 0
        assert os.fstat(opened.fileno()).st_size == 0


def test_what_killed_two_processes_is_not_tried_again(fresh):
    for _ in range(2):
        _killed(fresh)
    for _ in range(2):
        fault = verdicts.verdict(["deadly"], lambda: pytest.fail)
        assert "were killed; remove" in fault
    (path,) = fresh.glob("*.json")
    path.unlink()
    assert verdicts.verdict(["deadly"], lambda: lambda: None) is None


def _wait(folder, pipe):
    os.environ["TORCH_BF16_CACHE"] = folder

    def attempt():
        pipe.send("under way")
        return pipe.recv()

    pipe.send(verdicts.verdict(["shared"], lambda: attempt))


def test_two_processes_try_at_once_and_neither_waits(fresh):
    ours, theirs = multiprocessing.Pipe()
    with forked(_wait, str(fresh), theirs) as process:
        assert ours.poll(60)
        assert ours.recv() == "under way"
        assert verdicts.verdict(["shared"], lambda: lambda: None) is None
        ours.send(None)
        assert ours.poll(60)
        assert ours.recv() is None
        process.join(60)
        assert process.exitcode == 0
    assert [path.suffix for path in fresh.iterdir()] == [".json"]


def _train(folder, backend, together, pipe):
    os.environ["TORCH_BF16_CACHE"] = folder
    backends._BACKENDS["cpu"] = backend
    together.wait(60)
    pipe.send(trained().float().tolist())


def _training(folder, *wrong):
    """What processes that train at once with these backends send, None where one was killed."""
    together, processes = forkserver().Barrier(len(wrong)), []
    with contextlib.ExitStack() as stack:
        for each in wrong:
            ours, theirs = multiprocessing.Pipe(duplex=False)
            process = forked(_train, str(folder), each, together, theirs)
            processes.append((ours, stack.enter_context(process)))
        for _, process in processes:
            process.join(120)
        return [ours.recv() if process.exitcode == 0 else None for ours, process in processes]


def test_two_processes_that_find_a_fault_at_once_go_on_with_the_right_bits(fresh):
    want = trained("eager").float().tolist()
    assert _training(fresh, Planted("rule"), Planted("rule")) == [want, want]
    # The wrong backend's, and eager's.
    faults = [fault for _, fault in verdicts.all_verdicts()]
    assert sorted(fault is None for fault in faults) == [False, True]


def test_training_that_a_kernel_has_killed_goes_on_with_the_right_bits(fresh):
    want = trained("eager").float().tolist()
    for _ in range(2):
        assert _training(fresh, Deadly("run")) == [None]
    assert _training(fresh, Deadly("run")) == [want]
    assert any("were killed; remove" in (fault or "") for _, fault in verdicts.all_verdicts())


def test_a_process_that_is_ended_while_it_compiles_blames_no_kernel(fresh):
    want = trained("eager").float().tolist()
    assert _training(fresh, Deadly("compile")) == [None]
    assert _training(fresh, Deadly("nowhere")) == [want]
    assert [fault for _, fault in verdicts.all_verdicts()] == [None]


COMPILERS = {
    "cpu": ("cpu.kernel.compile_job", "cpu.squares.compile_job"),
    "triton": ("triton.launch.launcher", "triton.scalars.launcher", "triton.squares.launcher"),
}


def _compiled_when(folder, name):
    """What a trial compiles of a backend before it counts as an attempt, and after that."""
    backend, before, after = choose(CPU, name), [], []
    with pytest.MonkeyPatch.context() as patch:
        now = before
        for place in COMPILERS[name]:
            module, function = f"torch_bf16.backends.{place}".rsplit(".", 1)
            compile_ = getattr(importlib.import_module(module), function)

            def noted(*given, compile_=compile_, place=place, **named):
                now.append(place)
                return compile_(*given, **named)

            patch.setattr(f"{module}.{function}", noted)
        claim = verdicts._claim

        @contextlib.contextmanager
        def claimed(path):
            nonlocal now
            with claim(path) as killed:
                now = after
                yield killed
                now = before

        patch.setattr(verdicts, "_claim", claimed)
        patch.setattr(certificate, "_known", {})
        patch.setenv("TORCH_BF16_CACHE", folder)
        # The large tensors take the interpreter minutes.
        patch.setattr(trial, "_LARGE", ())
        patch.setattr(trial, "_SMALL", trial._SMALL[:4])
        certificate.fault_of(backend, VARIANT)
        certificate.fault_of_squares(backend, CPU, torch.float32)
    # Nothing is compiled anew that was compiled before.
    return {*before}, {*after} - {*before}


def test_what_is_tried_on_a_gpu_was_compiled_before(fresh, interpreted):
    assert interpreted(_compiled_when, str(fresh), "triton") == ({*COMPILERS["triton"]}, set())


def test_what_is_tried_on_a_cpu_was_compiled_before(fresh):
    kernel.compile_step.cache_clear()
    squares.compile_squares.cache_clear()
    assert _compiled_when(str(fresh), "cpu") == ({*COMPILERS["cpu"]}, set())


def test_what_an_attempt_raises_is_no_verdict(fresh, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    for load in (interrupted, lambda: interrupted):
        with pytest.raises(KeyboardInterrupt):
            verdicts.verdict(["a"], load)
    assert list(fresh.iterdir()) == []
    backend = Planted("nowhere")
    monkeypatch.setattr(backend, "load", _raise_memory)
    with pytest.raises(torch.OutOfMemoryError):
        certificate.fault_of(backend, VARIANT)
    assert list(fresh.iterdir()) == []


def test_what_could_not_be_compiled_is_tried_again_by_the_next_process(fresh, monkeypatch):
    assert "C compiler" in certificate.fault_of(Failing(), VARIANT)
    assert "C compiler" in certificate.fault_of(Failing(), VARIANT)
    assert list(fresh.iterdir()) == []
    monkeypatch.setattr(certificate, "_known", {})
    monkeypatch.setattr(Failing, "load", choose(CPU, "eager").load)
    assert certificate.fault_of(Failing(), VARIANT) is None


def test_what_made_the_device_unusable_is_not_tried_again(fresh, monkeypatch):
    monkeypatch.setattr(certificate, "is_lost", lambda device: True)
    backend = Breaking("run")
    assert "unusable until the process ends" in certificate.fault_of(backend, VARIANT)
    monkeypatch.setattr(certificate, "_known", {})
    monkeypatch.setattr(backend, "load", pytest.fail)
    assert "unusable until the process ends" in certificate.fault_of(backend, VARIANT)


def test_an_earlier_error_of_the_device_blames_no_backend(fresh, monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(certificate, "is_lost", lambda device: True)
    elsewhere = dataclasses.replace(VARIANT, device=torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="device-side assert"):
        certificate.fault_of(Failing(), elsewhere)
    assert certificate._known == {}
    assert list(fresh.iterdir()) == []


def test_processors_of_one_name_have_the_verdicts_of_their_features(monkeypatch):
    codegen = pytest.importorskip("numba.core.codegen")
    before = choose(CPU, "cpu").fingerprint(CPU)
    monkeypatch.setattr(codegen, "get_host_cpu_features", lambda: "+sse2,-avx2")
    assert choose(CPU, "cpu").fingerprint(CPU) != before


def test_each_model_of_gpu_gets_a_verdict_of_its_own(monkeypatch):
    eager, found = choose(CPU, "eager"), []
    for name in ("H100", "T4"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found.append(eager.fingerprint(torch.device("cuda", 0)))
    assert found[0] != found[1]


@pytest.mark.parametrize(("hip", "chip"), [(None, "sm_89"), ("7.0", "gfx942:sramecc+")])
def test_a_verdict_of_triton_is_of_an_architecture(monkeypatch, hip, chip):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    # torch's builds for CUDA have the name of the device there.
    architecture = chip if hip else "NVIDIA L4"
    found = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert chip in backends._BACKENDS["triton"].fingerprint(torch.device("cuda", 0))


def _raise_memory(bucket):
    raise torch.OutOfMemoryError("out of memory")

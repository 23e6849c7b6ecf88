"""``python -m torch_bf16 selftest``: what it finds, says and writes; parts are tried one by one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from gpu_marks import each_device

from torch_bf16.backends import choose
from torch_bf16.recipe import RECIPES
from torch_bf16.tools import cli, output
from torch_bf16.tools.selftest import certificates, command, speed, steps
from torch_bf16.tools.selftest.certificates import Certificate, certify, variants_for
from torch_bf16.tools.selftest.steps import NotHere, all_checks, differences, run

CPU = torch.device("cpu")
CHECKS = all_checks()
ON_GPUS = ("CUDA graph", "nothing waits")


@each_device()
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_finds_nothing_here(name, device):
    outcome = run(name, CHECKS[name], torch.device(device))
    assert outcome.fault is None
    assert (outcome.skipped is not None) == (name.startswith(ON_GPUS) and device == "cpu")


@pytest.mark.parametrize(
    "name", [each for each in CHECKS if not each.startswith(("Muon", *ON_GPUS))]
)
def test_every_check_notices_one_bit(name, monkeypatch):
    given = steps._give

    def one_bit_off(optimizer, seed, keep=True):
        given(optimizer, seed, keep)
        if optimizer.backend is None and seed == 2:
            weight = optimizer.param_groups[0]["params"][0].grad
            weight.view(torch.int16)[3, 5] ^= 1 << 9

    monkeypatch.setattr(steps, "_give", one_bit_off)
    outcome = run(name, CHECKS[name], CPU)
    assert re.search("differ from eager's|norm of the gradients", outcome.fault)


def test_what_a_check_raises_is_a_fault_and_what_it_cannot_ask_is_not():
    def broken(device):
        raise RuntimeError("no\nkernel")

    def elsewhere(device):
        raise NotHere("not on a cpu")

    assert run("a", broken, CPU).fault == "RuntimeError: no kernel"
    assert run("b", elsewhere, CPU).skipped == "not on a cpu"


def test_a_step_that_is_not_skipped_is_a_fault(monkeypatch):
    monkeypatch.setattr(
        "torch_bf16.optim.optimizer.BF16Optimizer.skip_next_step_where", lambda *_: None
    )
    name = "found_inf, bf16-stochastic"
    assert run(name, CHECKS[name], CPU).fault == "0 steps were counted as skipped and not 1"


def test_states_of_other_names_differ():
    recipes = [RECIPES[name] for name in ("bf16-stochastic", "bf16-fp32-master")]
    one, other = (steps._make(CPU, each) for each in recipes)
    for each in (one, other):
        steps._give(each, 0)
        each.step()
    assert "has states" in differences(one, other)


def test_what_the_checks_run_was_tried_before(monkeypatch):
    """Else a fault would be met by the process itself."""
    used = set()
    kept = type(choose(CPU)).load

    def load(self, bucket):
        used.add(replace(bucket.variant, indices="consecutive"))
        return kept(self, bucket)

    monkeypatch.setattr(type(choose(CPU)), "load", load)
    for name, check in CHECKS.items():
        run(name, check, CPU)
    assert used <= set(variants_for(CPU))


def short(device):
    return variants_for(device)[:3]


def test_kernels_are_tried_in_a_fresh_process_and_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_BF16_CACHE", str(tmp_path))
    monkeypatch.setattr(certificates, "variants_for", short)
    with certificates.fresh_verdicts():
        found = certify(CPU, 1)
    assert [each.variant for each in found] == [each.name for each in variants_for(CPU)[:3]]
    assert all(each.fault is None and each.backend == "cpu" for each in found)
    assert os.environ["TORCH_BF16_CACHE"] == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_other_processes_the_verdicts_are_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_BF16_CACHE", str(tmp_path))
    monkeypatch.setattr(certificates, "variants_for", short)
    found = certify(CPU, 0)
    assert [(each.variant, each.fault) for each in found] == [
        (each.name, None) for each in variants_for(CPU)[:3]
    ]


def killed(pipe, device, numbers):
    """Stands for a kernel that ends its process at the second variant."""
    for number in numbers:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send((number, None, 0.5))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_process_takes_its_own_verdict_along_and_no_other(
    processes, monkeypatch, forked_workers
):
    monkeypatch.setattr(certificates, "variants_for", short)
    monkeypatch.setattr(certificates, "_try", killed)
    faults = [each.fault for each in certify(CPU, processes)]
    assert faults == [None, "the process that tried it ended with -9", None]


def hanging(pipe, device, numbers):
    """Stands for a kernel that is wrong, and one that does not end."""
    for number in numbers:
        if number == 1:
            time.sleep(600)
        pipe.send((number, "wrong" if number == 0 else None, 0.5))


def test_a_kernel_that_hangs_is_given_up(monkeypatch, forked_workers):
    monkeypatch.setattr(certificates, "variants_for", short)
    monkeypatch.setattr(certificates, "_try", hanging)
    said = []

    def progress(line):
        said.append(line)
        # Only while the second is tried: to start a process may take longer.
        monkeypatch.setattr(certificates, "_PATIENCE", 1.0 if len(said) < 3 else 90.0)

    faults = [each.fault for each in certify(CPU, 1, progress)]
    assert faults == ["wrong", "the process that tried it did not end within 1 s", None]
    assert said[2].endswith("did not end within 1 s")


def losing(pipe, device, numbers):
    """Stands for an illegal access of the first variant."""
    certificates._trial = lambda variant: (None if tried else "it made the device unusable", 0.1)
    certificates.is_lost = lambda device: True
    tried = 0 not in numbers
    certificates.__dict__["variants_for"] = short
    _try(pipe, device, numbers)


_try = certificates._try


def test_a_process_that_lost_its_device_blames_no_other_variant(monkeypatch, forked_workers):
    monkeypatch.setattr(certificates, "variants_for", short)
    monkeypatch.setattr(certificates, "_try", losing)
    faults = [each.fault for each in certify(CPU, 1)]
    assert faults == ["it made the device unusable", None, None]


@pytest.fixture
def quick(monkeypatch):
    """A selftest whose parts take no time."""
    right = Certificate("adamw_x", "cpu", None, 0.1)
    monkeypatch.setattr(command, "certify", lambda *_: [right])
    monkeypatch.setattr(command, "all_checks", lambda: {"a check": lambda device: None})
    monkeypatch.setattr(command, "models_for", lambda device: {"tiny": [(40, 64), (64,)]})
    monkeypatch.setattr(speed, "_ROUNDS", {"cpu": 2})


def test_it_ends_in_a_verdict_a_table_a_picture_and_a_record(quick, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "record.json", tmp_path / "times.png"
    wanted = ["selftest", "--device", "cpu", "--json", str(file), "--plot", str(picture)]
    assert cli.main(wanted) == 0
    out = capsys.readouterr().out
    assert "certificates: 1 of 1 kernels have the bits of the oracle" in out
    assert re.search(r"^a check +ok +0\.", out, re.MULTILINE)
    assert re.search(r"^bf16-stochastic, moved +\d", out, re.MULTILINE)
    assert "passed on cpu" in out
    found = json.loads(file.read_text())
    assert found["passed"]
    assert found["command"].startswith("python -m torch_bf16 selftest --device cpu")
    assert found["environment"]["versions"]["torch"] == torch.__version__
    assert found["environment"]["backends"]["eager"] is None
    names = [row["name"] for row in found["speed"][0]["results"]]
    assert {"torch fused fp32", "bf16-fp32-master", "int8-moments, moved"} <= set(names)
    assert str(tmp_path.home()) not in json.dumps(found["environment"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("part", ["certificate", "check", "time"])
def test_what_is_wrong_is_named_and_ends_with_status_1(quick, monkeypatch, capsys, part):
    if part == "certificate":
        wrong = Certificate("adamw_x", "cpu", "weight has the wrong bits", 0.1)
        monkeypatch.setattr(command, "certify", lambda *_: [wrong])
        said = "failed: cpu, adamw_x"
    elif part == "check":
        monkeypatch.setattr(command, "all_checks", lambda: {"a check": lambda device: "3 bytes"})
        said = "failed: a check"
    else:
        monkeypatch.setattr("torch_bf16.AdamW.step", lambda *_: 1 / 0)
        said = "bf16-stochastic was not timed: ZeroDivisionError"
    assert cli.main(["selftest", "--device", "cpu"]) == 1
    assert said in capsys.readouterr().out


def test_a_named_backend_is_set_aside_and_that_is_said(quick, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_BF16_BACKEND", "eager")
    chosen = []
    checks = {"a check": lambda device: chosen.append(choose(device).name)}
    monkeypatch.setattr(command, "all_checks", lambda: checks)
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    assert chosen == ["cpu"]
    assert "note: TORCH_BF16_BACKEND=eager was set aside" in capsys.readouterr().out
    assert os.environ["TORCH_BF16_BACKEND"] == "eager"


def on_a_gpu(monkeypatch, fault, mode):
    """The record of a GPU that is not there; the number of processes."""
    state, processes = {"compute_mode": mode}, []
    place = {"device_state": state, "backends": {"triton": None, "eager": None}}
    monkeypatch.setattr(command, "_environment", lambda device: place)
    tried = Certificate("adamw_x", "triton", fault, 0.1)
    monkeypatch.setattr(command, "certify", lambda _, n, say: processes.append(n) or [tried])
    monkeypatch.setattr(command, "speed", lambda *_: {"failed": {}, "interrupted": False})
    return command._examine(torch.device("cuda", 0), "selftest"), processes[0]


def test_eager_is_not_timed_on_a_gpu_where_a_kernel_is_wrong(quick, monkeypatch):
    found, _ = on_a_gpu(monkeypatch, "weight has the wrong bits", "Default")
    assert found["speed"] == []
    assert "eager would run in place of Triton" in found["notes"][0]
    assert not found["passed"]
    found, _ = on_a_gpu(monkeypatch, None, "Default")
    assert len(found["speed"]) == 1
    assert found["passed"]


@pytest.mark.parametrize(("mode", "alone"), [("Default", False), ("Exclusive_Process", True)])
def test_a_gpu_for_one_process_is_not_shared(quick, monkeypatch, mode, alone):
    _, processes = on_a_gpu(monkeypatch, None, mode)
    assert (processes == 0) == alone


def test_what_breaks_while_it_is_timed_takes_nothing_along(quick, monkeypatch):
    monkeypatch.setattr(command, "speed", lambda *_: {}["a key"])
    found = command._examine(CPU, "selftest")
    assert found["certificates"]
    assert found["verdict"] == "failed: tiny was not timed: 'a key'"


@pytest.mark.parametrize("began", [False, True])
def test_ctrl_c_while_it_is_timed_keeps_what_was_found_before(quick, monkeypatch, began):
    def speed(*_):
        if not began:
            raise KeyboardInterrupt
        return {"failed": {}, "interrupted": True}

    monkeypatch.setattr(command, "speed", speed)
    found = command._examine(CPU, "selftest")
    assert found["certificates"]
    when = "while tiny was" if began else "before tiny was"
    assert found["verdict"] == f"failed: interrupted {when} timed"


def test_checks_after_one_that_lost_the_device_are_not_made(quick, monkeypatch):
    checks = {"a": lambda device: "3 bytes", "b": lambda device: "never asked"}
    monkeypatch.setattr(command, "all_checks", lambda: checks)
    monkeypatch.setattr(command, "is_lost", lambda device: True)
    found = command._examine(CPU, "selftest")
    assert found["verdict"] == "failed: a"
    assert found["checks"][1]["skipped"] == "cpu was lost in 'a'"
    assert found["speed"] == []


def test_eager_is_not_timed_on_a_cpu_without_its_backend(quick, monkeypatch):
    place = {"device_state": {}, "backends": {"cpu": "no Numba", "eager": None}}
    monkeypatch.setattr(command, "_environment", lambda device: place)
    found = command._examine(CPU, "selftest")
    assert found["speed"] == []
    assert "eager would run in place of the cpu backend" in found["notes"][0]


def test_what_does_not_fit_is_a_note(quick, monkeypatch, capsys):
    monkeypatch.setattr("torch_bf16.tools.bench.rounds.available_bytes", lambda device: 0)
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    assert "note: tiny was not timed: the baseline" in capsys.readouterr().out


def test_an_interrupt_ends_it_without_a_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "torch_bf16", "selftest", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell lets what it runs in the background ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr.readline().startswith("trying the kernels")
        # All processes of the terminal get it.
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130
    assert "python -m torch_bf16 selftest: interrupted" in err
    assert "Traceback" not in out + err


def test_a_terminal_gets_a_table_of_rich_if_it_is_wide_enough(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True, raising=False)
    output.print_table("no [/markup]", ("a", "b"), [("[/1]", "2")])
    out = capsys.readouterr().out
    assert "no [/markup]" in out
    assert "│ [/1] │ 2 │" in out
    monkeypatch.setenv("COLUMNS", "11")
    output.print_table("title", ("a", "b"), [("[/1]", "2")])
    assert capsys.readouterr().out == "\ntitle\na     b\n[/1]  2\n"

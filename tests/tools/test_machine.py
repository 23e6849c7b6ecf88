"""What is said of a machine: its versions, its hardware, and what a GPU says of itself."""

import platform
import re
from types import SimpleNamespace

import pytest
import torch

from torch_bf16.tools import machine

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    found = SimpleNamespace(
        uuid="1234",
        name="NVIDIA H100",
        major=9,
        minor=0,
        total_memory=80 * 2**30,
        multi_processor_count=132,
        # So it is in torch's builds for CUDA.
        gcnArchName="NVIDIA H100",
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_clocks_and_power_are_those_of_the_gpu_that_torch_means(gpu, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        values = [*(["580.1"] * 2), "00000000:01:00.0", *(["5"] * 12), "[N/A]"]
        return SimpleNamespace(returncode=0, stdout=", ".join(values) + "\n", stderr="")

    monkeypatch.setattr(machine.subprocess, "run", run)
    found = machine.device_state(GPU)
    assert "--id=GPU-1234" in commands[0]
    assert (found["pci"], found["power_limit_w"]) == ("00000000:01:00.0", 5.0)
    assert found["utilisation_percent"] is None
    assert machine.device_state(CPU) == {}


@pytest.mark.parametrize("missing", [True, False])
def test_without_nvidia_smi_the_state_says_why(gpu, monkeypatch, missing):
    def run(command, **_):
        if missing:
            raise FileNotFoundError("no nvidia-smi")
        return SimpleNamespace(returncode=9, stdout="", stderr="couldn't communicate")

    monkeypatch.setattr(machine.subprocess, "run", run)
    reason = "no nvidia-smi" if missing else "ended with 9: couldn't communicate"
    assert reason in machine.device_state(GPU)["unknown"]


def test_lines_for_people_have_what_the_record_has(gpu):
    found = machine.machine(CPU)
    first, system, processor = machine.machine_lines(found)
    assert f"torch {torch.__version__}" in first
    assert first.endswith(f"Python {platform.python_version()}")
    assert system.startswith(platform.platform())
    assert re.fullmatch(r".+, \d+ cores, \d+ threads", processor)
    elsewhere = {**found, "distribution": None, "hardware": machine.hardware(GPU)}
    lines = machine.machine_lines(elsewhere)
    assert lines[1] == platform.platform()
    assert lines[3].startswith("NVIDIA H100 (sm_90), 80.0 GiB, ")


@pytest.mark.parametrize(
    ("home", "text", "shown"),
    [
        ("/home/al", "/home/al/x: /home/al", "~/x: ~"),
        ("/home/al/", "'/home/al' is closed, /home/al.", "'~' is closed, ~."),
        ("/home/al", "/home/alice/c:/home/al.old", "/home/alice/c:/home/al.old"),
        ("/home/al", "/mnt/home/al", "/mnt/home/al"),
        ("/", "/tmp/cache", "/tmp/cache"),
        ("", "a. b", "a. b"),
    ],
)
def test_the_home_is_replaced_in_whole_parts_of_a_path(monkeypatch, home, text, shown):
    monkeypatch.setenv("HOME", home)
    assert machine.without_home(text) == shown


def test_a_package_that_is_not_installed_has_no_version():
    found = machine.versions(["no-such-package"])
    assert found["no-such-package"] is None
    assert "no no-such-package" in machine.versions_line(found)

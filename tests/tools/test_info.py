"""``info``: what a bug report needs, and what a run would meet on this machine."""

import contextlib
import importlib.metadata
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from torch_bf16 import backends
from torch_bf16.tools import cli
from torch_bf16.tools.info import hosts, obstacles

ROOT = Path(__file__).parents[2]


def info(capsys):
    """The record, which there is whatever is wrong."""
    assert cli.main(["info", "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def met(capsys):
    """What a run would meet, as one text."""
    return text_of(info(capsys)["obstacles"])


def text_of(found):
    return "\n".join(f"{each['kind']}: {each['what']} -> {each['instead']}" for each in found)


@pytest.fixture(scope="module")
def usual():
    """What a run meets without any of the variables below."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        cli.main(["info", "--json", "-"])
    return text_of(json.loads(out.getvalue())["obstacles"])


def test_the_record_and_the_page_say_the_same(capsys, monkeypatch):
    monkeypatch.setenv("BF16_MODE", "bf16-stochastic")
    found = info(capsys)
    assert cli.main(["info"]) == 0
    page = capsys.readouterr().out
    for each in found["hosts"]:
        row = next(line for line in page.splitlines() if line.startswith(f"  {each['name']:18}"))
        assert (each["version"] or "not installed") in row
        assert each["newest_tested"] in row
    assert "\nenvironment:\n" in page
    assert "  BF16_MODE=bf16-stochastic\n" in page
    assert found["variables"]["BF16_MODE"] == "bf16-stochastic"
    for each in found["obstacles"]:
        assert each["what"] in page
        assert each["instead"] in page


def test_the_optimizers_are_those_of_their_page(capsys):
    table = (ROOT / "docs/optimizers.md").read_text().partition("\n\n`")[0]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert info(capsys)["optimizers"] == sorted(named)


def test_nothing_private_is_told(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    cli.main(["info"])
    assert "secret" not in capsys.readouterr().out


def test_no_message_names_the_home(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_BF16_CACHE", f"{tmp_path}/file/x")
    found = info(capsys)
    assert str(tmp_path) not in json.dumps(found)
    whats = [each["what"] for each in found["obstacles"]]
    assert any(what.startswith("TORCH_BF16_CACHE=~/file/x cannot be written") for what in whats)


def test_tested_versions_are_those_of_the_constraints_or_newer_ones_that_a_page_names():
    page = (ROOT / "docs/versions.md").read_text()
    pinned = dict(
        re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "tests/constraints.txt").read_text(), re.M)
    )
    for name, version in hosts.TESTED.items():
        if pinned.get(name, version) != version:
            assert Version(version) > Version(pinned[name])
            assert version in page
    assert pinned.keys() >= hosts.TESTED.keys() - {"lightning-fabric"}


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TORCH_BF16_BACKEND", "tpu", "refused: TORCH_BF16_BACKEND: unknown backend 'tpu'"),
        ("TORCH_BF16_BACKEND", "triton", "backend 'triton' was asked for and cannot run on cpu"),
        ("BF16_MODE", "bf16_stochastic", "refused: BF16_MODE='bf16_stochastic' is not one"),
        ("BF16_MODE", "banana", "refused: BF16_MODE='banana' is not one of the modes"),
        ("ACCELERATE_MIXED_PRECISION", "bf16-stochastc", "names no mode"),
        ("ACCELERATE_MIXED_PRECISION", "fp32-master", "names no mode"),
        ("BF16_WEIGHTS", "bf16+9", "refused: BF16_WEIGHTS: weights='bf16+9' is unknown"),
        ("BF16_EXP_AVG", "int4", "refused: BF16_EXP_AVG: exp_avg='int4' is unknown"),
        ("BF16_ACCUMULATE", "fp16", "refused: BF16_ACCUMULATE: accumulate='fp16' is not a format"),
        ("BF16_BACKEND", "cuda", "refused: BF16_BACKEND: unknown backend 'cuda'"),
        ("BF16_COMPUTE", "fp16", "refused: BF16_COMPUTE: compute='fp16' is unknown"),
        ("BF16_OFFLOAD", "all", "refused: BF16_OFFLOAD: offload='all' does not say"),
        ("BF16_REDUCE", "foo", "refused: BF16_REDUCE: reduce='foo' is not a way"),
        ("BF16_VECTORS", "x", "refused: BF16_VECTORS: vectors='x' is not a way"),
        ("BF16_SEED", "1.5", "refused: BF16_SEED='1.5' must be a whole number"),
        ("BF16_RELEASE_GRADIENTS", "maybe", "refused: BF16_RELEASE_GRADIENTS='maybe' must be one"),
        ("BF16_RELEASE_NORM", "last_step", "refused: release_norm='last_step' is for released"),
        ("BF16_RELEASE_NORM", "none", "-> change BF16_RELEASE_NORM, or unset it"),
        ("BF16_RELEASE_MAX_NORM", "-1", "-> change BF16_RELEASE_MAX_NORM, or unset it"),
        ("BF16_MONITOR", "abc", "refused: BF16_MONITOR='abc' must be the number of steps"),
        ("BF16_WIEGHTS", "bf16+8", "note: BF16_WIEGHTS is set, and nothing reads it -> BF16_WEIG"),
        ("TORCH_BF16_CACHE", "/dev/null/cache", "slow: TORCH_BF16_CACHE=/dev/null/cache cannot"),
        ("NUMBA_CACHE_DIR", "/dev/null/cache", "slow: Numba finds no folder"),
        ("NUMBA_CACHE_DIR", "x" * 300, "slow: Numba finds no folder"),  # refused by the system
        ("BF16_AUTOLOAD", "off", "BF16_AUTOLOAD=off turns it off -> unset it, or import lightning"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", "_AUTOLOAD=0: torch loads no extension -> unset it"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "true", "_AUTOLOAD=true: torch loads no extension"),
        ("TORCH_BF16_DISABLE_PATCHES", "foo", "refused: TORCH_BF16_DISABLE_PATCHES='foo': foo is"),
        ("TRITON_INTERPRET", "1", "in its interpreter -> unset TRITON_INTERPRET"),
        ("TRITON_INTERPRET", "yes", "in its interpreter -> unset TRITON_INTERPRET"),
    ],
)
def test_what_the_environment_asks_for_and_cannot_be(
    variable, value, said, usual, capsys, monkeypatch
):
    assert said not in usual
    monkeypatch.setenv(variable, value)
    if said.startswith("slow: Numba"):
        pytest.importorskip("numba")
    assert said in met(capsys)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("BF16_MODE", ""), ("ACCELERATE_MIXED_PRECISION", "fp16"), ("BF16_WEIGHTS", "bf16+8")],
)
def test_what_can_be_meant_is_no_obstacle(variable, value, usual, capsys, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert met(capsys) == usual


def test_one_variable_that_is_refused_hides_no_other(capsys, monkeypatch):
    monkeypatch.setenv("BF16_COMPUTE", "fp16")
    monkeypatch.setenv("BF16_SEED", "abc")
    said = met(capsys)
    assert "refused: BF16_COMPUTE" in said
    assert "refused: BF16_SEED" in said


def test_versions_that_are_too_old_or_not_tested_are_named(capsys, monkeypatch):
    real = importlib.metadata.version
    given = {"lightning": "2.4.0", "accelerate": "0.34.2", "transformers": "99.0.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: given.get(name) or real(name))
    monkeypatch.setattr(torch, "__version__", "2.1.0")
    found = met(capsys)
    assert re.search(r"refused: torch 2\.1\.0 is older than 2\.\d", found)
    assert "refused: lightning 2.4.0 is older than 2.5 -> pip install -U 'lightning>=2.5'" in found
    assert "refused: accelerate 0.34.2 is older than 1.1" in found
    assert "note: transformers 99.0.0 is newer than" in found


def test_versions_are_compared_as_numbers():
    assert hosts.is_older("2.9.1", "2.10")
    assert not hosts.is_older("2.13.0+cpu", "2.6")
    assert not hosts.is_older("2.6.0", "2.6")


def test_a_package_that_is_not_installed_has_no_hook(capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert "the package is on the path but not installed" in met(capsys)


def test_a_user_without_a_home_is_told_the_same(usual, monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert obstacles._cache() is None
    assert not obstacles._writable(None)
    assert any("the user's cache cannot be written" in each.what for each in obstacles.obstacles())


def test_a_record_to_send_does_not_name_the_user(capsys, monkeypatch):
    for name in ("NUMBA_CACHE_DIR", "TORCH_BF16_CACHE"):
        monkeypatch.setenv(name, f"{Path.home()}/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{Path.home()}/.cache")
    found = info(capsys)
    assert found["variables"]["NUMBA_CACHE_DIR"] == "~/cache"
    assert f"{Path.home()}/" not in json.dumps(found)


def test_every_name_of_lightning_has_an_oldest_version(capsys):
    oldest = {each["name"]: each["oldest"] for each in info(capsys)["hosts"]}
    assert oldest["lightning"] == oldest["pytorch-lightning"] == oldest["lightning-fabric"]
    assert oldest["lightning"] is not None


def test_without_metadata_nothing_is_said_of_the_oldest(monkeypatch):
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    assert hosts.needed("torch") is None


def test_processors_with_slow_bf16_products_are_named(capsys, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the GPU is what would be used")
    monkeypatch.setattr(obstacles, "bf16_product_ratio", lambda: 12.3)
    said = met(capsys)
    assert "slow: this CPU takes 12.3 times as long for a bf16 matrix product" in said
    assert "-> compute='fp32'" in said
    monkeypatch.setattr(obstacles, "bf16_product_ratio", lambda: 1.5)
    assert "for a bf16 matrix product" not in met(capsys)


def with_a_gpu(monkeypatch, supported=True):
    """A machine whose torch sees a GPU; nothing is run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # none whose properties are asked


def test_gpus_that_emulate_bf16_are_slow(monkeypatch):
    with_a_gpu(monkeypatch, supported=False)
    said = [each.what for each in obstacles.obstacles() if each.kind == "slow"]
    assert "Tesla T4 has no arithmetic in bf16 and emulates it" in said


def test_a_backend_for_gpus_is_refused_only_where_there_is_none(monkeypatch):
    def why(device):
        return None if device.type == "cuda" else "it updates tensors on GPUs"

    monkeypatch.setattr(backends._BACKENDS["triton"], "unavailable", why)
    monkeypatch.setenv("TORCH_BF16_BACKEND", "triton")

    def kinds():
        found = [each for each in obstacles.obstacles() if "was asked for" in each.what]
        return [(each.kind, each.instead) for each in found]

    assert kinds() == [("refused", "unset TORCH_BF16_BACKEND")]
    with_a_gpu(monkeypatch)
    assert kinds() == [("note", "train on the GPU, or unset TORCH_BF16_BACKEND")]


def test_triton_needs_a_compiler_and_python_s_headers(monkeypatch):
    with_a_gpu(monkeypatch)
    monkeypatch.setattr(obstacles, "_headers", lambda: True)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    said = [each.what for each in obstacles.obstacles() if each.kind == "refused"]
    assert any("with a C compiler, and none was found" in each for each in said)
    monkeypatch.setattr(obstacles, "_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(obstacles, "_headers", lambda: False)
    assert any("Triton needs Python.h" in each.what for each in obstacles.obstacles())


def test_forks_are_warned_of_where_threads_would_be_gone(monkeypatch):
    monkeypatch.setattr(obstacles, "_loaded_libraries", lambda: "/lib/libgomp-98b21ff3.so.1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert any("GNU's OpenMP" in each.what for each in obstacles.obstacles())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not any("GNU's OpenMP" in each.what for each in obstacles.obstacles())


def test_a_target_that_cannot_be_written_is_refused_at_once(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", "--json", os.fspath(tmp_path / "new.json")])
    assert "new.json' may not be written by you" in capsys.readouterr().err
    for bad in (tmp_path, tmp_path / "no" / "file.json"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["info", "--json", os.fspath(bad)])
        assert "argument --json" in capsys.readouterr().err

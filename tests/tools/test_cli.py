"""The command line: what it prints and what it refuses; the files beside this one have the rest."""

import argparse
import errno
import os
import pathlib
import runpy
import sys

import pytest
import torch
from own_process import printed_by

from torch_bf16 import RECIPES
from torch_bf16.backends import choose
from torch_bf16.backends.certificates import facts_of, file_of
from torch_bf16.backends.certificates.verdicts import verdict
from torch_bf16.tools import cli
from torch_bf16.tools.arguments import count, keep_inputs
from torch_bf16.tools.info import command


def test_info_tells_versions_recipes_and_backends(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("torch-bf16 ")
    assert f"torch {torch.__version__}" in out
    for name, recipe in RECIPES.items():
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [name])
        assert str(recipe.bytes_per_parameter) in line.split()
        assert ("alias of" in line) == (name != recipe.name)
    assert "backends for cpu:\n  cpu      works  <- used\n  eager    works\n" in out


def test_info_says_how_backends_prove_themselves_and_which_failed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_BF16_CACHE", str(tmp_path))
    now = facts_of(choose(cpu := torch.device("cpu"), "cpu"), cpu)
    elsewhere = [now[0], *(f"another {each}" for each in now[1:-1]), now[-1]]
    verdict(["cpu", "adamw_bf16", *now], lambda: lambda: None)
    verdict(["cpu", "sgd_bf16", *now], lambda: lambda: "weight has the wrong bits")
    verdict(["cpu", "old_bf16", *now[:-1], "another hash"], lambda: lambda: "wrong")
    verdict(["cpu", "far_bf16", *elsewhere], lambda: lambda: "wrong on another processor")
    (tmp_path / "damaged.json").write_text("{")
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "before its first use on a device, each variant of a kernel takes two steps" in out
    assert f"  verdicts in {tmp_path}: 2 hold here, 1 failed\n" in out
    assert "  cpu: sgd_bf16 failed: weight has the wrong bits\n" in out
    assert "old_bf16" not in out
    assert "far_bf16" not in out
    kept = file_of(["cpu", "sgd_bf16", *now])
    met = out.partition("what a run would meet on this machine:\n")[2]
    assert "  slow: the cpu backend is not used for sgd_bf16: weight has the wrong bits" in met
    assert f"delete {kept} to try it again\n" in met
    kept.unlink()
    cli.main(["info"])
    assert "sgd_bf16" not in capsys.readouterr().out
    monkeypatch.setenv("TORCH_BF16_CACHE", "/dev/null/verdicts")
    cli.main(["info"])
    assert "no verdict can be kept: set TORCH_BF16_CACHE" in capsys.readouterr().out


def test_info_says_why_a_backend_does_not_work(capsys, monkeypatch):
    monkeypatch.setattr(command, "explain", lambda device: {"cpu": "no Numba", "eager": None})
    assert cli.main(["info"]) == 0
    assert "  cpu      not here: no Numba" in capsys.readouterr().out


def test_the_module_runs_as_a_program(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torch_bf16", "info"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("torch_bf16", run_name="__main__")
    assert "recipes (formats; bytes per parameter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["train"], "invalid choice: 'train'"),
        (["info", "--all"], "unrecognized arguments: --all\n"),
        (
            ["recommend", "train.py", "--epochs", "3"],
            "unrecognized arguments: --epochs 3; arguments of the script go after --\n",
        ),
        (["bench", "--threads", "1e12"], "'1e12' is more than 4,096 threads"),
        (["bench", "--time-limit", "3e6"], "'3e6' is more than 1,000,000 seconds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_end_with_status_2_and_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("usage: python -m torch_bf16")


@pytest.mark.parametrize("fault", [errno.EACCES, errno.ENAMETOOLONG])
def test_a_file_that_cannot_be_looked_at_is_refused_by_its_option(
    fault, tmp_path, capsys, monkeypatch
):
    def closed(*_, **__):
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(pathlib.Path, "is_dir", closed)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "run.pt", "--json", str(tmp_path / "found.json")])
    said = f"found.json' cannot be written: {os.strerror(fault)}; give the name of a file to write"
    assert said in capsys.readouterr().err


def test_an_error_of_the_machine_while_options_are_read_has_no_traceback(capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", full)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", full)
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err.startswith("python -m torch_bf16 info: [Errno 24] ")


def test_help_is_for_a_terminal(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert "`" not in capsys.readouterr().out


def test_whole_numbers_are_read_alike_by_all_commands():
    assert [count(text) for text in ("1", "1e3", "20.0", "1_0", "1.1k")] == [1, 1000, 20, 10, 1100]
    assert [count(text) for text in ("1,300,000", "8B", "1e+9")] == [1300000, 8 * 10**9, 10**9]
    for text in ("0", "-1", "1.9", "nan", "inf", "many", "", "8,5B", "1,2345", "1e999", "1e3B"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number of 1 or more"):
            count(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "saved.pt", "saved.pt"],
        ["export", "other.pt", "saved.pt", "--optimizer", "saved.pt"],
        ["doctor", "other.pt", "saved.pt", "--json", "link.pt"],
        ["estimate", "saved.pt", "--json", "./saved.pt"],
        ["recommend", "train.py", "--json", "train.py"],
        ["recommend", "train.py:make", "--json", "train.py"],
        ["estimate", "train.py:make", "--json", "train.py"],
        ["compare", "--text", "train.py", "--html", "train.py"],
        ["compare", "one=saved.pt", "other.pt", "--json", "saved.pt"],
    ],
    ids=" ".join,
)
def test_what_a_command_reads_is_not_overwritten(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(4, 4)}, "saved.pt")
    torch.save({"weight": torch.zeros(4, 4)}, "other.pt")
    os.symlink("saved.pt", "link.pt")
    (tmp_path / "train.py").write_text("raise SystemExit\n")
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    assert cli.main(arguments) == 2
    assert "is also what would be read, and would be overwritten" in capsys.readouterr().err
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_the_record_in_a_folder_is_kept_and_the_page_beside_it_is_made_again(tmp_path, capsys):
    record, page = tmp_path / "compare.json", tmp_path / "compare.html"
    record.write_text("{}")
    page.write_text("before")
    assert cli.main(["compare", str(tmp_path), "--html", str(record)]) == 2
    assert "compare.json lies in what would be read" in capsys.readouterr().err
    assert record.read_text() == "{}"
    keep_inputs(page, tmp_path)
    keep_inputs(tmp_path / "new.json", tmp_path)


HOSTS = ("transformers", "lightning", "accelerate")
COMPILERS = ("numba", "triton", "torch._dynamo", "torch.distributed.tensor")
PAGES = ("matplotlib", "rich", "tensorboard", "pandas")
HEAVY = (*HOSTS, *COMPILERS, *PAGES)


def test_nothing_heavy_is_imported_before_it_is_needed():
    """In one fresh interpreter: what a command imports, those after it find."""
    found = printed_by(f"""
        import sys
        import torch
        before = set(sys.modules)
        from torch_bf16.tools import cli

        def heavy():
            return [each for each in {HEAVY!r} if each in sys.modules and each not in before]

        assert cli.main(["estimate", "8B"]) == 0
        print("estimate:", heavy())
        from torch_bf16.tools.compare import command
        print("compare:", heavy())
        assert cli.main(["info"]) == 0
        print("info:", [each for each in heavy() if each in {(*HOSTS, "torch._dynamo", *PAGES)!r}])
    """)
    said = [line for line in found if line.startswith(("estimate:", "compare:", "info:"))]
    assert said == ["estimate: []", "compare: []", "info: []"]

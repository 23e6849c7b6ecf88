"""The command line: what it prints and what it refuses; test_bench_command.py has the rest."""

import runpy
import sys

import pytest
import torch

from torch_bf16 import RECIPES
from torch_bf16.tools import cli


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


def test_info_says_why_a_backend_does_not_work(capsys, monkeypatch):
    monkeypatch.setattr(cli, "explain", lambda device: {"cpu": "no Numba", "eager": None})
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
        (["info", "--all"], "unrecognized arguments: --all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_end_with_status_2_and_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("usage: python -m torch_bf16")

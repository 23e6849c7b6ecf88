"""The command line: what it prints, what it writes, and what it refuses."""

import json
import runpy
import sys

import pytest
import torch

from torch_bf16 import RECIPES, bench, cli

TINY = ["bench", "--parameters", "20000", "--tensors", "6", "--rounds", "2", "--threads", "1"]


@pytest.fixture
def no_processes(monkeypatch):
    """Peak memory as it is where a system does not tell, without a process for each contender."""
    monkeypatch.setattr(cli, "peak_bytes", lambda name, shapes, threads: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


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


@pytest.mark.usefixtures("no_processes")
def test_bench_prints_and_writes_the_same_figures(capsys, tmp_path):
    file = tmp_path / "figures.json"
    assert cli.main([*TINY, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["tensors"] == 6
    assert record["rounds"] == 2
    assert record["threads"] == 1
    assert abs(record["parameters"] - 20000) <= 4 * 768
    results = {row["name"]: row for row in record["results"]}
    assert tuple(results) == bench.CONTENDERS
    rounded_up = {"torch fused fp32": 16, "true-bf16-stochastic": 8, "bf16-fp32-master": 14}
    for name, row in results.items():
        # Vectors have an exact master in every recipe.
        assert rounded_up[name] <= row["bytes_per_parameter"] < rounded_up[name] + 0.7
        assert row["peak_bytes_per_parameter"] is None
        assert 0 < row["ms"]["p10"] <= row["ms"]["median"] <= row["ms"]["p90"]
        assert row["ns_per_element"] == pytest.approx(
            row["ms"]["median"] * 1e6 / record["parameters"]
        )
        (line,) = (line for line in out.splitlines() if line.startswith(name))
        assert f"{row['ms']['median']:.1f} [" in line
        assert f"{row['ratio']['median']:.2f} [" in line
        assert line.endswith("-")
    assert results[bench.BASELINE]["ratio"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}


@pytest.mark.usefixtures("no_processes")
def test_bench_measures_the_chosen_recipes_and_always_the_baseline(capsys):
    assert cli.main([*TINY, "--recipes", "bf16-fp32-master"]) == 0
    out = capsys.readouterr().out
    assert "\ntorch fused fp32 " in out
    assert "\nbf16-fp32-master " in out
    assert "true-bf16-stochastic" not in out


def test_peak_memory_of_a_fresh_process_is_that_of_the_tensors():
    """4 million parameters: large beside what a process gains and loses for other reasons."""
    shapes = bench.random_shapes(4_000_000, 6)
    total = sum(torch.Size(shape).numel() for shape in shapes)
    peak = bench.peak_bytes("true-bf16-stochastic", shapes, 1)
    if peak is None:
        pytest.skip("this system does not tell")
    assert 7.9 < peak / total < 9.5


def test_shapes_have_the_size_that_was_asked_for():
    shapes = bench.random_shapes(50_000_000, 150)
    assert len(shapes) == 150
    assert sum(len(shape) == 1 for shape in shapes) == 50
    assert abs(sum(torch.Size(s).numel() for s in shapes) - 50_000_000) < 768 * 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["train"], "invalid choice: 'train'"),
        (["bench", "--rounds", "0"], "argument --rounds: '0' is not a positive number"),
        (["bench", "--parameters", "-5"], "argument --parameters: '-5' is not a positive number"),
        (["bench", "--tensors", "many"], "argument --tensors: 'many' is not a positive number"),
        (["bench", "--parameters", "inf"], "argument --parameters: 'inf' is not a positive number"),
        (["bench", "--parameters", "nan"], "argument --parameters: 'nan' is not a positive number"),
        (["bench", "--recipes", "bf16"], "argument --recipes: invalid choice: 'bf16'"),
        (["bench", "--json"], "argument --json: expected one argument"),
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


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*TINY, "--json", str(tmp_path / "missing" / "figures.json")])
    assert "is in a folder that does not exist; give the name" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main([*TINY, "--json", str(tmp_path)])
    assert "is a folder" in capsys.readouterr().err


def test_numbers_may_be_written_with_an_exponent(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_bench", lambda options: seen.append(options) or 0)
    assert cli.main(["bench", "--parameters", "5e7"]) == 0
    assert seen[0].parameters == 50_000_000

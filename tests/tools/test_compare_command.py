"""``compare`` as a command: what it trains, what it refuses, and how it is stopped and goes on."""

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from compare_cases import FACTORIES, plan_of

from torch_bf16.tools import cli
from torch_bf16.tools.compare import progress
from torch_bf16.tools.compare.store import Store
from torch_bf16.tools.compare.subject import subject_of
from torch_bf16.tools.compare.training import OngoingRun

QUICK = ["--precisions", "32-true,bf16-true", "--steps", "6", "--seeds", "2"]


@pytest.fixture(autouse=True)
def factories(write_module):
    write_module("mine_to_compare", FACTORIES)


def compare(*arguments):
    return cli.main(["compare", *map(str, arguments)])


def test_it_ends_in_a_table_a_verdict_and_a_page(tmp_path, capsys):
    status = compare("mine_to_compare:make", *QUICK, "--lr", "1e-4", "--steps", "60")
    out, err = capsys.readouterr()
    assert status == 1
    assert "32-true" in out
    assert "- bf16-true ends" in out
    assert "rounding loses more than half of the updates of " in out
    assert err.splitlines()[0].startswith("32-true, seed 0: 60 steps, loss ")
    assert err.splitlines()[-1] == f"page: {tmp_path / 'compare' / 'compare.html'}"
    found = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert (found["healthy"], found["settings"]["seeds"]) == (False, 2)
    assert found["command"].startswith("python -m torch_bf16 compare mine_to_compare:make")
    assert found["environment"]["torch"] == torch.__version__


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_the_step_and_keeps_a_line_for_each_run(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setattr(progress, "_INTERVAL", -1)
    compare("mine_to_compare:make", *QUICK)
    shown, *runs = (each.split("\r\x1b[K") for each in terminal.getvalue().split("\n")[:4])
    assert shown[1].startswith("32-true, seed 0: step 1 of 6, loss ")
    assert shown[6].startswith("32-true, seed 0: step 6 of 6, loss ")
    kept = [each[-1].partition(" steps")[0] for each in (shown, *runs)]
    rows = ("32-true", "bf16-true")
    assert kept == [f"{row}, seed {seed}: 6" for seed in range(2) for row in rows]


def test_the_built_in_model_trains_on_a_text(tmp_path, capsys):
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question. " * 300)
    status = compare("--text", "words.txt", "--precisions", "32-true,bf16-fp32-master", *QUICK[2:])
    assert status == 0
    assert "of the next byte in words.txt" in capsys.readouterr().out


def test_a_record_is_drawn_again_without_training(tmp_path, capsys, monkeypatch):
    compare("mine_to_compare:make", *QUICK)
    first = capsys.readouterr().out
    page = (tmp_path / "compare" / "compare.html").read_text()
    monkeypatch.setattr(OngoingRun, "__init__", None)
    compare("compare/compare.json", "--html", "again.html", "--plot", "all.png")
    assert capsys.readouterr().out == first
    compare("compare/compare.json", "--plot", "all.pdf")
    assert (tmp_path / "again.html").read_text() == page
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "all.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("option", ["--reference", "--metric", "--device", "--schedule"])
def test_a_record_takes_no_option_of_what_it_was_made_from(option, tmp_path, capsys):
    record = tmp_path / "compare.json"
    record.write_text('{"kind": "compare", "schema": 1, "rows": [{}]}')
    assert cli.main(["compare", str(record), option, "constant"]) == 2
    assert f"is only shown again, which leaves {option} without effect" in capsys.readouterr().err


def test_ctrl_c_stops_between_two_steps_and_the_same_command_goes_on(tmp_path, capsys, monkeypatch):
    compare("mine_to_compare:make", *QUICK, "--out", "whole")
    whole = json.loads((tmp_path / "whole" / "compare.json").read_text())
    capsys.readouterr()
    step, calls = OngoingRun._step, []

    def interrupted(self, number):
        calls.append(number)
        if len(calls) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        step(self, number)

    monkeypatch.setattr(OngoingRun, "_step", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    assert compare("mine_to_compare:make", *QUICK) == 130
    err = capsys.readouterr().err
    assert "stopped at bf16-true, seed 0, step 4; the same command resumes from there" in err
    assert err.endswith("python -m torch_bf16 compare: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(OngoingRun, "_step", step)
    compare("mine_to_compare:make", *QUICK)
    found = json.loads((tmp_path / "compare" / "compare.json").read_text())
    timed = ("ms", "optimizer_ms")
    for ours, theirs in zip(found["rows"], whole["rows"], strict=True):
        assert {k: v for k, v in ours.items() if k not in timed} == {
            k: v for k, v in theirs.items() if k not in timed
        }


def test_runs_of_other_settings_are_not_mixed_in(tmp_path, capsys):
    compare("mine_to_compare:make", *QUICK)
    capsys.readouterr()
    assert compare("mine_to_compare:make", *QUICK, "--lr", "0.1") == 2
    assert "was made with lr 0.001 and not 0.1. Ask for the same" in capsys.readouterr().err
    source = tmp_path / "mine_to_compare.py"
    source.write_text(source.read_text() + "\nchanged = True\n")
    assert compare("mine_to_compare:make", *QUICK) == 2
    assert "was made with model 'mine_to_compare:make " in capsys.readouterr().err
    runs = tmp_path / "compare" / "runs"
    for name in ("gpt-seed1.pt", "gpt-seed1.json"):
        (runs / name).write_text("{}")
    (runs / "bf16-true-seed1.pt").write_text("damaged")
    assert (
        compare("mine_to_compare:make", *QUICK[2:], "--fresh", "--precisions", "32-true,bf16-mixed")
        != 2
    )
    rows = {each.name for each in runs.iterdir()}
    assert {"gpt-seed1.pt", "gpt-seed1.json", "bf16-true-seed1.pt"} < rows
    assert "bf16-true-seed0.json" not in rows


def test_a_folder_is_one_process_at_a_time(capsys):
    with Store(Path("compare"), plan_of()):
        assert compare("mine_to_compare:make", *QUICK) == 2
    said = f"another compare, process {os.getpid()}, is training in compare: wait for it"
    assert said in capsys.readouterr().err
    assert compare("mine_to_compare:make", *QUICK) != 2


def test_ctrl_c_in_the_last_step_of_a_broken_run_is_not_lost(tmp_path, capsys, monkeypatch):
    finish = OngoingRun.finish

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        return finish(self)

    monkeypatch.setattr(OngoingRun, "finish", interrupted)
    for row in ("32-true", "bf16-true"):
        assert compare("mine_to_compare:diverging", *QUICK) == 130
        assert f"stopped after {row}, seed 0; the same" in capsys.readouterr().err
    text = (tmp_path / "compare" / "runs" / "bf16-true-seed0.json").read_text()
    assert json.loads(text)["run"]["losses"] == [None]
    assert "NaN" not in text
    monkeypatch.setattr(OngoingRun, "finish", finish)
    assert compare("mine_to_compare:diverging", *QUICK) == 1
    assert "bf16-true is broken: its loss is no longer a number (seed 0" in capsys.readouterr().out


SCRIPT = """
from functools import partial

import mine_to_compare


def with_batches(count):
    import data_beside_it

    model, batches = mine_to_compare.make()
    return model, list(batches)[: data_beside_it.MOST * count]


make = partial(with_batches, 2)
"""


@pytest.mark.parametrize("changed", ["script.py", "mine_to_compare.py", "data_beside_it.py"])
def test_runs_are_used_again_until_a_file_of_the_model_changes(
    changed, tmp_path, write_module, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(tmp_path)  # as python -m does it
    write_module("script", SCRIPT)
    write_module("data_beside_it", "MOST = 4")
    assert compare("script.py:make", *QUICK) != 2
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "compare" / "runs").iterdir()}
    assert compare("script.py:make", *QUICK) != 2
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "\nmore = True\n")
    capsys.readouterr()
    assert compare("script.py:make", *QUICK) == 2
    assert "was made with model 'script.py:make " in capsys.readouterr().err


def test_a_package_is_hashed_as_a_whole(tmp_path, write_module, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "packed" / "inner").mkdir(parents=True)
    for name in ("__init__", "inner/__init__", "sizes"):
        (tmp_path / "packed" / f"{name}.py").touch()
    (tmp_path / "packed" / "inner" / "models.py").write_text("import packed.sizes\nmake = 1")
    sources = set()
    for size in (1, 2):
        (tmp_path / "packed" / "sizes.py").write_text(f"size = {size}")
        sources.add(subject_of("packed.inner.models:make").source)
    assert len(sources) == 2
    for name in [each for each in sys.modules if each.partition(".")[0] == "packed"]:
        del sys.modules[name]


@pytest.mark.parametrize("content", ["", "{}", '{"of": {}, "run": {"seed": 1}}', "[1]"])
def test_a_damaged_run_is_named(content, tmp_path, capsys):
    path = tmp_path / "compare" / "runs" / "32-true-seed0.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert compare("mine_to_compare:make", *QUICK) == 2
    assert f"{path.relative_to(tmp_path)} is not a run of compare" in capsys.readouterr().err


def test_a_factory_with_an_optimizer_takes_no_other(capsys):
    assert compare("mine_to_compare:with_optimizer", *QUICK, "--lr", "0.1") == 2
    assert "returns an optimizer of its own, so --lr and" in capsys.readouterr().err


BAD = {
    "raises": "RuntimeError: no data today",
    "model_alone": "returned Net",
    "three_numbers": "returned an int as the model",
    "no_batches": "the batches are empty",
    "few_batches": "ended after 3 batches",
    "kept_model": "returned the same model again, and each run must begin from new weights",
    "kept_part": "returned the same first.weight again",
    "lowered": "returned a model with weights in torch.bfloat16; return it in fp32",
    "frozen": "returned a model without trainable parameters",
    "wrong_batch": "failed on a batch",
    "no_loss": "returned a Tensor of shape (4, 1)",
    "number": "is an int",
    "nothing": "names nothing",
}


@pytest.mark.parametrize("name", BAD)
def test_a_factory_that_is_none_ends_with_status_2_and_the_reason(name, capsys):
    assert compare(f"mine_to_compare:{name}", *QUICK) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert BAD[name] in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--precisions", "fp8"], "unknown precision 'fp8'; known ones: 32-true, bf16-mixed"),
        (["--precisions", ","], "there is no row, and nothing to compare"),
        (["--device", "meta"], "--device meta cannot be used here"),
        (["--precisions", "32-true"], "there is one row, 32-true"),
        (["--precisions", "32-true,32-true"], "two rows have the name 32-true"),
        (["--precisions", "32-true,bf16+8/int9/int8"], "exp_avg='int9' is unknown"),
        (["--also", "torch.optim.SGD"], "must be NAME=module:Class"),
        (["--also", "x=no_such_module:SGD"], "cannot be imported"),
        (["--also", "x=torch.optim:Nonesuch"], "names nothing"),
        (["--also", "x=mine_to_compare:slow_steps"], "cannot be made: TypeError: not today"),
        (["--also", "x=torch.nn:Linear(bias=False)"], "cannot be made"),
        (["--optimizer", "torch.optim.AdamW(betas=3)"], "cannot be made"),
        (["--optimizer", "torch.optim.SGD(lr=1)", "--lr", "2"], "two learning rates: give one"),
        (["--optimizer", "AdamX"], "'torch.optim:AdamX' names nothing"),
        (["--device", "cuda:77"], "--device cuda:77 cannot be used here"),
        (["--reference", "bf16-mixed"], "'bf16-mixed' is not a row; those: 32-true"),
        (["--metric", "loss"], "--metric is for runs that exist"),
        (["--better", "higher"], "--better is for runs that exist"),
        (["--also", "a b=SGD", "--also", "A_b=SGD"], "rows 'a b' and 'A_b' would be kept in files"),
        (["--json", "x.html", "--html", "x.html"], "--json and --html would both write x.html"),
        (["--plot", "compare.json.png", "--html", "compare.json.png"], "--plot and --html would"),
        (["--text", "words.txt"], "is for the built-in model"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_options_that_cannot_be_meant_are_refused(arguments, said, capsys):
    assert compare("mine_to_compare:make", "--steps", "2", "--seeds", "1", *arguments) == 2
    assert said in capsys.readouterr().err


NO_NUMBERS = '{"kind": "compare", "schema": 1, "rows": [{}]}'


def test_a_text_that_is_too_short_and_a_record_that_is_none_are_refused(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("to be")
    assert compare("--text", "short.txt") == 2
    assert "short.txt has 5 bytes, and must have 10,000" in capsys.readouterr().err
    assert compare("--text", "none.txt") == 2
    assert "none.txt" in capsys.readouterr().err
    for content in (
        "",
        "{}",
        '{"kind": "compare", "schema": 2, "rows": [1]}',
        NO_NUMBERS,
        "[" * 100_000,
    ):
        (tmp_path / "x.json").write_text(content)
        assert compare("x.json") == 2
        assert "x.json is not a record of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--seeds", "x"], ["--lr", "-1"], ["--plot", "/no/x.png"]]
)
def test_arguments_of_another_type_are_refused_at_once(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare(*arguments)
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_before_training(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        compare("mine_to_compare:make", "--plot", "x.png")
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_record_of_another_comparison_is_not_replaced(tmp_path, capsys):
    compare("mine_to_compare:make", *QUICK)
    before = (tmp_path / "compare" / "compare.json").read_bytes()
    assert compare("mine_to_compare:diverging", *QUICK) == 2
    said = capsys.readouterr().err
    assert "compares mine_to_compare:make, and would be replaced by a comparison of" in said
    assert (tmp_path / "compare" / "compare.json").read_bytes() == before


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("backward", "FailingBackward failed in backward(): RuntimeError: no"),
        ("batches", "failing_batches: no next batch: KeyError: 'label'"),
    ],
)
def test_a_training_that_fails_is_not_taken_for_one_that_loses(fault, said, capsys):
    assert compare(f"mine_to_compare:failing_{fault}", *QUICK) == 2
    assert said in capsys.readouterr().err

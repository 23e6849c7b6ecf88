"""The command that runs suites of others, on a made-up one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import compare
import pytest
from suites import Suite

TESTS = """
import os

FORCED = os.environ.get("BF16_MODE")

def test_same():
    pass

def test_fails_anyway():
    assert not "here, too"

def test_differs():
    assert FORCED != "bf16-stochastic", "asks for fp32"

def test_kills():
    if FORCED == "bf16-fp32-master":
        os.abort()

def test_comes_after():
    pass
"""


def runs_in(folder, tests=TESTS, until=None):
    folder.joinpath("made").mkdir(exist_ok=True)
    folder.joinpath("made", "test_made.py").write_text(tests)
    suite = Suite("none", "made", ("test_made.py",))
    return compare.Runs(suite, folder, [], folder / "kept", until)


def found_in(folder, reasons, way):
    return compare.compare(runs_in(folder), reasons, [way])


def test_a_difference_is_named_with_what_it_said_until_it_is_explained(tmp_path, capsys):
    found = found_in(tmp_path, {"gone": ["test_made.py::test_same"]}, "bf16-stochastic")
    each = found["bf16-stochastic"]
    assert found["off"]["counts"] == {"failed": 1, "passed": 4}
    assert each["counts"] == {"failed": 2, "passed": 3}
    (name, (before, after, said)) = each["new"].popitem()
    assert (name, before, after) == ("test_made.py::test_differs", "passed", "failed")
    assert "asks for fp32" in said
    each["new"] = {name: [before, after, said]}
    assert not compare.report("made", found, {"gone": []})
    assert "passed -> failed  AssertionError: asks for fp32" in capsys.readouterr().out


def test_a_test_that_kills_the_process_is_one_difference_and_the_others_still_run(tmp_path, capsys):
    found = found_in(tmp_path, {"it aborts": ["test_made.py::test_kills"]}, "bf16-fp32-master")
    each = found["bf16-fp32-master"]
    assert each["counts"] == {"died": 1, "failed": 1, "passed": 3}
    assert (each["known"], each["new"]) == ({"test_made.py::test_kills": "it aborts"}, {})
    assert compare.report("made", found, {"it aborts": ["test_made.py::test_kills"]})
    assert "1 known differences, 0 new" in capsys.readouterr().out


def test_reasons_hold_for_parameters_classes_files_and_folders_and_nothing_else():
    reasons = {"why": ["a/b.py::test_x", "c", "d.py::TestY"]}
    known = ["a/b.py::test_x", "a/b.py::test_x[1-2]", "c/e.py::test_z", "d.py::TestY::test_z"]
    assert {compare.reason_of(name, reasons) for name in known} == {"why"}
    assert compare.reason_of("a/b.py::test_xy", reasons) is None


def test_a_run_that_is_stopped_goes_on_with_the_tests_that_it_has_not_run(tmp_path, monkeypatch):
    slow = """
import pathlib, suite_plugin

def note(name):
    with pathlib.Path(__file__).with_name("ran").open("a") as file:
        file.write(name)

def test_a():
    note("a")
    suite_plugin.UNTIL = 0  # Its time is over.

def test_b():
    note("b")
"""
    ran, until = tmp_path / "made" / "ran", time.time() + 3600
    clock = SimpleNamespace(time=lambda: until + ran.exists())
    monkeypatch.setattr(compare, "time", clock)
    with pytest.raises(SystemExit) as stopped:
        runs_in(tmp_path, slow, until).run("on")
    assert stopped.value.code == compare.UNFINISHED
    assert ran.read_text() == "a"
    outcomes = runs_in(tmp_path, slow).run("on")
    assert compare.counts(outcomes) == {"passed": 2}
    assert ran.read_text() == "ab"

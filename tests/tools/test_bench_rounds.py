"""Rounds of entries: in turn, each by itself, and none that fails takes others along."""

import itertools
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from bench_cases import PARAMETERS, SHAPES, Signs, entry

from torch_bf16.tools.bench import rounds as rounds_module
from torch_bf16.tools.bench.clock import CpuClock
from torch_bf16.tools.bench.rounds import measure
from torch_bf16.tools.bench.time_limit import time_limit
from torch_bf16.tools.redirection import quiet

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(rounds_module._COPY_BYTES, "cpu", 4096)
    monkeypatch.setattr(Signs, "log", [])


def failures_of(*entries, rounds=2, **options):
    return measure([entry("base"), *entries], SHAPES, CPU, rounds, **options).failures


def test_entries_take_turns_within_every_round():
    measured = measure([entry("a"), entry("b")], SHAPES, CPU, 3)
    # What comes first finds the copy in the caches. Each steps once more, after a product.
    assert "".join(Signs.log) == "aaabbb" + "aabb" + "bbaa" + "aabb" + "bbaa" + "aabb"
    assert [each.entry.name for each in measured.results] == ["a", "b"]
    assert all(len(each.seconds) == len(each.host_seconds) == 3 for each in measured.results)
    assert len(measured.copy_rates) == 3
    assert measured.failures == {}


def test_ratios_are_taken_round_by_round(monkeypatch):
    """Times that drift: the ratio of medians would see the drift, that of rounds does not."""
    of_copy_and_both = [[1, 2, 3], [1, 3, 2], [1, 2, 3], [1, 3, 2], [1, 2, 3]]
    drift = np.array([0.0, 0.0, 1.0, 10.0, 100.0])
    times = iter((drift[:, None] * of_copy_and_both).ravel())
    monkeypatch.setattr(CpuClock, "time", lambda self, step: (float(next(times)), 0.25))
    after_product = itertools.cycle([1.0, 3.0, 6.0, 2.0])
    monkeypatch.setattr(CpuClock, "time_after_product", lambda self, step: next(after_product))
    base, other = measure([entry("base"), entry("other")], SHAPES, CPU, 3).results
    assert base.seconds.tolist() == [2, 20, 200]
    assert base.ratios.tolist() == [1, 1, 1]
    assert other.ratios.tolist() == [1.5, 1.5, 1.5]
    assert other.host_seconds.tolist() == [0.25] * 3
    assert base.seconds_after_product.tolist() == [1, 2, 1]
    assert other.ratios_after_product.tolist() == [3, 3, 3]
    assert other.interleaved


def test_bytes_are_those_of_the_optimizer():
    (result,) = measure([entry()], SHAPES, CPU, 1).results
    assert result.held == 5 * PARAMETERS
    # Reads the gradient; its weights, codes and a state that is the gradient, read and written.
    assert result.moved == (2 + 2 * (2 + 1 + 2)) * PARAMETERS
    assert result.peak is None
    assert result.launches is None
    assert result.first_step > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fault": "constructor"}, "NotImplementedError: nothing works here."),
        ({"fail_at": 1}, "RuntimeError: step 1 is too much"),
        ({"fail_at": 6}, "RuntimeError: step 6 is too much"),
        ({"fault": "idle"}, "RuntimeError: three steps left the weights as they were"),
        (
            {"fault": "takes gradients"},
            "RuntimeError: its step removes the gradients, so the next one has nothing to do",
        ),
    ],
    ids=["constructor", "first step", "timed step", "idle", "takes gradients"],
)
def test_one_that_fails_is_named_and_the_rest_goes_on(options, why):
    fakes = [entry("base"), entry("bad", **options), entry("good")]
    measured = measure(fakes, SHAPES, CPU, 2)
    assert measured.failures == {"bad": why}
    assert [each.entry.name for each in measured.results] == ["base", "good"]
    assert all(len(each.seconds) == 2 for each in measured.results)


def test_a_module_that_cannot_be_imported_is_its_own_failure():
    missing = entry("missing")
    object.__setattr__(missing, "target", "no_such_library:AdamW")
    assert failures_of(missing) == {
        "missing": "ModuleNotFoundError: No module named 'no_such_library'"
    }


def test_one_that_compiles_for_ever_is_given_up():
    start = time.perf_counter()
    found = failures_of(entry("slow", fault="slow"), first_seconds=0.3)
    assert found == {"slow": "TimeoutError: its first steps took longer than 0.3 s (--time-limit)"}
    assert time.perf_counter() - start < 10


def test_a_profiler_that_fails_costs_the_launches_alone(monkeypatch):
    def launches(self, step):
        raise RuntimeError("no counters for this user")

    monkeypatch.setattr(CpuClock, "counts_launches", True)
    monkeypatch.setattr(CpuClock, "launches", launches)
    measured = measure([entry()], SHAPES, CPU, 2)
    assert measured.failures == {}
    assert measured.results[0].launches is None


def interrupt_at(monkeypatch, call):
    """Ctrl-C within one of the timed steps, counted over all entries and the copy."""
    calls, timed = itertools.count(), CpuClock.time

    def time_step(self, step):
        if next(calls) == call:
            raise KeyboardInterrupt
        return timed(self, step)

    monkeypatch.setattr(CpuClock, "time", time_step)


def test_ctrl_c_keeps_the_rounds_that_all_entries_have_completed(monkeypatch):
    # A round times the copy, then each of two entries twice (alone, and after a product).
    interrupt_at(monkeypatch, (2 + 3) * 5 + 2)
    measured = measure([entry("base"), entry("a")], SHAPES, CPU, 10)
    assert measured.interrupted
    assert measured.failures == {}
    assert len(measured.copy_rates) == 3
    for each in measured.results:
        assert [len(each.seconds), len(each.ratios), len(each.host_seconds)] == [3, 3, 3]
        assert len(each.seconds_after_product) == 3


@pytest.mark.parametrize(
    ("rounds_of_second", "kept"), [(1, ["base", "a"]), (2 + 1, ["base", "a", "b"])]
)
def test_ctrl_c_keeps_earlier_groups_and_names_what_had_no_turn(
    monkeypatch, rounds_of_second, kept
):
    interrupt_at(monkeypatch, (2 + 2 + rounds_of_second) * 5 + 1)
    names = ("base", "a", "b", "c")
    measured = measure([entry(each) for each in names], SHAPES, CPU, 2, most=2)
    assert [each.entry.name for each in measured.results] == kept
    why = "the run was interrupted before its turn"
    assert measured.failures == {each: why for each in names if each not in kept}


def test_ctrl_c_before_the_first_complete_round_ends_the_run(monkeypatch):
    interrupt_at(monkeypatch, 11)
    with pytest.raises(KeyboardInterrupt):
        measure([entry("base"), entry("a")], SHAPES, CPU, 10)


def test_launches_are_counted_after_all_groups_were_timed(monkeypatch):
    log = []

    def launches(self, step):
        log.append("count")
        step()
        return {"kernels": 3, "copies": 0, "fills": 0}

    timed = CpuClock.time
    monkeypatch.setattr(CpuClock, "time", lambda *each: log.append("time") or timed(*each))
    monkeypatch.setattr(CpuClock, "counts_launches", True)
    monkeypatch.setattr(CpuClock, "launches", launches)
    measured = measure([entry("base"), entry("a"), entry("b")], SHAPES, CPU, 2, most=2)
    assert len(measured.groups) == 2
    assert log.index("count") == len(log) - 3
    assert [each.launches["kernels"] for each in measured.results] == [3, 3, 3]


def test_without_the_baseline_there_is_no_result():
    with pytest.raises(ValueError, match="the baseline 'base' failed: RuntimeError: step 4"):
        measure([entry("base", fail_at=4), entry("other")], SHAPES, CPU, 2, most=2)
    # It ended with that step.
    assert Signs.log.count("other") == 3
    with pytest.raises(ValueError, match="the baseline 'base' failed: RuntimeError: step 1"):
        measure([entry("base", fail_at=1), entry("never")], SHAPES, CPU, 2)
    assert "never" not in Signs.log


def test_those_that_do_not_fit_together_run_in_groups_beside_the_baseline():
    fakes = [entry(name, estimate=1.0) for name in ("base", "a", "b", "c")]
    lines = []
    measured = measure(fakes, SHAPES, CPU, 2, lines.append, available=3 * PARAMETERS)
    assert measured.groups == [["base", "a", "b"], ["base", "c"]]
    assert [each.entry.name for each in measured.results] == ["base", "a", "b", "c"]
    assert all(each.interleaved and len(each.ratios) == 2 for each in measured.results)
    assert "in memory together: base, c" in lines


def test_one_that_fits_only_alone_is_compared_with_the_baselines_median(monkeypatch):
    times = iter([0, 0, 0, 0, 0, 2, 0, 4, 0, 6, *[0] * 4, 0, 8, 0, 8, 0, 12])
    monkeypatch.setattr(CpuClock, "time", lambda self, step: (max(next(times), 1e-9), 0.0))
    monkeypatch.setattr(CpuClock, "time_after_product", lambda self, step: 2.0)
    fakes = [entry("base", estimate=2.0), entry("other", estimate=2.0)]
    measured = measure(fakes, SHAPES, CPU, 3, available=3 * PARAMETERS)
    assert measured.groups == [["base"], ["other"]]
    base, other = measured.results
    assert base.interleaved
    assert not other.interleaved
    assert other.ratios.tolist() == [2, 2, 3]
    assert other.ratios_after_product.tolist() == [1, 1, 1]


def test_one_that_does_not_fit_at_all_is_refused_with_both_sizes():
    found = failures_of(entry("huge", estimate=1e9), available=2**30)
    assert found == {"huge": "needs about 1,013 GiB on cpu, where 1.00 GiB can be used"}


def test_a_baseline_that_does_not_fit_says_what_would():
    with pytest.raises(MemoryError, match=r"the baseline 'base' needs about .* --parameters 2e6"):
        measure([entry("base", estimate=500.0)], [(1000, 4096)], CPU, 1, available=2**30)
    with pytest.raises(MemoryError, match=r"where 0\.00391 GiB can be used\. Free memory$"):
        measure([entry("base", estimate=500.0)], [(1000, 4096)], CPU, 1, available=2**22)


def test_one_that_runs_out_of_memory_beside_others_gets_another_try():
    """Here it fails each time: with all, beside the baseline, and alone."""
    greedy = entry("greedy", fail_at=1, fault="memory")
    measured = measure([entry("base"), entry("a"), greedy], SHAPES, CPU, 2)
    assert Signs.log.count("greedy") == 3
    assert measured.failures == {"greedy": "OutOfMemoryError: step 1 is too much"}
    assert measured.groups == [["base", "a"], ["base"], []]
    assert [each.entry.name for each in measured.results] == ["base", "a"]


def test_what_libraries_print_and_warn_is_not_heard(capfd):
    measure([entry()], SHAPES, CPU, 2)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_quiet_gives_back_what_it_took(capfd):
    def fail():
        with quiet():
            print("lost")
            raise KeyError("given on")

    with pytest.raises(KeyError, match="given on"):
        fail()
    print("kept")
    assert capfd.readouterr().out == "kept\n"
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX")
def test_patience_ends_with_its_block():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(0.05):
        pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) is before

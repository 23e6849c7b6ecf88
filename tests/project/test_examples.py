"""The demos run from end to end, and the verdict of `make demo` can say no."""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import accelerate_demo
import convergence
import learning_rate_sweep as sweep
import lightning_demo as demo
import moment_formats
import nanogpt_char
import paired_runs
import pytest
import records
import small_updates
import torch
from accelerate import Accelerator
from accelerate.commands import launch
from accelerate.state import AcceleratorState, GradientState
from forked_scripts import call_in_fork, run_script
from forkserver import forkserver
from paired_runs import CONTROL
from torchrun_variables import as_torchrun_says

from torch_bf16.tools.bench.peers import PEERS
from torch_bf16.tools.compare.corpus import batches, load_corpus
from torch_bf16.tools.compare.intervals import Interval, student_t

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    "--steps=4",
    "--batch-size=2",
    "--context=16",
    "--width=16",
    "--layers=1",
    "--validation-batches=2",
    "--corpus-bytes=200000",
]


def strictly(script: str, *options: str) -> None:
    """Run a script for which warnings are errors."""
    warnings.simplefilter("error")
    # Whether a processor is slow with bf16 depends on the machine.
    warnings.filterwarnings("ignore", "this CPU takes")
    sys.argv = [script, *options]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(script, run_name="__main__")


def test_lightning_demo_ends_with_table_verdicts_and_plot(tmp_path: Path) -> None:
    options = [*TINY, "--accelerator=cpu", "--json=demo/record.json"]
    script = str(EXAMPLES / "lightning_demo.py")
    output = call_in_fork(strictly, script, *options, folder=tmp_path)
    for mode in demo.MODES:
        assert mode in output
    plot = tmp_path / "demo" / "loss_curves.png"
    assert str(plot) in output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["demo"], "nothing else is left behind"
    record = json.loads((tmp_path / "demo" / "record.json").read_text())
    assert [len(run["train_losses"]) for run in record["runs"].values()] == [4] * 4


def test_accelerate_demo_takes_its_mode_from_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command and the environment are the launcher's; the process is forked."""
    started = []

    def start(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        changed = {name: each for name, each in env.items() if os.environ.get(name) != each}
        assert command[0] == sys.executable
        started.append(call_in_fork(strictly, *command[1:], folder=tmp_path, **changed))
        return SimpleNamespace(wait=lambda: None, returncode=0)

    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(Popen=start))
    mode = "bf16-fp32-master"
    options = ["--cpu", "--num_processes=1", f"--mixed_precision={mode}"]
    script = str(EXAMPLES / "accelerate_demo.py")
    launch.launch_command(launch.launch_command_parser().parse_args([*options, script, *TINY]))
    (output,) = started
    assert mode in output
    assert "validation loss" in output


def validated_by_accelerate(options: list[str]) -> float:
    """On a rank that others will use after this: its group stays, and Accelerate is as it was."""
    on_cpu = mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"})
    with as_torchrun_says(), on_cpu, mock.patch.object(Accelerator, "end_training"):
        loss = accelerate_demo.main(options)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return loss


def test_batches_that_fill_up_the_last_round_do_not_count_twice(ranks) -> None:
    options = [*TINY, "--steps=1", "--lr=0", "--mixed-precision=no", "--validation-batches=3"]
    (one,) = ranks(1, validated_by_accelerate, options)
    assert ranks(2, validated_by_accelerate, options) == pytest.approx([one, one], abs=1e-6)


STUDY = ["--seeds=2", "--steps=2", "--validation-batches=1", "--corpus-bytes=200000", "--workers=1"]
# Two dozen kernels would be compiled for a few steps each.
NOTHING_COMPILED = {"BF16_BACKEND": "eager"}


def test_the_convergence_study_compares_every_recipe_in_pairs(tmp_path: Path) -> None:
    options = [*STUDY, "--width=16", "--out=study"]
    output = run_script(EXAMPLES / "convergence.py", *options, folder=tmp_path, **NOTHING_COMPILED)
    assert "bf16 nearest" in output
    record = json.loads((tmp_path / "study" / "convergence.json").read_text())
    assert {len(losses) for losses in record["losses"].values()} == {2}
    differences = record["differences"]["fp32"]
    assert set(convergence.RECIPES) <= set(differences)
    for name, each in differences.items():
        assert each["low"] <= each["mean"] <= each["high"], name
    assert (tmp_path / "study" / "convergence.png").read_bytes().startswith(b"\x89PNG")


def test_the_learning_rate_sweep_gives_shares_of_fp32s_improvement(tmp_path: Path) -> None:
    options = [*STUDY, "--seeds=1", "--pretraining-steps=2", "--out=sweep"]
    run_script(EXAMPLES / "learning_rate_sweep.py", *options, folder=tmp_path, **NOTHING_COMPILED)
    record = json.loads((tmp_path / "sweep" / "learning_rate_sweep.json").read_text())
    assert set(record["share_of_improvement"]) == set(sweep.RECIPES)


RECORD = EXAMPLES / "results" / "2026-11-21-cpu"


def test_the_shares_of_the_record_are_those_of_its_losses() -> None:
    record = json.loads((RECORD / "learning_rate_sweep.json").read_text())
    readme = (RECORD / "README.md").read_text()
    found = sweep.learned(record["before"], record["after"])
    assert {rate for shares in found.values() for rate in shares} == {f"{r:g}" for r in sweep.RATES}
    for name, shares in found.items():
        for rate, share in shares.items():
            assert vars(share) == pytest.approx(record["share_of_improvement"][name][rate]), name
        assert f"| {' | '.join(map(sweep.percent, shares.values()))} |" in readme, name


def test_a_share_of_no_improvement_is_none() -> None:
    worse = {rate: [3.1, 3.2] for rate in sweep.RATES}
    after = dict.fromkeys((sweep.REFERENCE, *sweep.RECIPES), worse)
    shares = sweep.learned([3.0, 3.0], after)
    assert {share for each in shares.values() for share in each.values()} == {None}
    assert sweep.percent(None) == "-"
    assert sweep.table([3.0, 3.0], after).row_count == 1 + len(sweep.RECIPES)


@pytest.mark.parametrize(
    ("main", "options", "said"),
    [
        (convergence.main, ["--seeds=0"], "--seeds: '0' is not a whole number of 1 or more"),
        (convergence.main, ["--optimizer=AdamWScheduleFree"], "pip install schedulefree"),
        (sweep.main, ["--steps=0"], "--steps: '0' is not a whole number of 1 or more"),
        (nanogpt_char.main, ["--text=none.txt", "--seeds=0"], "--seeds: '0' is not a whole"),
    ],
)
def test_what_a_study_cannot_do_is_refused_by_name(
    main, options: list[str], said: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(convergence, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(options)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "options"),
    [
        (convergence.main, ["--out=taken"]),
        (sweep.main, ["--out=taken"]),
        (small_updates.main, ["--json=taken/record.json"]),
        (nanogpt_char.main, ["--text=none.txt", "--json=taken/record.json"]),
        (demo.main, ["--json=taken/record.json"]),
        (demo.main, ["--plot=taken/plot.png"]),
    ],
)
def test_a_study_that_cannot_write_its_record_does_not_begin(
    main, options: list[str], monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    with pytest.raises(SystemExit, match="the folder taken cannot be made: File exists"):
        main(options)


def test_the_folder_of_a_record_is_made(tmp_path: Path) -> None:
    records.make_room_for(tmp_path / "new" / "one" / "record.json")
    assert [*(tmp_path / "new" / "one").iterdir()] == []
    with pytest.raises(SystemExit, match="new' is a folder; give the name of a file"):
        records.make_room_for(tmp_path / "new")
    with pytest.raises(SystemExit, match="File name too long"):
        records.make_room_for(tmp_path / ("x" * 300))
    records.make_room_for(None)


def test_a_record_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(SystemExit, match=r"record.json' may not be written by you"):
        records.make_room_for(tmp_path / "record.json")


def fail() -> None:
    raise ArithmeticError("a run that fails")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_fails_ends_a_study_at_once(workers: int, monkeypatch) -> None:
    monkeypatch.setattr(paired_runs, "get_context", lambda method: forkserver())
    start = time.monotonic()
    jobs = {0: fail, **{number: partial(time.sleep, 60) for number in range(1, 4)}}
    with pytest.raises(ArithmeticError, match="a run that fails"):
        paired_runs.run_all(jobs, workers, "runs")
    assert time.monotonic() < start + 40


def test_runs_in_this_process_have_one_thread_and_leave_the_others_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert paired_runs.run_all({"run": torch.get_num_threads}, 1, "runs") == {"run": 1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("script", [moment_formats, small_updates])
def test_help_is_a_sentence_and_starts_nothing(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it started"))
    with pytest.raises(SystemExit):
        runpy.run_path(script.__file__, run_name="__main__")
    help_ = " ".join(capsys.readouterr().out.split())
    assert script.__doc__.splitlines()[0] in help_
    assert script.__doc__.splitlines()[2].strip() not in help_


def test_an_interval_is_that_of_students_t() -> None:
    interval = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    # By hand: mean 3, standard error sqrt(2.5 / 5), t = 2.776 for 4 degrees of freedom.
    assert interval.mean == 3
    assert interval.high - 3 == pytest.approx(2.776 * 0.5**0.5, rel=1e-3)
    assert 3 - interval.low == pytest.approx(interval.high - 3)
    for degrees, t in ((1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (19, 2.093), (99, 1.984)):
        assert student_t(degrees) == pytest.approx(t, rel=2e-3)


@pytest.mark.parametrize(("high", "does"), [(0.0009, True), (0.0011, False), (math.inf, False)])
def test_the_verdict_of_the_study_can_say_no(high: float, does: bool) -> None:
    interval = Interval(-0.0001, -0.01, high)
    assert convergence.holds("9 bytes", interval) is does
    assert not convergence.holds(CONTROL, interval)
    assert not convergence.holds(CONTROL, Interval(0.05, 0.02, 0.08))
    assert convergence.holds(CONTROL, Interval(0.05, 0.04, 0.06))


def test_the_recorded_study_holds() -> None:
    record = json.loads((RECORD / "convergence.json").read_text())
    found = {name: Interval(**each) for name, each in record["differences"]["fp32"].items()}
    then = {"7.2 bytes": "7.1 bytes", "6.2 bytes": "6.1 bytes"}
    for name in convergence.RECIPES:
        assert convergence.holds(name, found[then.get(name, name)]), name


def finished(losses: dict[str, float]) -> dict[str, demo.Run]:
    return {mode: demo.Run(validation_loss=loss) for mode, loss in losses.items()}


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((2.0, 2.004, 2.009, 2.1), [True, True, True]),
        ((2.0, 2.006, 2.011, 2.1), [False, False, True]),
        ((2.0, 1.994, 1.989, 2.1), [False, False, True]),
        ((2.0, 2.0, 2.0, 2.02), [True, True, False]),
        ((2.0, float("nan"), 2.0, float("nan")), [False, True, False]),
    ],
    ids=["all-hold", "too-high", "too-low", "control-too-good", "not-a-number"],
)
def test_verdicts_follow_the_losses(losses: tuple[float, ...], expected: list[bool]) -> None:
    found = demo.verdicts(finished(dict(zip(demo.MODES, losses, strict=True))))
    assert [holds for holds, _ in found] == expected
    assert ["NOT" not in sentence for _, sentence in found] == expected


def test_bytes_per_parameter_counts_a_shared_storage_once() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8))
    module[1].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters())
    assert demo.bytes_per_parameter(module, optimizer) == 4
    module(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    steps = 2 * 4  # AdamW's fp32 step counters, one for each of two parameters
    assert demo.bytes_per_parameter(module, optimizer) == 16 + steps / 72


def test_corpus_is_the_same_each_time_and_of_the_size_asked_for() -> None:
    first, second = load_corpus(200_000), load_corpus(200_000)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    assert 200_000 <= len(first.train) + len(first.validation) < 300_000
    drawn = batches(first.train, n=3, batch_size=2, context=16, seed=0)
    assert drawn.shape == (3, 2, 17)
    assert torch.equal(drawn, batches(second.train, n=3, batch_size=2, context=16, seed=0))


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="has 17 tokens, and a context of 16 needs 18"):
        batches(torch.zeros(17), n=1, batch_size=1, context=16, seed=0)
    assert batches(torch.zeros(18), n=1, batch_size=1, context=16, seed=0).shape == (1, 1, 17)


def test_corpus_without_sources_says_what_to_do(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"too few \.py files"):
        load_corpus()


def test_small_updates_tells_who_loses_them() -> None:
    start, gradients = small_updates.numbers("cpu", steps=60)
    fp32, nearest = PEERS["torch"].entries
    found = {
        each.name: small_updates.ask(each, fp32, start, gradients)
        for each in (nearest, *small_updates.ours(["bf16-fp32-master", "bf16-stochastic"]))
    }
    lost = found.pop(nearest.name)
    assert lost.decay == 0
    assert lost.updates < 0.5
    for name, kept in found.items():
        assert abs(kept.decay - 1) < 0.1, name
        assert abs(kept.updates - 1) < 0.05, name
        assert kept.replicas, name
        assert kept.resume, name
    assert found["bf16-fp32-master"].distance < lost.distance / 5

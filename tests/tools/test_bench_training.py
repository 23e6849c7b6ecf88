"""``python -m torch_bf16 bench --training``: whole steps, by phase."""

import json

import pytest
import torch

from torch_bf16.tools import cli
from torch_bf16.tools.bench import command, training
from torch_bf16.tools.bench.clock import CpuClock
from torch_bf16.tools.bench.training import BASELINE, PHASES

TINY = ["bench", "--training", "--layers", "1", "--tokens", "8", "--rounds", "2", "--threads", "1"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(training, "_VOCABULARY", 64)
    monkeypatch.setattr(training, "_WIDTH", 96)
    yield
    torch.set_num_threads(threads)


def test_the_table_and_the_record_have_every_precision_and_every_phase(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(command, "peak_of", lambda row, *shape: 1 << 20)
    file = tmp_path / "training.json"
    assert cli.main([*TINY, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    record = json.loads(file.read_text())
    names = [row["name"] for row in record["results"]]
    modes = ["bf16-stochastic", "bf16-fp32-master"]
    assert names == [
        *(BASELINE, "bf16-mixed", *modes),
        *(f"{mode}, computes in fp32" for mode in modes),
    ]
    assert (record["layers"], record["tokens"], record["rounds"]) == (1, 8, 2)
    for row in record["results"]:
        assert set(row["phases"]) == set(PHASES)
        parts = [row["phases"][name]["ms"]["median"] for name in PHASES]
        assert sum(parts) == pytest.approx(row["ms"]["median"], rel=0.5)
        assert len(row["rounds_ms"]) == 2
        assert row["last_loss"] == pytest.approx(record["results"][0]["last_loss"], rel=0.02)
        assert f"\n{row['name']} " in out
    assert {each["ratio"]["median"] for each in record["results"][0]["phases"].values()} == {1.0}
    assert cli.main(["bench", "--from", str(file)]) == 0
    assert capsys.readouterr().out in out


def test_ctrl_c_keeps_the_rounds_that_were_complete(capsys, tmp_path, monkeypatch):
    taken = []
    step = training._Training.step

    def interrupted(self, clock, timed):
        # An untimed round and a timed one of two rows, and one step of the next.
        if len(taken) == 5:
            raise KeyboardInterrupt
        taken.append(self)
        step(self, clock, timed)

    monkeypatch.setattr(command, "every_row", lambda names: training.every_row(names)[:2])
    monkeypatch.setattr(training._Training, "step", interrupted)
    file = tmp_path / "training.json"
    assert cli.main([*TINY, "--rounds", "3", "--json", str(file)]) == 130
    assert BASELINE in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert (found["interrupted"], found["rounds"]) == (True, 1)
    assert [len(each["rounds_ms"]) for each in found["results"]] == [1, 1]


def test_rows_compute_in_what_they_are_called():
    rows = training.every_row(["bf16-stochastic"])
    assert [row.recipe and row.recipe.compute for row in rows] == [None, None, "autocast", "fp32"]
    (fp32, mixed, ours, ours_in_fp32), _ = training.time_rows(rows, 1, 8, CPU, 1)
    # The weights of a step are rounded in ours; the arithmetic of the last is that of the first.
    distances = [abs(each.loss - fp32.loss) for each in (mixed, ours, ours_in_fp32)]
    assert max(distances) < 0.05
    assert len({each.loss for each in (fp32, mixed, ours, ours_in_fp32)}) == 4


def test_the_peak_of_a_step_is_counted_where_the_allocator_knows_it(monkeypatch):
    asked = []

    class Counting(CpuClock):
        def allocated(self):
            return 1000 * len(asked)

        def start_peak(self):
            asked.append("start")

        def peak(self):
            return 1000 * len(asked) + 4000

    monkeypatch.setattr(training, "clock_for", Counting)
    rows = training.every_row(["bf16-stochastic"])[:2]
    assert [each.peak for each in training.time_rows(rows, 1, 8, CPU, 1)[0]] == [5000, 5000]
    assert asked == ["start"] * 2

"""``python -m torch_bf16 bench``: what it prints, what it writes, and what it refuses."""

import json
import subprocess
import sys
from itertools import count

import pytest
import torch
from bench_cases import entry
from distributions import modules_beside

from torch_bf16.optim.variants import VARIANTS
from torch_bf16.tools import cli
from torch_bf16.tools.bench import command
from torch_bf16.tools.bench.clock import CpuClock
from torch_bf16.tools.bench.entries import OURS
from torch_bf16.tools.bench.peers import BASELINE, PEERS, Peer
from torch_bf16.tools.bench.report import aligned

TINY = ["bench", "--parameters", "20000", "--tensors", "6", "--rounds", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    """Peak memory as it is where a system does not tell, without a process for each entry."""
    monkeypatch.setattr(command, "peak_bytes", lambda *arguments: None)


@pytest.fixture
def peers(monkeypatch):
    """A library that works beside one that fails, one that needs a GPU, and one not installed."""
    on_gpu = entry("gpu one")
    object.__setattr__(on_gpu, "only_on", "cuda")
    fakes = {
        "torch": PEERS["torch"],
        "fake": Peer("torch", "torch-fake", (entry("fake one"),)),
        "broken": Peer("torch", "broken", (entry("bad one", fail_at=1), on_gpu)),
        "absent": Peer("no_such_library", "pip-absent", (entry("never"),)),
    }
    monkeypatch.setattr(command, "PEERS", fakes)


def table_line(out, name):
    (line,) = (x for x in out.splitlines() if x.startswith(f"{name} ") and "[" in x)
    return line


def test_prints_and_writes_the_same_figures(capsys, tmp_path):
    file = tmp_path / "figures.json"
    assert cli.main([*TINY, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["command"].startswith("python -m torch_bf16 bench --parameters 20000 --tensors 6")
    assert (record["tensors"], record["rounds"], record["threads"]) == (6, 2, 1)
    assert (record["model"], record["backend"], record["baseline"]) == ("random", "cpu", BASELINE)
    assert record["versions"]["torch"] == torch.__version__
    assert record["hardware"]["cores"] > 0
    assert record["date"].endswith("UTC")
    assert abs(record["parameters"] - 20000) <= 4 * 768
    results = {row["name"]: row for row in record["results"]}
    # An interrupted run has ours, too.
    assert tuple(results) == (BASELINE, *OURS, "torch fused bf16")
    assert set(record["ours"]) == set(OURS)
    held = {BASELINE: 16, "torch fused bf16": 8, "bf16-stochastic": 8, "bf16-fp32-master": 14}
    moved = {BASELINE: 28, "torch fused bf16": 14, "bf16-stochastic": 14}
    for name, row in results.items():
        if name in held:
            # Vectors have an exact master in every recipe.
            assert held[name] <= row["bytes_per_parameter"] < held[name] + 0.7
        if name in moved:
            assert moved[name] <= row["moved_bytes_per_parameter"] < moved[name] + 1.4
        assert row["peak_bytes_per_parameter"] is None
        assert row["launches"] is None
        ms = row["ms"]
        assert 0 < ms["p10"] <= ms["median"] <= ms["p90"]
        assert len(row["rounds_ms"]) == 2
        per_element = ms["median"] * 1e6 / record["parameters"]
        assert row["ns_per_element"] == pytest.approx(per_element)
        rate = row["moved_bytes_per_parameter"] / per_element
        assert row["gb_per_second"] == pytest.approx(rate)
        share = rate / record["copy_gb_per_second"]["median"]
        assert row["share_of_copy"] == pytest.approx(share)
        line = table_line(out, name)
        assert float(line.removeprefix(name).split()[0]) == pytest.approx(ms["median"], rel=0.01)
        ratio = float(line.split("]")[1].split()[0])
        assert ratio == pytest.approx(row["ratio"]["median"], rel=0.01)
        assert f" {share:.0%} " in line
        assert line.endswith("-")
    assert results[BASELINE]["ratio"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert "note: a step moves less than four times the last-level cache" in out


def test_cells_that_are_long_stay_apart():
    rows = {
        "": ["ratio", "moved"],
        "one": ["0.0732 [0.0377, 0.109]", "14.00"],
        "another": ["1.00", "28.00"],
    }
    assert aligned(rows) == [
        "                          ratio  moved",
        "one      0.0732 [0.0377, 0.109]  14.00",
        "another                    1.00  28.00",
    ]


def test_measures_the_chosen_recipes_and_always_the_baseline(capsys):
    assert cli.main([*TINY, "--recipes", "bf16-stochastic", "--against", ""]) == 0
    out = capsys.readouterr().out
    assert table_line(out, BASELINE)
    assert table_line(out, "bf16-stochastic")
    assert "bf16-fp32-master" not in out
    assert "torch fused bf16" not in out


def test_libraries_are_measured_or_named_with_the_reason(peers, capsys, tmp_path):
    file = tmp_path / "figures.json"
    wanted = ["--against", "fake,broken", "absent", "--recipes", "bf16-fp32-master"]
    assert cli.main([*TINY, *wanted, "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    record = json.loads(file.read_text())
    names = [row["name"] for row in record["results"]]
    assert names == [BASELINE, "bf16-fp32-master", "fake one"]
    assert record["failed"] == {
        "gpu one": "needs CUDA",
        "bad one": "RuntimeError: step 1 is too much",
    }
    assert record["missing"] == {"absent": "pip-absent"}
    assert "failed: bad one: RuntimeError: step 1 is too much" in out
    assert "missing: absent (pip install -U pip-absent)" in out
    assert "every step" not in out + err
    assert "tuning" not in out + err


def test_the_baseline_can_be_any_entry(peers, capsys):
    assert cli.main([*TINY, "--baseline", "fake one", "--against", "torch"]) == 0
    out = capsys.readouterr().out
    assert " 1.00 [1.00, 1.00] " in table_line(out, "fake one")
    assert "time of 'fake one' in the same round" in " ".join(out.split())
    assert cli.main([*TINY, "--baseline", "never"]) == 2
    assert "the baseline 'never' needs pip-absent, which is not" in capsys.readouterr().err
    assert cli.main([*TINY, "--baseline", "sgd"]) == 2
    assert "bench: no entry 'sgd'; known ones: torch fused" in capsys.readouterr().err


def test_the_backend_can_be_chosen(capsys, monkeypatch):
    wanted = ["--backend", "eager", "--recipes", "bf16-fp32-master", "--against", "variants"]
    seen, measure = [], command.measure

    def measure_these(entries, *rest, **options):
        seen.extend(each for each in entries if each.is_ours)
        return measure(entries[:2], *rest, **options)

    monkeypatch.setattr(command, "measure", measure_these)
    assert cli.main([*TINY, *wanted]) == 0
    assert {(each.options["backend"], each.scratch) for each in seen} == {("eager", 48)}
    assert len(seen) == 1 + len(VARIANTS)
    assert "our backend 'eager'" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert cli.main([*TINY, "--backend", "triton"]) == 2
        assert "bench: backend 'triton' was asked for and cannot run" in capsys.readouterr().err


def test_peaks_of_processes_are_shown(capsys, monkeypatch):
    monkeypatch.setattr(command, "peak_bytes", lambda each, shapes, *_: 30_000)
    assert cli.main([*TINY, "--recipes", "bf16-fp32-master"]) == 0
    out, err = capsys.readouterr()
    parameters = int(out.split("random: ")[1].split()[0].replace(",", ""))
    assert table_line(out, BASELINE).endswith(f" {30_000 / parameters:.2f}")
    assert "peak memory in a process of its own" in err
    monkeypatch.setattr(command, "peak_bytes", lambda *_: None)
    assert cli.main([*TINY, "--recipes", "bf16-fp32-master"]) == 0
    assert f"{BASELINE}: peak memory could not be measured" in capsys.readouterr().err


def test_a_record_can_be_shown_and_drawn_without_measuring(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    assert cli.main([*TINY, "--json", str(file), "--plot", str(picture)]) == 0
    first = capsys.readouterr().out.split("\n", 1)[1]
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG\r\n")
    picture.unlink()
    monkeypatch.setattr(command, "measure", None)
    assert cli.main(["bench", "--from", str(file), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out == first
    assert picture.read_bytes() == drawn


@pytest.mark.parametrize("command", [TINY, ["selftest"]])
def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(
    command, capsys, tmp_path, monkeypatch
):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--plot", f"{tmp_path}/figures.foo"])
    assert "ends in none of .png, .pdf, .svg" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--plot", f"{tmp_path}/figures.png"])
    assert "a picture needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_a_baseline_that_needs_another_device_is_refused_before_measuring(capsys, monkeypatch):
    monkeypatch.setattr(command, "measure", None)
    assert cli.main([*TINY, "--baseline", "flashoptim 24-bit"]) == 2
    assert "the baseline 'flashoptim 24-bit' needs CUDA: choose another" in capsys.readouterr().err


def test_ctrl_c_while_peaks_are_measured_keeps_all_rounds(capsys, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "peak_bytes", interrupted)
    file = tmp_path / "figures.json"
    assert cli.main([*TINY, "--json", str(file)]) == 130
    assert BASELINE in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["interrupted"]
    assert len(found["results"][0]["rounds_ms"]) == found["rounds"]


def test_an_interrupted_record_has_the_rounds_that_were_taken(capsys, tmp_path, monkeypatch):
    timed, calls = CpuClock.time, count()

    def time(self, step):
        if next(calls) == 60:
            raise KeyboardInterrupt
        return timed(self, step)

    monkeypatch.setattr(CpuClock, "time", time)
    file = tmp_path / "figures.json"
    wanted = ["--backend", "eager", "--recipes", "bf16-fp32-master", "--rounds", "3000"]
    assert cli.main([*TINY, *wanted, "--json", str(file)]) == 130
    found = json.loads(file.read_text())
    assert len(found["results"][0]["rounds_ms"]) == found["rounds"] < 20
    assert f", {found['rounds']} interleaved rounds" in capsys.readouterr().out


def test_two_outputs_of_one_name_are_refused(capsys):
    assert cli.main([*TINY, "--json", "x.svg", "--plot", "x.svg"]) == 2
    assert "--json and --plot would both write x.svg" in capsys.readouterr().err


def test_one_of_ours_that_fails_is_told_by_the_exit_status(capsys, monkeypatch):
    def failing(self, *arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("torch_bf16.AdamW.step", failing)
    assert cli.main([*TINY, "--recipes", "bf16-stochastic"]) == 1
    assert "failed: bf16-stochastic: RuntimeError: no such kernel" in capsys.readouterr().out


def test_a_models_own_shapes_cannot_be_resized(capsys):
    assert cli.main(["bench", "--model", "gpt2-124m", "--parameters", "1e6"]) == 2
    assert "are for --model random; gpt2-124m has its own" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_refused_with_what_would(capsys, monkeypatch):
    monkeypatch.setattr("torch_bf16.tools.bench.rounds.available_bytes", lambda device: 10 * 2**30)
    assert cli.main(["bench", "--model", "llama-1b"]) == 2
    err = capsys.readouterr().err
    assert "'torch fused fp32' needs about 18.4 GiB on cpu, where 9.00 GiB can be used" in err
    assert "--model random --parameters 603e6" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "argument --rounds: '0' is not a whole number of 1 or more"),
        (["--parameters", "-5"], "argument --parameters: '-5' is not a whole number of 1 or more"),
        (["--tensors", "many"], "argument --tensors: 'many' is not a whole number of 1 or more"),
        (
            ["--parameters", "inf"],
            "argument --parameters: 'inf' is not a whole number of 1 or more",
        ),
        (
            ["--parameters", "nan"],
            "argument --parameters: 'nan' is not a whole number of 1 or more",
        ),
        (["--time-limit", "0"], "argument --time-limit: '0' is not a whole number of 1 or more"),
        (
            ["--recipes", "bf16"],
            "argument --recipes: no recipe 'bf16'; known ones: bf16-stochastic",
        ),
        (["--against", "torch,apex"], "argument --against: no library 'apex'; known ones: torch"),
        (["--model", "llama"], "argument --model: invalid choice: 'llama'"),
        (["--backend", "cuda"], "argument --backend: invalid choice: 'cuda'"),
        (["--device", "gpu"], "argument --device: 'gpu' is not cpu, cuda or cuda:N"),
        (["--device", "meta"], "argument --device: 'meta' is not cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "argument --device: 'cuda:99' is not here: torch sees "),
        (["--json"], "argument --json: expected one argument"),
        (
            ["--from", "missing.json"],
            "argument --from: 'missing.json' is not a record that bench --json",
        ),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_status_2_and_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(option, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*TINY, option, str(tmp_path / "missing" / "figures.json")])
    assert "is in a folder that does not exist; give the name" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main([*TINY, option, str(tmp_path)])
    assert "is a folder" in capsys.readouterr().err


def test_a_file_of_another_kind_is_no_record(capsys, tmp_path):
    file = tmp_path / "other.json"
    cut = '{"schema": 1, "kind": "training", "results": []}'
    one, deep = '{"schema": 1}', "[" * 100_000
    for content in ('{"schema": 7}', one, '{"schema": 1, "kind": "x"}', cut, deep, "[]"):
        file.write_text(content)
        with pytest.raises(SystemExit, match="2"):
            cli.main(["bench", "--from", str(file)])
        assert "is not a record that bench --json has written" in capsys.readouterr().err


def test_numbers_may_be_written_with_an_exponent(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "bench", lambda options: seen.append(options) or 0)
    assert cli.main(["bench", "--parameters", "5e7"]) == 0
    assert seen[0].parameters == 50_000_000


def test_it_needs_no_more_than_torch_and_numpy():
    """A run in a process that finds nothing else."""
    hidden = modules_beside("torch-bf16")
    assert {"numba", "matplotlib", "packaging"} <= hidden
    script = (
        "import sys\n"
        f"hidden = {hidden}\n"
        "class Hiding:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.partition('.')[0] not in hidden:\n"
        "            return self.finder.find_spec(name, *rest)\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self.finder, name)\n"
        "sys.meta_path[:] = map(Hiding, sys.meta_path)\n"
        "from torch_bf16.tools import cli\n"
        "from torch_bf16.tools.bench import command\n"
        # In processes that could import the extras again.
        "command.peak_bytes = lambda *arguments: None\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    wanted = [*TINY, "--recipes", "bf16-fp32-master", "--against", ""]
    found = subprocess.run(
        [sys.executable, "-c", script, *wanted], capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stderr
    assert "our backend 'eager'" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--training", "--model", "gpt2-124m"], "--model without effect"),
        (["--training", "--backend", "eager", "--against", "torchao"], "--against, --backend"),
        (["--training", "--baseline", "nosuch"], "--baseline without effect"),
        (
            ["--rules", "--against", "torch"],
            "its own entries, which leaves --against",
        ),
        (["--rules", "--ways", "moved", "--baseline", "torch"], "--baseline, --ways"),
        (["--layers", "3"], "--layers without effect"),
    ],
)
def test_options_that_would_be_ignored_are_refused(arguments, said, capsys):
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True), err


def test_a_record_is_not_measured_anew(capsys, tmp_path):
    file = tmp_path / "figures.json"
    assert cli.main([*TINY, "--json", str(file)]) == 0
    assert cli.main(["bench", "--from", str(file), "--rounds", "3"]) == 2
    assert "--from measures nothing, which leaves --rounds" in capsys.readouterr().err


def test_scripts_get_json_alone_on_standard_output(capsys):
    assert cli.main([*TINY, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2

"""The README's tables of GPUs."""

import json
import runpy
from pathlib import Path

import gpu_table
import pytest

from torch_bf16.tools.bench import peers, ways

ROOT = Path(__file__).parents[2]


def row(name, milliseconds, ratio):
    times = {"ms": {"median": milliseconds}, "ratio": {"median": ratio}}
    return {"name": name, **times, "bytes_per_parameter": 8.02}


OURS = row("bf16-stochastic", 0.5, 0.55)


def record(rows, model="gpt2-124m", device="H200", **changes):
    kind = {"device_type": "cuda", "rules": "AdamW", "baseline": "torch fused fp32"}
    what = {"model": model, "hardware": {"device": device}, "results": rows, "date": "2026-01-01"}
    return {**kind, **what, **changes}


def write(file, content):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def rows_in(results):
    return gpu_table.tables(results).splitlines()[2:]


@pytest.mark.parametrize(
    "changes", [{"device_type": "cpu"}, {"rules": "every rule"}, {"baseline": "bf16-stochastic"}]
)
def test_other_records_have_no_table(changes, tmp_path):
    (tmp_path / "compat.json").write_text("{}")
    write(tmp_path / "2026-01-01-x" / "bench-x.json", record([OURS], **changes))
    assert gpu_table.tables(tmp_path).startswith("No GPU has been measured yet")


def test_an_optimizer_has_a_row_and_the_fastest_is_first(tmp_path):
    folder = tmp_path / "2026-01-02-h200"
    rows = [row("slow", 107.4, 12), row("slow, moved", 1, 1), OURS]
    write(folder / "bench-gpt2-124m.json", record(rows))
    write(folder / "bench-llama-1b.json", record([OURS], "llama-1b"))
    first, second, *others = gpu_table.tables(tmp_path).splitlines()
    assert "[H200](examples/results/2026-01-02-h200)" in first
    assert others == [
        "| bf16-stochastic | 0.500 | 0.550 | 0.500 | 0.550 | 8.02 |",
        "| slow | 107 | 12.0 | - | - | 8.02 |",
    ]
    assert len({line.count("|") for line in (first, second, *others)}) == 1


def test_the_benchmark_of_the_model_counts_before_its_other_parts_and_the_selftest(tmp_path):
    folder = tmp_path / "2026-01-02-h200"
    write(folder / "bench-gpt2-124m.json", record([OURS]))
    other, peer = row("bf16-stochastic", 0.7, 0.77), row("heavyball SR", 30, 33)
    write(folder / "bench-gpt2-124m-heavyball.json", record([other, peer]))
    on_host = row("bf16-stochastic, states on the host", 30, 33)
    write(folder / "bench-gpt2-124m-offload.json", record([other, on_host]))
    selftest = record([other, row("int8-moments", 0.6, 0.66)])
    write(folder / "selftest.json", {"passed": True, "speed": [selftest]})
    assert rows_in(tmp_path) == [
        "| bf16-stochastic | 0.500 | 0.550 | 8.02 |",
        "| int8-moments | 0.600 | 0.660 | 8.02 |",
        "| heavyball SR | 30.0 | 33.0 | 8.02 |",
    ]
    write(folder / "selftest.json", {"passed": False, "speed": [selftest]})
    assert not any("int8" in line for line in rows_in(tmp_path))


def test_the_newest_record_of_each_gpu_counts(tmp_path):
    for minute, (folder, device) in enumerate([("b", "H200"), ("c", "A100"), ("a", "H200")]):
        of_it = record([OURS], device=device, date=f"2026-01-01 10:0{minute} UTC")
        write(tmp_path / folder / "bench-x.json", of_it)
    newest, other = gpu_table.tables(tmp_path).split("\n\n")
    assert "(examples/results/a)" in newest
    assert "(examples/results/c)" in other
    folders = {device: folder.name for device, (folder, _) in gpu_table.newest(tmp_path).items()}
    assert folders == {"H200": "a", "A100": "c"}


def test_what_cannot_be_read_is_named_and_left_out(tmp_path, capsys):
    folder = tmp_path / "2026-01-02-h200"
    write(folder / "bench-gpt2-124m.json", record([OURS]))
    (folder / "selftest.json").write_text('{"passed": tr')
    assert rows_in(tmp_path) == ["| bf16-stochastic | 0.500 | 0.550 | 8.02 |"]
    assert "selftest.json is left out" in capsys.readouterr().err


def test_the_tables_take_the_place_of_what_is_between_the_marks():
    readme = f"before\n{gpu_table.BEGIN}\nold\n{gpu_table.END}\nafter\n"
    found = gpu_table.written_into(readme, "new")
    assert found == f"before\n{gpu_table.BEGIN}\n\nnew\n\n{gpu_table.END}\nafter\n"
    assert gpu_table.written_into(found, "new") == found


@pytest.mark.parametrize("readme", ["", gpu_table.BEGIN, gpu_table.END + gpu_table.BEGIN])
def test_a_readme_without_the_marks_is_refused(readme):
    with pytest.raises(ValueError, match=r"README\.md must have"):
        gpu_table.written_into(readme, "new")


def test_the_readme_has_the_tables_of_the_records():
    readme = (ROOT / "README.md").read_text()
    assert gpu_table.written_into(readme, gpu_table.tables(gpu_table.RESULTS)) == readme


def test_help_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_table.py", "--help"])
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("it wrote"))
    with pytest.raises(SystemExit):
        runpy.run_path(gpu_table.__file__, run_name="__main__")
    assert "usage: gpu_table.py" in capsys.readouterr().out


def test_its_names_are_those_of_the_benchmark():
    assert (gpu_table.BASELINE, gpu_table.WAYS) == (peers.BASELINE, ways.WAYS)

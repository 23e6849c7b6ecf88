"""`make gpu`: each part once for a source tree, and its folder."""

import argparse
import json
import signal
import sys
import tarfile
import time
from pathlib import Path

import gpu_record
import pytest

from torch_bf16.tools.bench import command

ROOT = Path(__file__).parents[2]
TREE = {"one": "tree", "two": "tree"}


def part(folder, status):
    """A part that notes its run, says something, and ends with a status."""
    script = f"open('runs', 'a').write('x'); print('said'); raise SystemExit({status})"
    return [sys.executable, "-c", script]


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    monkeypatch.setattr(gpu_record, "LIMITS", {"one": 60, "two": 60})


def runs(folder):
    return len((folder / "runs").read_text())


def test_a_part_that_ended_well_is_not_run_again_and_one_that_failed_is(tmp_path):
    parts = {"one": part(tmp_path, 0), "two": part(tmp_path, 3)}
    assert not gpu_record.run(tmp_path, parts, TREE)
    assert runs(tmp_path) == 2
    state = json.loads((tmp_path / "run.json").read_text())
    assert [each["status"] for each in state["parts"].values()] == [0, 3]
    assert (tmp_path / "one.txt").read_text() == "said\n"
    parts["two"] = part(tmp_path, 0)
    assert gpu_record.run(tmp_path, parts, TREE)
    assert runs(tmp_path) == 3
    assert gpu_record.run(tmp_path, parts, TREE)
    assert runs(tmp_path) == 3


def test_parts_run_the_packages_of_this_tree(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script = "import accelerate_bf16 as a, torch_bf16 as t; print(a.__file__, t.__file__)"
    assert gpu_record.run(tmp_path, {"one": [sys.executable, "-c", script]}, TREE)
    found = [ROOT / each for each in (tmp_path / "one.txt").read_text().split()]
    assert all(each.is_relative_to(ROOT) and each.exists() for each in found)


def test_what_a_part_said_names_no_folder_of_this_machine(tmp_path):
    script = f"import sys; print('rootdir: {ROOT}', '{ROOT}/tests/x.py', sys.executable)"
    assert gpu_record.run(tmp_path, {"one": [sys.executable, "-c", script]}, TREE)
    assert (tmp_path / "one.txt").read_text() == "rootdir: . tests/x.py python\n"


def test_a_part_of_other_sources_is_run_again_and_no_other(tmp_path):
    parts = {"one": part(tmp_path, 0), "two": part(tmp_path, 0)}
    assert gpu_record.run(tmp_path, parts, TREE)
    assert gpu_record.run(tmp_path, parts, {**TREE, "two": "other"})
    assert runs(tmp_path) == 3


def test_a_mended_test_leaves_the_other_parts_as_they_are(monkeypatch, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_record, "ALL", ("kernels", "tests"))

    def keys():
        return [gpu_record.source_key(name, ["python"], "2.11") for name in ("tests", "selftest")]

    found = [keys()]
    (tmp_path / "tests" / "test_it.py").write_text("pass")
    found.append(keys())
    (tmp_path / "kernels" / "digests.txt").write_text("0")
    found.append(keys())
    assert found[0][0] != found[1][0] != found[2][0]
    assert found[0][1] == found[1][1] != found[2][1]


def test_the_end_of_what_a_failed_part_said_is_shown(tmp_path, capsys):
    gpu_record.run(tmp_path, {"one": part(tmp_path, 1)}, TREE)
    assert capsys.readouterr().out.endswith("one.txt:\nsaid\n\n")


def test_parts_that_would_end_too_late_are_left_for_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_record, "GRACE_SECONDS", 0)
    monkeypatch.setattr(gpu_record, "LEAST_SECONDS", 0.5)
    forever = [sys.executable, "-c", "import time; time.sleep(60)"]
    parts = {"one": forever, "two": part(tmp_path, 0)}
    start = time.monotonic()
    assert not gpu_record.run(tmp_path, parts, TREE, start + 1.0)
    assert time.monotonic() < start + 10
    state = json.loads((tmp_path / "run.json").read_text())
    assert [each["status"] for each in state["parts"].values()] == ["timeout"]
    assert gpu_record.run(tmp_path, {"two": parts["two"]}, TREE)


STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("what failed by now")
"""


@pytest.fixture
def in_the_background():
    """As where a shell runs us so."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_background")
def test_a_part_that_takes_too_long_sums_up_and_takes_its_processes_along(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_record.LIMITS, "one", 4)  # an interpreter starts in that time
    assert not gpu_record.run(tmp_path, {"one": [sys.executable, "-c", STUBBORN]}, TREE)
    child, *said = (tmp_path / "one.txt").read_text().split("\n")
    assert said == ["what failed by now", ""]
    for _ in range(100):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {child} outlives the part that started it")


def test_the_record_is_packed_after_each_part_and_another_copy_goes_on_with_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path / "there")
    folder, archive = tmp_path / "there" / "results" / "2026-01-02-h200", tmp_path / "record.tar.gz"
    parts = {"one": part(folder, 0), "two": [sys.executable, "-c", f"open({str(archive)!r})"]}
    assert gpu_record.run(folder, parts, TREE, archive=archive)
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "here", filter="data")
    here = tmp_path / "here" / "results" / "2026-01-02-h200"
    assert gpu_record.run(here, {"one": part(here, 3), "two": part(here, 3)}, TREE)
    assert runs(here) == 1


def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_record.LIMITS, "one", 0.5)
    forever = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert not gpu_record.run(tmp_path, {"one": forever, "two": part(tmp_path, 0)}, TREE)
    state = json.loads((tmp_path / "run.json").read_text())
    assert [each["status"] for each in state["parts"].values()] == ["timeout", 0]


def test_a_tree_goes_on_in_the_folder_where_it_was_begun(tmp_path):
    begun = tmp_path / "2026-01-02-nvidia-h200"
    begun.mkdir()
    (begun / "run.json").write_text('{"parts": {"one": {"source": "tree"}}}')
    assert gpu_record.folder_for(tmp_path, "NVIDIA H200", TREE) == begun
    other = gpu_record.folder_for(tmp_path, "NVIDIA H200", {"one": "other"})
    assert other != begun
    assert other.name.endswith("-nvidia-h200")
    other.mkdir()
    next_one = gpu_record.folder_for(tmp_path, "NVIDIA H200", {"one": "other"})
    assert not next_one.exists()
    assert next_one.name.endswith("-2-nvidia-h200")


def test_a_part_that_fails_leaves_no_figures_of_an_earlier_run(tmp_path):
    (tmp_path / "figures.json").write_text("{}")
    assert not gpu_record.run(
        tmp_path, {"one": [*part(tmp_path, 1), "--json", "figures.json"]}, {"one": "new"}
    )
    assert not (tmp_path / "figures.json").exists()


def packed(archive, name):
    with tarfile.open(archive) as file:
        return file.extractfile(f"record/{name}").read().decode()


def test_an_archive_is_of_this_record_if_all_parts_were_done_before(tmp_path):
    folder, archive = tmp_path / "record", tmp_path / "record.tar.gz"
    parts = {"one": part(folder, 0)}
    assert gpu_record.run(folder, parts, TREE)
    archive.write_text("of yesterday")
    assert gpu_record.run(folder, parts, TREE, archive=archive)
    assert packed(archive, "one.txt") == "said\n"


def test_an_archive_has_what_an_interrupted_part_had_said(tmp_path, monkeypatch):
    def interrupted(command, folder, name, limit):
        (folder / f"{name}.txt").write_text("so far")
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_record, "_run_part", interrupted)
    folder, archive = tmp_path / "record", tmp_path / "record.tar.gz"
    with pytest.raises(KeyboardInterrupt):
        gpu_record.run(folder, {"one": part(folder, 0)}, TREE, archive=archive)
    assert packed(archive, "one.txt") == "so far"


def test_parts_that_are_run_one_by_one_have_one_record(tmp_path, monkeypatch, capsys):
    parts = {"one": part(tmp_path, 0), "two": part(tmp_path, 0)}
    monkeypatch.setattr(gpu_record, "parts_for", lambda device, tests: parts)
    monkeypatch.setattr(gpu_record, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_record.gpu_table, "main", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    for name in parts:
        monkeypatch.setattr(sys, "argv", ["gpu_record.py", "--device", "cuda", "--only", name])
        assert gpu_record.main() == 0
        assert capsys.readouterr().out.endswith("all parts asked for are done\n")
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["parts"].keys() == parts.keys()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_has_a_limit(device, monkeypatch):
    monkeypatch.undo()
    parts = gpu_record.parts_for(device, gpu_record.gpu_test_files())
    assert parts.keys() == gpu_record.LIMITS.keys()
    for name, (_, _, _, kind, *options) in parts.items():
        if kind == "bench":
            # What would be refused there is refused here.
            parser = argparse.ArgumentParser()
            command.add_bench_arguments(parser)
            on_cpu = [each.replace("cuda", "cpu") for each in options]
            command._settle(parser.parse_args(on_cpu))
        assert kind == "bench" or name in ("selftest", "tests", "host-time")


def test_the_files_with_gpu_tests_are_found(request):
    """Of those that this run has collected, which may not be all."""
    items = request.session.items
    collected = {item.path.relative_to(ROOT).as_posix() for item in items}
    marked = {item.path for item in items if item.get_closest_marker("gpu")}
    found = collected.intersection(gpu_record.gpu_test_files())
    assert found == {path.relative_to(ROOT).as_posix() for path in marked}

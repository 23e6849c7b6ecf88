"""``compare`` reads runs that exist, as loggers wrote them, and says what is wrong."""

import json
import sqlite3
import sys

import pytest
from compare_cases import lightning_csv

from torch_bf16.tools import cli
from torch_bf16.tools.compare.logs import _files, logged_in
from torch_bf16.tools.compare.reading import runs_of

LOSSES = [3.0, 2.5, 2.0, 1.5]


def trainer_state(folder, losses, steps=None):
    folder.mkdir(parents=True, exist_ok=True)
    steps = steps or range(10, 10 * len(losses) + 1, 10)
    history = [{"step": s, "loss": v, "epoch": 0.1} for s, v in zip(steps, losses, strict=True)]
    history.append({"step": steps[-1], "eval_loss": 1.0, "train_runtime": 3.0})
    content = {"log_history": history, "global_step": steps[-1]}
    (folder / "trainer_state.json").write_text(json.dumps(content))
    return folder


def trackio_database(path, runs):
    """The schema of trackio 0.43, in its file beside others'."""
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, "
            "timestamp TEXT NOT NULL, run_name TEXT NOT NULL, step INTEGER NOT NULL, "
            "metrics TEXT NOT NULL, log_id TEXT, space_id TEXT)"
        )
        for name, losses in runs.items():
            for step, loss in enumerate(losses):
                when = f"2026-11-22T10:00:{2 * step:02d}+00:00"
                row = (name, when, name, step, json.dumps({"loss": loss, "note": "text"}))
                database.execute(
                    "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) "
                    "VALUES (?, ?, ?, ?, ?)",
                    row,
                )
    database.close()
    return path


def compare(capsys, *arguments):
    status = cli.main(["compare", *map(str, arguments), "--json", "-"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if status != 2 else None, err


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_csv_file_that_another_program_saved_again_is_read(tmp_path):
    (tmp_path / "saved.csv").write_bytes(b"\xef\xbb\xbfstep,train_loss\r\n1,3.0\r\n2,2.0\r\n")
    (run,) = logged_in(tmp_path / "saved.csv")
    assert run.values == {"train_loss": {1: 3.0, 2: 2.0}}


def test_lightnings_versions_are_the_runs_of_a_row(tmp_path, capsys):
    for seed in range(3):
        lightning_csv(tmp_path / "fp32" / f"version_{seed}", [x + seed for x in LOSSES])
        worse = [x + seed + 0.5 for x in LOSSES]
        lightning_csv(tmp_path / "bf16" / f"version_{seed}", worse, every=1)
    status, found, _ = compare(capsys, "fp32", "bf16")
    assert (status, found["measure"], found["reference"]) == (1, "train_loss", "fp32")
    row = found["rows"][1]
    assert (row["pairs"], row["against"]["mean"], row["verdict"]) == (3, 0.5, "loses")
    assert row["curve"] == [4.5, 4.0, 3.5, 3.0]
    assert (tmp_path / "compare" / "compare.html").exists()


def test_a_trainers_folder_is_read_at_its_last_checkpoint(tmp_path, capsys):
    trainer_state(tmp_path / "a" / "checkpoint-20", LOSSES[:2])
    trainer_state(tmp_path / "a" / "checkpoint-100", LOSSES)
    trainer_state(tmp_path / "b" / "checkpoint-40", LOSSES)
    status, found, _ = compare(capsys, "fp32=a", "bf16=b")
    assert (status, found["steps"], found["measure"]) == (0, [10, 20, 30, 40], "loss")


def test_the_one_mean_at_the_end_of_a_trainers_log_is_not_its_loss(tmp_path, capsys):
    for name, losses in (("fp32", LOSSES), ("bf16", [v + 0.5 for v in LOSSES])):
        file = trainer_state(tmp_path / name, losses) / "trainer_state.json"
        content = json.loads(file.read_text())
        content["log_history"].append({"step": 40, "train_loss": 2.0, "train_runtime": 3.0})
        file.write_text(json.dumps(content))
    status, found, _ = compare(capsys, "fp32", "bf16")
    assert (status, found["measure"]) == (1, "loss")


def test_a_metric_that_rises_needs_a_direction(tmp_path, capsys):
    for name, values in (("fp32", [0.1, 0.5, 0.9, 0.9]), ("bf16", [0.1, 0.4, 0.7, 0.7])):
        lightning_csv(tmp_path / name, values, "accuracy")
    status, _, err = compare(capsys, "fp32", "bf16", "--metric", "accuracy")
    assert status == 2
    assert "accuracy of fp32 rises by 0.800, so that it may be no loss: say which values" in err
    for better, status, worse in (("higher", 1, "Below"), ("lower", 0, "Above")):
        words = "fp32", "bf16", "--metric", "accuracy", "--better", better
        assert compare(capsys, *words)[0] == status
        assert f"{worse} 0 is worse than fp32" in (tmp_path / "compare/compare.html").read_text()
    cli.main(["compare", "compare/compare.json"])
    assert "      accuracy  difference" in capsys.readouterr().out


def test_a_record_of_other_runs_is_not_replaced(tmp_path, capsys):
    for name in ("a", "b", "c"):
        lightning_csv(tmp_path / name, LOSSES)
    for words, replaced in ((["a", "b"], True), (["a", "b", "c"], True), (["a", "c"], False)):
        status, _, err = compare(capsys, *words)
        assert (status != 2) == replaced
    assert (
        "compares train_loss of a, b, c, and would be replaced by a comparison of train_lo" in err
    )


def test_folders_with_an_equals_sign_are_folders(tmp_path, capsys):
    for name in ("lr=0.001", "lr=0.01"):
        trainer_state(tmp_path / name, LOSSES)
    (tmp_path / "runs=1").mkdir()
    trackio_database(tmp_path / "runs=1" / "t.db", {"one": LOSSES, "two": LOSSES})
    for words, rows in (
        (["lr=0.001", "lr=0.01"], ["lr=0.001", "lr=0.01"]),
        (["a=lr=0.001", "lr=0.01"], ["a", "lr=0.01"]),
        (["runs=1/t.db"], ["one", "two"]),
        (["./runs=1/t.db"], ["one", "two"]),
        (["runs=1/t.db:one", "x=runs=1/t.db:two"], ["t.db:one", "x"]),
    ):
        status, found, err = compare(capsys, *words, "--out", f"out {words[0]!r:.3} {len(rows[1])}")
        assert status != 2, err
        assert [row["name"] for row in found["rows"]] == rows


def test_runs_in_a_database_of_trackio_have_names_and_times(tmp_path, capsys):
    path = trackio_database(tmp_path / "project.db", {"fp32": LOSSES, "bf16": ["NaN"] * 4})
    status, found, _ = compare(capsys, path)
    assert status == 1
    assert [row["name"] for row in found["rows"]] == ["fp32", "bf16"]
    assert found["rows"][1]["broken"] == {"0": 0}
    assert found["rows"][0]["ms"]["p50"] == 2000
    cli.main(["compare", str(path)])
    assert " 2,000 (2,000 to 2,000)" in capsys.readouterr().out
    status, found, _ = compare(capsys, f"{path}:fp32", f"same={path}:fp32", "--out", "x")
    assert (status, found["rows"][1]["against"]["mean"]) == (0, 0.0)


def test_a_folder_of_event_files_is_one_run(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"events.out.tfevents.{number}").touch()
    assert _files(tmp_path / "a") == [tmp_path / "a"]
    assert _files(tmp_path) == [tmp_path / "a", tmp_path / "b"]


def test_event_files_are_read_by_tensorboard(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for name in ("a", "b"):
        with SummaryWriter(str(tmp_path / name)) as writer:
            for step, loss in enumerate(LOSSES):
                writer.add_scalar("train/loss", loss, step)
    status, found, _ = compare(capsys, "a", "b")
    assert (status, found["measure"], found["rows"][0]["final"]) == (0, "train/loss", 1.5)


def test_without_tensorboard_an_event_file_is_refused_by_name(tmp_path, capsys, monkeypatch):
    for name in ("tensorboard", "tensorboard.backend.event_processing"):
        monkeypatch.setitem(sys.modules, name, None)
    bad(tmp_path / "b", "events.out.tfevents.1.host", b"")
    lightning_csv(tmp_path / "a", LOSSES)
    status, _, err = compare(capsys, "a", "b")
    assert status == 2
    assert "pip install tensorboard" in err


def test_runs_of_different_lengths_are_compared_over_the_steps_they_share(tmp_path, capsys):
    lightning_csv(tmp_path / "a", [*LOSSES, 1.0, 0.5])
    lightning_csv(tmp_path / "b", LOSSES)
    status, found, _ = compare(capsys, "a", "b")
    assert (status, found["last_step"], found["rows"][0]["final"]) == (0, 3, 1.5)
    assert "not all runs have the same steps" in found["notes"][0]
    assert found["notes"][0].endswith("there are more in a")


def bad(folder, name, content):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_bytes(content) if isinstance(content, bytes) else file.write_text(content)
    return file


BAD = {
    "missing": (None, "there is no bad/metrics.csv. A run is metrics.csv of Lightning"),
    "empty csv": (("metrics.csv", ""), "has no column 'step'"),
    "foreign csv": (("metrics.csv", "a,b\n1,2\n"), "has no column 'step'"),
    "binary csv": (("metrics.csv", b"\xff\xfe\x00\x81"), "is not a CSV file"),
    "csv without steps": (("metrics.csv", "step,train_loss\n"), "holds no logged step"),
    "step is a word": (("metrics.csv", "step,train_loss\nx,1\n"), "line 2: 'x' is not a step"),
    "truncated state": (
        ("trainer_state.json", '{"log_history": [{"st'),
        "is not a trainer_state.json of transformers: JSONDecodeError",
    ),
    "state whose step is null": (
        ("trainer_state.json", '{"log_history": [{"step": null, "loss": 1}]}'),
        "bad/trainer_state.json: None is not a step",
    ),
    "foreign state": (("trainer_state.json", "[1]"), "is not a trainer_state.json"),
    "state without steps": (("trainer_state.json", '{"log_history": []}'), "holds no logged step"),
    "foreign database": (("x.db", b"not a database" * 99), "is not a database of trackio"),
    "other kind": (("run.yaml", "a: 1"), "is of an unknown kind"),
    "no metric": (("metrics.csv", "step,accuracy\n1,2\n"), "have no metric in common"),
    "other steps": (("metrics.csv", "step,train_loss\n77,2\n"), "have no step in common"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_run_ends_with_status_2_and_the_reason(kind, tmp_path, capsys):
    content, said = BAD[kind]
    lightning_csv(tmp_path / "good", LOSSES)
    path = bad(tmp_path / "bad", *content) if content else "bad/metrics.csv"
    assert cli.main(["compare", "good", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["good"], "there is one row, 'good', and nothing to compare it with"),
        (["good", "empty"], "empty holds no run"),
        (["a=good", "b=good", "--metric", "val"], "has no metric 'val'; those in it: train_loss"),
        (["a=good", "b=good", "--reference", "c"], "'c' is not a row; those: a, b"),
        (["a=good", "b=good", "--steps", "5"], "which leaves --steps without effect"),
        (["a=good", "b=good", "--device", "cpu", "--schedule", "cosine"], "--schedule, --device"),
        (["a=good", "b=project.db:other"], "has no run 'other'; those in it: fp32"),
        (["a=two", "b=two"], "which metric? Give --metric: all runs have gen_loss, loss_d"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_meant_is_refused(arguments, said, tmp_path, capsys):
    lightning_csv(tmp_path / "good", LOSSES)
    (tmp_path / "empty").mkdir()
    bad(tmp_path / "two", "metrics.csv", "step,gen_loss,loss_d\n1,2,3\n")
    trackio_database(tmp_path / "project.db", {"fp32": LOSSES})
    assert cli.main(["compare", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_unreadable_file_is_told(tmp_path, capsys):
    lightning_csv(tmp_path / "good", LOSSES)
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    assert cli.main(["compare", "good", "loop.csv"]) == 2
    assert "loop.csv" in capsys.readouterr().err


def test_names_are_the_least_that_tells_paths_apart(tmp_path):
    for folder in ("x/run", "y/run", "z"):
        lightning_csv(tmp_path / folder, LOSSES)
    rows, _ = runs_of(["x/run", "y/run/metrics.csv", "z"], None)
    assert list(rows) == ["x/run", "y/run/metrics.csv", "z"]
    assert len(logged_in(tmp_path / "z")) == 1

"""Checkpoint files: whole or refused, and nothing changes in memory when they are refused."""

import os
import random
import subprocess
import sys
import zipfile

from proofs import faults
import pytest
import torch

import torch_bf16
from torch_bf16 import CheckpointError, StateMismatchError, load_checkpoint, save_checkpoint


@pytest.fixture
def run():
    model, optimizer = faults.make_run()
    faults.train_step(model, optimizer, 1)
    return model, optimizer


def test_a_file_brings_every_bit_back_and_what_was_not_asked_for(run, tmp_path):
    model, optimizer = run
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    save_checkpoint(
        tmp_path / "run.pt",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        step=1,
        random=torch.get_rng_state(),
    )
    again, its = faults.make_run()
    later = torch.optim.lr_scheduler.MultiStepLR(its, [9])
    rest = load_checkpoint(tmp_path / "run.pt", optimizer=its, scheduler=later, model=again)
    assert rest.keys() == {"step", "random"}
    assert later.milestones == scheduler.milestones
    assert faults.digest(again, its) == faults.digest(model, optimizer)
    for each in (run, (again, its)):
        faults.train_step(*each, 2)
    assert faults.digest(again, its) == faults.digest(model, optimizer)


def test_torch_and_zip_tools_read_the_file(run, tmp_path):
    save_checkpoint(tmp_path / "run.pt", model=run[0], step=1)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert all(
        torch.equal(state["model"][name], each) for name, each in run[0].state_dict().items()
    )
    with zipfile.ZipFile(tmp_path / "run.pt") as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"torch-bf16 checkpoint 1, crc32 ")


@pytest.mark.parametrize("size", [0, 1, 3, 4097, 1 << 20])
def test_files_of_every_size(size, tmp_path):
    tensor = torch.arange(size, dtype=torch.uint8) if size < 256 else torch.randn(size)
    save_checkpoint(tmp_path / "some.pt", tensor=tensor)
    assert torch.equal(load_checkpoint(tmp_path / "some.pt")["tensor"], tensor)


def test_damaged_files_are_refused_by_name_and_nothing_changes(tmp_path):
    counts = faults.corrupt_at_random(tmp_path, 40, seed=1)
    assert (counts["refused"], counts["silent"], counts["changed"]) == (40, 0, 0)
    # The control: torch alone takes most of them.
    assert counts["torch silent"] > 10


def test_every_cut_and_every_flipped_bit_of_the_ends_is_refused(tmp_path):
    path, changed = tmp_path / "some.pt", tmp_path / "changed.pt"
    save_checkpoint(path, tensor=torch.arange(5))
    data = path.read_bytes()
    places = [*range(80), *range(len(data) - 200, len(data))]
    for place in places:
        for copy in (data[:place], flipped(data, place, place % 8)):
            changed.write_bytes(copy)
            with pytest.raises(CheckpointError, match=r"changed.pt .*Nothing was changed"):
                load_checkpoint(changed)


def flipped(data, place, bit):
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@pytest.mark.parametrize("what", ["empty", "text", "torch", "newer", "other model", "half a model"])
def test_a_foreign_file_is_refused_and_nothing_changes(run, what, tmp_path):
    path, (model, optimizer) = tmp_path / "foreign.pt", run
    before = faults.digest(model, optimizer)
    match = "does not end as save_checkpoint ends its files"
    if what == "empty":
        path.touch()
    elif what == "text":
        path.write_text("hello " * 100)
    elif what == "torch":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    elif what == "newer":
        save_checkpoint(path, model=model, optimizer=optimizer)
        path.write_bytes(path.read_bytes().replace(b"checkpoint 1,", b"checkpoint 2,"))
        match = "has version 2 and this torch_bf16 reads version 1"
    elif what == "other model":
        other = torch.nn.Linear(3, 2)
        save_checkpoint(path, model=other, optimizer=torch.optim.SGD(other.parameters()))
        match = "model in .* is of another model: it lacks 0.bias.*unknown bias"
    else:
        save_checkpoint(path, model=torch.nn.Linear(3, 2))
        match = "has no optimizer; it holds model"
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert faults.digest(model, optimizer) == before


def test_an_optimizer_that_does_not_fit_leaves_the_model_alone(run, tmp_path):
    model, optimizer = run
    save_checkpoint(tmp_path / "run.pt", model=model, optimizer=optimizer)
    other, _ = faults.make_run()
    with torch.no_grad():
        other[0].weight.zero_()
    sgd = torch_bf16.SGD(other.parameters(), lr=0.1, momentum=0.9)
    few = torch_bf16.AdamW(list(other.parameters())[1:])
    for its, match in ((sgd, "has no momentum, dampening"), (few, r"groups of \[4\] parameters")):
        with pytest.raises(StateMismatchError, match=match):
            load_checkpoint(tmp_path / "run.pt", model=other, optimizer=its)
        assert not other[0].weight.any()
        assert not its.state


def test_what_cannot_be_loaded_again_is_not_written(run, tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, step=1)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"run.pt was not written, because weights_only=True"):
        save_checkpoint(path, model=run[0], odd=random.Random(1))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_file_that_another_process_writes_is_left_alone(tmp_path):
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        "f.write('x'); f.flush(); print('locked', flush=True); sys.stdin.read()"
    )
    partial = tmp_path / ".run.pt.partial"
    with subprocess.Popen(
        [sys.executable, "-c", script, partial],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match="another process is writing"):
            save_checkpoint(tmp_path / "run.pt", step=1)
        assert partial.read_text() == "x"
        other.kill()
    save_checkpoint(tmp_path / "run.pt", step=2)
    assert load_checkpoint(tmp_path / "run.pt") == {"step": 2}
    assert not partial.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """In a process of its own: the test process may hold threads, which a fork would lose."""
    command = [sys.executable, faults.__file__, "kills", "--count", "8", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed: 8" in done.stdout

"""Checkpoint files: whole or refused, and nothing changes in memory when they are refused."""

import os
import random
import subprocess
import sys
import zipfile
from argparse import Namespace

import pytest
import torch
from proofs import faults

import torch_bf16
from torch_bf16 import CheckpointError, StateMismatchError, load_checkpoint, save_checkpoint
from torch_bf16.checkpoints import atomic_write


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


@pytest.mark.parametrize("names", [("model", "optimizer"), ("optimizer", "model")])
def test_masters_change_format_by_the_weights_that_were_saved_with_them(names, tmp_path):
    runs = []
    for seed, weights in enumerate(("bf16+16", "bf16+fp32")):
        torch.manual_seed(seed)
        recipe = torch_bf16.Recipe("own", weights=weights)
        model = torch_bf16.cast_model(torch.nn.Linear(16, 16), recipe)
        optimizer = torch_bf16.AdamW(model.parameters(), lr=1e-4, recipe=recipe)
        faults.train_step(model, optimizer, 1)
        runs.append({"model": model, "optimizer": optimizer})
    saved, loaded = ({name: run[name] for name in names} for run in runs)
    save_checkpoint(tmp_path / "run.pt", **saved)
    load_checkpoint(tmp_path / "run.pt", **loaded)
    for ours, theirs in zip(*(run["model"].parameters() for run in runs), strict=True):
        exact = runs[0]["optimizer"].exact_weight(ours), runs[1]["optimizer"].exact_weight(theirs)
        assert torch.equal(*exact)


def test_a_part_may_have_any_name(tmp_path):
    save_checkpoint(tmp_path / "run.pt", path="a", parts=1)
    assert load_checkpoint(tmp_path / "run.pt") == {"path": "a", "parts": 1}


def test_torch_and_zip_tools_read_the_file(run, tmp_path):
    save_checkpoint(tmp_path / "run.pt", model=run[0], step=1)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    assert all(
        torch.equal(state["model"][name], each) for name, each in run[0].state_dict().items()
    )
    with zipfile.ZipFile(tmp_path / "run.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.skipif(
    not hasattr(torch.serialization, "set_crc32_options"), reason="torch always computes them"
)
def test_checksums_are_written_where_a_process_has_switched_them_off(run, tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "run.pt", model=run[0])
        assert not torch.serialization.get_crc32_options()
        torch.save({"model": run[0].state_dict()}, tmp_path / "without.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    load_checkpoint(tmp_path / "run.pt", model=run[0])
    with pytest.raises(CheckpointError, match=r"without.pt .*record .*data.pkl is damaged"):
        load_checkpoint(tmp_path / "without.pt", model=run[0])


@pytest.mark.parametrize("size", [0, 1, 3, 4097, 1 << 20])
def test_files_of_every_size(size, tmp_path):
    tensor = torch.arange(size, dtype=torch.uint8) if size < 256 else torch.randn(size)
    save_checkpoint(tmp_path / "some.pt", tensor=tensor)
    assert torch.equal(load_checkpoint(tmp_path / "some.pt")["tensor"], tensor)


def test_damaged_files_are_refused_by_name_or_have_every_bit(tmp_path):
    counts = faults.corrupt_at_random(tmp_path, 40, seed=1)
    assert (counts["silent"], counts["changed"]) == (0, 0)
    assert counts["refused"] + counts["harmless"] == 40
    assert counts["refused"] > 30
    # The control: torch alone reads other numbers from most of them.
    assert counts["torch silent"] > 10


@pytest.fixture
def small(tmp_path):
    """A file with one tensor, its bytes, and where its records lie."""
    path = tmp_path / "some.pt"
    save_checkpoint(path, tensor=torch.arange(5))
    with zipfile.ZipFile(path) as archive:
        return path, path.read_bytes(), archive


@pytest.mark.parametrize("end", ["first", "last"])
def test_every_cut_of_the_ends_is_refused(small, end, tmp_path):
    _, data, _ = small
    changed = tmp_path / "changed.pt"
    for place in range(80) if end == "first" else range(len(data) - 200, len(data)):
        changed.write_bytes(data[:place])
        with pytest.raises(CheckpointError, match=r"changed.pt .*Nothing was changed"):
            load_checkpoint(changed)


def test_a_flipped_bit_outside_of_the_records_changes_no_number(small, tmp_path):
    """Headers have no checksum: all bits of the tensor's entry in the directory, and some more."""
    _, data, archive = small
    tensor = archive.getinfo(next(n for n in archive.namelist() if n.endswith("/data/0")))
    entry = data.index(tensor.filename.encode(), archive.start_dir) - 46
    header, end = tensor.header_offset, len(data)
    bits = [(place, bit) for place in range(entry, entry + 70) for bit in range(8)]
    bits += [(place, place % 8) for place in (*range(header, header + 60), *range(end - 99, end))]
    changed, counts = tmp_path / "changed.pt", {"refused": 0, "read": 0}
    for place, bit in bits:
        changed.write_bytes(flipped(data, place, bit))
        try:
            found = load_checkpoint(changed)
        except CheckpointError:
            counts["refused"] += 1
        else:
            assert found.keys() == {"tensor"}
            assert torch.equal(found["tensor"], torch.arange(5)), (place, bit)
            counts["read"] += 1
    assert min(counts.values()) > 100


def flipped(data, place, bit):
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@pytest.mark.parametrize(
    "what", ["empty", "text", "a tensor", "a module", "other model", "half a model"]
)
def test_a_foreign_file_is_refused_and_nothing_changes(run, what, tmp_path):
    path, (model, optimizer) = tmp_path / "foreign.pt", run
    before = faults.digest(model, optimizer)
    match = "or is not a file that torch.save made of tensors"
    if what == "empty":
        path.touch()
    elif what == "text":
        path.write_text("hello " * 100)
    elif what == "a tensor":
        torch.save(torch.ones(3), path)
        match = "holds a Tensor and no parts with names"
    elif what == "a module":
        torch.save({"model": model}, path)
        match = (
            r"holds .*torch.nn.modules.linear.Linear.*if you trust its source.*weights_only=False"
        )
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


def test_a_file_of_torch_save_is_loaded(run, tmp_path):
    model, optimizer = run
    before = faults.digest(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "it")
    faults.train_step(model, optimizer, 2)
    assert load_checkpoint(tmp_path / "it", model=model, optimizer=optimizer) == {}
    assert faults.digest(model, optimizer) == before


def test_an_optimizer_that_does_not_fit_leaves_the_model_alone(run, tmp_path):
    model, optimizer = run
    save_checkpoint(tmp_path / "run.pt", model=model, optimizer=optimizer)
    other, _ = faults.make_run()
    with torch.no_grad():
        other[0].weight.zero_()
    sgd = torch_bf16.SGD(other.parameters(), lr=0.1, momentum=0.9)
    few = torch_bf16.AdamW(list(other.parameters())[1:])
    torch_s = torch.optim.AdamW(few.param_groups[0]["params"])
    cases = (
        (sgd, "has no momentum, dampening"),
        (few, r"groups of \[4\] parameters"),
        (torch_s, r"groups of \[4\] parameters.*Nothing was changed"),
    )
    for its, match in cases:
        with pytest.raises(StateMismatchError, match=match):
            load_checkpoint(tmp_path / "run.pt", model=other, optimizer=its)
        assert not other[0].weight.any()
        assert not its.state


def test_what_cannot_load_anything_is_refused_before_the_model_is_loaded(run, tmp_path):
    model, optimizer = run
    save_checkpoint(tmp_path / "run.pt", model=model, epoch=3)
    faults.train_step(model, optimizer, 2)
    before = faults.digest(model, optimizer)
    with pytest.raises(ValueError, match=r"and epoch is of type int, without one.*\['epoch'\]"):
        load_checkpoint(tmp_path / "run.pt", model=model, epoch=0)
    assert faults.digest(model, optimizer) == before


@pytest.mark.parametrize("kind", ["number", "empty", "scheduler", "scaler"])
def test_a_part_of_another_kind_leaves_the_model_alone(kind, run, tmp_path):
    model, optimizer = run
    theirs = torch.optim.AdamW(model.parameters())
    parts = {"number": 3, "empty": {}, "scheduler": 3, "scaler": {}}
    save_checkpoint(tmp_path / "run.pt", model=model, part=parts[kind])
    faults.train_step(model, optimizer, 2)
    before = faults.digest(model, optimizer)
    target = theirs
    if kind == "scheduler":
        target = torch.optim.lr_scheduler.LinearLR(theirs)
    elif kind == "scaler":
        target = torch.amp.GradScaler("cpu")
    with pytest.raises((CheckpointError, RuntimeError, TypeError)) as caught:
        load_checkpoint(tmp_path / "run.pt", model=model, part=target)
    if kind in ("number", "empty"):
        assert "no state dict of an optimizer" in str(caught.value)
    assert faults.digest(model, optimizer) == before


ODD_VALUES = {
    "a number": ("gain", 2.0, "a float"),
    "complex": ("weight", torch.zeros(4, 4) + 1j, "a tensor of torch.complex64"),
    "a fraction": ("count", torch.tensor(5.7), "a tensor of torch.float32"),
    "sparse": ("weight", torch.zeros(4, 4).to_sparse(), "a tensor of torch.float32, sparse_coo"),
    "meta": (
        "weight",
        torch.zeros(4, 4, device="meta"),
        "a tensor of torch.float32, strided on the meta",
    ),
}


# torch 2.11 warns whenever it reads a sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize(("name", "value", "told"), ODD_VALUES.values(), ids=list(ODD_VALUES))
def test_a_value_that_a_tensor_cannot_take_leaves_the_model_alone(name, value, told, tmp_path):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(4, 4))
    model.gain = torch.nn.Parameter(torch.ones(()))
    model.register_buffer("count", torch.tensor(3))
    saved = {"weight": torch.zeros(4, 4), "gain": torch.tensor(2.0), "count": torch.tensor(5)}
    torch.save({"model": saved | {name: value}}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=rf"has {told}.* for '{name}', and the model's own"):
        load_checkpoint(tmp_path / "run.pt", model=model)
    assert (model.weight == 1).all()
    assert (model.gain, model.count) == (1, 3)
    torch.save({"model": saved | {"gain": torch.tensor(2)}}, tmp_path / "run.pt")
    load_checkpoint(tmp_path / "run.pt", model=model)
    assert (model.gain, model.count) == (2, 5)


class Around:
    """A host's wrapper, which hands the state dict on."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def test_a_wrapped_optimizer_that_does_not_fit_leaves_the_model_alone(run, tmp_path):
    save_checkpoint(tmp_path / "run.pt", model=run[0], optimizer=run[1])
    other = faults.make_run()[0]
    with torch.no_grad():
        other[0].weight.zero_()
    few = torch_bf16.AdamW(list(other.parameters())[1:])
    with pytest.raises(StateMismatchError, match=r"groups of \[4\] parameters"):
        load_checkpoint(tmp_path / "run.pt", model=other, optimizer=Around(few))
    assert not other[0].weight.any()
    fits = Around(torch_bf16.AdamW(other.parameters()))
    load_checkpoint(tmp_path / "run.pt", model=other, optimizer=fits)
    assert fits.optimizer.state


def test_an_error_without_words_is_named(tmp_path, monkeypatch):
    def load(*args, **options):
        raise MemoryError

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CheckpointError, match="could not load it again: MemoryError"):
        save_checkpoint(tmp_path / "run.pt", step=1)


def test_what_cannot_be_loaded_again_is_not_written(run, tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, step=1)
    before = path.read_bytes()
    for odd, name in ((random.Random(1), "random.Random"), (Namespace(a=1), "argparse.Namespace")):
        match = (
            rf"run.pt was not written, because weights_only=True .*again: it holds {name}\. Pass"
        )
        with pytest.raises(CheckpointError, match=match):
            save_checkpoint(path, model=run[0], odd=odd)
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


@pytest.mark.parametrize("again", [False, True], ids=["done", "writes-the-next"])
def test_a_file_that_another_process_has_finished_meanwhile_is_left_alone(
    again, tmp_path, monkeypatch
):
    """It was opened under its temporary name, and is the checkpoint by the time it is locked."""
    path, partial = tmp_path / "run.pt", tmp_path / ".run.pt.partial"
    lock = atomic_write._lock

    def late(*arguments):
        monkeypatch.setattr(atomic_write, "_lock", lock)
        save_checkpoint(path, who="the other one")
        if again:
            partial.write_bytes(b"x")
        lock(*arguments)

    monkeypatch.setattr(atomic_write, "_lock", late)
    with pytest.raises(CheckpointError, match="another process is writing"):
        save_checkpoint(path, who="this one")
    assert load_checkpoint(path) == {"who": "the other one"}
    assert partial.exists() == again


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_at_random_moments_lose_nothing():
    """In a process of its own: the test process may hold threads, which a fork would lose."""
    command = [sys.executable, faults.__file__, "kills", "--count", "8", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed: 8" in done.stdout

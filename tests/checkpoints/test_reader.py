"""Checkpoints of every kind are read alike, a piece at a time; what is none is refused by name."""

import io
import json
import os
import pickle
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torch_bf16
from torch_bf16.checkpoints.reader import open_checkpoint
from torch_bf16.errors import CheckpointError
from torch_bf16.sharding import as_real
from torch_bf16.tools.doctor.assignment import assign_states

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # DCP without a process group


def trained():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False))
    model[1].wave = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    (model(torch.randn(3, 8)).square().mean() + model[1].wave.abs().sum()).backward()
    optimizer.step()
    return model, optimizer


def write(kind, path):
    """A checkpoint of :func:`trained` in one form; its path."""
    model, optimizer = trained()
    weights, states = model.state_dict(), optimizer.state_dict()
    folder = path / kind
    folder.mkdir()
    file = folder / "run.ckpt"
    if kind == "state dict":
        torch.save(weights, file)
    elif kind == "lightning":
        content = {"state_dict": weights, "optimizer_states": [states], "global_step": 7}
        torch.save(content, file)
    elif kind == "ours":
        torch_bf16.save_checkpoint(file, model=model, optimizer=optimizer)
    elif kind == "safetensors":
        file = folder / "model.safetensors"
        safetensors.save_file(weights, file)
    elif kind == "sharded index":
        names = list(weights)
        for number, name in enumerate(names):
            safetensors.save_file({name: weights[name]}, folder / f"part{number}.safetensors")
        file = folder / "model.safetensors.index.json"
        placed = {name: f"part{number}.safetensors" for number, name in enumerate(names)}
        file.write_text(json.dumps({"weight_map": placed}))
    elif kind == "bin index":
        torch.save(weights, folder / "part.bin")
        file = folder
        index = {"weight_map": dict.fromkeys(weights, "part.bin")}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    elif kind == "trainer":
        file = folder
        safetensors.save_file(weights, folder / "model.safetensors")
        torch.save(states, folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text('{"global_step": 7}')
    elif kind == "adapter":
        file = folder
        safetensors.save_file(weights, folder / "adapter_model.safetensors")
    else:
        file = folder
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    return file


KINDS = [
    *("state dict", "lightning", "ours", "safetensors", "sharded index", "bin index"),
    *("trainer", "adapter", "dcp"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_numbers(kind, tmp_path):
    model, optimizer = trained()
    found = open_checkpoint(write(kind, tmp_path))
    weights = model.state_dict()
    assert found.tensors.keys() == weights.keys()
    for name, each in found.tensors.items():
        assert torch.equal(each.whole(), weights[name])
        assert each.shape == tuple(as_real(weights[name]).shape)
        assert torch.equal(each.read(2, 5), as_real(weights[name]).reshape(-1)[2:5])
    if kind in ("lightning", "trainer"):
        assert found.step == 7
    if kind in ("lightning", "ours", "trainer", "dcp"):
        assert len(found.optimizers[0].state) == 4
        assert found.optimizers[0].groups[0]["lr"] == 1e-3
        *_, of_matrix, of_wave = found.optimizers[0].state.values()
        for parameter, saved in ((model[1].weight, of_matrix), (model[1].wave, of_wave)):
            assert torch.equal(saved["exp_avg"].whole(), optimizer.state[parameter]["exp_avg"])


def save_shards(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(70.0).view(7, 10)
    mesh = init_device_mesh("cpu", (2,))
    parts = {f"by{dim}": distribute_tensor(whole, mesh, [Shard(dim)]) for dim in (0, 1)}
    dcp.save({"model": parts}, checkpoint_id=folder)


@pytest.mark.parametrize("kind", ["lightning", "dcp"])
def test_tensors_are_read_by_rows_however_they_lie_in_memory(kind, tmp_path):
    torch.manual_seed(0)
    weights = {
        "channels_last": torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 5).t(),
        "complex": torch.randn(3, 5, dtype=torch.complex64).t(),
        "float8": torch.randn(3, 4).to(torch.float8_e4m3fn),
        "column": torch.randn(4, 1),
        "number": torch.tensor(2.0),
        "nothing": torch.empty(0, 3),
    }
    path = tmp_path / "run"
    if kind == "dcp":
        dcp.save({"model": weights}, checkpoint_id=path)
    else:
        torch.save({"state_dict": weights}, path)
    for name, saved in open_checkpoint(path).tensors.items():
        weight = as_real(weights[name])
        assert torch.equal(as_real(saved.whole()).float(), weight.float())
        pieces = [saved.read(at, min(at + 7, saved.numel)) for at in range(0, saved.numel, 7)]
        read = torch.cat([torch.empty(0, dtype=saved.dtype), *pieces]).view(saved.shape)
        assert torch.equal(read.float(), weight.float())


def test_parts_of_several_ranks_are_put_together(ranks, tmp_path):
    ranks(2, save_shards, str(tmp_path / "saved"))
    found = open_checkpoint(tmp_path / "saved").tensors
    for name in ("by0", "by1"):
        assert torch.equal(found[name].read(0, 70), torch.arange(70.0)), name
        assert torch.equal(found[name].read(13, 58), torch.arange(13.0, 58.0)), name


class Sparing(io.FileIO):
    """A file of which one call reads no more than seven bytes, as Linux's reads at most 2 GiB."""

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:7])


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_a_tensor_is_read_by_as_many_calls_as_it_takes(kind, tmp_path, monkeypatch):
    found = open_checkpoint(write(kind, tmp_path)).tensors["0.weight"]
    monkeypatch.setattr(type(tmp_path), "open", lambda path, *_, **__: Sparing(path))
    assert torch.equal(found.whole(), trained()[0][0].weight)


def test_a_file_that_became_shorter_since_it_was_opened_is_named(tmp_path):
    path = write("safetensors", tmp_path)
    found = open_checkpoint(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut short while"):
        [each.whole() for each in found.tensors.values()]


class Evil:
    """What would write a file, were it unpickled."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


class Harmless:
    def __init__(self):
        self.number = 3


def test_objects_of_other_classes_are_left_out_and_their_code_is_not_run(tmp_path):
    content = {"state_dict": {"w": torch.ones(3)}, "hyper_parameters": Harmless()}
    torch.save(content, tmp_path / "run.ckpt")
    found = open_checkpoint(tmp_path / "run.ckpt")
    assert torch.equal(found.tensors["w"].read(0, 3), torch.ones(3))
    assert "also holds test_reader.Harmless; none of its code was run" in found.notes[0]


def _mkdir_by(module: str, name: str, target: str) -> bytes:
    """A pickle that calls what a module has imported."""

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()

    function = text(module) + text(name) + pickle.STACK_GLOBAL
    call = text(target) + pickle.TUPLE1 + pickle.REDUCE
    return pickle.PROTO + b"\x04" + function + call + pickle.STOP


@pytest.mark.parametrize("kind", ["torch", "plain pickle", "dcp", "dcp, by an import"])
def test_pickles_with_code_run_nothing(kind, tmp_path):
    ran, path = tmp_path / "ran", tmp_path / "run.ckpt"
    if kind == "torch":
        torch.save({"state_dict": {"w": torch.ones(3)}, "x": Evil(ran)}, path)
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps(Evil(ran)))
    else:
        path.mkdir()
        module = "torch.distributed.checkpoint.metadata"
        by_import = _mkdir_by(module, "os.mkdir", str(ran))
        content = pickle.dumps(Evil(ran)) if kind == "dcp" else by_import
        (path / ".metadata").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"names? (posix|.*os\.mkdir)|GLOBAL posix\.mkdir|Unsupported operand"
    ):
        open_checkpoint(path)
    assert not ran.exists()


CORRUPT = [
    *("empty.ckpt", "truncated.ckpt", "binary.pt", "text.pt", "archive.zip", "numbers.pt"),
    *("foreign.pt", "empty.safetensors", "short.safetensors", "huge.safetensors"),
    *("text.safetensors", "size.safetensors", "float.safetensors", "negative.safetensors"),
    *("overlap.safetensors", "gap.safetensors", "rest.safetensors"),
    *("none.safetensors", "model.index.json", "other.index.json", "self.index.json"),
    *("deep.index.json", "other.json"),
]


def corrupt(path):
    """Files that are not checkpoints, by what is wrong, and what is said of them."""
    good = path / "good.ckpt"
    torch.save({"w": torch.ones(100)}, good)
    whole = good.read_bytes()
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    length = len(header).to_bytes(8, "little")

    def sized(header):
        return len(header).to_bytes(8, "little") + header + b"\0" * 16

    part = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":'
    overlap, gap = (
        part + each for each in (b'[3],"data_offsets":[4,16]}}', b'[1],"data_offsets":[12,16]}}')
    )
    negative, real = (header.replace(b"[4]", each) for each in (b"[-2,-2]", b"[4.0]"))
    index = {"weight_map": {"w": "gone.safetensors"}}
    return {
        "empty.ckpt": (b"", "is empty"),
        "truncated.ckpt": (whole[: len(whole) // 2], "was cut short or damaged"),
        "binary.pt": (os.urandom(5000), "was cut short or damaged"),
        "text.pt": (b"hello", "was cut short or damaged"),
        "archive.zip": (None, "not a file that torch.save made"),
        "numbers.pt": ([1, 2, 3], "holds a list, not tensors by name"),
        "foreign.pt": ({"a": 1, "b": "x"}, "has no weights: it holds a, b"),
        "empty.safetensors": (b"", "is empty"),
        "short.safetensors": (length + header + b"\0" * 9, "would end at byte"),
        "huge.safetensors": (b"\xff" * 8 + header, "its header would have"),
        "text.safetensors": (b"\x05\0\0\0\0\0\0\0hello", "its header is not valid"),
        "size.safetensors": (length + header.replace(b"[4]", b"[5]") + b"\0" * 16, "has 16 bytes"),
        "float.safetensors": (sized(real), "has shape"),
        "negative.safetensors": (sized(negative), "has shape"),
        "overlap.safetensors": (sized(overlap), "b begins at byte 4 of the tensors, not at 8"),
        "gap.safetensors": (sized(gap), "b begins at byte 12 of the tensors, not at 8"),
        "rest.safetensors": (sized(header) + b"\0", "1 bytes belong to no tensor"),
        "none.safetensors": (b"\x02\0\0\0\0\0\0\0{}", "holds no tensors"),
        "model.index.json": (json.dumps(index).encode(), "gone.safetensors is not there"),
        "other.index.json": (b"[]", "is not an index of a checkpoint"),
        "self.index.json": (b'{"weight_map": {"w": "self.index.json"}}', "another index"),
        "deep.index.json": (b"[" * 100_000, "is not an index of a checkpoint"),
        "other.json": (b"{}", "such a name ends in .index.json"),
    }


@pytest.mark.parametrize("name", CORRUPT)
def test_a_file_that_is_none_is_named_with_what_is_wrong(name, tmp_path):
    content, said = corrupt(tmp_path)[name]
    path = tmp_path / name
    if content is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("hello.txt", "hello")
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_checkpoint(path)
    assert name in str(caught.value)


def test_folders_that_are_none_say_what_they_hold(tmp_path):
    for name, inside, said in (
        ("nothing", [], "It holds nothing"),
        ("run", ["checkpoint-10", "checkpoint-20"], "give the path of one of them"),
        ("deepspeed", ["zero_to_fp32.py", "global_step5"], "zero_to_fp32.py"),
        ("files", ["a.ckpt", "b.ckpt"], "a.ckpt, b.ckpt: give the path of one of them"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for each in inside:
            (folder / each).mkdir()
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(folder)
    with pytest.raises(FileNotFoundError, match="there is no"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_checkpoint(type(tmp_path)("/dev/null"))


def test_a_weight_may_have_the_name_under_which_others_keep_an_optimizer(tmp_path):
    torch.save({"optimizer": torch.ones(3), "w": torch.ones(3)}, tmp_path / "w.pt")
    assert list(open_checkpoint(tmp_path / "w.pt").tensors) == ["optimizer", "w"]


@pytest.mark.parametrize("kind", ["lightning", "dcp"])
def test_steps_may_be_counted_in_a_tensor_of_one_element(kind, tmp_path):
    model, optimizer = trained()
    for state in optimizer.state.values():
        state["step"] = state["step"].reshape(1)
    weights, states = model.state_dict(), optimizer.state_dict()
    if kind == "dcp":
        dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path)
    else:
        torch.save({"state_dict": weights, "optimizer_states": [states]}, tmp_path / "run.ckpt")
    saved = open_checkpoint(tmp_path if kind == "dcp" else tmp_path / "run.ckpt")
    found = assign_states(saved)
    assert found.note is None
    assert [float(state["step"]) for state, *_ in found.states.values()] == [1.0] * len(weights)


def test_the_order_of_a_file_of_safetensors_is_not_taken_for_the_models(tmp_path):
    model = nn.Sequential()
    model.b, model.a = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "config.json").write_text('{"architecture": "of timm"}')
    found = assign_states(open_checkpoint(tmp_path))
    assert found.states == {}
    assert "2 of 2 states of the optimizer could not be told apart" in str(found.note)


@pytest.mark.parametrize("kind", ["several by name", "under another key", "a config beside them"])
def test_optimizers_are_found_wherever_programs_put_them(kind, tmp_path):
    model, optimizer = trained()
    states = optimizer.state_dict()
    content = {
        "several by name": {"optimizer": {"G": states, "D": states}},
        "under another key": {"optim": states},
        "a config beside them": {"optimizer": {"lr": 1e-3}, "optimizer_state_dict": states},
    }[kind]
    torch.save({"epoch": 3, "net": model.state_dict(), **content}, tmp_path / "run.pt")
    found = open_checkpoint(tmp_path / "run.pt")
    assert found.tensors.keys() == model.state_dict().keys()
    assert len(found.optimizers) == (2 if kind == "several by name" else 1)
    assert set(found.optimizers[0].names().values()) == set(model.state_dict())
    # Nor are moments of an optimizer taken for weights, where those have no key of their own.
    torch.save({"generator": model.state_dict(), **content}, tmp_path / "run.pt")
    names = [f"generator.{name}" for name in model.state_dict()]
    assert [*open_checkpoint(tmp_path / "run.pt").tensors] == names


def test_tied_tensors_appear_once_under_their_first_name(tmp_path):
    head, other = torch.ones(3, 2), torch.ones(3, 2)
    torch.save({"embedding": head, "other": other, "head": head}, tmp_path / "tied.pt")
    saved = open_checkpoint(tmp_path / "tied.pt")
    assert list(saved.tensors) == ["embedding", "other", "head"]
    assert list(saved.untied()) == ["embedding", "other"]


def test_an_incomplete_dcp_folder_is_named(tmp_path):
    path = write("dcp", tmp_path)
    (part,) = path.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="was cut short: model"):
        open_checkpoint(path)
    (path / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"is not what torch\.distributed\.checkpoint writes"):
        open_checkpoint(path)


def test_an_unreadable_file_is_said(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    safetensors.save_file({"w": torch.ones(3)}, path)

    def refused(self, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(path), "open", refused)
    with pytest.raises(PermissionError, match=r"w\.safetensors"):
        open_checkpoint(path)

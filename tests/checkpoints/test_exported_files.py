"""What ``export`` reads of other programs' files, and what it neither reads nor writes over."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from exported import export_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import torch_bf16
from torch_bf16 import fp32_state_dict
from torch_bf16.checkpoints.reader import open_checkpoint
from torch_bf16.errors import CheckpointError
from torch_bf16.tools import cli


def trained():
    """A model with exact masters after a step, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    model, optimizer = torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


class Twice(torch.nn.Module):
    """A module with two weights that have one bare name."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))
        self.module = torch.nn.Linear(4, 4, bias=False)


def test_weights_whose_names_differ_by_module_keep_their_own_masters(tmp_path):
    model = Twice()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    model, optimizer = torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    path, out = tmp_path / "run.pt", tmp_path / "out.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert "2 of them from exact masters" in export_file(path, out)
    read, expected = torch.load(out), fp32_state_dict(model, optimizer)
    assert all(torch.equal(read[name], each) for name, each in expected.items())


@pytest.mark.parametrize("dtype", [torch.float32, "fp32", "float16"])
def test_a_dtype_that_is_not_written_is_refused(dtype, tmp_path):
    torch.save(trained()[0].state_dict(), tmp_path / "run.pt")
    with pytest.raises(ValueError, match=rf"given dtype={dtype!r}; it writes 'float32'"):
        export_file(tmp_path / "run.pt", tmp_path / "out.pt", dtype=dtype)
    assert not (tmp_path / "out.pt").exists()


class Foreign:
    """What is no tensor or number."""


@pytest.mark.parametrize("given", ["folder", "index", "link"])
def test_a_checkpoint_of_several_files_is_not_written_over(given, tmp_path, capsys):
    folder, source, out = tmp_path / "run", tmp_path / "run", str(tmp_path / "out.pt")
    folder.mkdir()
    model, _ = trained()
    torch.save(model.state_dict(), folder / "pytorch_model-1.bin")
    index = folder / "pytorch_model.bin.index.json"
    placed = dict.fromkeys(model.state_dict(), "pytorch_model-1.bin")
    index.write_text(json.dumps({"weight_map": placed}))
    if given == "index":
        source = index
    elif given == "link":
        source = tmp_path / "link"
        source.symlink_to(folder)
    before = {each: each.read_bytes() for each in folder.iterdir()}
    for output in map(str, before):
        for command in (["export", str(source), output], ["doctor", str(source), "--json", output]):
            assert cli.main(command) == 2
            assert "and would be overwritten: give another name" in capsys.readouterr().err
    assert {each: each.read_bytes() for each in folder.iterdir()} == before
    assert cli.main(["export", str(source), out]) == 0
    assert cli.main(["export", str(source), str(folder / "new.pt")]) == 0


@pytest.mark.parametrize("key", ["net", "weights", "params", "module", None])
def test_export_reads_what_estimate_and_doctor_read(key, tmp_path, capsys):
    (model, optimizer), path = trained(), tmp_path / "run.pt"
    weights = {key: model.state_dict()} if key else model.state_dict()
    states = {"one": optimizer.state_dict()}
    torch.save({**weights, "optimizer": states, "hyper_parameters": Foreign()}, path)
    assert cli.main(["export", str(path), str(tmp_path / "out.pt")]) == 0
    assert (
        "also holds test_exported_files.Foreign; none of its code was run"
        in capsys.readouterr().err
    )
    read = torch.load(tmp_path / "out.pt")
    expected = fp32_state_dict(model, optimizer)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], each) for name, each in expected.items())


@pytest.mark.parametrize("given", ["an index", "a folder", "an optimizer's file"])
def test_checksums_are_compared_in_files_of_every_place(given, tmp_path, capsys):
    (model, optimizer), path = trained(), tmp_path / "run.pt"
    torch.save({"model": model.state_dict()}, path)
    target = tmp_path / "pytorch_model.bin"
    content = optimizer.state_dict() if "optimizer" in given else model.state_dict()
    torch.save(content, target)
    held = optimizer.state[model[0].weight]["exp_avg"] if "optimizer" in given else model[0].weight
    data = bytearray(target.read_bytes())
    data[data.index(held.detach().view(torch.uint8).numpy().tobytes())] ^= 1
    target.write_bytes(data)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), target.name)}))
    arguments = {
        "an index": [str(index)],
        "a folder": [str(tmp_path)],
        "an optimizer's file": [str(path), "--optimizer", str(target)],
    }[given]
    assert cli.main(["export", *arguments[:1], str(tmp_path / "out.x"), *arguments[1:]]) == 2
    assert "pytorch_model.bin" in (err := capsys.readouterr().err)
    assert "was cut short or damaged" in err


# torch 2.11 warns whenever it reads a sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("kind", ["sparse", "unknown dtype"])
def test_weights_that_cannot_be_read_are_not_left_out_in_silence(kind, tmp_path, capsys):
    path = tmp_path / "run.pt"
    torch.save({"a": torch.ones(3), "b": torch.eye(3).to_sparse()}, path)
    if kind == "unknown dtype":
        path = tmp_path / "run.safetensors"
        entries = {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F2", "shape": [1], "data_offsets": [4, 8]},
        }
        header = json.dumps(entries).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert cli.main(["export", str(path), str(tmp_path / "out.pt")]) == 2
    assert "run" in (err := capsys.readouterr().err)
    assert "holds tensors that cannot be exported: b is " in err
    assert cli.main(["estimate", str(path)]) == 0
    assert "b is " in capsys.readouterr().out


def test_tied_weights_are_written_to_safetensors_under_each_name(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    whole = torch.arange(6.0).view(2, 3)
    torch.save({"a": whole, "b": whole, "row": whole[1:], "c": whole + 1}, tmp_path / "tied.pt")
    export_file(tmp_path / "tied.pt", tmp_path / "out.safetensors")
    read = safetensors.load_file(tmp_path / "out.safetensors")
    assert read.keys() == {"a", "b", "row", "c"}
    assert torch.equal(read["b"], whole)
    assert torch.equal(read["row"], whole[1:])


def test_a_weight_with_the_bits_of_two_has_the_master_of_neither(tmp_path):
    """Nor one of the same number all over, as many norms have."""
    model = torch.nn.ModuleDict({name: torch.nn.LayerNorm(4, bias=False) for name in "abc"})
    model.update({name: torch.nn.Linear(4, 4, bias=False) for name in "de"})
    model["e"].weight.data.copy_(model["d"].weight)
    trained = [model[name].weight for name in "abde"]
    optimizer = torch.optim.SGD([(f"{name}.weight", model[name].weight) for name in "abde"], 2**-12)
    torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    for each in trained:
        each.grad = torch.ones_like(each)
    optimizer.step()
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    weights["f.weight"] = weights["d.weight"].clone()
    torch_bf16.save_checkpoint(tmp_path / "run.pt", model=weights, optimizer=optimizer)
    assert "6 tensors, 4 of them from exact masters" in export_file(
        tmp_path / "run.pt", tmp_path / "out.pt"
    )


def parted():
    """A model whose two halves have an optimizer each, with exact masters after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    both = [
        torch.optim.AdamW(part.parameters(), lr=lr)
        for part, lr in zip(model, (1e-3, 1e-2), strict=True)
    ]
    torch_bf16.prepare(model, both, "bf16-fp32-master")
    for part, optimizer in zip(model, both, strict=True):
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, both


@pytest.mark.filterwarnings("ignore::UserWarning")  # DCP without a process group
@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("place", ["two keys", "a list", "other keys", "flattened"])
def test_masters_of_several_optimizers_are_found_and_not_mixed_up(place, kind, tmp_path):
    model, both = parted()
    expected, path = fp32_state_dict(model, *both), tmp_path / "run"
    one, two = (each.state_dict() for each in both)
    if place == "flattened":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        content = {"optimizer": get_optimizer_state_dict(model, both, options=options)}
    else:
        content = {
            "two keys": {"optimizer_0": one, "optimizer_1": two},
            "a list": {"optimizer": [one, two]},
            "other keys": {"opt_encoder": one, "opt_decoder": two},
        }[place]
    content["model"] = model.state_dict()
    if kind == "dcp":
        dcp.save(content, checkpoint_id=path)
    else:
        torch.save(content, path)
    assert "4 of them from exact masters" in export_file(path, tmp_path / "out.pt")
    read = torch.load(tmp_path / "out.pt")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], each) for name, each in expected.items())
    rates = [group["lr"] for each in open_checkpoint(path).optimizers for group in each.groups]
    assert sorted({*rates}) == [1e-3, 1e-2]


def test_states_of_optimizers_are_never_taken_for_weights(tmp_path):
    model, optimizer = trained()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="has no weights: it holds state, param_groups"):
        open_checkpoint(tmp_path / "optimizer.pt")
    inner = {"net": model.state_dict(), "adam": optimizer.state_dict()}
    torch.save({"trainer": inner}, tmp_path / "run.pt")
    saved = open_checkpoint(tmp_path / "run.pt")
    assert [*saved.tensors] == [f"trainer.net.{name}" for name in model.state_dict()]
    assert saved.notes == ["trainer.adam is an optimizer's, and not at the first level: left out"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # DCP without a process group
def test_a_weight_of_a_folder_may_be_named_like_an_optimizer(tmp_path):
    weights = {"optimizer_net.weight": torch.ones(3), "optim_head.state.bias": torch.ones(2)}
    dcp.save(weights, checkpoint_id=tmp_path)
    assert open_checkpoint(tmp_path).tensors.keys() == weights.keys()

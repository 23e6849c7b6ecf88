"""Folders of ``torch.distributed.checkpoint`` that are whole, and those that must be refused."""

import io
import pickle
import shutil
import zipfile
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exported import export_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_bf16
from torch_bf16.checkpoints.reader import open_checkpoint
from torch_bf16.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # DCP without a process group


@pytest.fixture
def mesh():
    """The mesh of the first rank of two, of which the other does not run."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_folder_that_lacks_the_parts_of_other_ranks_is_refused(mesh, tmp_path):
    weight = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    folder = tmp_path / "run"
    dcp.save({"weight": weight}, checkpoint_id=folder, no_dist=True)
    wrong = rf"{folder} has 6 of the 12 elements of weight: it lacks the parts of other ranks"
    with pytest.raises(CheckpointError, match=wrong):
        export_file(folder, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_folder_that_replaces_another_is_read_as_it_lies(tmp_path):
    folder, numbers = tmp_path / "run", torch.arange(12.0)
    for weight in (numbers.view(3, 4), numbers.view(4, 3).t()):
        shutil.rmtree(folder, ignore_errors=True)
        dcp.save({"weight": weight}, checkpoint_id=folder)
        assert torch.equal(open_checkpoint(folder).tensors["weight"].whole(), weight)


def test_the_master_of_a_number_is_read(tmp_path):
    """Such as CLIP's logit_scale, whose states have its shape, ()."""
    model = torch.nn.ParameterDict({"scale": torch.tensor(0.3)})
    model, optimizer = torch_bf16.prepare(
        model, torch.optim.AdamW(model.parameters()), "bf16-fp32-master"
    )
    model["scale"].grad = torch.ones_like(model["scale"])
    optimizer.step()
    states = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optim": states}, checkpoint_id=tmp_path / "run")
    export_file(tmp_path / "run", tmp_path / "out.pt")
    exact = optimizer.exact_weight(model["scale"])
    assert torch.equal(torch.load(tmp_path / "out.pt")["scale"], exact)


@pytest.mark.parametrize("part", [b"", b"weight"], ids=["first byte", "name"])
def test_a_small_object_that_is_damaged_is_not_taken_for_none(part, tmp_path):
    """Those with the names of an optimizer's parameters, whose masters would belong to nothing."""
    model = torch_bf16.cast_model(torch.nn.Linear(4, 4), "bf16-fp32-master")
    optimizer = torch_bf16.AdamW(model.named_parameters(), recipe="bf16-fp32-master")
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    groups = [{"params": ["weight", "bias"]}]
    states = {"state": {"weight": optimizer.state[model.weight]}, "param_groups": groups}
    content, folder = {"model": model.state_dict(), "optim": states}, tmp_path / "run"
    dcp.save(content, checkpoint_id=folder)
    places = dcp.FileSystemReader(folder).read_metadata().storage_data
    (place,) = (each for index, each in places.items() if "param_groups" in index.fqn)
    file = folder / place.relative_path
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(part, place.offset)] ^= 0x40
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"is damaged at byte .* where optim.param_groups"):
        export_file(folder, tmp_path / "out.pt")
    assert open_checkpoint(folder).optimizers[0].names() == {"weight": "weight"}


def test_a_flipped_byte_in_a_folder_is_not_exported(tmp_path):
    weight, folder = torch.arange(12.0), tmp_path / "run"
    dcp.save({"weight": weight}, checkpoint_id=folder)
    (file,) = folder.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 7] ^= 0x40
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged at byte .*Bad CRC-32|another checksum"):
        export_file(folder, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def _without_its_place(folder, metadata):
    for index in [each for each in metadata.storage_data if each.fqn == "weight"]:
        del metadata.storage_data[index]


def _of_another_dtype(folder, metadata):
    metadata.state_dict_metadata["weight"].properties.dtype = torch.float64


def _compressed(folder, metadata):
    """The one part of the folder, its records deflated."""
    ((index, place),) = metadata.storage_data.items()
    file, packed = folder / place.relative_path, io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    file.write_bytes(packed.getvalue())
    metadata.storage_data[index] = replace(place, length=len(packed.getvalue()))


def test_an_option_that_has_no_place_in_the_files_is_taken_for_none(tmp_path):
    states = {"state": {"weight": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
    folder = tmp_path / "run"
    dcp.save({"model": {"weight": torch.ones(3)}, "optim": states}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for index in [each for each in metadata.storage_data if "param_groups" in each.fqn]:
        del metadata.storage_data[index]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (found,) = open_checkpoint(folder).optimizers
    assert found.state["weight"]["step"] == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (_without_its_place, r"run: weight lacks its part at \(0, 0\)"),
        (_of_another_dtype, r"weight of shape \(4, 3\) has 48 bytes; it is damaged"),
        (_compressed, "it is compressed"),
    ],
)
def test_a_part_that_is_not_what_the_metadata_say_is_refused(changed, said, tmp_path):
    folder = tmp_path / "run"
    dcp.save({"weight": torch.arange(12.0).view(4, 3)}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    changed(folder, metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(folder).tensors["weight"].whole()


def test_a_view_that_is_not_its_memory_is_refused(tmp_path):
    weight = torch.randn(3, dtype=torch.complex64).conj()
    dcp.save({"weight": weight}, checkpoint_id=tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds a view of a tensor, such as its conjugate"):
        open_checkpoint(tmp_path / "run").tensors["weight"].whole()

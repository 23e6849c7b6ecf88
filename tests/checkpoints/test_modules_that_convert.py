"""Modules that read files of other versions of themselves, with other names and shapes."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from torch_bf16 import CheckpointError, load_checkpoint, save_checkpoint


class Renamed(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Grown(nn.Module):
    def __init__(self, count=0):
        super().__init__()
        self.register_buffer("seen", torch.arange(count))

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def renamed():
    """What was saved, the part that reads it, and the names of one tensor in both."""
    old = {"1.kernel" if k == "1.weight" else k: each for k, each in inner(Renamed(3, 3)).items()}
    return old, Renamed(3, 3), "1.kernel", "1.weight"


def normed():
    old = inner(nn.utils.weight_norm(nn.Linear(3, 3)))
    part = parametrizations.weight_norm(nn.Linear(3, 3))
    return old, part, "1.weight_v", "1.parametrizations.weight.original1"


def grown():
    return inner(Grown(5)), Grown(), "1.seen", "1.seen"


def inner(part):
    return nn.Sequential(nn.Linear(2, 3), part).state_dict()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [renamed, normed, grown])
def test_what_torch_loads_is_loaded(make, tmp_path):
    saved, part, name, own_name = make()
    model = nn.Sequential(nn.Linear(2, 3), part)
    torch.save({"model": saved}, tmp_path / "old.pt")
    load_checkpoint(tmp_path / "old.pt", model=model)
    loaded = model.state_dict()
    assert torch.equal(loaded["0.weight"], saved["0.weight"])
    assert torch.equal(loaded[own_name], saved[name])


def test_the_parts_beside_them_are_compared_before_anything_is_loaded(tmp_path):
    saved, part, *_ = renamed()
    model = nn.Sequential(nn.Linear(4, 3), part)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    torch.save({"model": saved}, tmp_path / "old.pt")
    with pytest.raises(CheckpointError, match=r"has shapes 0\.weight"):
        load_checkpoint(tmp_path / "old.pt", model=model)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_batch_norms_are_compared(tmp_path):
    save_checkpoint(tmp_path / "it.pt", model=nn.BatchNorm1d(3))
    with pytest.raises(CheckpointError, match="is of another model"):
        load_checkpoint(tmp_path / "it.pt", model=nn.BatchNorm1d(4))

"""What is replaced in torch for the whole process is listed, and can be turned off and undone."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bf16
from torch_bf16 import torch_patches
from torch_bf16.model import autocast
from torch_bf16.torch_patches import PATCHES, SWITCH

ROOT = Path(__file__).parents[2]
torch_patches.restore()
SAVE = torch.optim.Optimizer.state_dict  # which torch itself has wrapped


@pytest.fixture(autouse=True)
def unpatched():
    torch_patches.restore()
    yield
    torch_patches.restore()
    autocast.fill_gaps()


def train() -> None:
    """All that applies a patch."""
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    recipe = torch_bf16.get_recipe("bf16-fp32-master", backend="eager")
    torch_bf16.prepare(model, optimizer, recipe)
    with torch_bf16.arithmetic("cpu", "fp32"):
        model(torch.arange(8)).sum().backward()
    optimizer.step()


def applied() -> set[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name
        for name, is_applied in {
            "optimizer_subclasses": "__subclasses__" in vars(torch.optim.Optimizer),
            "optimizer_state_dict": SAVE is not torch.optim.Optimizer.state_dict,
            "autocast_kernels": has_kernel("aten::linalg_matrix_exp", "AutocastCPU"),
            "autocast_to_fp32": has_kernel("aten::embedding", "AutocastCPU"),
            "dispatch_mode_enter": hasattr(TorchDispatchMode.__enter__, "__wrapped__"),
            "autocast_init": hasattr(torch.autocast.__init__, "__wrapped__"),
            "autocast_exit": hasattr(torch.autocast.__exit__, "__wrapped__"),
            "averaged_model": hasattr(AveragedModel.update_parameters, "__wrapped__"),
            "foreach_lerp": hasattr(torch._foreach_lerp_, "__wrapped__"),
            "tensor_lerp": hasattr(torch.Tensor.lerp_, "__wrapped__"),
            "load_from_state_dict": hasattr(nn.Module._load_from_state_dict, "__wrapped__"),
            "parameter_deepcopy": hasattr(nn.Parameter.__deepcopy__, "__wrapped__"),
            "parameter_data": "data" in vars(nn.Parameter),
        }.items()
        if is_applied
    }


def test_training_applies_each_listed_patch_and_restore_undoes_all():
    assert applied() == set()
    train()
    assert applied() == set(PATCHES)
    torch_patches.restore()
    assert applied() == set()


@pytest.mark.parametrize("value", ["all", "autocast_exit", "parameter_data, autocast_init"])
def test_what_the_variable_names_is_not_applied(monkeypatch, value):
    monkeypatch.setenv(SWITCH, value)
    train()
    named = {part.strip() for part in value.split(",")}
    assert applied() == (set() if value == "all" else set(PATCHES) - named)


def test_a_patch_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv(SWITCH, "autocast")
    with pytest.raises(ValueError, match=r"'autocast': autocast is no patch .* autocast_kernels"):
        torch_bf16.cast_model(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:.* written through p.data:UserWarning")
def test_without_the_patch_a_write_through_data_keeps_the_remainder(monkeypatch):
    """What the table says of parameter_data is true."""

    def written() -> torch.Tensor:
        weight = nn.Parameter(torch.full((64, 64), 1.003))
        model = nn.ParameterDict({"weight": weight})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        torch_bf16.prepare(
            model, optimizer, torch_bf16.get_recipe("bf16-fp32-master", backend="eager")
        )
        for _ in range(2):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            weight.data.fill_(2)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        return optimizer.exact_weight(weight)

    assert (written() == 2).all()
    torch_patches.restore()
    monkeypatch.setenv(SWITCH, "parameter_data")
    assert (written() != 2).all()


def test_each_patch_is_undone_by_its_module_and_has_a_row_in_the_documentation():
    page = (ROOT / "docs" / "versions.md").read_text()
    for name, patch in PATCHES.items():
        assert callable(importlib.import_module(patch.module).restore)
        assert re.search(rf"^\| `{name}` \|", page, re.M)

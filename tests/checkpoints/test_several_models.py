"""Files with several models, or with one under a name of the program's own."""

import torch
from exported import export_file
from torch import nn

import torch_bf16
from torch_bf16.checkpoints.reader import open_checkpoint


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)


def trained(module):
    module = torch_bf16.cast_model(module, "bf16-fp32-master")
    optimizer = torch_bf16.AdamW(module.named_parameters(), recipe="bf16-fp32-master")
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return module, optimizer


def exported(tmp_path, **parts):
    torch_bf16.save_checkpoint(tmp_path / "run.pt", **parts)
    line = export_file(tmp_path / "run.pt", tmp_path / "out.pt")
    return line, torch.load(tmp_path / "out.pt")


def assert_exact(found, model, optimizer, prefix=""):
    for name, p in model.named_parameters():
        assert torch.equal(found[f"{prefix}{name}"], optimizer.exact_weight(p))


def test_a_model_may_have_any_name(tmp_path):
    model, optimizer = trained(nn.Linear(8, 8))
    line, found = exported(tmp_path, net_g=model, optimizer=optimizer, epoch=3)
    assert "2 tensors, 2 of them from exact masters" in line
    assert_exact(found, model, optimizer, "net_g.")


def test_two_models_have_their_masters_under_their_own_names(tmp_path):
    one, two = trained(nn.Linear(8, 8)), trained(Inside())
    parts = {"generator": one[0], "critic": two[0], "first": one[1], "second": two[1]}
    line, found = exported(tmp_path, **parts)
    assert "4 tensors, 4 of them from exact masters" in line
    assert_exact(found, *one, "generator.")
    assert_exact(found, *two, "critic.")


def test_a_module_around_the_trained_one_was_saved(tmp_path):
    model, optimizer = trained(nn.Linear(8, 8))
    around = Inside()
    around.inner = model
    _, found = exported(tmp_path, model=around, optimizer=optimizer)
    assert_exact(found, model, optimizer, "inner.")


def test_a_model_beside_the_one_that_is_read_is_named(tmp_path):
    rest = {"rng": torch.get_rng_state(), "scores": {"best": torch.ones(()), "of": "accuracy"}}
    torch_bf16.save_checkpoint(
        tmp_path / "run.pt", model=nn.Linear(3, 2), critic=nn.Linear(3, 1), **rest
    )
    saved = open_checkpoint(tmp_path / "run.pt", verify=True)
    assert [each.shape for each in saved.tensors.values()] == [(2, 3), (2,)]
    (note,) = saved.notes
    assert "also holds tensors under 'critic' beside 'model': left out" in note


def test_exported_weights_are_fp32_if_that_loses_nothing(tmp_path):
    tensors = {"half": torch.randn(3).half(), "double": torch.randn(3).double()}
    torch.save(tensors, tmp_path / "run.pt")
    export_file(tmp_path / "run.pt", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")
    assert torch.equal(found["half"], tensors["half"].float())
    assert found["half"].dtype == torch.float32
    assert torch.equal(found["double"], tensors["double"])

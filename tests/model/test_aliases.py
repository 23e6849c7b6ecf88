"""A buffer that is the memory of a weight follows it after the cast, or is named."""

import pytest
import torch
from torch import nn

import torch_bf16

MODES = ["bf16-stochastic", "bf16-fp32-master"]


def with_buffer(make) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model.register_buffer("seen", make(model))
    return model, model.seen


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8).bfloat16()).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_is_the_data_of_a_weight_follows_it(mode):
    model, seen = with_buffer(lambda model: model.weight.data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer, torch_bf16.get_recipe(mode, backend="eager"))
    before = model.weight.detach().clone()
    step(model, optimizer)
    assert not torch.equal(model.weight, before)
    assert model.seen is seen
    assert torch.equal(seen, model.weight)


def test_a_copy_and_a_buffer_of_a_weight_that_stays_fp32_are_left_alone():
    model, copy = with_buffer(lambda model: model.weight.data.clone())
    model.register_buffer("kept", model.bias.data)
    torch_bf16.cast_model(model, torch_bf16.Recipe("kept", keep_fp32=("bias",)))
    assert copy.dtype == model.kept.dtype == torch.float32
    assert model.kept.data_ptr() == model.bias.data_ptr()


@pytest.mark.parametrize(
    "make",
    [lambda model: model.weight.data[2:4], lambda model: model.weight.data.t()],
    ids=["rows", "transposed"],
)
def test_a_buffer_over_memory_of_a_weight_in_another_layout_is_named(make):
    model, _ = with_buffer(make)
    with pytest.warns(UserWarning, match=r"buffer 'seen' \(1 in all\) shares memory with weights"):
        torch_bf16.cast_model(model)


def test_a_row_in_which_weights_lie_is_named():
    model = nn.Linear(8, 8, bias=False)
    row = torch.zeros(200)
    model.register_buffer("row", row)
    model.weight.data = row[64:128].view(8, 8)
    with pytest.warns(UserWarning, match="buffer 'row'"):
        torch_bf16.cast_model(model)


def test_neighbours_in_one_storage_share_no_memory():
    model = nn.Linear(8, 8, bias=False)
    file = torch.zeros(200)
    model.weight.data = file[64:128].view(8, 8)
    model.register_buffer("before", file[:64])
    model.register_buffer("after", file[128:])
    torch_bf16.cast_model(model)
    assert model.before.dtype == model.after.dtype == torch.float32


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)


def as_parameter(model):
    model.decoder.weight = nn.Parameter(model.encoder.weight.t())


def as_data(model):
    model.decoder.weight.data = model.encoder.weight.data.transpose(0, 1)


@pytest.mark.parametrize("tie", [as_parameter, as_data])
def test_weights_that_are_tied_by_their_memory_are_refused(tie):
    model = Autoencoder()
    tie(model)
    with pytest.raises(ValueError, match=r"'(en|de)coder.weight' .* would be trained apart"):
        torch_bf16.cast_model(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.decoder.weight.data_ptr() == model.encoder.weight.data_ptr()


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_parameter_over_the_memory_of_a_weight_follows_it(mode):
    model = nn.ModuleDict({"student": nn.Linear(8, 8), "teacher": nn.Linear(8, 8)})
    model["teacher"].requires_grad_(False).weight.data = model["student"].weight.data
    optimizer = torch.optim.AdamW(model["student"].parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer, torch_bf16.get_recipe(mode, backend="eager"))
    before = model["student"].weight.detach().clone()
    step(model["student"], optimizer)
    assert not torch.equal(model["student"].weight, before)
    assert torch.equal(model["teacher"].weight, model["student"].weight)


def test_weights_in_one_storage_that_share_no_memory_are_cast():
    model, row = Autoencoder(), torch.randn(64)
    model.encoder.weight.data, model.decoder.weight.data = row[:32].view(4, 8), row[32:].view(8, 4)
    columns = torch.randn(4, 10)
    model.both = nn.ParameterList([columns[:, :3], columns[:, 3:]])
    torch_bf16.cast_model(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}

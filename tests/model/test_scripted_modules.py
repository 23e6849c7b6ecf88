"""Modules that TorchScript has compiled, which refuse some of a module's methods."""

import copy

import pytest
import torch
from torch import nn

import torch_bf16

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # deprecated

RECIPES = ["bf16-stochastic", "bf16-fp32-master"]


class HalfUsed(nn.Module):
    """One matrix is trained and one is not, as in the first layer of RWKV-7."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.used(x)


def trained(recipe, steps):
    torch.manual_seed(0)
    model = torch.jit.script(HalfUsed())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch_bf16.prepare(model, optimizer, recipe)
    take_steps(model, optimizer, range(steps))
    return model, optimizer


def take_steps(model, optimizer, seeds):
    for seed in seeds:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        model(x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_matrix_that_is_not_trained_ends_no_run(recipe):
    """Blended weights are looked for after some twenty steps."""
    model, _ = trained(recipe, 40)
    assert model.unused.weight.grad is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_has_the_bits_of_one(recipe):
    whole, optimizer = trained(recipe, 4)
    resumed, other = trained(recipe, 0)
    first, of_first = trained(recipe, 2)
    resumed.load_state_dict(first.state_dict())
    other.load_state_dict(of_first.state_dict())
    take_steps(resumed, other, range(2, 4))
    for one, same in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, same)
        assert torch.equal(optimizer.exact_weight(one), other.exact_weight(same))


def test_places_of_weights_are_found_where_casts_replace_parameters():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model, optimizer = trained("bf16-fp32-master", 1)
        exact = optimizer.exact_weight(model.unused.weight)
        assert not torch.equal(exact, model.unused.weight.float())
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


class Recurrent(nn.Module):
    """TorchScript knows the forward of an LSTM by its overloads."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def test_a_recurrent_network_that_carried_autocast_is_scripted_in_fp32():
    model = torch_bf16.carry_autocast(torch_bf16.cast_model(Recurrent()))
    exported = copy.deepcopy(model).float()
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(torch.jit.script(exported)(x), exported(x))

"""State dicts of complex parameters: complex states, to and from torch.optim and files."""

import copy

import pytest
import torch
from complex_cases import assert_like_twin, give, make_pair, make_tensors, random_gradients, real
from optimizer_cases import OPTIMIZERS, backend_of
from torch import nn

import torch_bf16
from torch_bf16 import StateMismatchError

IN_TORCH = [name for name, case in OPTIMIZERS.items() if case[1]]


def complex_only(name, ours=True):
    """An optimizer of complex parameters only, of ours or torch's."""
    mine, theirs, options = OPTIMIZERS[name]
    tensors = [each.clone() for each in make_tensors().values() if each.is_complex()]
    parameters = [nn.Parameter(each) for each in tensors]
    if not ours:
        return theirs(parameters, **options)
    return mine(parameters, **options, recipe="bf16-stochastic", backend=backend_of(name))


def train(optimizer, seeds):
    for seed in seeds:
        parameters = optimizer.param_groups[0]["params"]
        gradients = random_gradients(optimizer, seed)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    return optimizer


def move_weights(source, target):
    pairs = zip(source.param_groups[0]["params"], target.param_groups[0]["params"], strict=True)
    with torch.no_grad():
        for p, other in pairs:
            other.copy_(p)


def states(optimizer):
    return [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]


def tensors_in(state):
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step"}


def assert_same_states(one, other):
    for state, theirs in zip(states(one), states(other), strict=True):
        found = tensors_in(state)
        assert all(torch.equal(each, theirs[key]) for key, each in found.items())
        assert all(each.dtype == theirs[key].dtype for key, each in found.items())


def assert_close(one, other):
    pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in pairs)


@pytest.mark.parametrize("way", ["load", "convert"])
@pytest.mark.parametrize("name", IN_TORCH)
def test_torch_states_are_taken_over_and_go_on_as_in_torch(name, way):
    theirs = train(complex_only(name, ours=False), range(3))
    if way == "load":
        ours = complex_only(name)
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    else:
        ours = complex_only(name, ours=False)
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        torch_bf16.convert(ours, "bf16-stochastic")
    move_weights(theirs, ours)
    assert_same_states(ours, theirs)
    assert_close(train(ours, range(3, 6)), train(theirs, range(3, 6)))


@pytest.mark.parametrize("name", IN_TORCH)
def test_torch_takes_our_states_over_and_goes_on_as_we_do(name):
    ours, theirs = train(complex_only(name), range(3)), complex_only(name, ours=False)
    saved = torch_bf16.fp32_optimizer_state_dict(ours)
    aliases = {each.data_ptr() for state in states(ours) for each in tensors_in(state).values()}
    theirs.load_state_dict(saved)
    move_weights(ours, theirs)
    assert_same_states(ours, theirs)
    for state in states(theirs):
        assert all(
            each.data_ptr() not in aliases for each in tensors_in(state).values() if each.numel()
        )
    assert_close(train(theirs, range(3, 6)), train(ours, range(3, 6)))


@pytest.mark.parametrize("name", ["amsgrad", "centered", "schedule_free_adamw"])
@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_a_resumed_run_repeats_every_bit(name, recipe, tmp_path):
    pair = make_pair(name, recipe, "eager")
    for seed in range(3):
        give(pair, random_gradients(pair[0], seed))
        for each in pair:
            each.step()
    torch.save(pair[0].state_dict(), tmp_path / "state.pt")
    resumed, _ = make_pair(name, recipe, "eager", seed=1)
    move_weights(pair[0], resumed)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for seed in range(3, 5):
        give(pair, random_gradients(pair[0], seed))
        give((resumed, copy.deepcopy(pair[1])), random_gradients(resumed, seed))
        for each in (*pair, resumed):
            each.step()
    assert_like_twin(*pair)
    assert_like_twin(resumed, pair[1])


def test_states_of_a_model_that_stored_pairs_of_real_numbers_are_taken_over():
    complex_, twin = make_pair("adamw", "stochastic", "cpu")
    give((complex_, twin), random_gradients(complex_, 0))
    twin.step()
    complex_.load_state_dict(copy.deepcopy(twin.state_dict()))
    for p, other in zip(
        *(each.param_groups[0]["params"] for each in (complex_, twin)), strict=True
    ):
        with torch.no_grad():
            real(p).copy_(other)
    assert_like_twin(complex_, twin)


def test_a_state_of_another_shape_is_refused_and_nothing_changes():
    ours = train(complex_only("adamw"), range(2))
    before = copy.deepcopy(states(ours))
    saved = copy.deepcopy(ours.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(3, 5, dtype=torch.complex64)
    with pytest.raises(StateMismatchError, match=r"exp_avg of .* saved from another model"):
        ours.load_state_dict(saved)
    for state, then in zip(states(ours), before, strict=True):
        assert all(torch.equal(each, then[key]) for key, each in tensors_in(state).items())


@pytest.mark.parametrize("mode", ["bf16-stochastic", "bf16-fp32-master"])
def test_files_hold_complex_weights_and_exports_keep_them(mode, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        model.wave = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        return torch_bf16.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), mode)

    def step(model, optimizer, seed):
        torch.manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()

    model, optimizer = make(0)
    step(model, optimizer, 1)
    torch_bf16.save_checkpoint(tmp_path / "run.pt", model=model, optimizer=optimizer)
    again = make(2)
    torch_bf16.load_checkpoint(tmp_path / "run.pt", model=again[0], optimizer=again[1])
    exported = torch_bf16.fp32_state_dict(model, optimizer)["wave"].clone()
    assert exported.dtype == torch.complex64
    assert torch.equal(exported, model.wave)
    for each in ((model, optimizer), again):
        step(*each, 3)
    pairs = zip(model.parameters(), again[0].parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert (exported != model.wave).all()

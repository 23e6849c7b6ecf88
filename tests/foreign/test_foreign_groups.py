"""Parameter groups of an optimizer that steps by its own code: their counters and options."""

import pytest
import torch
from foreign_cases import exact_weights, make_run
from optimizer_cases import bits

import torch_bf16


class WarmsUp(torch.optim.Optimizer):
    """Descent at a rate that grows with the steps that each group has counted."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "steps": 0})

    def rate(self, group):
        return group["lr"] * min(1.0, 0.1 * group["steps"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            device = group["params"][0].device
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * torch.tensor(self.rate(group), device=device))


class FollowsTheFirst(WarmsUp):
    """The same, at the rate of the first group."""

    def rate(self, group):
        return super().rate(self.param_groups[0])


def in_groups(kind):
    """An optimizer with a group for each of the parameters."""
    return lambda parameters: kind(
        [{"params": [p], "lr": 0.01 * (n + 1)} for n, p in enumerate(parameters)]
    )


@pytest.mark.parametrize("kind", [WarmsUp, FollowsTheFirst])
@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20], ids=["a tensor at a time", "all at once"])
def test_a_group_that_is_unfrozen_late_has_counted_the_steps_before(kind, bucket_bytes):
    runs = [make_run(in_groups(kind), recipe) for recipe in (None, "bf16-fp32-master")]
    runs[1][1].bucket_bytes = bucket_bytes
    for model, optimizer in runs:
        model[0].requires_grad_(False)
        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            if seed == 6:
                model.requires_grad_(True)
            for p in model.parameters():
                gradient = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
                p.grad = gradient if p.requires_grad else None
            optimizer.step()
    (fp32, reference), (model, optimizer) = runs
    for each, (key, value) in zip(
        exact_weights(model, optimizer), fp32.named_parameters(), strict=True
    ):
        assert torch.equal(bits(each), bits(value)), key
    for group, expected in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert group["steps"] == expected["steps"] == 12


class ReadsLists(torch.optim.Optimizer):
    """Descent at rates from a list beside the parameters, some of which it lowers as it goes."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            entries = zip(group["params"], group["rates"], group["param_names"], strict=True)
            for n, (p, rate, name) in enumerate(entries):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=rate * self.defaults["by_name"][name])
                    group["rates"][n] = rate * 0.9


def with_lists(parameters):
    parameters = [*parameters]
    names = [f"p{n}" for n in range(len(parameters))]
    rates = [0.01 * (n + 1) for n in range(len(parameters))]
    group = {"params": parameters, "rates": rates, "param_names": names}
    return ReadsLists([group], {"by_name": {name: 1.0 + n for n, name in enumerate(names)}})


@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20], ids=["a tensor at a time", "all at once"])
def test_a_step_that_gets_some_parameters_gets_their_entries_of_lists(bucket_bytes):
    runs = [make_run(with_lists, recipe) for recipe in (None, "bf16-fp32-master")]
    runs[1][1].bucket_bytes = bucket_bytes
    for model, optimizer in runs:
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            for n, p in enumerate(model.parameters()):
                gradient = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
                p.grad = gradient if n % 3 != seed % 3 else None
            optimizer.step()
    (fp32, reference), (model, optimizer) = runs
    exact = exact_weights(model, optimizer)
    for each, (key, value) in zip(exact, fp32.named_parameters(), strict=True):
        assert torch.equal(bits(each), bits(value)), key
    assert optimizer.param_groups[0]["rates"] == reference.param_groups[0]["rates"]


def test_lists_beside_frozen_parameters_are_refused():
    model, optimizer = make_run(with_lists, None)
    model[0].requires_grad_(False)
    with pytest.raises(NotImplementedError, match="it may pair frozen parameters with trained"):
        torch_bf16.prepare(model, optimizer, "bf16-stochastic")
    assert type(optimizer) is ReadsLists
    assert model[0].weight.dtype == torch.float32
    del optimizer.param_groups[0]["rates"]
    torch_bf16.prepare(model, optimizer, "bf16-stochastic")


class ReadsOneList(torch.optim.Optimizer):
    """Descent at the first number of a list that is as long as its parameters by chance."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["coefficients"][0])
        self.state["calls"] = 1


def test_a_list_of_numbers_is_not_cut_where_tensors_step_one_at_a_time():
    model = torch.nn.Linear(4, 4)
    groups = [{"params": [*model.parameters()], "coefficients": [0.5, 8.0]}]
    model, optimizer = torch_bf16.prepare(model, ReadsOneList(groups, {}), "bf16-fp32-master")
    optimizer.bucket_bytes = 1
    for _ in range(6):
        before = exact_weights(model, optimizer)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        for was, now in zip(before, exact_weights(model, optimizer), strict=True):
            torch.testing.assert_close(now, was - 0.5)


def test_states_of_the_whole_optimizer_do_not_disturb_the_check_of_roles():
    model = torch.nn.Linear(4, 4)
    groups = [{"params": [*model.parameters()], "coefficients": [0.5, 8.0]}]
    optimizer = ReadsOneList(groups, {})
    torch_bf16.cast_model(model)
    optimizer = torch_bf16.convert(optimizer, "bf16-stochastic", roles={"momentum": "exp_avg"})
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    with pytest.warns(UserWarning, match="roles name momentum"):
        optimizer.step()

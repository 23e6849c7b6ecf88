"""Schedule-free optimizers: the paper's sequences, and modes that leave training as it was."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from optimizer_cases import (
    assert_same,
    every_recipe,
    make_optimizer,
    make_parameters,
    parameters_of,
    set_gradients,
    snapshot,
    take_steps,
)
from sharded_models import ALONE, UNEVEN, Case
from sharded_training import RECIPES, Run, joined
from sharded_training import assert_same as assert_same_parts
from torch import nn

import torch_bf16

KINDS = ("schedule_free_adamw", "schedule_free_sgd")
SHARES = ((0.9, 0.999), (0.7, 0.999))
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, recipe, seed=0, **options):
    parameters = make_parameters(seed)
    return make_optimizer(kind, recipe, "eager", parameters.items(), **options)


def weights(optimizer):
    return [optimizer.exact_weight(p).clone() for p in parameters_of(optimizer)]


class Paper:
    """Equations 18 to 20 of the paper in float64, with all three sequences written out."""

    def __init__(self, w, lr, beta1, decay, warmup, r, beta2=None, eps=1e-8):
        self.x = self.y = self.z = w
        self.lr, self.beta1, self.decay, self.warmup, self.r = lr, beta1, decay, warmup, r
        self.beta2, self.eps, self.v = beta2, eps, np.zeros_like(w)
        self.t = self.total = 0

    def step(self, g):
        self.t += 1
        lr = self.lr * min(1, self.t / self.warmup)
        u = g
        if self.beta2 is not None:
            self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
            u = g / (np.sqrt(self.v / (1 - self.beta2**self.t)) + self.eps)
        self.z = self.z - lr * (u + self.decay * self.y)
        weight = self.t**self.r * lr**2
        self.total += weight
        self.x = self.x + (self.z - self.x) * weight / self.total
        self.y = (1 - self.beta1) * self.z + self.beta1 * self.x


@every_kind
def test_in_fp32_it_is_the_paper_up_to_rounding(kind):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, 8))
    options = {"lr": 0.05, "weight_decay": 0.1, "warmup_steps": 7, "r": 0.5}
    optimizer = make_optimizer(kind, "master", "eager", [parameter], **options)
    second = {"beta2": 0.999} if kind == "schedule_free_adamw" else {}
    paper = Paper(parameter.detach().double().numpy(), 0.05, 0.9, 0.1, 7, 0.5, **second)
    for _ in range(60):
        parameter.grad = torch.randn(40, 8)
        optimizer.step()
        paper.step(parameter.grad.double().numpy())
    assert abs(parameter.detach().numpy() - paper.y).max() < 2e-6
    optimizer.eval()
    assert abs(parameter.detach().numpy() - paper.x).max() < 2e-6
    assert abs(paper.x - paper.y).max() > 1e-3


@every_kind
@every_recipe
def test_validations_between_the_steps_change_no_bit(kind, recipe):
    validated, other = make(kind, recipe), make(kind, recipe)
    for step in range(12):
        take_steps(validated, [step])
        take_steps(other, [step])
        before = weights(validated)
        validated.eval()
        assert not all(map(torch.equal, weights(validated), before)) or step == 0
        validated.eval()
        validated.train()
        validated.train()
        assert_same(snapshot(validated), snapshot(other))


@every_recipe
def test_the_average_is_rounded_once_to_nearest_where_there_is_no_master(recipe):
    optimizer = make(KINDS[0], recipe)
    take_steps(optimizer, range(5))
    ys = weights(optimizer)
    zs = [optimizer.state[p]["z"].float() for p in parameters_of(optimizer)]
    optimizer.eval()
    for p, y, z in zip(parameters_of(optimizer), ys, zs, strict=True):
        x = y + (z - y) * (1 - 1 / 0.9)
        exact = optimizer.recipe.format_of("weights", p.shape, p.dtype).planes[1:]
        assert torch.equal(optimizer.exact_weight(p), x if exact else x.to(p.dtype).float())
        assert torch.equal(p, x.to(p.dtype)) or exact  # halves: ties away from zero


@every_kind
@every_recipe
@pytest.mark.parametrize("saved_in", ["train", "eval"])
def test_a_run_resumed_from_a_checkpoint_of_either_mode_has_the_bits_of_one(kind, recipe, saved_in):
    whole, first, second = make(kind, recipe), make(kind, recipe), make(kind, recipe, seed=1)
    take_steps(whole, range(10))
    take_steps(first, range(5))
    getattr(first, saved_in)()
    held = [p.detach().clone() for p in parameters_of(first)]
    saved = pickle.loads(pickle.dumps(copy.deepcopy(first.state_dict())))
    with torch.no_grad():
        for p, weight in zip(parameters_of(second), held, strict=True):
            p.copy_(weight)
    second.load_state_dict(saved)
    assert second.param_groups[0]["train_mode"] is (saved_in == "train")
    second.train()
    take_steps(second, range(5, 10))
    assert_same(snapshot(second), snapshot(whole))
    assert second.param_groups[0]["weight_sum"] == whole.param_groups[0]["weight_sum"]


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
@pytest.mark.parametrize("mode", [True, False])
def test_before_the_first_step_the_weight_is_its_own_average(recipe, mode):
    model = nn.Linear(8, 8)
    optimizer = torch_bf16.AdamWScheduleFree(model.parameters(), recipe=recipe)
    optimizer = torch_bf16.prepare(model, optimizer, recipe)[1]
    optimizer.train(mode)
    # It holds what the cast has cut off, and with it an iterate of zeros.
    optimizer.load_state_dict(optimizer.state_dict())
    before = weights(optimizer)
    optimizer.train(not mode)
    assert all(map(torch.equal, weights(optimizer), before))


def test_a_step_in_eval_mode_is_refused_and_changes_nothing():
    optimizer = make(KINDS[0], "stochastic")
    take_steps(optimizer, range(2))
    optimizer.eval()
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match=r"is in eval mode.*Call optimizer.train\(\) before the"):
        take_steps(optimizer, [3])
    assert_same(snapshot(optimizer), before)


def test_a_group_that_comes_in_eval_mode_is_in_it_too():
    optimizer = make(KINDS[0], "stochastic")
    take_steps(optimizer, range(2))
    optimizer.eval()
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(2, 2)))]})
    assert [g["train_mode"] for g in optimizer.param_groups] == [False, False]
    optimizer.train()
    take_steps(optimizer, [2])
    assert [g["k"] for g in optimizer.param_groups] == [3, 1]


@every_recipe
@pytest.mark.parametrize("mode", [True, False])
def test_a_change_of_mode_that_breaks_off_leaves_the_mode_of_before(recipe, mode, monkeypatch):
    optimizer = make(KINDS[0], recipe)
    take_steps(optimizer, range(3))
    optimizer.train(mode)
    before = weights(optimizer)
    swap, seen = optimizer._swap, []

    def fails_once(parameter, *arguments):
        seen.append(parameter)
        if len(seen) == 3:
            raise KeyboardInterrupt
        swap(parameter, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_swap", fails_once)
        with pytest.raises(KeyboardInterrupt):
            optimizer.train(not mode)
    assert optimizer.param_groups[0]["train_mode"] is mode
    assert len(seen) == 5
    assert all(map(torch.equal, weights(optimizer), before))


def test_a_step_that_is_skipped_is_not_counted_in_the_average():
    optimizer = make(KINDS[0], "stochastic")
    take_steps(optimizer, range(3))
    counted = dict(optimizer.param_groups[0])
    optimizer.skip_next_step_where(torch.ones(()))
    take_steps(optimizer, [3])
    assert optimizer.param_groups[0] == counted
    assert optimizer.skipped_steps == 1


def test_a_learning_rate_that_rises_later_weighs_more_as_in_the_package():
    optimizer = make(KINDS[1], "stochastic", lr=0.1)
    (group,) = optimizer.param_groups
    for step, lr in enumerate((0.1, 0.3, 0.2)):
        group["lr"] = lr
        take_steps(optimizer, [step])
    assert group["lr_max"] == 0.3
    assert group["weight_sum"] == pytest.approx(0.1**2 + 0.3**2 + 0.3**2)
    assert (group["k"], group["scheduled_lr"]) == (3, 0.2)


def test_released_gradients_take_the_same_steps():
    runs = []
    for release in (False, True):
        torch.manual_seed(0)
        model = torch_bf16.cast_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
        optimizer = torch_bf16.AdamWScheduleFree(model.named_parameters(), lr=0.01, backend="eager")
        if release:
            torch_bf16.release_gradients(model, optimizer)
        for _ in range(4):
            model(torch.randn(4, 8).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
            optimizer.train()
        runs.append(snapshot(optimizer))
    assert_same(*runs)


@pytest.mark.parametrize("beta1", [0.0, 1.0])
def test_an_average_without_a_share_is_refused(beta1):
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"must lie between 0 and 1|betas"):
        torch_bf16.AdamWScheduleFree([parameter], betas=(beta1, 0.99))
    with pytest.raises(ValueError, match=f"momentum={beta1} must lie between 0 and 1"):
        torch_bf16.SGDScheduleFree([parameter], momentum=beta1)
    with pytest.raises(ValueError, match="warmup_steps"):
        torch_bf16.AdamWScheduleFree([parameter], warmup_steps=-1)


def _schedule_free(model, recipe):
    named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    return torch_bf16.AdamWScheduleFree(named, lr=0.01, weight_decay=0.1, recipe=recipe)


def _two_modes(case, recipe):
    """What a rank holds in eval mode, and after it went on from there and from what it saved."""
    run = Run(case, recipe, make=_schedule_free).train(range(4))
    run.optimizer.eval()
    found = [run.parts()]
    other = Run(case, recipe, make=_schedule_free).put(run.state_dicts())
    for each in (run, other):
        each.optimizer.train()
        found.append(each.train(range(4, 8)).parts())
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "case",
    [Case("fsdp2", (2,), UNEVEN), Case("tp", (2,)), Case("fsdp1", (2,), UNEVEN)],
    ids=Case.id,
)
def test_shards_have_the_bits_of_one_process_in_both_modes(ranks, case, recipe):
    found = ranks(case.world, _two_modes, case, recipe)
    expected = _two_modes(replace(ALONE, sizes=case.sizes), recipe)
    for number, alone in enumerate(expected):
        assert_same_parts(joined([alone]), joined([each[number] for each in found]))


def _regathered():
    """Outputs of a module that keeps its weights gathered, and of what they are as a whole."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch_bf16.cast_model(nn.Linear(8, 8, bias=False))
    alone = copy.deepcopy(model)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch_bf16.AdamWScheduleFree(model.parameters(), lr=0.1)
    x = torch.randn(4, 8).bfloat16()
    for step in range(3):
        model(x * (step + 1)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = []
    with torch.no_grad():
        for mode in (True, False, True):
            optimizer.train(mode)
            alone.weight.copy_(model.weight.full_tensor())
            assert torch.equal(model(x), alone(x)), mode
            seen.append(alone.weight.detach().clone())
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


def test_fsdp2_gathers_anew_what_a_mode_wrote(ranks):
    ranks(2, _regathered)


@every_kind
@pytest.mark.parametrize("by", ["scheduler", "hand", "range"])
def test_a_share_of_the_average_that_changes_is_refused_before_it_is_used(kind, by):
    optimizer = make(kind, "bf16-stochastic", lr=0.01)
    name = "betas" if kind == "schedule_free_adamw" else "momentum"
    take_steps(optimizer, range(2))
    before = weights(optimizer)
    (group,) = optimizer.param_groups
    message = r"was 0\.9 in the step before.*cycle_momentum=False"
    if by == "scheduler":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
    else:
        share = 0.8 if by == "hand" else 1.5
        group[name] = (share, 0.999) if name == "betas" else share
        message = message if by == "hand" else "must lie between 0 and 1"
    set_gradients(parameters_of(optimizer), 3)
    for call in (optimizer.step, optimizer.eval):
        with pytest.raises(ValueError, match=message):
            call()
    assert all(map(torch.equal, weights(optimizer), before))
    assert (group["train_mode"], group["k"]) == (True, 2)


def test_a_state_dict_brings_its_own_share_of_the_average():
    one, other = (make("schedule_free_adamw", "bf16-stochastic", betas=b) for b in SHARES)
    for optimizer in (one, other):
        take_steps(optimizer, range(2))
    one.load_state_dict(other.state_dict())
    take_steps(one, range(1))
    assert one.param_groups[0]["betas"] == SHARES[1]
    twin = copy.deepcopy(one)
    take_steps(twin, range(1))
    assert twin.param_groups[0]["k"] == 4


@pytest.mark.parametrize("option", ["r", "weight_lr_power"])
def test_weights_of_no_average_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=inf must be finite"):
        make("schedule_free_adamw", "bf16-stochastic", **{option: float("inf")})

"""Constructors that release gradients: what a trainer does to an optimizer known by its name."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

import torch_bf16
from torch_bf16 import errors
from torch_bf16.tools.estimate.optimizers import OPTIMIZERS

RELEASE = {"max_norm": None}


def network(recipe="bf16-stochastic"):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    return torch_bf16.cast_model(model, recipe)


def backward(model, step, of=1):
    torch.manual_seed(step)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 16)).float().square().mean() / of
    loss.backward()
    return loss


def train(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def same(one, other):
    assert all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_releases(name):
    models = [network() for _ in range(2)]
    for model, release in zip(models, (False, RELEASE), strict=True):
        # As Hydra and jsonargparse make it: by a dotted name and keyword arguments.
        cls = getattr(importlib.import_module("torch_bf16"), name)
        optimizer = cls(params=model.parameters(), lr=0.01, release=release)
        if hasattr(optimizer, "train"):
            optimizer.train()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        for step in range(4):
            backward(model, step)
            assert all((p.grad is None) == bool(release) for p in model.parameters())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    same(*models)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_releases_its_own_gradients(through):
    model = network()
    optimizer = torch_bf16.AdamW(
        model.parameters(), release={"max_norm": 0.01, "norm": "last_step"}
    )
    train(model, optimizer, range(2))
    twin, its_optimizer = through((model, optimizer))
    for each, its in ((model, optimizer), (twin, its_optimizer)):
        for step in range(2, 4):
            backward(each, step)
            assert all(p.grad is None for p in each.parameters())
            its.step()
    same(model, twin)


def test_groups_that_come_later_are_released():
    model = network()
    optimizer = torch_bf16.AdamW(model[:2].parameters(), release=RELEASE)
    optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 1e-4})
    backward(model, 0)
    assert all(p.grad is None for p in model.parameters())


def test_a_closure_and_a_parameter_without_a_gradient():
    models = [network() for _ in range(2)]
    for model, release in zip(models, (False, RELEASE), strict=True):
        optimizer = torch_bf16.AdamW(model.parameters(), lr=0.01, release=release)
        for step in range(3):

            def closure(model=model, step=step, optimizer=optimizer):
                optimizer.zero_grad()
                return backward(model[: 2 + step], step)

            assert optimizer.step(closure).isfinite()
        assert "step" not in optimizer.state[model[3].weight] or step == 2
    same(*models)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
def test_checkpointed_layers_and_sums(reentrant, passes):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x):
            x.requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    models = [Checkpointed() for _ in range(2)]
    for model, release in zip(models, (False, True), strict=True):
        given = {**RELEASE, "accumulation_steps": passes} if release else False
        optimizer = torch_bf16.AdamW(model.parameters(), lr=0.01, release=given)
        for step in range(3):
            for number in range(passes):
                backward(model, 10 * step + number, passes)
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    same(*models)


@pytest.mark.parametrize("accumulate", torch_bf16.recipe.ACCUMULATIONS)
@pytest.mark.parametrize("passes", [3, 2])
def test_sums_are_stepped_in_the_last_pass_and_fewer_after_it(accumulate, passes):
    recipe = torch_bf16.get_recipe("bf16-stochastic", accumulate=accumulate)
    models = [network(recipe) for _ in range(2)]
    for model, release in zip(models, (False, True), strict=True):
        given = {**RELEASE, "accumulation_steps": 3} if release else False
        named = model.named_parameters()
        optimizer = torch_bf16.AdamW(named, lr=0.01, recipe=recipe, release=given)
        for step in range(3):
            for number in range(passes):
                backward(model, 10 * step + number, passes)
                gone = release and number == 2
                assert all((p.grad is None) == gone for p in model.parameters())
            optimizer.step()
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.zero_grad()
    same(*models)


def test_sums_of_parameters_that_the_last_pass_leaves_out():
    """As experts are: their sums are complete, and taken by the step after the pass."""
    models = [network() for _ in range(2)]
    for model, release in zip(models, (False, True), strict=True):
        given = {**RELEASE, "accumulation_steps": 3} if release else False
        optimizer = torch_bf16.AdamW(model.parameters(), lr=0.01, release=given)
        for step in range(4):
            for number in range(3):
                used = model[:2] if number == 2 and step > 0 else model
                backward(used, 10 * step + number, 3)
            left = [p.grad is not None for p in model.parameters()]
            assert left == ([step > 0 and n > 1 for n in range(4)] if release else [True] * 4)
            optimizer.step()
            optimizer.zero_grad()
    same(*models)


DISCARDS = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
}


@pytest.mark.parametrize("accumulate", torch_bf16.recipe.ACCUMULATIONS)
@pytest.mark.parametrize("discard", DISCARDS)
@pytest.mark.parametrize("passes", ["one", "one and a failing one", "a failing one"])
def test_passes_whose_gradients_are_discarded_do_not_count(accumulate, discard, passes):
    """As after a loss that is NaN, or after an error of memory that was caught."""
    recipe = torch_bf16.get_recipe("bf16-stochastic", accumulate=accumulate)

    def fail(_):
        raise MemoryError

    models = [network(recipe) for _ in range(2)]
    for model, release in zip(models, (False, True), strict=True):
        given = {**RELEASE, "accumulation_steps": 2} if release else False
        named = model.named_parameters()
        optimizer = torch_bf16.AdamW(named, lr=0.01, recipe=recipe, release=given)
        for step in range(3):
            if passes.startswith("one"):
                backward(model, 100 + step, 2)
            if passes.endswith("failing one"):
                hook = model[1].weight.register_hook(fail)
                with pytest.raises(MemoryError):
                    backward(model, 200 + step, 2)
                hook.remove()
            DISCARDS[discard](model, optimizer)
            before = copy.deepcopy(model)
            backward(model, 10 * step, 2)
            same(model, before)
            backward(model, 10 * step + 1, 2)
            assert all((p.grad is None) == release for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    same(*models)


def test_a_format_for_sums_may_be_asked_for_after_the_release():
    models = [network() for _ in range(2)]
    for model, release in zip(models, (False, True), strict=True):
        given = {**RELEASE, "accumulation_steps": 2} if release else False
        optimizer = torch_bf16.AdamW(model.named_parameters(), lr=0.01, release=given)
        torch_bf16.accumulate_gradients(model, optimizer, "fp32")
        for number in range(2):
            backward(model, number, 2)
        assert all((p.grad is None) == release for p in model.parameters())
        optimizer.step()
    same(*models)


@pytest.mark.parametrize("norm", ["parameter", "last_step"])
def test_sums_that_step_takes_are_clipped_alike(norm):
    """Two passes that make a step in one optimizer, and are fewer than enough in the other."""
    models = [network("bf16-fp32-master") for _ in range(2)]
    for model, steps in zip(models, (2, 5), strict=True):
        given = {"max_norm": 0.001, "norm": norm, "accumulation_steps": steps}
        optimizer = torch_bf16.SGD(
            model.parameters(), lr=0.1, recipe="bf16-fp32-master", release=given
        )
        for step in range(3):
            for number in range(2):
                backward(model, 10 * step + number, 2)
            optimizer.step()
    same(*models)


def test_a_resumed_run_clips_by_the_norm_that_was_saved(tmp_path):
    options = {"max_norm": 0.001, "norm": "last_step"}

    def made():
        model = network()
        return model, torch_bf16.AdamW(model.parameters(), lr=0.01, release=options)

    whole, half, resumed = made(), made(), made()
    train(*whole, range(6))
    train(*half, range(3))
    torch.save([each.state_dict() for each in half], tmp_path / "file")
    for each, saved in zip(resumed, torch.load(tmp_path / "file", weights_only=True), strict=True):
        each.load_state_dict(saved)
    train(*resumed, range(3, 6))
    same(whole[0], resumed[0])
    # Of the control, which has no norm to go on from, the bits differ.
    lost = made()
    lost[0].load_state_dict(half[0].state_dict())
    without = {**half[1].state_dict()}
    without["torch_bf16"] = {k: v for k, v in without["torch_bf16"].items() if k != "last_norm"}
    with pytest.warns(UserWarning, match="no norm of the last step"):
        lost[1].load_state_dict(without)


def test_distributed_checkpoints_read_a_released_optimizer():
    model = network()
    optimizer = torch_bf16.AdamW(model.parameters(), lr=0.01, release=RELEASE)
    before = [p.detach().clone() for p in model.parameters()]
    found = get_optimizer_state_dict(model, optimizer)
    assert len(found["state"]) == 4
    assert all(map(torch.equal, before, model.parameters()))


def test_what_a_trainer_clips_by_itself_is_said_once(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    model = network()  # whose cast may say that this CPU is slow
    with pytest.warns(UserWarning, match="max_grad_norm find no gradient") as caught:
        torch_bf16.AdamW(model.parameters(), release=True)
    assert caught[0].filename == __file__
    torch_bf16.AdamW(network().parameters(), release=True)
    monkeypatch.setattr(errors, "_said", set())
    torch_bf16.AdamW(network().parameters(), release=RELEASE)


@pytest.mark.parametrize("asked", ["True", 1, ["max_norm"], {"max_nrom": 1.0}])
def test_what_is_no_release_is_refused(asked):
    with pytest.raises(ValueError, match="must be True, False or a dict of options"):
        torch_bf16.AdamW(network().parameters(), release=asked)


def test_a_retained_graph_and_a_pass_too_many():
    model = network()
    optimizer = torch_bf16.AdamW(model.parameters(), release=RELEASE)
    loss = model(torch.randn(2, 16).bfloat16()).float().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.step()
    backward(model, 0)
    after_one = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NotImplementedError, match="'accumulation_steps': n"):
        backward(model, 1)
    assert all(map(torch.equal, after_one, model.parameters()))

"""State dicts of optimizers that step by their own code."""

import abc
import copy
import pickle

import pytest
import torch
from foreign_cases import (
    ADAMW_WITH_AMSGRAD,
    CountsInState,
    LoadsByItself,
    Momentum,
    exact_weights,
    make_run,
    train,
)
from optimizer_cases import bits

import torch_bf16


def save_and_go_on(kind, recipe):
    """What a run saves after three steps, and its exact weights after three more."""
    model, optimizer = make_run(kind, recipe)
    train(model, optimizer, range(3))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(3, 6))
    return saved, exact_weights(model, optimizer)


def resume(kind, recipe, saved):
    """A run with other weights, which loads those of another model and its optimizer's states."""
    model, optimizer = make_run(kind, recipe, seed=1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return model, optimizer


@pytest.mark.parametrize("recipe", ["bf16-fp32-master", "bf16-stochastic"])
@pytest.mark.parametrize("anew", [True, False], ids=["new", "goes back"])
def test_a_class_that_loads_without_torchs_hooks_resumes_bit_for_bit(recipe, anew):
    model, optimizer = make_run(LoadsByItself, recipe)
    train(model, optimizer, range(3))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(3, 6))
    expected = [bits(p) for p in model.parameters()]
    if anew:
        model, optimizer = make_run(LoadsByItself, recipe, seed=1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(3, 6))
    assert all(map(torch.equal, map(bits, model.parameters()), expected))


class CastsWhatItHasLoaded(Momentum):
    """Casts states to its weights' dtype once torch has loaded them, as adv_optm's classes do."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            state["momentum_buffer"] = state["momentum_buffer"].to(p.dtype)


def test_states_that_a_class_casts_once_they_are_loaded_keep_their_bits():
    saved, expected = save_and_go_on(CastsWhatItHasLoaded, "bf16-fp32-master")
    model, optimizer = resume(CastsWhatItHasLoaded, "bf16-fp32-master", saved)
    dtypes = {each["momentum_buffer"].dtype for each in optimizer.state.values()}
    assert dtypes == {torch.float32}
    train(model, optimizer, range(3, 6))
    found = exact_weights(model, optimizer)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["Adadelta", "Adamax", "ASGD", "Rprop"])
def test_steps_that_older_versions_of_torch_kept_as_numbers_are_loaded(name):
    kind = getattr(torch.optim, name)
    saved, expected = save_and_go_on(kind, "bf16-stochastic")
    for state in saved[1]["state"].values():
        state.update((k, v.item()) for k, v in state.items() if k in ("step", "eta", "mu"))
    model, optimizer = make_run(kind, "bf16-stochastic", seed=1)
    frozen = next(model.parameters()).requires_grad_(False)  # its state is loaded nevertheless
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    frozen.requires_grad_(True)
    train(model, optimizer, range(3, 6))
    assert all(map(torch.equal, exact_weights(model, optimizer), expected))


class ReadsItsStates(Momentum):
    """Refuses states that are not of its weights' dtype, as those that a recipe stores are not."""

    def __setstate__(self, state):
        super().__setstate__(state)
        for p, own in self.state.items():
            if own["momentum_buffer"].dtype != p.dtype:
                raise RuntimeError(f"{own['momentum_buffer'].dtype} beside {p.dtype}")


def test_states_of_today_are_not_shown_to_a_class_that_may_expect_other_dtypes():
    saved, expected = save_and_go_on(ReadsItsStates, "bf16-fp32-master")
    model, optimizer = resume(ReadsItsStates, "bf16-fp32-master", saved)
    train(model, optimizer, range(3, 6))
    assert all(map(torch.equal, exact_weights(model, optimizer), expected))


def test_a_class_that_loads_without_torchs_hooks_is_told_what_does_not_fit(caplog):
    model, optimizer = make_run(LoadsByItself, "bf16-fp32-master")
    train(model, optimizer, range(3))
    _, other = make_run(LoadsByItself, "bf16-stochastic")
    other.load_state_dict(optimizer.state_dict())
    assert "weights bf16+16 -> bf16_stochastic" in caplog.text
    broken = copy.deepcopy(optimizer.state_dict())
    broken["state"][0]["wrapped"]["momentum_buffer"] = torch.zeros(7)
    broken["state"][0]["remainder16"] = torch.zeros(7)
    states, groups = optimizer.state, optimizer.param_groups
    with pytest.raises(torch_bf16.StateMismatchError, match=r"No state was changed"):
        optimizer.load_state_dict(broken)
    assert optimizer.state is states
    assert optimizer.param_groups is groups


def test_what_is_counted_in_the_state_is_saved_resumed_and_copied():
    model, optimizer = make_run(CountsInState, "bf16-stochastic")
    train(model, optimizer, range(3))
    assert optimizer.state["k"].tolist() == [4]
    assert torch_bf16.fp32_optimizer_state_dict(optimizer)["state"]["k"].tolist() == [4]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, other = resume(CountsInState, "bf16-stochastic", saved)
    copied, third = pickle.loads(pickle.dumps((model, optimizer)))
    for each in ((model, optimizer), (resumed, other), (copied, third)):
        train(*each, range(3, 6))
        assert each[1].state["k"].tolist() == [7]
    for each in (resumed, copied):
        pairs = zip(model.parameters(), each.parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)


def test_a_change_of_recipe_on_load(caplog):
    model, optimizer = make_run(ADAMW_WITH_AMSGRAD, "bf16-fp32-master")
    train(model, optimizer, range(3))
    other, into = make_run(ADAMW_WITH_AMSGRAD, "bf16-stochastic")
    other.load_state_dict(model.state_dict())
    into.load_state_dict(optimizer.state_dict())
    assert "weights bf16+16 -> bf16_stochastic" in caplog.text
    state = into.state[other[0].weight]
    saved = optimizer.state[model[0].weight]
    assert torch.equal(state["exp_avg"], saved["exp_avg"].bfloat16())
    assert torch.equal(state["max_exp_avg_sq"], saved["max_exp_avg_sq"])
    assert "remainder16" not in state
    train(other, into, range(3, 5))


class ChoosesHalves(torch.optim.SGD):
    """Keeps its momentum in bf16, whatever its parameters are."""

    key = "average"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if self.key not in state:
                    state[self.key] = torch.zeros_like(p, dtype=torch.bfloat16)
                state[self.key].mul_(0.9).add_(p.grad)
                p.sub_(state[self.key], alpha=0.1)


class ChoosesHalvesForAKnownState(ChoosesHalves):
    """The same, under a name for which recipes have a format."""

    key = "exp_avg"


@pytest.mark.parametrize("recipe", ["bf16-fp32-master", "bf16-stochastic"])
@pytest.mark.parametrize("kind", [ChoosesHalves, ChoosesHalvesForAKnownState])
def test_a_state_that_a_class_keeps_in_bf16_stays_so_also_after_a_resume(kind, recipe):
    runs = [make_run(kind, recipe, seed=seed) for seed in (0, 1)]
    train(*runs[0], range(2))
    for ours, other in zip(*runs, strict=True):
        other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for run in runs:
        train(*run, range(2, 5))
        assert run[1].state[run[0][0].weight][kind.key].dtype == torch.bfloat16
    assert all(map(torch.equal, runs[0][0].parameters(), runs[1][0].parameters()))


def test_a_refused_state_dict_does_not_say_which_states_these_are():
    model, optimizer = make_run(ChoosesHalvesForAKnownState, "bf16-fp32-master")
    train(model, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["torch_bf16"]["narrow"] == ["exp_avg"]
    saved["state"][0]["remainder16"] = torch.zeros(7)
    model, other = make_run(ChoosesHalvesForAKnownState, "bf16-fp32-master")
    with pytest.raises(torch_bf16.StateMismatchError, match=r"No state was changed"):
        other.load_state_dict(saved)
    assert "narrow" not in other.state_dict()["torch_bf16"]
    saved["torch_bf16"]["narrow"] = 3
    for method in (other.load_state_dict, other.check_state_dict):
        with pytest.raises(
            torch_bf16.StateMismatchError, match=r"its 'narrow' is 3 and must be a list"
        ):
            method(saved)


class NormedMomentum(torch.optim.Optimizer):
    """Descent by momentum over its norm in all parameters; writes its states in place."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        for p in every:
            state = self.state[p]
            if not state:
                state["exp_avg"], state["count"] = torch.zeros_like(p), torch.zeros(())
            state["count"] += 1
            state["exp_avg"].mul_(0.9).add_(p.grad)
        norm = torch.stack([self.state[p]["exp_avg"].norm() for p in every]).norm()
        for p in every:
            p.sub_(self.state[p]["exp_avg"] / norm / self.state[p]["count"])


def test_a_call_that_is_undone_leaves_the_states_of_a_resumed_run():
    """The first call is for some parameters only, and shows that they are coupled."""
    model, optimizer = make_run(NormedMomentum, "bf16-fp32-master")
    train(model, optimizer, range(3))
    other, resumed = make_run(NormedMomentum, "bf16-fp32-master", seed=1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.bucket_bytes = 1
    fp32, reference = make_run(NormedMomentum, None)
    train(fp32, reference, range(6))
    train(other, resumed, range(3, 6))
    pairs = zip(exact_weights(other, resumed), fp32.parameters(), strict=True)
    assert all(torch.equal(bits(each), bits(expected)) for each, expected in pairs)
    assert all(state["count"] == 6 for state in resumed.state.values())


def counting(*bases):
    """A class of descent at a growing rate, whose count is an entry of its state dict."""

    class Counts(*bases):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})
            self.total = 0

        def state_dict(self):
            return {**super().state_dict(), "total": self.total}

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.total = state_dict["total"]

        @torch.no_grad()
        def step(self, closure=None):
            self.total += 1
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] * self.total)

    return Counts


# The optimizers of pytorch_optimizer derive from ABC.
@pytest.mark.parametrize("bases", [[torch.optim.Optimizer], [abc.ABC, torch.optim.Optimizer]])
def test_what_a_class_adds_to_its_state_dict_is_saved_and_loaded(bases):
    kind = counting(*bases)
    runs = [make_run(kind, "bf16-fp32-master", seed=seed) for seed in (0, 1)]
    train(*runs[0], range(3))
    saved = copy.deepcopy([each.state_dict() for each in runs[0]])
    assert saved[1]["total"] == 3
    assert saved[1]["torch_bf16"]["recipe"]["name"] == "bf16-fp32-master"
    for each, content in zip(runs[1], saved, strict=True):
        each.load_state_dict(content)
    for run in runs:
        train(*run, range(3, 6))
        assert run[1].total == 6
    assert all(
        map(torch.equal, map(bits, runs[0][0].parameters()), map(bits, runs[1][0].parameters()))
    )


class Codes(torch.optim.Optimizer):
    """Keeps its momentum in codes, under the name of a number that recipes have formats for."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["exp_avg"] = torch.full_like(p, 128, dtype=torch.uint8)
            blend = 0.9 * (state["exp_avg"].float() - 128) + 12.0 * p.grad.sign()
            state["exp_avg"] = (blend.round() + 128).to(torch.uint8)
            p.sub_(blend, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("moment", ["fp32", "bf16_stochastic", "int8"])
def test_codes_of_the_classes_own_stay_codes(moment):
    recipe = torch_bf16.Recipe("codes", weights="bf16+16", exp_avg=moment)
    fp32, reference = make_run(Codes, None)
    model, optimizer = make_run(Codes, recipe)
    for run in ((fp32, reference), (model, optimizer)):
        train(*run, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = resume(Codes, recipe, saved)
    for run in ((fp32, reference), (model, optimizer)):
        train(*run, range(3, 6))
    assert all(map(torch.equal, exact_weights(model, optimizer), fp32.parameters()))
    for p, q in zip(model.parameters(), fp32.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[q]["exp_avg"])


@pytest.mark.parametrize("kind", [torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD])
def test_a_step_from_the_state_of_another_class_asks_for_its_own(kind):
    def make(kind):
        model = torch.nn.Linear(4, 4)
        optimizer = kind(model.parameters())
        torch_bf16.prepare(model, optimizer, "bf16-stochastic")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return optimizer

    saved, optimizer = make(torch.optim.AdamW), make(kind)
    saved.step()
    optimizer.load_state_dict(saved.state_dict())
    with pytest.raises(KeyError) as raised:
        optimizer.step()
    (note,) = [each for each in raised.value.__notes__ if "float32 copies" in each]
    assert f"another class may have been loaded: load one of {kind.__name__}, or start" in note

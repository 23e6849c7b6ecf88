"""State dicts: the same bits and dtypes after a round trip, and refusals that change nothing."""

import copy

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    RECIPES,
    backend_of,
    every_pair,
    every_recipe,
    every_torch_pair,
    make_optimizer,
    make_parameters,
    parameters_of,
    set_gradients,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import torch_bf16
from torch_bf16 import StateMismatchError


def bits(tensor):
    """Bits as integers, so that NaNs compare, beside dtype and shape."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = tensor.detach().contiguous().view(integers[tensor.element_size()])
    return str(tensor.dtype), tuple(tensor.shape), whole.flatten().tolist()


def snapshot(value):
    """Everything in nested containers, comparable with ``==``."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return {key: snapshot(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [snapshot(v) for v in value]
    return value


def everything(optimizer):
    """All bits that a step reads: weights, states, groups and recipe."""
    return snapshot([parameters_of(optimizer), optimizer.state_dict()])


def fresh(name, recipe, seed=0, noise=0, **options):
    if isinstance(recipe, str):
        recipe = torch_bf16.get_recipe(RECIPES[recipe], seed=noise)
    return make_optimizer(name, recipe, backend_of(name), make_parameters(seed).values(), **options)


def train(optimizer, first, last):
    for number in range(first, last):
        set_gradients(parameters_of(optimizer), number)
        optimizer.step()
    return optimizer


def through_file(state_dict, tmp_path):
    torch.save(state_dict, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


def assert_refused(optimizer, state_dict, error, match):
    """The error comes, no bit changes, and the optimizer steps on as one that saw nothing."""
    twin = copy.deepcopy(optimizer)
    before = everything(optimizer)
    with pytest.raises(error, match=match):
        optimizer.load_state_dict(state_dict)
    assert everything(optimizer) == before
    assert everything(train(optimizer, 90, 92)) == everything(train(twin, 90, 92))
    assert everything(optimizer) != before


@every_pair
def test_a_round_trip_through_a_file_keeps_every_bit(name, recipe, tmp_path):
    saved = train(fresh(name, recipe), 0, 3)
    loaded = fresh(name, recipe)
    loaded.load_state_dict(through_file(saved.state_dict(), tmp_path))
    assert snapshot(loaded.state_dict()) == snapshot(saved.state_dict())
    assert len(loaded.state) == len(parameters_of(loaded))


@every_pair
@pytest.mark.parametrize("when", ["before the first step", "after steps"])
def test_a_resumed_run_repeats_the_uninterrupted_one(name, recipe, when, tmp_path):
    whole = train(fresh(name, recipe, noise=7), 0, 3)
    saved = through_file(
        {"model": [p.detach() for p in parameters_of(whole)], "optimizer": whole.state_dict()},
        tmp_path,
    )
    # Another seed for the noise: the saved one must win.
    resumed = fresh(name, recipe, seed=1, noise=8)
    if when == "after steps":
        train(resumed, 50, 52)
    with torch.no_grad():
        for parameter, value in zip(parameters_of(resumed), saved["model"], strict=True):
            parameter.copy_(value)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.recipe.seed == 7
    assert everything(train(resumed, 3, 6)) == everything(train(whole, 3, 6))


def test_the_seed_matters_for_a_resumed_run():
    """The control of the test above: had the live seed won, the weights would differ."""
    one, other = (
        train(fresh("adamw", "stochastic", noise=noise), 0, 3).state_dict()["state"]
        for noise in (7, 8)
    )
    assert snapshot(one) != snapshot(other)


def test_a_state_dict_of_no_steps_loads(tmp_path):
    saved = fresh("adamw", "master", noise=3)
    loaded = fresh("adamw", "master")
    loaded.load_state_dict(through_file(saved.state_dict(), tmp_path))
    assert not loaded.state
    assert everything(train(loaded, 0, 2)) == everything(train(saved, 0, 2))


def fp32_twin(name, **options):
    """torch's optimizer of the same name over the same parameters in fp32, a few steps old."""
    parameters = [torch.nn.Parameter(p.detach().float()) for p in make_parameters().values()]
    _, torchs, defaults = OPTIMIZERS[name]
    return train(torchs(parameters, **{**defaults, **options}), 0, 3)


@every_torch_pair
def test_a_state_dict_of_torch_loads_with_moments_rounded_into_their_formats(name, recipe):
    theirs, ours = fp32_twin(name), fresh(name, recipe)
    ours.load_state_dict(theirs.state_dict())
    for there, here in zip(parameters_of(theirs), parameters_of(ours), strict=True):
        state = ours.state[here]
        for key in theirs.state[there].keys() - {"step", "mu_product"}:
            if theirs.state[there][key] is not None:
                assert here.dtype == torch.float32 or state[key].dtype in (
                    torch.bfloat16,
                    torch.float32,
                )
                assert bits(state[key]) == bits(theirs.state[there][key].to(state[key].dtype))
        assert "mu_product" not in state  # of NAdam: the step's number says it
        if state:
            assert state["step"] == theirs.state[there].get("step", 1)
    train(ours, 3, 5)
    trained = fresh(name, recipe)
    assert snapshot(parameters_of(train(trained, 3, 5))) != snapshot(parameters_of(ours)) or (
        name == "sgd"
    )


def test_a_momentum_buffer_of_none_is_a_first_step():
    theirs = fp32_twin("momentum")
    state_dict = theirs.state_dict()
    for state in state_dict["state"].values():
        state["momentum_buffer"] = None
    ours = fresh("momentum", "master")
    ours.load_state_dict(state_dict)
    assert (
        everything(train(ours, 0, 1))[0] == everything(train(fresh("momentum", "master"), 0, 1))[0]
    )


@every_torch_pair
def test_our_state_dict_loads_into_torchs_optimizer(name, recipe):
    saved = train(fresh(name, recipe), 0, 3).state_dict()
    theirs = fp32_twin(name)
    theirs.load_state_dict(saved)
    train(theirs, 3, 4)
    for state in theirs.state.values():
        read = [v for k, v in state.items() if isinstance(v, torch.Tensor) and k != "remainder16"]
        assert all(v.isfinite().all() for v in read), "its next step is an ordinary one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["bf16+16", "bf16+8", "bf16+fp32"])
def test_a_run_that_torchs_optimizer_continued_comes_back_without_old_low_bits(
    weights, dtype, caplog
):
    recipe = torch_bf16.Recipe("own", weights=weights)
    numbers = torch.rand(4, 64, generator=torch.Generator().manual_seed(1)) + 1

    def make(kind, dtype, **options):
        parameter = torch.nn.Parameter(numbers.to(dtype))
        return parameter, kind([parameter], lr=1e-3, **options)

    ours = train(make(torch_bf16.AdamW, torch.bfloat16, recipe=recipe)[1], 0, 3)
    weight, theirs = make(torch.optim.AdamW, dtype)
    weight.data.copy_(parameters_of(ours)[0])
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(theirs, 3, 6)
    back, again = make(torch_bf16.AdamW, torch.bfloat16, recipe=recipe)
    back.data.copy_(weight)
    again.load_state_dict(copy.deepcopy(theirs.state_dict()))
    said = f"weights {weights} -> bf16_nearest: 256 of 256 numbers rounded"
    kept = {torch.float32: "bf16+fp32", torch.bfloat16: "bf16+16"}[dtype]  # it is not cast there
    assert (said in caplog.text) == (weights != kept)
    assert torch.equal(again.exact_weight(back), back.float()) == (weights != kept)
    train(again, 6, 8)


@every_recipe
def test_loading_aliases_none_of_the_given_tensors(recipe):
    saved = train(fresh("adamw", recipe), 0, 2).state_dict()
    first, second = fresh("adamw", recipe), fresh("adamw", recipe)
    for optimizer in (first, second):
        optimizer.load_state_dict(saved)
    before = snapshot(saved)
    reference = everything(second)
    train(first, 2, 4)
    assert snapshot(saved) == before
    assert everything(second) == reference


def test_hooks_of_users_run_around_the_load_and_see_it():
    saved = train(fresh("adamw", "master", noise=9), 0, 2).state_dict()
    ours, seen = fresh("adamw", "master"), []

    def before(optimizer, state_dict):
        seen.append(("before", len(optimizer.state), state_dict["torch_bf16"]["recipe"]["seed"]))
        return {**state_dict, "param_groups": [{**state_dict["param_groups"][0], "lr": 0.5}]}

    def after(optimizer):
        groups = optimizer.state_dict()["torch_bf16"]["recipe"]["seed"]
        steps = {float(state["step"]) for state in optimizer.state.values()}
        dtypes = {state["exp_avg"].dtype for state in optimizer.state.values()}
        seen.append(("after", groups, steps, dtypes, optimizer.param_groups[0]["lr"]))

    handles = [
        ours.register_load_state_dict_pre_hook(before),
        ours.register_load_state_dict_post_hook(after),
    ]
    ours.load_state_dict(saved)
    assert seen == [("before", 0, 9), ("after", 9, {2.0}, {torch.float32}, 0.5)]
    for handle in handles:
        handle.remove()
    ours.load_state_dict(saved)
    assert len(seen) == 2
    assert not ours._optimizer_load_state_dict_pre_hooks
    assert not ours._optimizer_load_state_dict_post_hooks


def test_a_hook_may_bring_the_state_dict_into_shape():
    saved = train(fresh("adamw", "master"), 0, 2).state_dict()
    ours = fresh("adamw", "master")
    ours.register_load_state_dict_pre_hook(lambda optimizer, given: given["wrapped"])
    ours.load_state_dict({"wrapped": saved})
    assert snapshot(ours.state_dict()) == snapshot(saved)


def damaged(damage):
    """A state dict of AdamW with the master recipe after ``damage(state_dict)``."""
    state_dict = copy.deepcopy(train(fresh("adamw", "master"), 0, 2).state_dict())
    return damage(state_dict) or state_dict


def in_first_state(key, change):
    def damage(state_dict):
        state_dict["state"][0][key] = change(state_dict["state"][0][key])

    return damage


def in_header(**entries):
    return lambda state_dict: state_dict["torch_bf16"].update(entries)


DAMAGES = {
    "no state": (lambda d: d.pop("state") and None, "not an optimizer's state dict"),
    "no groups": (lambda d: d.pop("param_groups") and None, "not an optimizer's state dict"),
    "a list": (lambda d: [d], "not an optimizer's state dict: .* <class 'list'>"),
    "newer schema": (
        in_header(schema=99),
        "schema 99 .* reads schema 1; use the version",
    ),
    "header without schema": (lambda d: d.update(torch_bf16={}), "'torch_bf16' .* is damaged"),
    "header of text": (lambda d: d.update(torch_bf16="x"), "'torch_bf16' .* is damaged: 'x'"),
    "header without recipe": (in_header(recipe={}), "its recipe has no exp_avg, "),
    "wrong shape": (
        in_first_state("exp_avg", lambda t: t.T.contiguous()),
        r"exp_avg of parameter '#0' .* shape \(5, 7\) .* shape \(7, 5\)",
    ),
    "no tensor": (in_first_state("exp_avg_sq", lambda t: 5), "has shape int in its state"),
    "master of other shape": (
        in_first_state("remainder16", lambda t: t[:1]),
        "remainder16 of param",
    ),
    "master cast": (
        in_first_state("remainder16", torch.Tensor.half),
        "remainder16 torch.float16 of .* is in no format of a weight's remainder; it was cast",
    ),
    "integer moment": (in_first_state("exp_avg", torch.Tensor.int), "must be floating-point"),
    "complex moment": (in_first_state("exp_avg", lambda t: t * 1j), "must be floating-point"),
    "moment missing": (
        lambda d: d["state"][0].pop("exp_avg_sq").numel() and None,
        "counts 2 steps and has no exp_avg_sq, .* the state is damaged: load it",
    ),
    "step of nan": (in_first_state("step", lambda t: t * float("nan")), "step of .* damaged"),
    "negative step": (in_first_state("step", lambda t: -t), "step of .* damaged"),
    "many steps": (in_first_state("step", lambda t: t.expand(3)), "step of .* damaged"),
    "no learning rate": (lambda d: d["param_groups"][0].pop("lr") and None, "has no lr: it was"),
}


@pytest.mark.parametrize("live", ["before the first step", "after steps"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_state_dict_is_refused_and_nothing_changes(kind, live):
    damage, match = DAMAGES[kind]
    ours = fresh("adamw", "master")
    if live == "after steps":
        train(ours, 0, 2)
    assert_refused(ours, damaged(damage), StateMismatchError, match)


@pytest.mark.parametrize("count", ["one less", "one more", "another group"])
def test_another_number_of_parameters_is_refused_as_torch_refuses_it(count):
    ours = train(fresh("adamw", "master"), 0, 2)
    values = list(make_parameters().values())
    extra = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    params = {"one less": values[:-1], "one more": [*values, extra]}.get(count, values)
    other = make_optimizer("adamw", "master", "cpu", params)
    if count == "another group":
        other.add_param_group({"params": [extra]})
    message = (
        "different number of parameter groups" if "group" in count else "doesn't match the size"
    )
    assert_refused(ours, train(other, 0, 2).state_dict(), ValueError, message)


def test_a_state_dict_of_another_class_is_refused():
    ours = train(fresh("momentum", "master"), 0, 2)
    assert_refused(
        ours, fp32_twin("adamw").state_dict(), StateMismatchError, "has no momentum, dampening"
    )
    ours = train(fresh("adamw", "master"), 0, 2)
    assert_refused(ours, fp32_twin("sgd").state_dict(), StateMismatchError, "has no betas, eps")


def test_a_state_dict_of_a_differentiable_optimizer_is_refused():
    theirs = fp32_twin("adamw")
    theirs.param_groups[0]["differentiable"] = True
    ours = train(fresh("adamw", "master"), 0, 2)
    assert_refused(ours, theirs.state_dict(), NotImplementedError, "able=True .* not supported")


def distributed_case(name, recipe):
    """A cast module and an optimizer, as torch.distributed.checkpoint wants them."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    torch_bf16.cast_model(module, RECIPES[recipe])
    return module, make_optimizer(name, recipe, backend_of(name), module.parameters())


@every_pair
def test_a_round_trip_through_the_distributed_checkpoint_api_keeps_every_bit(name, recipe):
    module, saved = distributed_case(name, recipe)
    train(saved, 0, 3)
    state_dict = get_optimizer_state_dict(module, saved)
    again, loaded = distributed_case(name, recipe)
    weights = snapshot(list(again.parameters()))
    set_optimizer_state_dict(again, loaded, state_dict)
    assert snapshot(list(again.parameters())) == weights
    assert snapshot(loaded.state_dict()) == snapshot(saved.state_dict())


@every_pair
def test_a_state_dict_for_a_distributed_checkpoint_disturbs_no_weight_and_no_master(name, recipe):
    """Torch makes the state by a step with zero gradients at a learning rate of zero."""
    module, optimizer = distributed_case(name, recipe)
    weights = [p.detach().clone() for p in module.parameters()]
    state_dict = get_optimizer_state_dict(module, optimizer)
    assert state_dict["state"]
    assert snapshot(list(module.parameters())) == snapshot(weights)
    if recipe == "stochastic":
        return
    torch.manual_seed(0)
    fp32 = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    for exact, parameter in zip(fp32.parameters(), module.parameters(), strict=True):
        state = optimizer.state[parameter]
        master = state.get("master")
        if master is None:
            master = torch_bf16.numerics.rounding.join16(parameter, state["remainder16"])
        assert bits(master) == bits(exact)


@every_recipe
def test_a_state_for_parameters_on_meta_is_refused(recipe):
    saved = train(fresh("adamw", recipe), 0, 2).state_dict()
    values = [torch.nn.Parameter(p.detach().to("meta")) for p in make_parameters().values()]
    empty = make_optimizer("adamw", RECIPES[recipe], "cpu", values)
    with pytest.raises(StateMismatchError, match=r"is on the meta device, .* \(model\.to_empty"):
        empty.load_state_dict(saved)
    assert not empty.state

"""Optimizers without a fused rule: their own step, our storage."""

import copy
import pickle
import weakref

import pytest
import torch
from foreign_cases import (
    ADAMW_WITH_AMSGRAD,
    COUPLED,
    OWN,
    REFUSED,
    REFUSED_AT_STEP,
    exact_weights,
    make_run,
    train,
)
from optimizer_cases import RECIPES, bits

import torch_bf16
from torch_bf16 import Recipe, convert
from torch_bf16.engine.encoder import Encoder
from torch_bf16.foreign import contents

NEAREST = Recipe("nearest", weights="bf16_nearest", exp_avg="fp32", exp_avg_sq="fp32")


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20], ids=["a tensor at a time", "all at once"])
def test_with_exact_masters_it_is_the_fp32_run_bit_for_bit(name, bucket_bytes):
    model, optimizer = make_run(OWN[name], "bf16-fp32-master")
    assert isinstance(optimizer, torch_bf16.BF16Optimizer)
    optimizer.bucket_bytes = bucket_bytes
    fp32, reference = make_run(OWN[name], None)
    train(model, optimizer, range(30))
    train(fp32, reference, range(30))
    exact = exact_weights(model, optimizer)
    for each, (key, value) in zip(exact, fp32.named_parameters(), strict=True):
        assert torch.equal(bits(each), bits(value)), key
    before, _ = make_run(OWN[name], None)
    pairs = zip(before.parameters(), fp32.parameters(), strict=True)
    assert all(not torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("recipe", ["bf16-stochastic", NEAREST], ids=["stochastic", "nearest"])
def test_stochastic_weights_follow_where_nearest_ones_stall(recipe):
    """500 steps of a 128th of a bf16 spacing each; the mean may be off by five sigma."""
    parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = convert(Drift([parameter]), recipe)
    for _ in range(500):
        parameter.grad = torch.full_like(parameter, 2.0**-15)
        optimizer.step()
    moved, expected = 1 - parameter.float().mean(), 500 * 2.0**-15
    if recipe is NEAREST:
        assert moved == 0
        return
    # Each step is all of a unit of 2**-8 with probability 2**-7, below 1.0.
    sigma = (500 * 2.0**-15 * 2.0**-8 / parameter.numel()) ** 0.5
    assert abs(moved - expected) < 5 * sigma


class Drift(torch.optim.Optimizer):
    """Plain descent, whose class nobody knows."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])


def test_a_step_that_fails_before_it_encodes_leaves_nothing_to_the_next_ones(monkeypatch):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(8, 8).bfloat16()) for _ in range(3)]
    copies, gradient = copy.deepcopy(parameters), torch.randn(8, 8).bfloat16()
    optimizer = convert(OWN["adamax"](parameters), "bf16-stochastic")
    reference = convert(OWN["adamax"](copies), "bf16-stochastic")
    add, calls = Encoder.add, []

    def short_of_memory(*given):
        calls.append(given)
        if len(calls) == 4:
            raise MemoryError("full")
        add(*given)

    for each in parameters:
        each.grad = gradient.clone()
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "add", short_of_memory)
        with pytest.raises(MemoryError):
            optimizer.step()
    parameters[0].grad = None
    optimizer.step()
    assert torch.equal(parameters[0], copies[0])
    parameters[0].grad, parameters[1].grad, parameters[2].grad = gradient.clone(), None, None
    optimizer.step()
    for each in copies:
        each.grad = gradient.clone()
    reference.step()
    assert all(map(torch.equal, parameters, copies))


@pytest.mark.parametrize("name", OWN)
def test_a_resumed_run_and_a_copy_repeat_the_uninterrupted_one(name, tmp_path):
    whole = make_run(OWN[name], "bf16-stochastic")
    train(*whole, range(3))
    torch_bf16.save_checkpoint(tmp_path / "run.pt", model=whole[0], optimizer=whole[1])
    resumed = make_run(OWN[name], "bf16-stochastic", seed=1)
    torch_bf16.load_checkpoint(tmp_path / "run.pt", model=resumed[0], optimizer=resumed[1])
    copied = copy.deepcopy(whole)
    pickled = pickle.loads(pickle.dumps(whole))
    runs = (whole, resumed, copied, pickled)
    for run in runs:
        train(*run, range(3, 6))
    first, *others = ([bits(p) for p in run[0].parameters()] for run in runs)
    for other in others:
        assert all(map(torch.equal, first, other))
    states = [snapshot(run) for run in runs]
    assert states.count(states[0]) == len(states)


def snapshot(run):
    model, optimizer = run
    return [
        {
            key: bits(v).tolist() if isinstance(v, torch.Tensor) and v.dtype != torch.int64 else v
            for key, v in optimizer.state[p].items()
        }
        for p in model.parameters()
    ]


class OfBF16(torch.optim.SGD):
    """Needs bf16 weights, as the Muon of modded-nanogpt's medium track does."""

    error: BaseException = TypeError("needs bits")

    def step(self, closure=None):
        if {each.dtype for each in self.param_groups[0]["params"]} != {torch.bfloat16}:
            raise self.error


def step_of_bf16():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = convert(OfBF16([parameter], lr=0.1), "bf16-stochastic")
    parameter.data = parameter.bfloat16()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA")])
def test_what_ends_an_own_step_from_outside_is_not_blamed_on_its_class(error, monkeypatch):
    monkeypatch.setattr(OfBF16, "error", error)
    with pytest.raises(type(error)) as caught:
        step_of_bf16()
    assert not hasattr(caught.value, "__notes__")


def test_an_own_step_that_fails_is_said_to_run_on_fp32_copies():
    with pytest.raises(TypeError) as caught:
        step_of_bf16()
    (note,) = caught.value.__notes__
    assert "the step of OfBF16 on float32 copies" in note
    assert "its first steps run uncompiled" in note


def test_known_states_take_the_recipes_formats_and_others_stay_fp32():
    model, optimizer = make_run(ADAMW_WITH_AMSGRAD, "bf16-stochastic")
    train(model, optimizer, range(2))
    dtypes = {k: v.dtype for k, v in optimizer.state[model[0].weight].items() if k != "noise_step"}
    assert dtypes == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "max_exp_avg_sq": torch.float32,
    }
    given = make_run(
        ADAMW_WITH_AMSGRAD, "bf16-stochastic", roles={"max_exp_avg_sq": "exp_avg", "exp_avg": None}
    )
    train(*given, range(2))
    state = given[1].state[given[0][0].weight]
    assert (state["max_exp_avg_sq"].dtype, state["exp_avg"].dtype) == (
        torch.bfloat16,
        torch.float32,
    )
    with pytest.raises(ValueError, match=r"a state takes the format of .exp_avg. or .exp_avg_sq."):
        make_run(ADAMW_WITH_AMSGRAD, "bf16-stochastic", roles={"max_exp_avg_sq": "int3"})


@pytest.mark.parametrize("name", COUPLED)
def test_an_optimizer_that_couples_parameters_steps_on_all_at_once(name):
    model, optimizer = make_run(COUPLED[name], "bf16-fp32-master")
    optimizer.bucket_bytes = 1
    fp32, reference = make_run(COUPLED[name], None)
    train(model, optimizer, range(5))
    train(fp32, reference, range(5))
    for each, value in zip(exact_weights(model, optimizer), fp32.parameters(), strict=True):
        assert torch.equal(bits(each), bits(value))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_step_on_copies_is_refused_with_the_reason_and_stays_as_it_was(name):
    make, match = REFUSED[name]
    parameters = [torch.nn.Parameter(torch.ones(3, 2))]
    optimizer = make(parameters)
    kind, attributes = type(optimizer), dict(vars(optimizer))
    with pytest.raises(NotImplementedError, match=match):
        convert(optimizer)
    assert type(optimizer) is kind
    assert vars(optimizer) == attributes
    assert (parameters[0] == 1).all()


class Branch:
    """One of many objects that refer to each other through the same list."""

    def __init__(self, siblings):
        self.siblings = siblings
        siblings.append(self)


class Closed:
    """Tells nothing about itself."""

    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(name)


class ClosedMapping(dict):
    """A mapping whose keys cannot be listed."""

    def keys(self):
        raise RuntimeError("keys")


def test_attributes_that_refer_to_each_other_or_raise_do_not_stop_an_optimizer():
    def make(parameters):
        optimizer = OWN["adagrad"](parameters)
        optimizer.tree, optimizer.circle = [], {}
        for _ in range(300):
            Branch(optimizer.tree)
        optimizer.circle["itself"] = optimizer.circle
        optimizer.closed = [Closed(), ClosedMapping(a=1)]
        optimizer.gone = weakref.proxy(Branch([]))
        return optimizer

    looked = 0
    for _ in contents._leaves(make([torch.nn.Parameter(torch.ones(2))]).tree):
        looked += 1
    assert looked < 10
    model, optimizer = make_run(make, "bf16-stochastic")
    train(model, optimizer, range(2))


def test_a_snapshot_of_objects_differs_when_one_changes():
    tree = []
    for _ in range(300):
        Branch(tree)
    before = contents.snapshot(tree)
    assert len(before) < 2000
    assert contents.snapshot(tree) == before
    tree[7].siblings = tree[:]
    assert contents.snapshot(tree) != before
    first, second = [1], [1]
    assert contents.snapshot([first, second, first]) != contents.snapshot([first, second, second])


@pytest.mark.parametrize("name", REFUSED_AT_STEP)
def test_what_shows_in_the_first_step_is_refused_there_and_updates_nothing(name):
    make, match = REFUSED_AT_STEP[name]
    model, optimizer = make_run(make, "bf16-stochastic")
    before, attributes = copy.deepcopy(model.state_dict()), {*vars(optimizer)}
    error = RuntimeError if "run time" in name else NotImplementedError
    with pytest.raises(error, match=match):
        train(model, optimizer, [1])
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert {*vars(optimizer)} == attributes


class Differentiates(torch.optim.SGD):
    """Needs the graph of the gradients, as AdaHessian does."""

    @torch.enable_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        torch.autograd.grad([p.grad.square().sum() for p in every], every)


class DifferentiatesSome(torch.optim.SGD):
    """The same, for parameters that are not in the first bucket."""

    @torch.enable_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.shape == (5,):
                torch.autograd.grad(p.grad.square().sum(), p)
            p.data.add_(1.0)


class LooksFirst(torch.optim.SGD):
    """As torch_optimizer's Adahessian does."""

    def step(self, closure=None):
        for group in self.param_groups:
            if any(p.grad.grad_fn is None for p in group["params"]):
                raise RuntimeError("a gradient does not have grad_fn: set create_graph to True")


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # torch's, of create_graph
@pytest.mark.parametrize(
    ("kind", "after"),
    [
        (Differentiates, "Nothing was updated"),
        (LooksFirst, "Nothing was updated"),
        (
            DifferentiatesSome,
            "[0-9]+ of [0-9]+ parameters were updated, the others not. Load the last checkpoint "
            "before going on",
        ),
    ],
)
def test_a_step_that_differentiates_gradients_is_refused_by_name(kind, after):
    model, optimizer = make_run(kind, "bf16-stochastic")
    optimizer.bucket_bytes = 1
    before = copy.deepcopy(model.state_dict())
    loss = sum(p.float().square().sum() for p in model.parameters())
    loss.backward(create_graph=True)
    with pytest.raises(NotImplementedError, match=rf"cannot .* without their graph.*\. {after}$"):
        optimizer.step()
    same = all(map(torch.equal, model.state_dict().values(), before.values()))
    assert same == (after == "Nothing was updated")
    optimizer.zero_grad()


def test_following_the_first_steps_draws_no_random_number():
    model, optimizer = make_run(COUPLED["counter"], "bf16-stochastic")
    before = torch.get_rng_state()
    train(model, optimizer, range(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_are_only_read_and_hooks_run_once():
    model, optimizer = make_run(OWN["rmsprop"], "bf16-stochastic")
    optimizer.bucket_bytes = 1
    ran = []
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, [1])
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    scheduler.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert ran == [1, 1]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_written_from_outside_counts(recipe):
    model, optimizer = make_run(Drift, RECIPES[recipe])
    train(model, optimizer, [1])
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()
    assert (exact_weights(model, optimizer)[0] == 0.25).all()


def test_states_in_blocks_of_int8_follow_the_fp32_run():
    recipe = Recipe("int8", weights="bf16+8", exp_avg="int8", exp_avg_sq="int8")
    runs = []
    for own in (recipe, None):
        weight = torch.ones(4, 128, dtype=torch.float32 if own is None else torch.bfloat16)
        weight = torch.nn.Parameter(weight)
        optimizer = ADAMW_WITH_AMSGRAD([weight])
        runs.append((weight, optimizer if own is None else convert(optimizer, own)))
    for seed in range(20):
        gradient = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for weight, optimizer in runs:
            weight.grad = gradient.to(weight.dtype)
            optimizer.step()
    (weight, optimizer), (expected, _) = runs
    assert optimizer.state[weight]["exp_avg"].dtype in (torch.int8, torch.uint8)
    # 20 steps of at most 0.01, whose direction codes of 7 bits move by a few percent.
    torch.testing.assert_close(weight.float(), expected.detach(), rtol=0, atol=0.05)


def test_a_role_for_a_state_that_is_never_made_is_pointed_out():
    run = make_run(OWN["adamax"], "bf16-stochastic", roles={"momentum_bufer": "exp_avg"})
    with pytest.warns(
        UserWarning, match=r"roles name momentum_bufer, .*first steps, but exp_avg, exp_inf"
    ) as caught:
        train(*run, range(5))
    assert len(caught) == 1

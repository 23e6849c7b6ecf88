"""`convert` makes a user's ``torch.optim`` optimizer ours, and nothing else changes."""

import copy
import functools
import types

import pytest
import torch
from optimizer_cases import (
    OPTIMIZERS,
    RECIPES,
    assert_same,
    backend_of,
    bits,
    differs,
    every_recipe,
    every_torch_pair,
    set_gradients,
    snapshot,
    take_steps,
)
from optimizer_wrappers import Around
from torch import nn
from torch.optim import lr_scheduler

import torch_bf16
from torch_bf16 import BF16Optimizer, convert
from torch_bf16.numerics.rounding import bf16_nearest, join16


def make_module(recipe="bf16-stochastic"):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.LayerNorm(3))
    return module if recipe is None else torch_bf16.cast_model(module, recipe)


def torch_optimizer(name, parameters, **options):
    return OPTIMIZERS[name][1](parameters, **{**OPTIMIZERS[name][2], **options})


@every_torch_pair
def test_the_object_and_all_that_hangs_on_it_stay(name, recipe):
    module = make_module()
    optimizer = torch_optimizer(name, [{"params": p} for p in module.parameters()])
    groups, defaults, ran = optimizer.param_groups, optimizer.defaults, []
    each_group = [(group, dict(group)) for group in groups]
    optimizer.register_step_pre_hook(lambda *_: ran.append("pre"))
    optimizer.register_step_post_hook(lambda *_: ran.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: ran.append("state_dict"))
    assert convert(optimizer, RECIPES[recipe], backend=backend_of(name)) is optimizer
    assert isinstance(optimizer, OPTIMIZERS[name][0])
    assert isinstance(optimizer, (OPTIMIZERS[name][1], BF16Optimizer))
    assert optimizer.recipe == RECIPES[recipe]
    assert optimizer.param_groups is groups
    assert optimizer.defaults is defaults
    for group, (before, content) in zip(groups, each_group, strict=True):
        assert group is before
        assert group == content
    assert not optimizer.state
    take_steps(optimizer, [1])
    optimizer.state_dict()
    assert ran == ["pre", "post", "state_dict"]


@every_torch_pair
def test_a_converted_optimizer_steps_as_one_that_was_made_so(name, recipe):
    how = {"recipe": RECIPES[recipe], "backend": backend_of(name)}
    theirs = torch_optimizer(name, make_module(RECIPES[recipe]).parameters())
    converted = convert(theirs, **how)
    ours, _, options = OPTIMIZERS[name]
    made = ours(make_module(RECIPES[recipe]).parameters(), **options, **how)
    for optimizer in (converted, made):
        take_steps(optimizer, range(4))
    assert_same(snapshot(converted), snapshot(made))


SCHEDULERS = {
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
}
every_scheduler = pytest.mark.parametrize("kind", SCHEDULERS)


def train_with(scheduler, optimizer, kind):
    for seed in range(5):
        take_steps(optimizer, [seed])
        scheduler.step(*((1.0,) if kind == "ReduceLROnPlateau" else ()))


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@pytest.mark.parametrize("when", ["before", "after"])
@every_scheduler
def test_schedulers_built_before_or_after_steer_it(kind, when, name):
    optimizer = torch_optimizer(name, make_module().parameters())
    if when == "before":
        scheduler = SCHEDULERS[kind](optimizer)
        convert(optimizer)
    else:
        convert(optimizer)
        scheduler = SCHEDULERS[kind](optimizer)
    ours, _, options = OPTIMIZERS[name]
    reference = ours(make_module().parameters(), **options)
    its = SCHEDULERS[kind](reference)
    train_with(scheduler, optimizer, kind)
    train_with(its, reference, kind)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["lr"] != options["lr"]
    assert_same(snapshot(optimizer), snapshot(reference))


def test_a_scheduler_built_before_still_sees_a_forgotten_step():
    optimizer = torch_optimizer("adamw", make_module().parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    convert(optimizer)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


def test_one_scheduler_before_and_one_after_count_each_step_once():
    optimizer = torch_optimizer("adamw", make_module().parameters())
    before = lr_scheduler.ExponentialLR(optimizer, 0.9)
    ran = []
    convert(optimizer).register_step_post_hook(lambda *_: ran.append(1))
    after = lr_scheduler.ConstantLR(optimizer)
    take_steps(optimizer, [1])
    before.step()
    after.step()
    assert ran == [1]
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


@every_recipe
@pytest.mark.parametrize("name", ["adamw", "adam", "momentum", "nesterov"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_state_of_torch_is_taken_over_in_the_formats_of_the_recipe(dtype, name, recipe):
    module = make_module(None).to(dtype)
    optimizer = torch_optimizer(name, module.parameters())
    take_steps(optimizer, range(3))
    weights = [p.detach().float().clone() for p in module.parameters()]
    moments = [
        {k: t.clone() for k, t in optimizer.state[p].items() if k != "step"}
        for p in module.parameters()
    ]
    torch_bf16.cast_model(module, RECIPES[recipe])
    convert(optimizer, RECIPES[recipe], backend=backend_of(name))
    reference = OPTIMIZERS[name][0]
    for p, weight, before in zip(module.parameters(), weights, moments, strict=True):
        state = optimizer.state[p]
        # torch's SGD keeps no step; a buffer says that there was one.
        assert state["step"].item() == (1 if reference is torch_bf16.SGD else 3)
        for key, moment in before.items():
            role = "exp_avg" if key == "momentum_buffer" else key
            wanted = RECIPES[recipe].format_of(role, p.shape, p.dtype).planes[0].dtype
            expected = bf16_nearest(moment.float()) if wanted == torch.bfloat16 else moment.float()
            assert state[key].dtype == wanted
            assert torch.equal(bits(state[key]), bits(expected)), key
        if "remainder16" in state:
            assert torch.equal(bits(join16(p.detach(), state["remainder16"])), bits(weight))
        if "master" in state:
            assert torch.equal(bits(state["master"]), bits(weight))
    take_steps(optimizer, [3])
    # The next step continues from there: with fresh moments it would be another one.
    fresh = copy.deepcopy(module)
    fresh_optimizer = convert(
        torch_optimizer(name, fresh.parameters()), RECIPES[recipe], backend=backend_of(name)
    )
    before = snapshot(optimizer)
    for each in (optimizer, fresh_optimizer):
        take_steps(each, [4])
    assert differs(before, snapshot(optimizer))
    pairs = zip(module.parameters(), fresh.parameters(), strict=True)
    assert any(not torch.equal(bits(p), bits(q)) for p, q in pairs)


def test_a_converted_fp32_optimizer_goes_on_as_torchs_would():
    modules = [make_module(None) for _ in range(2)]
    optimizers = [torch_optimizer("adamw", m.parameters(), foreach=False) for m in modules]
    for optimizer in optimizers:
        take_steps(optimizer, range(5))
    convert(optimizers[0])
    for optimizer in optimizers:
        take_steps(optimizer, range(5, 10))
    for p, q in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        # Five steps, each with at most 8 roundings of numbers below 4.
        torch.testing.assert_close(p, q, rtol=0, atol=5 * 8 * 2.0**-23)


def compile_within(module):
    module[0] = torch.compile(module[0])
    return module


WRAPPERS = {
    "plain": lambda module: module,
    "compile": torch.compile,
    "compiled-submodule": compile_within,
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp-of-compile": lambda m: nn.parallel.DistributedDataParallel(torch.compile(m)),
    "compile-of-ddp": lambda m: torch.compile(nn.parallel.DistributedDataParallel(m)),
}


# The first use of torch.compile imports much of torch, which warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_the_module_key_the_noise_also_under_wrappers(wrapper):
    named = torch_bf16.AdamW(make_module().named_parameters(), lr=0.01, weight_decay=0.1)
    module = make_module()
    # The last first, so that positions would draw other noise.
    parameters = list(module.parameters())
    optimizer = torch_optimizer("adamw", parameters[::-1])
    wrapped = WRAPPERS[wrapper](module)
    # DDP writes into the weights as it wraps them, and exact masters would start from those.
    torch_bf16.sync_masters(wrapped)
    convert(optimizer, model=wrapped)
    positional = convert(torch_optimizer("adamw", make_module().parameters()))
    for seed in range(3):
        for each in (list(named.param_groups[0]["params"]), parameters):
            set_gradients(each, seed)
        named.step()
        optimizer.step()
        take_steps(positional, [seed])
    assert_same(snapshot(named), snapshot(optimizer, parameters))
    assert differs(snapshot(named), snapshot(positional))
    twin = copy.deepcopy(optimizer)
    take_steps(twin, [3])
    take_steps(optimizer, [3])
    assert_same(snapshot(optimizer), snapshot(twin))


def test_a_second_convert_is_refused_and_changes_nothing():
    one, other = (convert(torch_optimizer("adamw", make_module().parameters())) for _ in range(2))
    take_steps(one, [1])
    take_steps(other, [1])
    with pytest.raises(ValueError, match="already stores its numbers by recipe 'bf16-stochastic'"):
        convert(one, "bf16-fp32-master")
    ours = torch_bf16.SGD(make_module().parameters())
    with pytest.raises(ValueError, match="this SGD already stores its numbers by recipe"):
        convert(ours)
    take_steps(one, [2])
    take_steps(other, [2])
    assert one.recipe.name == "bf16-stochastic"
    assert_same(snapshot(one), snapshot(other))


def test_a_wrapper_around_ours_is_not_told_what_nobody_does():
    base = torch_bf16.AdamW(make_module().parameters(), recipe="bf16-fp32-master")
    around = Around(base)
    with pytest.raises(ValueError, match=r"AdamW in this Around was made with recipe 'bf16-fp32-"):
        convert(around)
    for asked in ({"roles": {"z": "exp_avg"}}, {"elementwise": True}, {"backend": "eager"}):
        with pytest.raises(ValueError, match="this Around leaves the step to its AdamW"):
            convert(around, "bf16-fp32-master", **asked)
    assert convert(around, "bf16-fp32-master") is around
    assert (base.recipe.name, base.backend) == ("bf16-fp32-master", None)


def with_state_of_another_shape(parameters):
    optimizer = torch.optim.AdamW(parameters)
    take_steps(optimizer, [1])
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    # torch's own step would fail on this one as well, so only the first parameter is left out.
    state["exp_avg"] = torch.zeros(2, 2)
    return optimizer


def with_own_step(parameters, scheduler=None):
    optimizer = torch.optim.AdamW(parameters)
    if scheduler == "below":
        lr_scheduler.ConstantLR(optimizer)
    inner, kind = optimizer.step, type(optimizer)

    @functools.wraps(inner)
    def step(*args, **kwargs):
        return inner()

    optimizer.step = step
    if scheduler == "above":
        optimizer.step = types.MethodType(lambda self, closure=None: kind.step(self), optimizer)
        lr_scheduler.ConstantLR(optimizer)
    return optimizer


def with_own_loading(parameters):
    """nanotron's NamedOptimizer keeps torch's method, with which it loads."""
    optimizer = torch.optim.AdamW(parameters)
    of_torch = optimizer.load_state_dict
    optimizer.load_state_dict = lambda state_dict, map_location=None: of_torch(state_dict)
    return optimizer


def constructor(kind, **options):
    return lambda parameters: kind(parameters, **options)


# what is refused -> (how it is made, arguments of convert, error, what its message says)
REFUSED = {
    "lbfgs": (torch.optim.LBFGS, {}, NotImplementedError, "LBFGS.*closure several times per step"),
    "differentiable": (
        constructor(torch.optim.SGD, differentiable=True),
        {}, NotImplementedError, "differentiable=True in parameter group 0 is not supported",
    ),
    "differentiable-copies": (
        constructor(torch.optim.Adamax, differentiable=True),
        {}, NotImplementedError, "made with differentiable=True.*on copies. Leave that option out",
    ),
    "recipe": (
        torch.optim.AdamW, {"recipe": "bf16"},
        ValueError, "unknown recipe 'bf16'; known recipes: bf16-stochastic, bf16-fp32-master",
    ),
    "backend": (
        torch.optim.AdamW, {"backend": "tpu"},
        ValueError, "unknown backend 'tpu'; known backends: cpu, eager",
    ),
    "state-shape": (
        with_state_of_another_shape, {},
        torch_bf16.StateMismatchError, r"exp_avg of parameter.*has shape \(2, 2\)",
    ),
    "own-step": (with_own_step, {}, NotImplementedError, "step method of this AdamW was replaced"),
    "own-step-over-scheduler": (
        functools.partial(with_own_step, scheduler="below"),
        {}, NotImplementedError, "step method of this AdamW was replaced",
    ),
    "own-step-under-scheduler": (
        functools.partial(with_own_step, scheduler="above"),
        {}, NotImplementedError, "step method of this AdamW was replaced",
    ),
    "own-loading": (
        with_own_loading, {},
        NotImplementedError, "load_state_dict method of this AdamW .*with_own_loading.*lambda",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_why_and_keeps_torchs_own_step(what):
    make, arguments, error, message = REFUSED[what]
    optimizer, twin = (make(list(make_module(None).parameters())) for _ in range(2))
    attributes, state = dict(vars(optimizer)), {p: dict(s) for p, s in optimizer.state.items()}
    with pytest.raises(error, match=message):
        convert(optimizer, **arguments)
    assert type(optimizer) is type(twin)
    assert vars(optimizer) == attributes
    assert {p: dict(s) for p, s in optimizer.state.items()} == state
    if what in ("differentiable", "differentiable-copies", "state-shape"):
        return  # these cannot step in torch either
    before = [bits(p) for p in optimizer.param_groups[0]["params"]]
    for each in (optimizer, twin):
        set_gradients(each.param_groups[0]["params"], 1)
        each.step(lambda: 1.0)
    after = [[bits(p) for p in each.param_groups[0]["params"]] for each in (optimizer, twin)]
    assert all(map(torch.equal, *after))
    assert not all(map(torch.equal, after[0], before))


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (torch.float16, r"model.float\(\) before the model is cast"),
        (torch.float64, r"model.float\(\) before the model is cast"),
        (torch.complex128, r"Make it complex64: torch.nn.Parameter\("),
    ],
    ids=["fp16", "fp64", "complex128"],
)
def test_a_parameter_of_another_dtype_is_refused_with_a_remedy(dtype, remedy):
    parameters = [nn.Parameter(torch.ones(2, 2, dtype=d)) for d in (torch.bfloat16, dtype)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    message = rf"number 1 of group 0, shape \(2, 2\), is {dtype}; bfloat16, float32.*{remedy}"
    with pytest.raises(ValueError, match=message):
        convert(optimizer)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all((p == 0.5).all() for p in parameters)


@pytest.mark.parametrize("what", [nn.Linear(1, 1), None, "AdamW"], ids=["module", "none", "str"])
def test_what_is_no_optimizer_is_refused(what):
    with pytest.raises(ValueError, match=r"convert takes a torch.optim optimizer, not \w+"):
        convert(what)


def test_after_a_refusal_the_remedy_works():
    optimizer = torch.optim.AdamW(make_module().parameters(), differentiable=True)
    with pytest.raises(NotImplementedError, match="set it to False"):
        convert(optimizer)
    optimizer.param_groups[0]["differentiable"] = False
    reference = torch_bf16.AdamW(make_module().parameters())
    for each in (convert(optimizer), reference):
        take_steps(each, range(2))
    assert_same(snapshot(optimizer), snapshot(reference))

"""The contract of every optimizer with every recipe on every backend."""

import copy
import pickle

import pytest
import torch
from optimizer_cases import (
    BACKENDS,
    RECIPES,
    assert_same,
    bits,
    differs,
    every_backend,
    every_case,
    every_pair_on_cpu,
    make_optimizer,
    make_parameters,
    parameters_of,
    set_gradients,
    snapshot,
    take_steps,
)

from torch_bf16 import backends, get_recipe

# recipe -> key of the state of a bf16 matrix -> dtype
DTYPES = {
    "stochastic": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "master": {
        "remainder16": torch.int16,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    },
    "mixed": {"master": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32},
}
STATES = {
    "adamw": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "adam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "sgd": {},
    "momentum": {"momentum_buffer": "exp_avg"},
    "nesterov": {"momentum_buffer": "exp_avg"},
    "amsgrad": {
        "exp_avg": "exp_avg",
        "exp_avg_sq": "exp_avg_sq",
        "max_exp_avg_sq": "exp_avg_sq",
    },
    "nadam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "radam": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "adagrad": {"sum": "exp_avg_sq"},
    "rmsprop": {"square_avg": "exp_avg_sq"},
    "centered": {"square_avg": "exact", "grad_avg": "exact", "momentum_buffer": "exp_avg"},
    "lion": {"exp_avg": "exp_avg"},
    "cautious": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "cautious_lion": {"exp_avg": "exp_avg"},
    "stable": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "adopt": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    "schedule_free_adamw": {"z": "iterate", "exp_avg_sq": "exp_avg_sq"},
    "schedule_free_sgd": {"z": "iterate"},
}
# How far the first step goes for a gradient of one, in learning rates, where that is not 1.
FIRST_STEP = {
    "nesterov": 1.9,
    "nadam": 1.0 + 0.1 * 0.45 / (1 - 0.45**2),
    "adagrad": 1.1**-0.5,
    "rmsprop": 0.01**-0.5,
    "centered": (0.01 - 0.01**2) ** -0.5,
    "adopt": 0.0,
    "schedule_free_adamw": 1 / 3,
}
# Those that CUDA makes, that IEEE suggests, quiet and signalling ones with a payload, both signs.
NANS = {
    torch.bfloat16: (0x7FFF, 0xFFFF, 0x7FC0, 0x7FC1, 0x7F81, 0xFF81),
    torch.float32: (0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7FC00001, 0x7F800001, 0xFF800001),
}


def from_bits(patterns, dtype):
    width, integer = {torch.bfloat16: (16, torch.int16), torch.float32: (32, torch.int32)}[dtype]
    signed = [p - (1 << width) if p >> (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=integer).view(dtype)


@every_case
def test_a_step_keeps_every_state_tensor_and_its_dtype_shape_and_place(name, recipe, backend):
    parameters = make_parameters()
    optimizer = make_optimizer(name, recipe, backend, parameters.values())
    assert not optimizer.state, "state exists before the first step"
    take_steps(optimizer, [1])
    before = {p: dict(optimizer.state[p]) for p in parameters.values()}
    places = [(p.data_ptr(), p.stride(), p.dtype) for p in parameters.values()]
    shapes = {k: (t.dtype, t.shape, t.data_ptr()) for s in before.values() for k, t in s.items()}
    take_steps(optimizer, [2, 3])
    for p, state in before.items():
        assert optimizer.state[p].keys() == state.keys()
        assert all(optimizer.state[p][key] is tensor for key, tensor in state.items())
        for key, tensor in state.items():
            assert tensor.shape == (() if key == "step" else p.shape)
            assert tensor.device == p.device
    after = {k: (t.dtype, t.shape, t.data_ptr()) for s in before.values() for k, t in s.items()}
    assert after == shapes
    assert [(p.data_ptr(), p.stride(), p.dtype) for p in parameters.values()] == places


@every_case
def test_states_have_the_formats_of_the_recipe(name, recipe, backend):
    parameters = make_parameters()
    optimizer = make_optimizer(name, recipe, backend, parameters.values())
    take_steps(optimizer, [1])
    chosen, own = DTYPES[recipe], {"step": torch.float32}
    masters = {key: dtype for key, dtype in chosen.items() if key in ("remainder16", "master")}
    exact = dict.fromkeys(STATES[name], torch.float32)
    iterate = torch.float32 if masters else torch.bfloat16
    dtypes = {**chosen, "exact": torch.float32, "iterate": iterate}
    compressed = {key: dtypes[role] for key, role in STATES[name].items()}
    # Whatever the recipe, a vector has an exact master: one that it names, else the two halves.
    expected = {
        "matrix": own | masters | compressed,
        "vector": own | (masters or {"remainder16": torch.int16}) | exact,
        "fp32": own | exact,
    }
    for key, dtypes in expected.items():
        state = optimizer.state[parameters[key]]
        assert {k: tensor.dtype for k, tensor in state.items()} == dtypes, key
    assert all(optimizer.state[p]["step"].item() == 1 for p in parameters.values())


@every_case
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_a_zero_gradient_without_decay_leaves_every_bit(name, recipe, backend, maximize):
    special = [0x8000, 0x0000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x0080, 0x3F80]
    parameters = [torch.nn.Parameter(t) for t in (
        torch.cat([from_bits(special, torch.bfloat16), torch.randn(8).bfloat16()]).view(4, 4),
        torch.cat([from_bits(special, torch.bfloat16), torch.randn(8).bfloat16()]),
        torch.cat([from_bits([0x80000000, 1], torch.float32), torch.randn(4)]).view(3, 2),
    )]  # fmt: skip
    options = {"maximize": maximize, "weight_decay": 0.0}
    optimizer = make_optimizer(name, recipe, backend, parameters, **options)
    # Under maximize a zero counts as -0.0, and IEEE says -0.0 - -0.0 = +0.0, also in torch.
    start = -0.0 if maximize else 0.0
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, start)
    weights = [bits(p) for p in parameters]
    optimizer.step()
    for parameter in parameters:
        # A weight that is not its iterate moves towards it.
        if "remainder16" in optimizer.state[parameter] and "schedule_free" not in name:
            lower = torch.randint(-(2**15), 2**15, parameter.shape).to(torch.int16)
            lower.view(-1)[:8] = 0
            optimizer.state[parameter]["remainder16"].copy_(lower)
    before = [{k: bits(t) for k, t in optimizer.state[p].items()} for p in parameters]
    for _ in range(3):
        optimizer.step()
    for parameter, weight, state in zip(parameters, weights, before, strict=True):
        assert torch.equal(bits(parameter), weight)
        for key in state.keys() - {"step"}:
            assert torch.equal(bits(optimizer.state[parameter][key]), state[key]), key


@every_case
@pytest.mark.parametrize("at", ["first", "third"])
def test_a_non_finite_gradient_never_leaves_a_finite_weight(name, recipe, backend, at):
    parameters, bad = [], 8
    for dtype, shape in (
        (torch.bfloat16, (5, 2)),
        (torch.bfloat16, (10,)),
        (torch.float32, (2, 5)),
    ):
        p = torch.nn.Parameter(torch.randn(shape).to(dtype))
        parameters.append(p)
    optimizer = make_optimizer(name, recipe, backend, parameters)
    take_steps(optimizer, [] if at == "first" else [1, 2])
    for p in parameters:
        infinite = torch.tensor([torch.inf, -torch.inf], dtype=p.dtype)
        finite = torch.tensor([1.0, 3e38], dtype=p.dtype)
        p.grad = torch.cat([from_bits(NANS[p.dtype], p.dtype), infinite, finite]).view(p.shape)
    optimizer.step()
    for _ in range(2):
        for p in parameters:
            assert not torch.isfinite(p.detach().view(-1)[:bad]).any(), p
            assert torch.isfinite(p.detach().view(-1)[bad]), p
            p.grad = torch.zeros_like(p)
        optimizer.step()


@every_case
def test_a_parameter_without_gradient_is_passed_over(name, recipe, backend):
    first, second = (torch.nn.Parameter(torch.randn(4, 3).bfloat16()) for _ in range(2))
    optimizer = make_optimizer(name, recipe, backend, [first, second])
    optimizer.step()
    before = bits(second)
    for _ in range(2):
        first.grad = torch.ones_like(first)
        optimizer.step()
    assert torch.equal(bits(second), before)
    assert not optimizer.state.get(second)
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in (first, second)] == [3, 1]
    assert torch.equal(bits(second), before) == (name == "adopt")


@every_case
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_continues_bit_for_bit(name, recipe, backend, way):
    options = {"recipe": get_recipe(RECIPES[recipe], seed=11)}
    named = make_parameters().items()
    optimizer = make_optimizer(name, options["recipe"], backend, named)
    take_steps(optimizer, [1, 2])
    twin = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert type(twin) is type(optimizer)
    assert (twin.recipe, twin.backend) == (optimizer.recipe, backend)
    assert not set(parameters_of(twin)) & set(parameters_of(optimizer))
    before = snapshot(optimizer)
    assert_same(snapshot(twin), before)
    take_steps(twin, [3, 4, 5])
    assert_same(snapshot(optimizer), before)
    take_steps(optimizer, [3, 4, 5])
    assert_same(snapshot(twin), snapshot(optimizer))
    assert differs(before, snapshot(optimizer))


@every_case
def test_maximize_is_a_step_against_the_negated_gradient(name, recipe, backend):
    ascending, descending = (
        make_optimizer(name, recipe, backend, make_parameters().values(), maximize=maximize)
        for maximize in (True, False)
    )
    for seed in range(3):
        for optimizer, sign in ((ascending, 1), (descending, -1)):
            set_gradients(parameters_of(optimizer), seed)
            for p in parameters_of(optimizer):
                p.grad.mul_(sign)
            optimizer.step()
    assert_same(snapshot(ascending), snapshot(descending))


@every_case
def test_a_closure_runs_with_gradients_and_its_loss_comes_back(name, recipe, backend):
    one, other = (
        make_optimizer(name, recipe, backend, make_parameters().values()) for _ in range(2)
    )
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        one.zero_grad()
        loss = sum((p.float() ** 2).sum() for p in parameters_of(one))
        loss.backward()
        return loss

    loss = one.step(closure)
    assert calls == [True]
    sum((p.float() ** 2).sum() for p in parameters_of(other)).backward()
    expected = sum((p.detach().float() ** 2).sum() for p in make_parameters().values())
    assert other.step() is None
    assert loss.item() == expected.item()
    assert_same(snapshot(one), snapshot(other))


@every_case
def test_step_hooks_run_around_the_step(name, recipe, backend):
    parameters = make_parameters()
    optimizer = make_optimizer(name, recipe, backend, parameters.values())
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("pre", snapshot(o))))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(("post", snapshot(o))))
    before = snapshot(optimizer)
    take_steps(optimizer, [1])
    assert [when for when, _ in seen] == ["pre", "post"]
    assert_same(seen[0][1], before)
    assert_same(seen[1][1], snapshot(optimizer))


@every_pair_on_cpu
@every_backend
def test_the_backend_attribute_decides_who_steps_also_between_steps(
    name, recipe, backend, monkeypatch
):
    other = next(each for each in BACKENDS if each != backend)
    ran = []
    for each in BACKENDS:
        chosen = backends.choose(torch.device("cpu"), each)
        real = chosen.load
        monkeypatch.setattr(
            chosen, "load", lambda bucket, real=real, each=each: (ran.append(each), real(bucket))[1]
        )
    optimizer = make_optimizer(name, recipe, backend, make_parameters().values())
    take_steps(optimizer, [1, 2])
    assert set(ran) == {backend}
    ran.clear()
    optimizer.backend = other
    take_steps(optimizer, [3])
    assert set(ran) == {other}


@every_backend
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_recipe_chosen_between_steps_rewrites_the_state(name, backend, caplog):
    parameters = make_parameters()
    optimizer = make_optimizer(name, "stochastic", backend, parameters.values(), weight_decay=0.0)
    take_steps(optimizer, [1])
    before = {key: t.float() for key, t in optimizer.state[parameters["matrix"]].items()}
    optimizer.recipe = RECIPES["master"]
    set_gradients(parameters.values(), 2)
    optimizer.scale_next_step(0.0)
    optimizer.step()
    state = optimizer.state[parameters["matrix"]]
    for key in STATES[name]:
        assert state[key].dtype == torch.float32
        # A gradient of zero leaves nothing of a moment but its decay.
        decay = 0.999 if key == "exp_avg_sq" else 0.9
        torch.testing.assert_close(state[key], before[key] * decay, rtol=2.0**-22, atol=0)
    assert state["remainder16"].dtype == torch.int16
    assert optimizer.state_dict()["torch_bf16"]["recipe"]["name"] == "bf16-fp32-master"
    optimizer.recipe = RECIPES["stochastic"]
    set_gradients(parameters.values(), 3)
    optimizer.step()
    assert "remainder16" not in optimizer.state[parameters["matrix"]]
    (record,) = caplog.records
    assert "weights bf16+16 -> bf16_stochastic" in record.getMessage()


@every_pair_on_cpu
def test_backends_agree_bit_for_bit_on_every_kind_of_parameter(name, recipe):
    optimizers = [
        make_optimizer(name, recipe, backend, make_parameters().values()) for backend in BACKENDS
    ]
    for optimizer in optimizers:
        take_steps(optimizer, range(5))
    assert_same(*map(snapshot, optimizers))


@every_case
def test_a_group_added_between_steps_starts_at_its_own_step_one(name, recipe, backend):
    plain, grown = (
        make_optimizer(name, recipe, backend, make_parameters().values()) for _ in range(2)
    )
    for optimizer in (plain, grown):
        take_steps(optimizer, [1, 2])
    late = torch.nn.Parameter(torch.linspace(-2, 2, 24).reshape(6, 4).bfloat16())
    still = torch.nn.Parameter(torch.linspace(-2, 2, 24).reshape(6, 4))
    before = bits(late), bits(still)
    old = parameters_of(grown)
    first = FIRST_STEP.get(name, 1.0)
    lr = 0.5 / first if first else 0.5
    grown.add_param_group({"params": [late], "lr": lr, "weight_decay": 0.0})
    grown.add_param_group({"params": [still], "lr": 0.0, "weight_decay": 0.0})
    late.grad, still.grad = torch.ones_like(late), torch.ones_like(still)
    for optimizer in (plain, grown):
        set_gradients(parameters_of(plain) if optimizer is plain else old, 3)
        optimizer.step()
    assert_same(snapshot(plain), snapshot(grown, old))
    assert grown.state[late]["step"].item() == 1
    assert torch.equal(bits(still), before[1])
    # Up to a bf16 step of 3, which is 1/64.
    moved = bits_to_bf16(before[0]) - late.detach().float()
    torch.testing.assert_close(moved, torch.full_like(moved, lr * first), rtol=0, atol=1 / 64)


def bits_to_bf16(pattern):
    return pattern.view(torch.bfloat16).float()

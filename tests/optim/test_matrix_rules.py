"""Muon and Adafactor, whose steps look at a whole matrix: torch's results, and our contracts."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from optimizer_cases import assert_same, differs, snapshot
from torch import nn

import torch_bf16
from torch_bf16.engine import direction_solver
from torch_bf16.optim import adafactor, muon
from torch_bf16.optim.newton_schulz import orthogonalise

STEPS = 60
SHAPES = {
    "muon": ((8, 5), (5, 9), (6, 6), (0, 3)),
    "adafactor": ((8, 5), (5, 9, 3), (6,), (), (0, 3)),
}
OURS = {"muon": torch_bf16.Muon, "adafactor": torch_bf16.Adafactor}
THEIRS = {"muon": getattr(torch.optim, "Muon", None), "adafactor": torch.optim.Adafactor}
OPTIONS = [
    ("muon", {"lr": 0.02}),
    ("muon", {"lr": 0.02, "nesterov": False}),
    ("muon", {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}),
    ("muon", {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.5}),
    ("muon", {"lr": torch.tensor(0.02), "ns_steps": 3, "eps": 0.1}),
    ("adafactor", {}),
    ("adafactor", {"weight_decay": 0.3, "maximize": True}),
    ("adafactor", {"beta2_decay": -0.5, "d": 2.0, "eps": (1e-3, 0.1)}),
    ("adafactor", {"lr": torch.tensor(0.05)}),
]
every_one = pytest.mark.parametrize("name", OURS)


def fresh(name, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Adafactor of torch divides by the number of elements of an empty one.
    shapes = SHAPES[name] if dtype == torch.bfloat16 else SHAPES[name][:-1]
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def train(optimizer, parameters, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            gradient = torch.randn(p.shape, generator=generator) * (1 if step < STEPS // 2 else 0.1)
            p.grad = gradient.to(p.dtype)
        optimizer.step()


def ours(name, parameters, backend="eager", **options):
    return OURS[name](parameters, **options, backend=backend)


@pytest.mark.parametrize(
    ("name", "options"), OPTIONS, ids=[f"{n}-{'-'.join(o) or 'plain'}" for n, o in OPTIONS]
)
def test_results_and_states_are_torchs(name, options):
    if THEIRS[name] is None:
        pytest.skip("this version of torch has no Muon")
    mine, its = fresh(name, torch.float32), fresh(name, torch.float32)
    first = [p.detach().clone() for p in its]
    optimizer, reference = ours(name, mine, **options), THEIRS[name](its, **options)
    train(optimizer, mine, range(STEPS))
    train(reference, its, range(STEPS))
    # Muon: a difference of the last bit of fp32 now and then takes a number of the bf16 iteration
    # to its other neighbour, 2**-8 of a step of lr. Adafactor: as other rules, a few half steps of
    # fp32 per step at the largest weight.
    tolerance = 0.02 * 2.0**-8 * 8 if name == "muon" else STEPS * 2.0**-22
    for p, q, start in zip(mine, its, first, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
        assert (q - start).abs().max() > 20 * tolerance
        for key, state in reference.state[q].items():
            torch.testing.assert_close(optimizer.state[p][key], state, rtol=2.0**-18, atol=2.0**-20)
    optimizer.load_state_dict(reference.state_dict())
    saved = optimizer.state_dict()
    del saved["torch_bf16"]
    reference.load_state_dict(saved)
    train(reference, its, [STEPS])


@every_one
def test_a_run_goes_on_from_a_step_that_broke_off_as_its_copy_does(name, monkeypatch):
    optimizer = ours(name, fresh(name), recipe="bf16-fp32-master")
    train(optimizer, optimizer.param_groups[0]["params"], range(3))

    def fail(*_):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(direction_solver, "_solve", fail)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            optimizer.step()
    runs = optimizer, copy.deepcopy(optimizer)
    for each in runs:
        train(each, each.param_groups[0]["params"], [3])
    assert {member.steps for member in optimizer._engine.plan.members} == {4}
    assert_same(*map(snapshot, runs))


@every_one
def test_a_step_in_autocast_is_the_same(name):
    plain, cast = ([*fresh(name), *fresh(name, seed=1)] for _ in range(2))
    runs = ours(name, plain), ours(name, cast)
    train(runs[0], plain, range(3))
    with torch.autocast("cpu", torch.float16):
        train(runs[1], cast, range(3))
    assert_same(*map(snapshot, runs))


@every_one
@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_backends_agree_and_a_resumed_run_equals_an_uninterrupted_one(name, recipe):
    runs = []
    for backend, parts in (("eager", [6]), ("cpu", [6]), ("eager", [2, 4])):
        parameters, done = fresh(name), 0
        optimizer = ours(name, parameters, backend, lr=0.02, recipe=recipe)
        for part in parts:
            train(optimizer, parameters, range(done, done + part))
            done += part
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = ours(name, parameters, backend, lr=0.02, recipe=recipe)
            optimizer.load_state_dict(saved)
        runs.append(snapshot(optimizer))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])
    assert differs(runs[0], snapshot(ours(name, fresh(name))))


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_muons_momentum_takes_any_format(backend):
    """With one in blocks of int8 weights end within a tenth of the way from where fp32 leads."""
    places = []
    for exp_avg in ("fp32", "int8"):
        parameter = nn.Parameter(torch.randn(16, 128, generator=torch.Generator().manual_seed(0)))
        parameter.data = parameter.data.bfloat16()
        recipe = torch_bf16.Recipe("mine", weights="bf16+16", exp_avg=exp_avg)
        optimizer = ours("muon", [parameter], backend, lr=0.02, recipe=recipe)
        train(optimizer, [parameter], range(10))
        places.append(parameter.detach().float())
    assert optimizer.state[parameter]["momentum_buffer"].dtype == torch.int8
    start = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    moved = (places[0] - start).norm()
    assert (places[1] - places[0]).norm() < 0.1 * moved


@every_one
def test_states_have_their_formats_and_shapes(name):
    parameters = fresh(name)
    optimizer = ours(name, parameters)
    train(optimizer, parameters, range(2))
    found = {k: (t.dtype, tuple(t.shape)) for k, t in optimizer.state[parameters[0]].items()}
    step = {"step": (torch.float32, ())}
    if name == "muon":
        assert found == {**step, "momentum_buffer": (torch.bfloat16, (8, 5))}
    else:
        factors = {"row_var": (torch.float32, (8, 1)), "col_var": (torch.float32, (1, 5))}
        assert found == step | factors
        assert optimizer.state[parameters[2]].keys() == {"step", "variance", "remainder16"}


@every_one
def test_a_converted_optimizer_steps_as_one_that_was_made_so(name):
    if THEIRS[name] is None:
        pytest.skip("this version of torch has no Muon")
    mine, its = fresh(name), fresh(name)
    made, converted = ours(name, mine), torch_bf16.convert(THEIRS[name](its), backend="eager")
    train(made, mine, range(3))
    train(converted, its, range(3))
    assert_same(snapshot(made), snapshot(converted))


@every_one
def test_clipping_and_maximize_are_in_the_direction(name):
    runs = []
    for factor, maximize in ((1.0, False), (4.0, True)):
        parameters = fresh(name)
        optimizer = ours(name, parameters, maximize=maximize)
        for p in parameters:
            p.grad = (torch.ones_like(p) + p.detach().sign()) * (-factor if maximize else factor)
        optimizer.scale_next_step(1.0 / factor)
        optimizer.step()
        runs.append(snapshot(optimizer))
    assert_same(*runs)


def test_orthogonalised_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((40, 20), (20, 40), (30, 30)):
        values = torch.linalg.svdvals(
            orthogonalise(torch.randn(shape), (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
        )
        assert values.max() < 1.3
        # The square one has singular values near zero, which five steps do not lift all the way.
        assert values.median() > 0.6


@every_one
def test_hyperparameters_are_those_of_a_list_of_groups_that_took_the_place_of_another(name):
    parameters = fresh(name)
    optimizer = ours(name, parameters, lr=0.01)
    train(optimizer, parameters, range(2))
    optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.0, "weight_decay": 0.0}]
    before = [p.clone() for p in parameters]
    train(optimizer, parameters, range(2, 4))
    assert all(map(torch.equal, before, parameters))


def test_groups_that_are_not_muons_are_adamws():
    def make():
        torch.manual_seed(0)
        layers = nn.Embedding(5, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        return torch_bf16.cast_model(nn.Sequential(*layers))

    model, twin = make(), make()
    groups = torch_bf16.param_groups(model, weight_decay=0.1, muon=True)
    both = torch_bf16.Muon(groups, lr=0.01, backend="eager")
    rest = [(n, p) for n, p in twin.named_parameters() if n != "1.weight"]
    adamw = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.0}
    alone = torch_bf16.AdamW(rest, **adamw, backend="eager")
    train(both, list(model.parameters()), range(3))
    train(alone, list(twin.parameters()), range(3))
    names = [n for n, _ in rest]
    assert_same(
        snapshot(both, [dict(model.named_parameters())[n] for n in names]),
        snapshot(alone, [p for _, p in rest]),
    )
    assert set(both.state[model[1].weight]) == {"step", "momentum_buffer"}


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"number 1 of group 0 has shape \(3,\).*use_muon=False"):
        torch_bf16.Muon([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))])
    optimizer = torch_bf16.Muon([nn.Parameter(torch.ones(2, 2))], adamw_eps=1e-6)
    group = {"params": [nn.Parameter(torch.ones(3))]}
    with pytest.raises(ValueError, match="use_muon=False"):
        optimizer.add_param_group(group)
    # What the error names helps: torch has filled the dict with Muon's options, eps among them.
    optimizer.add_param_group({**group, "use_muon": False})
    assert [each["eps"] for each in optimizer.param_groups] == [1e-7, 1e-6]
    with pytest.raises(ValueError, match="unknown adjust_lr_fn='moon'; known: None, 'original'"):
        torch_bf16.Muon([nn.Parameter(torch.ones(2, 2))], adjust_lr_fn="moon")
    with pytest.raises(
        ValueError, match="ns_steps=100 must be an integer, at least 0 and below 100"
    ):
        torch_bf16.Muon([nn.Parameter(torch.ones(2, 2))], ns_steps=100)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("muon", {"adjust_lr_fn": "rms"}, "unknown adjust_lr_fn='rms'; known: None"),
        ("muon", {"ns_coefficients": (1, 2)}, r"ns_coefficients=\(1, 2\) must be three numbers"),
        ("muon", {"ns_coefficients": "abc"}, "ns_coefficients='abc' must be three numbers"),
        ("muon", {"ns_steps": 2.5}, "ns_steps=2.5 must be an integer"),
        ("muon", {"momentum": None}, "momentum=None must be a number of at least 0"),
        ("muon", {"eps": -1.0}, "eps=-1.0 must be a number of at least 0"),
        ("adafactor", {"beta2_decay": None}, "beta2_decay=None must be a number of at most 0"),
        ("adafactor", {"eps": (None,)}, r"eps=\(None,\) must be two numbers"),
        ("adafactor", {"eps": (None, None)}, r"eps\[1\]=None must be a number of at least 0"),
        ("adafactor", {"d": "x"}, "d='x' must be a number of at least 1"),
        ("adafactor", {"d": 0.0}, "d=0.0 must be a number of at least 1"),
    ],
)
def test_a_wrong_option_of_a_group_is_refused_before_any_state_changes(name, wrong, message):
    ones = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    with pytest.raises(ValueError, match=f"^parameter group 0: {message}"):
        ours(name, [{"params": ones, **wrong}])
    optimizer = ours(name, [{"params": [each]} for each in ones])
    train(optimizer, ones, [0])
    before = snapshot(optimizer)
    optimizer.param_groups[1].update(wrong)
    with pytest.raises(ValueError, match=f"^parameter group 1: {message}.*Nothing was updated$"):
        train(optimizer, ones, [1])
    assert_same(snapshot(optimizer), before)
    if name == "muon":
        # Nothing computes a direction for a group of AdamW.
        others = {**wrong, "eps": 1e-8, "use_muon": False}
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **others})


def test_a_pickled_muon_keeps_what_its_adamw_groups_start_from():
    optimizer = torch_bf16.Muon(fresh("muon")[:1], adamw_betas=(0.8, 0.9), adamw_eps=1e-6)
    twin = pickle.loads(pickle.dumps(optimizer))
    twin.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "use_muon": False})
    assert (twin.param_groups[1]["betas"], twin.param_groups[1]["eps"]) == ((0.8, 0.9), 1e-6)
    assert twin.param_groups[0].keys().isdisjoint({"adamw_betas", "adamw_eps"})


def test_a_lazy_vector_is_refused_by_name_where_it_has_got_its_shape():
    model = torch.nn.LazyLinear(3)
    optimizer = torch_bf16.Muon(model.named_parameters(), lr=1e-3)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"'bias' .* has shape \(3,\), and Muon .*Nothing was upd"):
        optimizer.step()
    model.bias.grad = None
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 1


def test_a_step_number_that_was_written_is_the_one_of_the_step_size():
    weight = torch.randn(8, 8)
    moved = []
    for kind in (torch.optim.Adafactor, torch_bf16.Adafactor):
        torch.manual_seed(0)
        p = torch.nn.Parameter(weight.clone())
        optimizer = kind([p], lr=1.0)
        for _ in range(30):
            p.grad = torch.randn_like(p)
            optimizer.step()
        optimizer.state[p]["step"].zero_()
        before = p.detach().clone()
        p.grad = torch.ones_like(p)
        optimizer.step()
        moved.append(p.detach() - before)
    assert torch.allclose(*moved, rtol=1e-4)


def test_the_means_of_an_empty_matrix_are_zero():
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((0, 5), (5, 0), (2, 0, 3))]
    optimizer = torch_bf16.Adafactor(parameters)
    train(optimizer, parameters, range(2))
    for p in parameters:
        assert not torch.cat([each.view(-1) for each in optimizer.state[p].values()][1:]).any()


def fail(*_):
    raise torch.OutOfMemoryError("out of memory")


def test_adafactor_changes_no_state_before_its_directions_are_solved(monkeypatch):
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8,), (8, 4))]
    optimizer = torch_bf16.Adafactor(parameters, lr=1e-2)

    def give():
        for p in parameters:
            p.grad = torch.randn_like(p)

    give()
    optimizer.step()
    before = [v.clone() for state in optimizer.state.values() for v in state.values()]
    give()
    with monkeypatch.context() as patch:
        patch.setattr(adafactor._Relative, "_factor", fail)
        with pytest.raises(torch.OutOfMemoryError, match=r"Nothing was updated$"):
            optimizer.step()
    after = [v for state in optimizer.state.values() for v in state.values()]
    assert all(map(torch.equal, before, after))


def test_a_step_of_muon_that_fails_says_which_state_has_its_gradients(monkeypatch):
    parameters = [torch.nn.Parameter(torch.randn(8, 4)) for _ in range(2)]
    optimizer = torch_bf16.Muon(parameters, lr=1e-2)
    for p in parameters:
        p.grad = torch.randn_like(p)
    with monkeypatch.context() as patch:
        patch.setattr(muon, "orthogonalise_each", fail)
        with pytest.raises(torch.OutOfMemoryError, match="updated, but momentum_buffer of 2 param"):
            optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in parameters] == [0, 0]
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in parameters] == [1, 1]


@every_one
def test_weights_and_states_are_freed_with_the_optimizer(name):
    parameters = fresh(name)
    optimizer = ours(name, parameters)
    train(optimizer, parameters, [0])
    alive = [weakref.ref(each) for each in (*parameters, optimizer)]
    gc.disable()
    try:
        del optimizer
        parameters.clear()
        assert not any(each() is not None for each in alive)
    finally:
        gc.enable()

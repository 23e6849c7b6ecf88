"""Complex parameters: stepped as pairs of fp32 numbers, with the bits of their real twins."""

import copy

import pytest
import torch
from complex_cases import (
    assert_like_twin,
    conjugated,
    give,
    make_pair,
    make_tensors,
    random_gradients,
    real,
    scattered,
)
from optimizer_cases import OPTIMIZERS, backend_of, every_backend, every_case, parameters_of
from recorded_graphs import record
from torch import nn

import torch_bf16
from torch_bf16.backends import cuda_graphs
from torch_bf16.sharding import as_real


def take(pair, seeds, form=torch.clone):
    for seed in seeds:
        give(pair, random_gradients(pair[0], seed), form)
        for each in pair:
            each.step()


@every_case
def test_every_rule_gives_complex_parameters_the_bits_of_their_real_twins(name, recipe, backend):
    pair = make_pair(name, recipe, backend)
    start = copy.deepcopy([real(p) for p in pair[0].param_groups[0]["params"]])
    take(pair, range(2))
    take(pair, [2], conjugated)
    take(pair, [3], scattered)
    gradients = random_gradients(pair[0], 4)
    gradients[0] = gradients[5] = None
    give(pair, gradients)
    for each in pair:
        each.step()
    take(pair, [5])
    assert_like_twin(*pair)
    now = [real(p) for p in pair[0].param_groups[0]["params"]]
    assert all(not a.numel() or (a != b).any() for a, b in zip(start, now, strict=True))
    if hasattr(pair[0], "eval"):
        for mode in (False, True):
            for each in pair:
                each.train(mode)
            assert_like_twin(*pair)


def steps_agree(name, recipe):
    pair = make_pair(name, recipe, "triton")
    take(pair, range(2))
    take(pair, [2], conjugated)
    take(pair, [3], scattered)
    assert_like_twin(*pair)


def replays_agree(name, recipe):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "record", record)
        # A graph cannot hold the copy through which others step.
        contiguous = {key: each.contiguous() for key, each in make_tensors().items()}
        pair = make_pair(name, recipe, "triton", tensors=contiguous)
        give(pair, random_gradients(pair[0], 0))
        replay = pair[0].graphed()
        for seed in range(3):
            gradients = random_gradients(pair[0], seed)
            for optimizer, step in zip(pair, (replay, pair[1].step), strict=True):
                for parameter, each in zip(parameters_of(optimizer), gradients, strict=True):
                    as_real(parameter.grad).copy_(as_real(each))
                step()
    assert_like_twin(*pair)


@pytest.mark.parametrize(("name", "recipe"), [("adamw", "stochastic"), ("stable", "master")])
def test_triton_gives_them_too_and_so_do_replays_of_a_graph(interpreted, name, recipe):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    interpreted(steps_agree, name, recipe)
    interpreted(replays_agree, name, recipe)


@pytest.mark.parametrize("name", [name for name, case in OPTIMIZERS.items() if case[1]])
def test_complex_parameters_follow_torch(name):
    _, theirs, options = OPTIMIZERS[name]
    ours, _ = make_pair(name, "master", backend_of(name))
    parameters = [nn.Parameter(each.clone()) for each in make_tensors().values()]
    reference = theirs(parameters, **options)
    for seed in range(6):
        gradients = random_gradients(ours, seed)
        for each in (ours, reference):
            for p, gradient in zip(each.param_groups[0]["params"], gradients, strict=True):
                p.grad = gradient.clone() if p.is_complex() else None
            each.step()
    for p, other in zip(ours.param_groups[0]["params"], parameters, strict=True):
        assert torch.allclose(p, other, rtol=1e-5, atol=1e-6)


@every_backend
def test_complex_gradients_are_read_in_place_by_the_plan_of_the_last_step(backend, monkeypatch):
    pair = make_pair("adamw", "stochastic", backend)
    optimizer = pair[0]
    for p in optimizer.param_groups[0]["params"]:
        if not p.is_contiguous():
            p.requires_grad_(False)
    take(pair, range(3))
    plan, asked = optimizer._engine.plan, []
    monkeypatch.setattr(
        type(plan._guard._shards[0]), "gradient", lambda self: asked.append(self) or None
    )
    take(pair, range(3, 5))
    assert optimizer._engine.plan is plan
    assert not asked
    assert plan._guard.holds(plan._parameters, optimizer.state)
    assert plan._guard.gradients().addresses is not None


def test_a_gradient_is_followed_when_it_turns_to_a_conjugate_in_the_same_memory():
    pair = make_pair("sgd", "master", "cpu")
    gradients = random_gradients(pair[0], 0)
    kept = [each.clone() for each in gradients]
    for turned in (False, True, False, True):
        shown = [each.conj() if turned and each.is_complex() else each for each in kept]
        give(pair, shown, form=lambda each: each)
        for each in pair:
            each.step()
        assert_like_twin(*pair)


def test_states_stay_the_same_tensors_when_a_step_is_planned_again():
    pair = make_pair("adamw", "stochastic", "cpu")
    take(pair, range(2))
    parameter = pair[0].param_groups[0]["params"][0]
    before = dict(pair[0].state[parameter])
    pair[0]._engine.invalidate()
    take(pair, [2])
    assert pair[0].state[parameter]["exp_avg"] is before["exp_avg"]
    assert_like_twin(*pair)


REFUSED = {
    "complex128": (
        lambda: nn.Parameter(torch.ones(2, dtype=torch.complex128)),
        r"is torch.complex128; .*Make it complex64",
    ),
    "complex32": (
        lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64).to(torch.complex32)),
        r"is torch.complex32; .*Make it complex64",
    ),
    "conjugated": (
        lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64).conj()),
        r"negated or conjugated when it is read; .*torch.nn.Parameter\(p.clone\(\)\)",
    ),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", REFUSED)
def test_other_complex_parameters_are_refused_and_the_advice_works(kind):
    make, match = REFUSED[kind]
    with pytest.raises(ValueError, match=match):
        torch_bf16.AdamW([make()])
    refused = make()
    advised = refused.clone() if kind == "conjugated" else refused.to(torch.complex64)
    parameter = nn.Parameter(advised.detach())
    optimizer = torch_bf16.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.allclose(parameter, torch.full_like(parameter, 0.899))


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_optimizers_of_whole_matrices_refuse_complex_parameters_by_name(name):
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4) * (1 + 1j))]
    message = rf"'w', number 1 of group 0, shape \(4, 4\), is torch.complex64, and {name} looks at"
    named = [*zip("vw", parameters, strict=True)]
    with pytest.raises(ValueError, match=message):
        getattr(torch_bf16, name)(named)
    if hasattr(torch.optim, name):
        with pytest.raises(ValueError, match=message):
            torch_bf16.convert(getattr(torch.optim, name)(named))


def test_muon_steps_complex_parameters_by_adamw_and_param_groups_knows_it():
    model = nn.Linear(4, 4)
    model.wave = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
    model.vector = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    groups = torch_bf16.param_groups(model, muon=True, weight_decay=0.1)
    of = {name: group for group in groups for name, _ in group["params"]}
    assert [of[name]["use_muon"] for name in ("weight", "wave", "vector")] == [True, False, False]
    assert (of["wave"]["weight_decay"], of["vector"]["weight_decay"]) == (0.1, 0.0)
    optimizer = torch_bf16.Muon(groups)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert {*optimizer.state[model.wave]} == {"step", "exp_avg", "exp_avg_sq"}
    assert (model.wave != 1).all()

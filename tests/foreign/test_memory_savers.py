"""Optimizers that recipes name for memory: carried, replaced on request, or refused with advice."""

import copy
import io

import pytest
import torch
from foreign_cases import (
    KeepsByParameter,
    Marks,
    NeedsClosure,
    ScheduleFree,
    exact_weights,
    make_run,
    train,
)
from optimizer_cases import bits
from torch import nn

import torch_bf16
from torch_bf16 import Recipe

INT8 = Recipe("int8", exp_avg="int8", exp_avg_sq="int8")


def swapping_run(recipe, rounds=3):
    model, optimizer = make_run(ScheduleFree, recipe)
    for n in range(rounds):
        optimizer.train()
        train(model, optimizer, range(10 * n, 10 * n + 10))
        optimizer.eval()
    return model, optimizer


def test_schedule_free_swaps_its_weights_as_in_fp32():
    fp32, _ = swapping_run(None)
    model, optimizer = swapping_run("bf16-fp32-master")
    expected = [bits(p) for p in fp32.parameters()]
    assert all(map(torch.equal, map(bits, exact_weights(model, optimizer)), expected))
    optimizer.train()
    assert not all(map(torch.equal, map(bits, exact_weights(model, optimizer)), expected))


class Packed(torch.Tensor):
    """Like ``OptimState8bit`` of torchao, which has codes and scales inside."""


class PacksItsMoments(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("exp_avg", torch.zeros_like(p).as_subclass(Packed))
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("recipe", ["bf16-stochastic", "bf16-fp32-master"])
def test_states_in_tensors_of_a_class_of_their_own_are_refused_by_name(recipe):
    model, optimizer = make_run(PacksItsMoments, recipe)
    before = [p.detach().clone() for p in model.parameters()]
    match = "state 'exp_avg' in a tensor of the class Packed.*Nothing was updated"
    with pytest.raises(NotImplementedError, match=match):
        train(model, optimizer, range(1))
    assert all(map(torch.equal, model.parameters(), before))


def test_schedule_free_averages_are_right_in_the_mean_without_masters():
    fp32, _ = swapping_run(None)
    model, _ = swapping_run("bf16-stochastic")
    for p, want in zip(model.parameters(), fp32.parameters(), strict=True):
        assert (p.float() - want).abs().max() <= 0.05 * want.abs().max()


def test_a_run_that_was_saved_while_its_average_was_swapped_in_resumes_bit_for_bit():
    model, optimizer = swapping_run("bf16-stochastic", rounds=1)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    other, resumed = make_run(ScheduleFree, "bf16-stochastic", seed=1)
    file.seek(0)
    weights, states = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    resumed.load_state_dict(states)
    for run in ((model, optimizer), (other, resumed)):
        run[1].train()
        train(*run, range(50, 60))
        run[1].eval()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_swap_that_was_forgotten_is_the_classes_own_error_and_updates_nothing():
    model, optimizer = make_run(ScheduleFree, "bf16-fp32-master")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"call train\(\) before step"):
        train(model, optimizer, range(1))
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_what_a_constructor_keeps_of_each_parameter_is_carried():
    fp32, reference = make_run(Marks, None)
    model, optimizer = make_run(Marks, "bf16-fp32-master")
    for run in ((fp32, reference), (model, optimizer)):
        train(*run, range(20))
    expected = [bits(p) for p in fp32.parameters()]
    assert all(map(torch.equal, map(bits, exact_weights(model, optimizer)), expected))


def test_a_step_whose_closure_has_no_default_is_carried():
    def make(parameters):
        return NeedsClosure(parameters, lr=0.1)

    model, optimizer = make_run(make, "bf16-fp32-master")
    stock, reference = make_run(lambda p: torch.optim.SGD(p, lr=0.1), "bf16-fp32-master")
    calls = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        for p, q in zip(model.parameters(), stock.parameters(), strict=True):
            p.grad = q.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
        assert optimizer.step(lambda: calls.append(1) or 3.5) == 3.5
        reference.step()
    assert len(calls) == 5
    assert all(map(torch.equal, model.parameters(), stock.parameters()))


class AdamW8bit(torch.optim.Optimizer):
    """The outside of bitsandbytes' class of that name."""

    __module__ = "bitsandbytes.optim.adamw"

    def __init__(self, params, lr=1e-3, weight_decay=0.01, **args):
        betas = (0.9, 0.999)
        options = {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}
        super().__init__(params, {**options, "alpha": 0.0, "t_beta3": None})
        self.args = type("Args", (), args)()
        self.name2qmap = {"dynamic": torch.arange(256.0)}

    def step(self, closure=None):
        """Take the step on a GPU."""


class Manager:
    """The outside of its ``GlobalOptimManager``, of which a process has one."""

    def __init__(self):
        self.pid2config = {}
        self.module_weight_config_triple = []
        Manager._instance = self


class AdamW(AdamW8bit):
    """Its class that has moments in as many bits as ``optim_bits`` says; this one steps in 32."""

    __module__ = "bitsandbytes.optim.adamw"

    def __init__(self, params, optim_bits, manager=None):
        super().__init__(params, lr=1e-2, optim_bits=optim_bits)
        self.mng = manager
        if optim_bits == 32:
            self.name2qmap = {}

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step of SGD."""
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def groups(model):
    first, *others = model.named_parameters()
    return [{"params": [first], "lr": 3e-3, "weight_decay": 0.0}, {"params": others}]


def test_8_bit_moments_become_ours_where_the_recipe_asks_for_them():
    runs = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        optimizer = kind(groups(model), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        torch_bf16.prepare(model, optimizer, INT8)
        for seed in range(10):
            train(model, optimizer, [seed])
            scheduler.step()
        runs.append((model, optimizer))
    (model, optimizer), (other, reference) = runs
    assert type(optimizer) is type(reference) is torch_bf16.AdamW
    assert optimizer.state_dict().keys() == reference.state_dict().keys()
    assert optimizer.param_groups[0].keys() == reference.param_groups[0].keys()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert not hasattr(optimizer, "name2qmap")


def test_8_bits_may_be_an_option_as_the_trainer_writes_them():
    model = nn.Linear(64, 64)
    manager = Manager()
    # The Trainer wants the embeddings' moments in 32 bits.
    manager.module_weight_config_triple.append((model, "weight", {"optim_bits": 32}))
    optimizer = AdamW(model.parameters(), 8, manager)
    with pytest.raises(NotImplementedError, match="is what it becomes with exp_avg='int8', exp_a"):
        torch_bf16.prepare(model, optimizer)
    torch_bf16.prepare(model, optimizer, INT8)
    assert type(optimizer) is torch_bf16.AdamW
    # The advice for other 8-bit classes is one with 32 bits, also for the same model.
    model = model.float()
    _, optimizer = torch_bf16.prepare(model, AdamW(model.parameters(), 32, manager))
    before = model.weight.clone()
    train(model, optimizer, range(2))
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(("bits", "recipe"), [(8, INT8), (32, "bf16-stochastic")])
@pytest.mark.parametrize("by_id", [False, True])
def test_options_of_single_parameters_in_its_manager_are_refused(bits, recipe, by_id):
    model, manager = nn.Linear(64, 64), Manager()
    if by_id:
        manager.pid2config[id(model.weight)] = {"lr": 0.1, "betas": (0.9, 0.99)}
    else:
        options = {"lr": 0.1, "betas": [0.9, 0.99]}
        manager.module_weight_config_triple.append((model, "weight", options))
    with pytest.raises(
        NotImplementedError, match=r"overrides betas, lr of single|options betas, lr\."
    ):
        torch_bf16.prepare(model, AdamW(model.parameters(), bits, manager), recipe)
    other = nn.Linear(64, 64)
    torch_bf16.prepare(other, AdamW(other.parameters(), bits, manager), recipe)


@pytest.mark.parametrize("recipe", ["bf16-stochastic", Recipe("half", exp_avg="int8")], ids=str)
def test_8_bit_moments_are_refused_where_it_does_not_with_the_line_to_write(recipe):
    model = nn.Linear(64, 64)
    optimizer = AdamW8bit(model.parameters())
    match = (
        "AdamW8bit cannot be converted: .*torch_bf16.AdamW keeps its moments in 8 bits, too .*"
        "exp_avg='int8', exp_avg_sq='int8' .*BF16_EXP_AVG=int8 BF16_EXP_AVG_SQ=int8 for a launcher"
    )
    with pytest.raises(NotImplementedError, match=match):
        torch_bf16.prepare(model, optimizer, recipe)
    assert model.weight.dtype == torch.float32
    assert type(optimizer) is AdamW8bit
    assert optimizer.param_groups[0]["t_beta3"] is None


@pytest.mark.parametrize(
    ("options", "match"),
    [({"percentile_clipping": 5}, "options percentile_clipping"), ({"max_unorm": 1.0}, "max_un")],
)
def test_8_bit_options_that_ours_has_not_are_refused(options, match):
    model = nn.Linear(64, 64)
    with pytest.raises(NotImplementedError, match=f"knows nothing of its .*{match}|{match}"):
        torch_bf16.prepare(model, AdamW8bit(model.parameters(), **options), INT8)
    assert model.weight.dtype == torch.float32


def test_8_bit_states_that_are_there_already_are_refused():
    model = nn.Linear(64, 64)
    optimizer = AdamW8bit(model.parameters())
    optimizer.state[model.weight]["state1"] = torch.zeros(64, 64, dtype=torch.uint8)
    with pytest.raises(
        NotImplementedError, match=r"the 8-bit states that it has.*before its first"
    ):
        torch_bf16.convert(optimizer, INT8)


def test_a_conversion_that_fails_late_leaves_the_8_bit_optimizer_as_it_was():
    p = nn.Parameter(torch.ones(64, 64))
    optimizer = AdamW8bit([p])
    before = dict(optimizer.param_groups[0]), {*vars(optimizer)}
    with pytest.raises(ValueError, match="backend"):
        torch_bf16.convert(optimizer, INT8, backend="none such")
    assert (dict(optimizer.param_groups[0]), {*vars(optimizer)}) == before
    assert type(optimizer) is AdamW8bit


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its scripts have it: around a base that takes the step."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure):
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.float().norm() for p in every]).norm()
        for p in every:
            self.state[p]["old"] = p.data.clone()
            p.add_((p.grad * (0.05 / norm)).to(p.dtype))
        with torch.enable_grad():
            closure()
        for p in every:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()


def test_sam_around_a_converted_base_moves_as_far_as_in_fp32():
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    moved = []
    for recipe in (None, "bf16-fp32-master"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
        start = model[0].weight.detach().clone()
        optimizer = SAM(model.parameters(), lr=1e-5)
        if recipe:
            with pytest.raises(NotImplementedError, match=r"convert\(optimizer.base_optimizer, r"):
                torch_bf16.prepare(model, optimizer, recipe)
            torch_bf16.prepare(model, optimizer.base_optimizer, recipe)
            torch_bf16.prepare(model, optimizer, recipe)
            assert torch_bf16.convert(optimizer, recipe) is optimizer

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            y = model(x.to(model[0].weight.dtype)).float()
            (y - x[:, :1]).square().mean().backward()

        for _ in range(50):
            closure()
            optimizer.step(closure)
        weight = model[0].weight
        weight = optimizer.base_optimizer.exact_weight(weight) if recipe else weight
        moved.append((weight - start).abs().mean().item())
    assert moved[1] == pytest.approx(moved[0], rel=0.02)


@pytest.mark.parametrize(
    ("module", "match"), [("dion.dion", "Dion2, NorDion2"), ("heavyball", "SOAP, .* of pytorch_op")]
)
def test_a_class_that_looks_parameters_up_is_told_of_others_that_do_not(module, match):
    kind = type("Dion", (KeepsByParameter,), {"__module__": module})
    model, optimizer = make_run(kind, "bf16-stochastic")
    with pytest.raises(NotImplementedError, match=rf"{module}.Dion cannot .*{match}.*are taken as"):
        train(model, optimizer, [1])


def test_a_riemannian_class_is_told_to_train_alone_what_lies_on_manifolds():
    class RiemannianAdam(torch.optim.Adam):
        __module__ = "geoopt.optim.radam"

        def step(self, closure=None):
            parameters = (p for group in self.param_groups for p in group["params"])
            assert all(hasattr(p, "manifold") for p in parameters)
            return super().step(closure)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for p in model[0].parameters():
        p.manifold = "sphere"
    with pytest.raises(NotImplementedError, match=r"it keeps manifold .*manifolds alone, kept in"):
        torch_bf16.prepare(model, RiemannianAdam(model.parameters()), "bf16-stochastic")
    alone, rest = RiemannianAdam(model[0].parameters()), torch.optim.Adam(model[1].parameters())
    torch_bf16.prepare(model, [alone, rest], Recipe("geometry in fp32", keep_fp32=("0",)))
    assert type(alone) is RiemannianAdam
    assert isinstance(rest, torch_bf16.Adam)
    assert [p.dtype for p in (model[0].weight, model[1].weight)] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("recipe", ["bf16-fp32-master", "bf16-stochastic"])
def test_an_ascent_from_exact_weights_is_kept_where_one_in_bf16_is_lost(recipe):
    torch.manual_seed(0)
    model = nn.Linear(128, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_bf16.prepare(model, optimizer, recipe)
    ascent = torch.randn(128, 128).sign() * 1e-5  # a tenth of a bf16 spacing

    def moved(before):
        return ((model.weight.detach().float() - before.float()) * ascent.sign()).mean().item()

    start = model.weight.detach().clone()
    with torch_bf16.exact_weights(model, optimizer) as weights:
        before = {name: weight.clone() for name, weight in weights.items()}
        weights["weight"] += ascent
    assert moved(start) == pytest.approx(1e-5, rel=0.2)
    with torch_bf16.exact_weights(model, optimizer) as weights:
        weights.update(before)
    assert torch.equal(model.weight, start)
    with torch.no_grad():
        model.weight.add_(ascent)
    assert moved(start) < 2e-6

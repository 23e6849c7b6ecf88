"""Parameters that have a gradient in some steps only: one plan, and the bits of a plan for each."""

import itertools

import pytest
import torch
from optimizer_cases import assert_same, make_optimizer, set_gradients, snapshot, take_steps
from torch import nn

import torch_bf16
from torch_bf16.optim import optimizer as optimizer_module
from torch_bf16.optim.planning import make_plan

BF16 = torch.bfloat16
MATRIX_RULES = {"muon": torch_bf16.Muon, "adafactor": torch_bf16.Adafactor}
SETS = [{"a", "b", "c"}, {"b", "t"}, set(), {"t"}, {"a", "t"}, {"a", "b", "c", "t"}, {"c"}]


def parameters():
    torch.manual_seed(1)
    weights = {
        "a": torch.randn(40, 64),
        "b": torch.randn(7),
        "c": torch.randn(8, 64),
        "t": torch.randn(64, 9).t(),
    }
    return {name: nn.Parameter(each.to(BF16)) for name, each in weights.items()}


def run(rule, recipe, backend, planned_anew):
    """Steps of one set after another; how many plans were made, and what is left."""
    mine = parameters()
    dense = {n: p for n, p in mine.items() if rule != "muon" or p.ndim == 2}
    if rule in MATRIX_RULES:
        optimizer = MATRIX_RULES[rule](dense.items(), backend=backend)
    else:
        optimizer = make_optimizer(rule, recipe, backend, dense.items())
    made = []

    def counting(*arguments):
        made.append(arguments)
        return make_plan(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "make_plan", counting)
        for seed, names in enumerate(SETS * 2):
            set_gradients([*dense.values()], seed)
            for name, parameter in dense.items():
                if name not in names:
                    parameter.grad = None
            if planned_anew:
                optimizer._engine.plan = None
            optimizer.scale_next_step(torch.tensor(0.5))
            optimizer.step()
    return len(made), snapshot(optimizer)


def one_plan_serves_all_sets(rule, recipe, backend):
    count, left = run(rule, recipe, backend, planned_anew=False)
    # Whose bits are those of every backend.
    _, expected = run(rule, recipe, "eager", planned_anew=True)
    assert_same(left, expected)
    # The first, and the one that brings the last parameter in.
    assert count == 2


CASES = [*itertools.product(["adamw", "momentum"], ["stochastic", "master"])]


@pytest.mark.parametrize(("rule", "recipe"), CASES)
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_a_set_that_comes_and_goes_is_planned_for_once(rule, recipe, backend):
    one_plan_serves_all_sets(rule, recipe, backend)


@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_a_direction_is_made_only_where_there_is_a_gradient(rule):
    one_plan_serves_all_sets(rule, "stochastic", "eager")


# A plan knows nothing of what the kernel that it calls makes of both.
@pytest.mark.parametrize(("rule", "recipe"), [("adamw", "stochastic"), ("momentum", "master")])
def test_the_same_on_the_device(interpreted, rule, recipe):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    interpreted(one_plan_serves_all_sets, rule, recipe, "triton")


def two(backend="eager", **options):
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(8, 64).to(BF16)) for _ in range(2)]
    optimizer = make_optimizer("adamw", "master", backend, mine, **options)
    take_steps(optimizer, [0])
    return optimizer, mine


def test_a_weight_written_while_it_took_no_part_drops_its_lower_half_when_it_comes_back():
    optimizer, (first, second) = two()
    plan = optimizer._engine.plan
    second.grad = None
    with torch.no_grad():
        second.fill_(1.0)
    optimizer.step()
    assert optimizer.state[second]["remainder16"].any()
    second.grad = torch.zeros_like(second)
    assert plan.fits(optimizer._setting(), [first, second], optimizer.state)
    assert plan.overwritten_members() == [plan.members[1]]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.exact_weight(second), torch.ones(8, 64))
    assert optimizer._engine.plan is plan


def test_a_member_that_was_moved_while_it_took_no_part_is_planned_for_when_it_comes_back():
    optimizer, (first, second) = two()
    second.grad = None
    optimizer.step()
    before = second.detach().clone()
    second.data = second.data.clone()
    optimizer.step()
    assert len(optimizer._engine.plan.members) == 1
    assert torch.equal(second.detach(), before)
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert len(optimizer._engine.plan.members) == 2
    assert not torch.equal(second.detach(), before)
    assert [optimizer.state[each]["step"].item() for each in (first, second)] == [4, 2]


def test_bad_options_of_a_group_without_gradients_stop_no_step():
    optimizer, (first, second) = two()
    one = optimizer.param_groups[0]
    one["params"] = [first]
    one.pop("param_names", None)
    optimizer.add_param_group({"params": [second], "betas": (1.0, 0.9)})
    for _ in range(2):
        second.grad = None
        optimizer.step()
    second.grad = torch.ones_like(second)
    with pytest.raises(ValueError, match="no step can be computed from the options of group 1"):
        optimizer.step()
    assert optimizer.state[first]["step"].item() == 3


def test_steps_without_any_gradient_change_nothing_and_are_planned_for_once():
    mine = [nn.Parameter(torch.ones(8, 8, dtype=BF16))]
    optimizer = make_optimizer("adamw", "master", "eager", mine)
    optimizer.step()
    plan = optimizer._engine.plan
    optimizer.step()
    assert optimizer._engine.plan is plan
    assert not optimizer.state
    take_steps(optimizer, [0])
    assert optimizer.state[mine[0]]["step"].item() == 1


def test_more_parameters_than_are_looked_at_together():
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        mine = {f"p{n}": nn.Parameter(torch.randn(3).to(BF16)) for n in range(300)}
        made.append((make_optimizer("adamw", "stochastic", "cpu", mine.items()), [*mine.values()]))
    (kept, weights), (anew, _) = made
    for seed in range(3):
        for _, mine in made:
            set_gradients(mine, seed)
            for p in mine[seed * 120 : seed * 120 + 5]:
                p.grad = None
        if seed == 2:
            weights[270].data = weights[270].data.clone()
        anew._engine.plan = None
        kept.step()
        anew.step()
    assert_same(snapshot(kept), snapshot(anew))
    assert kept.state[weights[270]]["step"].item() == 3


def count_of(optimizer, parameter):
    # Past what notices a look into the states.
    return dict.__getitem__(optimizer.state, parameter)["step"].item()


@pytest.mark.parametrize("looked", [False, True])
def test_the_plan_of_before_one_that_took_no_step_does_not_count_for_it(looked):
    optimizer, (first, second) = two()
    third = nn.Parameter(torch.ones(8, 64, dtype=BF16))
    optimizer.add_param_group({"params": [third], "lr": 0.01})
    optimizer.step()
    plan = optimizer._engine.plan
    third.grad = torch.ones_like(third)
    optimizer.param_groups[1]["lr"] = "fast"
    with pytest.raises(ValueError, match="no step can be computed from the options of group 1"):
        optimizer.step()
    if looked:
        optimizer.state.seen = True
    assert optimizer._engine.plan is plan
    third.grad = None
    optimizer.step()
    assert [count_of(optimizer, each) for each in (first, second)] == [3, 3]


def test_ordinary_steps_after_released_gradients_go_on_counting():
    model = torch_bf16.cast_model(nn.Linear(4, 4))
    optimizer = torch_bf16.AdamW(model.parameters(), lr=0.01, backend="eager")

    def backward():
        model(torch.ones(1, 4, dtype=BF16)).sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    release = torch_bf16.release_gradients(model, optimizer)
    for _ in range(2):
        backward()
        optimizer.step()
    release.remove()
    backward()
    optimizer.step()
    assert {count_of(optimizer, each) for each in model.parameters()} == {4}


def test_observers_see_what_takes_part():
    optimizer, (first, second) = two()
    seen = []

    class Watching:
        def before_update(self, members, scale):
            seen.append([each.parameter for each in members])

        def after_update(self):
            pass

    optimizer.observers.append(Watching())
    second.grad = None
    optimizer.step()
    assert len(seen) == 1
    assert seen[0][0] is first
    assert len(seen[0]) == 1


def test_a_step_that_breaks_off_counts_what_it_updated_and_says_so(monkeypatch):
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(8, 64).to(BF16)), nn.Parameter(torch.randn(8))]
    optimizer = make_optimizer("adamw", "stochastic", "eager", mine)
    take_steps(optimizer, [0])
    first, second = optimizer._engine.plan._launches

    def fail(*arguments, **named):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(second.batch, "run", fail)
        with pytest.raises(torch.OutOfMemoryError, match="1 parameters were updated"):
            optimizer.step()
    assert [optimizer.state[each]["step"].item() for each in mine] == [2, 1]
    with monkeypatch.context() as patch:
        patch.setattr(first.batch, "run", fail)
        with pytest.raises(torch.OutOfMemoryError, match=r"memory\. Nothing was updated"):
            optimizer.step()
    assert [optimizer.state[each]["step"].item() for each in mine] == [2, 1]


@pytest.mark.parametrize("kind", [torch_bf16.AdamW, *MATRIX_RULES.values()])
def test_an_interrupt_that_waited_for_a_kernel_leaves_its_step_counted(monkeypatch, kind):
    """Python raises it when the kernel returns, which is where most of a step's time goes."""
    torch.manual_seed(0)
    weights = [torch.randn(8, 64).to(BF16), torch.randn(16, 64).to(BF16)]
    interrupted, plain = (kind([nn.Parameter(each.clone()) for each in weights]) for _ in range(2))
    take_steps(interrupted, [0])
    take_steps(plain, [0, 1])
    part = interrupted._engine.plan._launches[-1]
    run = part.batch.run

    def run_and_raise(*arguments, **named):
        run(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(part.batch, "run", run_and_raise)
        with pytest.raises(KeyboardInterrupt):
            take_steps(interrupted, [1])
    assert_same(snapshot(interrupted), snapshot(plain))
    for optimizer in (interrupted, plain):
        take_steps(optimizer, [2])
    assert_same(snapshot(interrupted), snapshot(plain))


def a_device_takes_its_count_back():
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(8, 64).to(BF16)), nn.Parameter(torch.randn(8))]
    optimizer = make_optimizer("adamw", "stochastic", "triton", mine)
    take_steps(optimizer, [0])
    _, second = optimizer._engine.plan._launches

    def fail(*arguments, **named):
        raise torch.OutOfMemoryError("out of memory")

    for part, counts in ((second, [2, 1]), (None, [3, 2])):
        with pytest.MonkeyPatch.context() as patch:
            if part is not None:
                patch.setattr(part.batch, "run", fail)
                with pytest.raises(torch.OutOfMemoryError, match="1 parameters were updated"):
                    optimizer.step()
            else:
                optimizer.step()
        assert [optimizer.state[each]["step"].item() for each in mine] == counts


def test_a_device_takes_its_count_back_where_a_launch_fails(interpreted):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    interpreted(a_device_takes_its_count_back)


@pytest.mark.parametrize("kind", MATRIX_RULES.values())
def test_what_a_step_was_told_is_read_once_and_not_for_each_matrix(kind, monkeypatch):
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(8, 64).to(BF16)) for _ in range(5)]
    optimizer = kind(mine, backend="eager")
    take_steps(optimizer, [0])
    reads, read = [], torch.Tensor.__float__
    coefficient = torch.tensor(0.5)
    found = torch.zeros(())

    def counted(self):
        if self is coefficient or self is found:
            reads.append(self)
        return read(self)

    optimizer.scale_next_step(coefficient)
    optimizer.found_inf = found
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__float__", counted)
        optimizer.step()
    # Once for the scalars, once for all directions.
    assert len(reads) == 4

"""``compare`` trains in pairs: what is the same in all rows, what is measured, and what resumes."""

import copy
import sys
from functools import partial

import pytest
import torch
from compare_cases import FACTORIES, plan_of, run, trained

import torch_bf16
from torch_bf16.tools.compare.analysis import analyse
from torch_bf16.tools.compare.intervals import band_of
from torch_bf16.tools.compare.rows import also_argument, choice_of, row_of
from torch_bf16.tools.compare.store import Store
from torch_bf16.tools.compare.survival import exact_weight
from torch_bf16.tools.compare.training import OngoingRun
from torch_bf16.tools.compare.verdict import judge
from torch_bf16.tools.optimizer_bytes import held_by_role

NEAREST = "bf16_nearest/fp32/fp32"
ROWS = ("32-true", "bf16-mixed", "bf16-true", "bf16-stochastic", "bf16-fp32-master", NEAREST)


@pytest.fixture(autouse=True)
def factories(write_module):
    write_module("mine_to_compare", FACTORIES)


def batches_of(training):
    return [training._next_batch() for _ in range(8)]


def test_every_row_has_the_same_weights_batches_and_dropout():
    """What the optimizer draws meanwhile makes no difference."""
    first, other = (OngoingRun(plan_of(), row_of(name), 3) for name in ("32-true", "bf16-mixed"))
    seen = batches_of(first)
    torch.rand(7)
    for ours, theirs in zip(seen, batches_of(other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    noisy = also_argument("noisy=mine_to_draw:Noisy")
    quiet = also_argument("quiet=torch.optim:SGD")
    assert trained(plan_of(), noisy).losses == trained(plan_of(), quiet).losses


@pytest.fixture(autouse=True)
def noisy_optimizer(factories, tmp_path):
    (tmp_path / "mine_to_draw.py").write_text(
        "import torch\n\n\nclass Noisy(torch.optim.SGD):\n    def step(self):\n"
        "        torch.rand(5)\n        return super().step()\n"
    )
    yield
    sys.modules.pop("mine_to_draw", None)


@pytest.mark.parametrize("name", ROWS)
def test_a_run_that_was_interrupted_ends_in_the_same_bits(name, tmp_path):
    """Its data are shuffled anew in each epoch, its dropout is on, and its model counts steps."""
    plan, row = plan_of("mine_to_compare:normed", steps=16), row_of(name)
    whole = trained(plan, row, seed=1)
    store, training = Store(tmp_path / "out", plan), OngoingRun(plan, row, 1)
    for _ in training.steps():
        if training.done == 9:
            break
    assert store.save_interrupted(row, training)
    resumed = OngoingRun(plan, row, 1, store.load_interrupted(row, 1))
    assert resumed.done == 9
    for _ in resumed.steps():
        pass
    again = resumed.finish()
    assert again.losses == whole.losses
    assert again.survived == whole.survived
    assert again.unmoved == whole.unmoved
    assert again.bytes == whole.bytes
    store.save(row, again)
    assert store.load_interrupted(row, 1) is None
    assert store.load_finished(row, 1).losses == whole.losses


def test_an_optimizer_whose_state_cannot_be_relied_on_begins_again(tmp_path):
    plan, row = plan_of(), also_argument("noisy=mine_to_draw:Noisy")
    training = OngoingRun(plan, row, 0)
    next(training.steps())
    assert not Store(tmp_path / "out", plan).save_interrupted(row, training)


def test_what_was_kept_is_what_the_monitor_sees():
    """The monitor computes the rule from the stored moments, the twin runs torch's optimizer."""
    plan, row = plan_of(steps=10, lr=3e-4), row_of(NEAREST)
    training = OngoingRun(plan, row, 0)
    monitor = torch_bf16.UpdateMonitor(training._trained.optimizer, every=1, warn=False)
    seen = []
    for _ in training.steps():
        seen.append({name: each.survived for name, each in monitor.layers.items()})
    found = training.finish()
    assert found.ends == list(range(1, 11))
    for layer, sums in found.survived.items():
        shares = [stored / intended for stored, intended in sums]
        assert shares == pytest.approx([each[layer] for each in seen], abs=2e-3), layer
    assert min(seen[-1].values()) < 0.5


def test_exact_weights_keep_all_and_plain_bf16_does_not():
    found = {name: trained(plan_of(lr=1e-4), row_of(name)) for name in ROWS}
    for name in ("32-true", "bf16-mixed", "bf16-fp32-master"):
        for sums in found[name].survived.values():
            assert sum(a for a, _ in sums) == pytest.approx(sum(b for _, b in sums), rel=1e-3)
        assert all(stood == 0 for stood, _ in found[name].unmoved.values())
        normed = trained(plan_of("mine_to_compare:normed", lr=1e-4), row_of(name))
        assert normed.unmoved["batch_norm"] == [0, 16]
    stood, numel = found["bf16-true"].unmoved["norm"]
    # Gains of 1.0 stand still, biases that begin with 0.0 do not.
    assert (stood, numel) == (32, 64)
    kept = found["bf16-true"].survived["norm"]
    assert sum(a for a, _ in kept) < 0.7 * sum(b for _, b in kept)


class Kept(torch.optim.Optimizer):
    """SGD that keeps what bf16 takes of a weight, in a state of a given name."""

    def __init__(self, parameters, lr, name, whole):
        super().__init__(parameters, {"lr": lr, "name": name, "whole": whole})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                exact = self.state[p].setdefault("held", p.detach().double())
                exact -= group["lr"] * p.grad
                p.copy_(exact)
                rest = exact if group["whole"] else exact - p.double()
                self.state[p][group["name"]] = rest.float()


@pytest.mark.parametrize(
    ("name", "whole"), [("compensation", False), ("kahan_comp", False), ("fp32_param", True)]
)
def test_what_other_libraries_keep_of_a_weight_is_read_and_booked(name, whole):
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
    optimizer = Kept(layer.parameters(), lr=1e-5, name=name, whole=whole)
    before = layer.weight.detach().float().clone()
    layer.weight.grad, layer.bias.grad = (torch.ones_like(p) for p in layer.parameters())
    optimizer.step()
    moved = exact_weight(optimizer, layer.weight) - before
    torch.testing.assert_close(moved, torch.full((32, 32), -1e-5), rtol=1e-2, atol=0)
    roles = held_by_role(optimizer, layer.parameters())
    assert roles["master"] == 4 * sum(p.numel() for p in layer.parameters())


def test_never_moved_is_counted_over_all_looks():
    """By hand: train a copy, and compare its weights with the first ones after every step."""
    plan, row = plan_of(steps=6, lr=1e-4), row_of("bf16-true")
    training = OngoingRun(plan, row, 0)
    model = training._trained.model
    first = copy.deepcopy(model)
    moved = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for _ in training.steps():
        for name, p in model.named_parameters():
            moved[name] |= p != first.get_parameter(name)
    stood = sum(int((~each).sum()) for each in moved.values())
    assert 0 < stood == sum(each for each, _ in training.finish().unmoved.values())


def test_bytes_are_those_of_the_formats():
    found = trained(plan_of(), row_of("bf16-stochastic"))
    matrices, vectors = 8 * 32 + 32, 32 + 32 + 32 + 1
    assert found.parameters == matrices + vectors
    counters = 4 * 6  # the step of each parameter, with its padding
    assert found.bytes == {
        "weights": 2 * found.parameters,
        "gradients": 2 * found.parameters,
        "moments": pytest.approx(4 * matrices + 8 * vectors, abs=counters),
        "master": 2 * vectors,
    }


def test_a_factorys_own_optimizer_is_used():
    found = trained(plan_of("mine_to_compare:with_optimizer"), row_of("bf16-stochastic"))
    assert "lr=0.01" in found.options
    assert "weight_decay=0.0" in found.options
    other = trained(plan_of("mine_to_compare:with_optimizer"), also_argument("o=torch.optim:SGD"))
    assert other.options.startswith("SGD(lr=0.01")


class SGD(torch.optim.SGD):
    """A user's class of a name that torch has, too."""


def other(name, module, **options):
    """A class of another library, which has one option more than torch's."""

    def init(self, params, lr, storage_dtype="float32", cautious=False):
        super(kind, self).__init__(params, lr=lr)
        self.param_groups[0].update(storage_dtype=storage_dtype, cautious=cautious)

    kind = type(name, (torch.optim.AdamW,), {"__init__": init, "__module__": module})
    return lambda parameters: kind(parameters, lr=0.1, **options)


@pytest.mark.parametrize(
    ("make", "twin"),
    [
        (torch.optim.SGD, torch.optim.SGD),
        (SGD, SGD),
        (torch_bf16.AdamW, torch.optim.AdamW),
        (partial(torch_bf16.AdamW, cautious=True), torch_bf16.AdamW),
        (other("AdamW8bit", "torchao.optim", storage_dtype="bfloat16"), torch.optim.AdamW),
        (other("AdamW8bit", "torchao.optim", cautious=True), "AdamW8bit"),
        (other("AdamW8bit", "mine"), "AdamW8bit"),
    ],
)
def test_a_twin_is_torchs_only_if_it_has_the_same_rule(make, twin):
    model = torch.nn.Linear(4, 4)
    trained = row_of("32-true").prepare(model, lambda: make(model.parameters()), 0)
    found = type(trained.twin({p: torch.nn.Parameter(p.clone()) for p in model.parameters()}))
    assert twin in (found, found.__name__)


@pytest.mark.parametrize(("compute", "dtype"), [("fp32", torch.float32), ("", torch.bfloat16)])
def test_recipes_compute_in_what_the_environment_says(compute, dtype, monkeypatch):
    monkeypatch.setenv("BF16_COMPUTE", compute)
    row = row_of("bf16-stochastic")
    assert row.description.endswith("fp32 compute" if compute else "bf16 autocast")
    training, seen = OngoingRun(plan_of(), row, 0), []
    linear = training._trained.model.first
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    next(training.steps())
    assert (seen, linear.weight.dtype) == ([dtype], torch.bfloat16)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_an_optimizer_that_finds_its_rate_trains(precision):
    found = trained(plan_of("mine_to_compare:own_rate", steps=4), row_of(precision))
    assert (len(found.losses), found.broken_at) == (4, None)


def test_sparse_gradients_have_no_shares():
    found = trained(plan_of("mine_to_compare:sparse", steps=4), row_of("32-true"))
    assert found.unmeasured == "the gradient of table.weight is sparse, and has no samples"
    assert found.bytes["gradients"] == 5 * 4 * 4 + 5 * 8


def test_a_run_that_broke_early_does_not_count_among_those_that_ended():
    def looked(seed, losses, unmoved):
        found = run("a", seed, losses)
        found.parameters, found.unmoved = 8, {"layer": [unmoved, 8]}
        found.bytes = {} if len(losses) == 1 else {"weights": 32}
        found.ends = [*range(1, len(losses))]
        return found

    nan = float("nan")
    broken = [looked(0, [nan], 8), looked(1, [3.0, nan], 5)]
    (row,) = analyse({"a": [*broken, looked(2, BASE, 2)]}, "a")["rows"]
    assert (row["unmoved"], row["layers"]["layer"]["numel"], row["bytes"]) == (
        0.25,
        8,
        {"weights": 4},
    )
    (row,) = analyse({"a": broken}, "a")["rows"]
    assert row["unmoved"] == 0.625
    (row,) = analyse({"a": broken[:1]}, "a")["rows"]
    assert (row["unmoved"], row["bytes"], row["layers"]) == (None, None, {})


def test_a_loss_that_is_no_number_ends_the_run_and_convicts_the_row():
    plan = plan_of("mine_to_compare:diverging")
    rows = {name: [trained(plan, row_of(name))] for name in ("32-true", "bf16-true")}
    assert rows["bf16-true"][0].broken_at == 1
    found = analyse(rows, "32-true")
    judge(found)
    assert not found["healthy"]
    assert found["sentences"] == [
        "bf16-true is broken: its loss is no longer a number (seed 0 at step 1)"
    ]


def test_an_optimizer_of_whole_matrices_has_no_shares():
    """Of fp32 weights everything is kept, so a twin that says other does something else."""
    plan = plan_of(optimizer="torch.optim.Adafactor")
    rows = {name: [trained(plan, row_of(name))] for name in ("32-true", "bf16-true")}
    found = analyse(rows, "32-true")
    # Whichever row others are compared with.
    rows = {name: [trained(plan, row_of(name))] for name in ("bf16-true", "32-true")}
    for row in (*found["rows"], *analyse(rows, "bf16-true")["rows"]):
        assert row["unmeasured"] == "Adafactor does not update elements one by one"
        assert row["survived"] is None
        assert row["unmoved"] is not None
    judge(found)
    assert found["rows"][1]["stalled"] == []


def test_a_band_is_that_of_students_t():
    """By hand, from a table: t is 2.776 for 4 degrees of freedom and 12.706 for one."""
    mean, half = band_of([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0], [5.0, 0.0]])
    assert mean.tolist() == [3.0, 0.0]
    assert half[0] == pytest.approx(2.776 * (2.5 / 5) ** 0.5, rel=1e-3)
    assert half[1] == 0.0
    assert band_of([[0.0], [2.0]])[1][0] == pytest.approx(12.706, rel=1e-3)
    assert band_of([[1.0]])[1][0] == float("inf")


BASE = [3.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("losses", "verdict", "healthy"),
    [
        ([[1.1, 1.1], [1.11, 1.11], [1.1, 1.1]], "loses", False),
        ([[1.1, 1.1], [0.9, 0.9], [1.0, 1.0]], "as good", True),
        ([[1.003, 1.003], [1.003, 1.003], [1.0031, 1.0031]], "as good", True),
        ([[0.9, 0.9], [0.91, 0.91], [0.9, 0.9]], "as good", True),
        ([[1.05, 1.05]], "one pair", True),
        ([[1.2, 1.2]], "loses", False),
    ],
    ids=["worse", "by chance", "too little", "better", "one pair", "one pair, far off"],
)
def test_a_verdict_needs_a_loss_that_counts_and_that_chance_does_not_explain(
    losses, verdict, healthy
):
    """fp32 improves by 2.0 here: 0.2 % of it is 0.004, and 5 % 0.1."""
    rows = {
        "a": [run("a", seed, BASE) for seed in range(len(losses))],
        "b": [run("b", seed, [3.0, 2.0, *tail]) for seed, tail in enumerate(losses)],
    }
    found = analyse(rows, "a")
    judge(found)
    assert (found["rows"][1]["verdict"], found["healthy"]) == (verdict, healthy)


def test_a_parameter_without_elements_is_in_no_figure():
    runs = [trained(plan_of("mine_to_compare:with_an_empty_parameter"), row_of("32-true"))]
    (row,) = analyse({"32-true": runs}, "32-true")["rows"]
    assert list(row["layers"]) == ["first", "norm", "last"]


def test_of_a_reference_that_learns_nothing_there_is_no_share():
    rows = {
        "a": [run("a", seed, [1.0, 1.5, 2.0, 2.0]) for seed in range(3)],
        "b": [run("b", seed, [1.0, 1.5, 2.1, 2.1 + 0.01 * seed]) for seed in range(3)],
    }
    found = analyse(rows, "a")
    judge(found)
    assert (found["rows"][1]["verdict"], found["rows"][1]["learned"]) == ("loses", None)
    assert not any("learned" in each for each in found["sentences"])


def test_an_accuracy_is_judged_by_its_fall():
    """The same numbers, upside down."""
    for low, verdict in ((0.1, "loses"), (-0.1, "as good")):
        rows = {
            "a": [run("a", seed, [-v for v in BASE]) for seed in range(3)],
            "b": [run("b", seed, [-3.0, -2.0, *[-1 - low - 0.01 * seed] * 2]) for seed in range(3)],
        }
        found = analyse(rows, "a", "higher")
        judge(found)
        assert (found["rows"][1]["verdict"], found["improvement"]) == (verdict, 2.0)
        assert found["rows"][1]["learned"] == pytest.approx(1 - (low + 0.01) / 2)
        assert found["sentences"][0].startswith("b ends " + ("0.1100 b" if low > 0 else "no lower"))


@pytest.mark.parametrize(("scale", "said"), [(1, "0.1100 below"), (1e-6, "0.000000110 below")])
def test_a_row_that_ends_better_is_said_to_end_no_higher(scale, said):
    rows = {
        name: [
            run(name, n, [scale * (v - low * (i > 1) * (1 + n / 10)) for i, v in enumerate(BASE)])
            for n in range(3)
        ]
        for name, low in (("a", 0.0), ("b", 0.1))
    }
    found = analyse(rows, "a")
    judge(found)
    assert found["sentences"][0] == "b ends no higher than a"
    assert found["sentences"][1].startswith(f"b ends {said}, 95 % interval -")


def test_what_was_learned_before_the_compared_steps_does_not_count():
    found = []
    for more in (0, 2):
        base, other = run("a", 0, [10.0] * more + BASE), run("b", 0, [3.0, 2.0, 1.2, 1.2])
        base.steps = [*range(1 - more, 1), *other.steps] if more else other.steps
        found.append(analyse({"a": [base], "b": [other]}, "a"))
        judge(found[-1])
    assert found[0]["improvement"] == found[1]["improvement"] == 2.0
    assert found[0]["rows"][1]["verdict"] == found[1]["rows"][1]["verdict"] == "loses"


def test_an_optimizers_own_learning_rate_is_the_one_it_gets():
    parameters = torch.nn.Linear(2, 2)
    for text, lr in (("torch.optim.SGD(lr=0.5)", 0.5), ("torch.optim.SGD", 0.1)):
        assert choice_of(text).over(parameters, 0.1).param_groups[0]["lr"] == lr


def test_options_of_an_optimizer_are_plain_values():
    choice = choice_of("torch.optim.SGD(momentum=0.9, nesterov=True)")
    assert (choice.make, choice.options) == (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})
    assert choice_of("SGD").make is choice_of("torch.optim:SGD").make is torch.optim.SGD
    for text in ("torch.optim.SGD(momentum=x)", "SGD(0.9)", "SGD(**{})", "a b"):
        with pytest.raises(ValueError, match=r"not an optimizer such as|not plain values"):
            choice_of(text)

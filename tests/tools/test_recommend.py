"""``recommend``: what is measured of updates, and what follows from it."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.utils import prune

from torch_bf16 import get_recipe
from torch_bf16.environment import options_from_environment
from torch_bf16.model import kept_fp32
from torch_bf16.tools.recommend import models
from torch_bf16.tools.recommend.lines import launch_line, lines
from torch_bf16.tools.recommend.models import errors_of, to_tf32
from torch_bf16.tools.recommend.report import rounded
from torch_bf16.tools.recommend.updates import Layer, ParameterSums
from torch_bf16.tools.recommend.verdict import DISTANCE, LEARNED, judge

SWEEP = (
    Path(__file__).parents[2] / "examples" / "results" / "2026-11-21-cpu/learning_rate_sweep.json"
)


def seen(name="a.weight", size=0.02, update=1e-5, lr=1e-4, steps=1000, shape=(64, 64), observed=3):
    """A parameter whose elements are all of one size and move by the same in each step."""
    sums = ParameterSums(name, shape, (0, 0))
    n = math.prod(shape)
    for _ in range(observed):
        weight = torch.full((n,), size, dtype=torch.float64)
        sums.add(weight, torch.full_like(weight, update), torch.full((n,), 1e-3), lr)
    sums.length = lr * steps
    return sums


def test_distance_is_that_of_the_documentation():
    """Elements that all go the same way: as many spacings as they go (docs/numerics.md)."""
    spacing = 2.0 ** (math.floor(math.log2(0.02)) - 7)
    for update, steps in ((1e-5, 1000), (3e-7, 1000), (1e-5, 40)):
        layer = Layer("a", (seen(update=update, steps=steps),))
        assert layer.distance("bf16_stochastic") == pytest.approx(steps * update / spacing)
        assert layer.distance("bf16+8") == pytest.approx(256 * steps * update / spacing)
        assert layer.distance("bf16+16") == math.inf
        assert layer.spacings() == pytest.approx(steps * update / spacing)
        assert layer.update() == pytest.approx(update / 1e-4)


def test_a_few_steps_of_a_warm_up_tell_of_the_whole_schedule():
    warm = seen(update=1e-7, lr=1e-6)
    warm.length = 1e-4 * 1000
    whole = seen(update=1e-5, lr=1e-4)
    distances = [Layer("a", (each,)).distance("bf16_stochastic") for each in (warm, whole)]
    assert distances[0] == pytest.approx(distances[1])


def test_noise_of_real_stochastic_rounding_is_what_is_foretold():
    from torch_bf16 import numerics

    n, steps, update = 4096, 200, 4e-6
    weight = torch.full((n,), 0.02).bfloat16()
    start = weight.float()
    key = numerics.tensor_key("a")
    for step in range(1, steps + 1):
        bits = numerics.noise(
            seed=0, step=step, key=key, stream=numerics.WEIGHT.stream, start=0, n=n
        )
        draws = numerics.draw16(bits, numerics.WEIGHT)
        weight = numerics.bf16_stochastic(weight.float() + update, draws)
    drift = steps * update
    noise = float((weight.float() - start - drift).double().square().mean().sqrt())
    layer = Layer("a", (seen(size=float(start[0]), update=update, steps=steps),))
    # sqrt(1 - f), and four standard errors of a deviation.
    share = update / 2.0 ** (math.floor(math.log2(0.02)) - 7)
    foretold = layer.distance("bf16_stochastic") ** -0.5 * math.sqrt(1 - share)
    assert noise / drift == pytest.approx(foretold, rel=4 / math.sqrt(2 * n))


def test_samples_stand_for_the_whole_parameter():
    small = seen(shape=(8, 8))
    large = seen(shape=(8, 8), size=0.5)
    large.shape = (800, 8)
    layer = Layer("a", (small, large))
    alone = Layer("a", (large,)).distance("bf16_stochastic")
    assert layer.elements == 64 + 6400
    assert layer.distance("bf16_stochastic") == pytest.approx(alone, rel=0.04)


@pytest.mark.parametrize(
    ("update", "name"),
    [(1e-4, "bf16-stochastic"), (1e-6, "bf16+8"), (1e-8, "bf16+16")],
)
def test_the_smallest_recipe_that_loses_nothing_is_chosen(update, name):
    verdict = judge([seen(update=update), seen("a.bias", shape=(64,), update=update)])
    assert verdict.chosen.name == name
    assert [each.loses for each in verdict.candidates] == sorted(
        (each.loses for each in verdict.candidates), reverse=True
    )


def test_the_smallest_is_the_one_that_holds_least_with_this_optimizer():
    """Without moments exact masters take as much with both recipes: then the mode itself."""
    held = {"bf16-stochastic": 4, "bf16+8": 5, "bf16+16": 6, "bf16-fp32-master": 6}
    assert judge([seen(update=1e-8)], held).chosen.name == "bf16-fp32-master"
    assert judge([seen(update=1e-6)], {**held, "bf16+8": 7}).chosen.name == "bf16-fp32-master"


def test_a_few_weights_at_zero_do_not_rule_the_mean():
    """As of LoRA, whose second matrices start at 0, where spacings are as small as the step."""
    whole = rounded(judge([seen()])).spacings()
    both = rounded(judge([seen(), seen("b.weight", size=1e-12, shape=(8, 8))])).spacings()
    assert both == pytest.approx(whole, rel=0.05)


def test_recipes_begin_to_lose_at_the_rate_that_is_said():
    first = judge([seen(update=1e-6)]).candidates[0]
    assert first.loses
    for factor, loses in ((1.01, False), (0.99, True)):
        times = first.needed * factor
        again = judge([seen(update=1e-6 * times, lr=1e-4 * times)]).candidates[0]
        assert again.loses == loses


def test_one_layer_that_hardly_moves_is_enough():
    quick, slow = seen("quick.weight", update=1e-3, shape=(640, 64)), seen("slow.weight", size=64.0)
    verdict = judge([quick, slow])
    assert verdict.candidates[0].distance > DISTANCE
    assert verdict.candidates[0].loses
    assert verdict.candidates[0].worst[0] == "slow"
    assert verdict.layers[0].name == "slow"


def test_vectors_lose_nothing_because_they_are_exact():
    verdict = judge([seen("norm.weight", size=1.0, update=1e-9, shape=(64,))])
    assert verdict.chosen.name == "bf16-stochastic"
    assert verdict.chosen.noise == 0


def test_adapters_of_peft_that_stay_fp32_lose_nothing(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    monkeypatch.setattr(kept_fp32, "fp32_adapters", lambda module: [model[1].weight])
    found = models.Models()
    found.add([*model.parameters()])
    assert [*map(found.stays_fp32, model.parameters())] == [False, False, True, False]


def test_nothing_that_moves_is_no_answer():
    for parameters in ([], [seen(update=0.0)]):
        with pytest.raises(ValueError, match="no weight would move"):
            judge(parameters)


def test_what_nearest_loses_is_what_it_loses():
    torch.manual_seed(0)
    weight = (torch.randn(4096) * 0.02).bfloat16().double()
    update = torch.randn(4096, dtype=torch.float64) * 3e-5
    sums = ParameterSums("a.weight", (64, 64), (0, 0))
    sums.add(weight, update, torch.ones(4096), 1e-3)
    stored = (weight + update).float().bfloat16().double() - weight
    expected = float(stored @ update / (update @ update))
    assert Layer("a", (sums,)).nearest() == pytest.approx(expected, abs=0.01)


def test_rows_of_padding_have_no_spacing():
    weight = torch.full((4096,), 0.02, dtype=torch.float64)
    update = torch.full_like(weight, 1e-5)
    weight[::4] = update[::4] = 0.0
    sums = ParameterSums("a.weight", (64, 64), (0, 0))
    sums.add(weight, update, update.float(), 1e-4)
    sums.length = 1e-4
    assert Layer("a", (sums,)).spacings() == pytest.approx(1e-5 / 2.0**-13)


def test_gradients_that_fp16_rounds_to_zero_are_counted():
    sums = ParameterSums("a.weight", (2, 4), (0, 0))
    gradient = torch.tensor([0.0, 1e-8, 2e-8, 1e-6, 1e-3, -1e-9, 1.0, 5e-8])
    ones = torch.ones(8, dtype=torch.float64)
    sums.add(ones, ones, gradient, 1.0)
    layer = Layer("a", (sums,))
    kept = gradient[gradient != 0].half() == 0
    assert layer.underflow() == pytest.approx(float(kept.float().mean()))
    assert layer.underflow(65504.0) == 0


@pytest.mark.parametrize("batch", [(), (70,)])
def test_convolutions_are_measured_with_and_without_a_batch(batch):
    layer = torch.nn.Conv2d(3, 4, 3).requires_grad_(False)
    assert errors_of(layer, (torch.randn(*batch, 3, 160, 160),))["bf16"] > 0


def test_products_off_by_what_rounding_makes_of_them():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32).requires_grad_(False), torch.randn(16, 64)
    found = errors_of(layer, (x,))
    exact = layer(x)
    weight, bias = layer.weight.bfloat16().float(), layer.bias.bfloat16().float()
    rounded = torch.nn.functional.linear(x.bfloat16().float(), weight, bias)
    assert found["bf16"] == pytest.approx(float((rounded - exact).norm() / exact.norm()), rel=1e-5)
    assert found["tf32"] < found["bf16"] / 4
    # Terms that cancel leave what was rounded.
    cancelling = torch.nn.Linear(2, 1, bias=False)
    cancelling.weight.data = torch.tensor([[1.0, -1.0]])
    assert errors_of(cancelling, (torch.tensor([[1.0, 1.003]]),))["bf16"] > 0.3


@pytest.mark.parametrize("made", ["norm", "spectral", "pruned"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_products_are_those_of_the_weight_that_a_norm_or_a_mask_makes(made):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32), torch.randn(16, 64)
    if made == "norm":
        torch.nn.utils.weight_norm(layer)
    elif made == "spectral":
        torch.nn.utils.spectral_norm(layer).eval()
    else:
        prune.l1_unstructured(layer, "weight", 0.3)
    layer(x)
    plain = torch.nn.Linear(64, 32)
    plain.weight.data, plain.bias.data = layer.weight.detach(), layer.bias.detach()
    assert errors_of(layer, (x,)) == errors_of(plain, (x,))


def test_a_layer_that_computes_otherwise_than_its_base_class_is_not_measured():
    class Transposed(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.T).T

    layer, x = Transposed(8, 8), torch.randn(8, 16)
    assert layer(x).shape == x.shape
    assert errors_of(layer, (x,)) == {}


def test_tf32_has_ten_bits_and_rounds_ties_to_even():
    half = 2.0**-11
    x = torch.tensor([1 + half, 1 + 3 * half, 1 + half * 1.01, -1 - half, float("inf"), 3e38])
    expected = torch.tensor([1, 1 + 4 * half, 1 + 2 * half, -1, float("inf"), 3e38])
    assert torch.equal(to_tf32(x)[:5], expected[:5])
    assert float(to_tf32(x)[5]) == pytest.approx(3e38, rel=2**-11)


def test_the_threshold_is_the_one_by_which_the_sweep_is_judged():
    """Each rate of the record lies below 99.8 %, and is found so (tests/proofs/recommended.py)."""
    share = json.loads(SWEEP.read_text())["share_of_improvement"]["bf16-stochastic"]
    assert LEARNED == 0.998
    assert all(each["mean"] < LEARNED for each in share.values())
    assert pytest.approx(500) == DISTANCE


HOSTS = ("pytorch", "lightning", "pytorch_lightning", "fabric", "lightning_fabric", "accelerate")


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("update", [1e-4, 1e-6, 1e-8])
def test_the_lines_are_python_and_name_the_recipe(host, update):
    chosen = judge([seen(update=update)]).chosen
    written = lines(host, chosen, "python train.py")
    assert len(written) == 2
    compile("\n".join(written), "lines", "exec")
    assert chosen.mode in written[1]
    assert all(value in written[1] for value in chosen.options.values())
    assert get_recipe(chosen.mode, **chosen.options) == chosen.recipe


def test_the_lines_for_the_trainer_are_the_shell_s():
    chosen = judge([seen(update=1e-6)]).chosen
    assert lines("trainer", chosen, "python train.py --lr 1") == [
        "export BF16_MODE=bf16-stochastic BF16_WEIGHTS=bf16+8",
        "python train.py --lr 1",
    ]


def test_a_launcher_trains_what_is_not_changed():
    command = "python train.py --lr 1"
    launched = "accelerate launch --mixed_precision bf16-stochastic train.py --lr 1"
    for update, option in ((1e-2, ""), (1e-6, "BF16_WEIGHTS=bf16+8 ")):
        chosen = judge([seen(update=update)]).chosen
        assert launch_line("accelerate", chosen, command) == f"{option}{launched}"
        assert launch_line("trainer", chosen, command) == f"{option}{launched}"
        for host in ("lightning", "fabric"):
            line = launch_line(host, chosen, command)
            assert line == f"BF16_MODE=bf16-stochastic {option}{command}"
        assert launch_line("pytorch", chosen, command) is None


@pytest.mark.parametrize("host", HOSTS)
def test_what_the_script_keeps_in_fp32_stands_in_what_to_write(host):
    chosen = judge([seen(update=1e-2)]).chosen
    for key, written in ((torch.nn.LayerNorm, "LayerNorm"), ("[0,1].*", '"[0,1].*"')):
        kept = replace(chosen, options={"keep_fp32": ["head", "*.router", key]})
        line = lines(host, kept, "python train.py")[1]
        assert f'keep_fp32=["head", "*.router", {written}]' in line
        compile(line, "lines", "exec")
        # A class has no name in a shell, and commas separate patterns there.
        assert launch_line(host, kept, "python train.py") is None
        shell = lines("trainer", kept, "python train.py")[0]
        assert shell.endswith("BF16_KEEP_FP32='head,*.router'")


def test_a_shell_is_told_patterns_and_does_not_expand_them():
    chosen = judge([seen(update=1e-2)]).chosen
    kept = replace(chosen, options={"keep_fp32": ["head", "*.router"]})
    variable = "BF16_KEEP_FP32='head,*.router'"
    line = launch_line("lightning", kept, "python train.py")
    assert line == f"BF16_MODE=bf16-stochastic {variable} python train.py"
    assert lines("trainer", kept, "python train.py")[0].endswith(variable)
    parsed = options_from_environment(dict([shlex.split(line)[1].split("=")]))
    assert parsed == {"keep_fp32": ("head", "*.router")}


def test_each_layer_has_a_name_of_its_own():
    """A matrix and its bias are two rows; the gain and bias of a norm are one."""
    shapes = {"0.weight": (40, 40), "0.bias": (40,), "1.weight": (40,), "1.bias": (40,)}
    rows = judge([seen(name=name, shape=shape) for name, shape in shapes.items()]).layers
    assert [each.name for each in rows] == ["0.weight", "0.bias", "1"]

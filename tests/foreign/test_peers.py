"""Optimizers of other packages through convert(); CONTRIBUTING says how to install them."""

import pytest
import torch
from foreign_cases import exact_weights, make_run, train
from optimizer_cases import bits

import torch_bf16
from torch_bf16 import Recipe

PEERS = {
    "pytorch_optimizer.Lion": {"lr": 1e-3},
    "pytorch_optimizer.AdaBelief": {"lr": 1e-2},
    "pytorch_optimizer.Adan": {"lr": 1e-2},
    "pytorch_optimizer.Lamb": {"lr": 1e-2},
    "pytorch_optimizer.Prodigy": {"lr": 1.0},
    "pytorch_optimizer.ADOPT": {"lr": 1e-2},
    "pytorch_optimizer.CAME": {"lr": 1e-2},
    "pytorch_optimizer.AdEMAMix": {"lr": 1e-2},
    "pytorch_optimizer.LARS": {"lr": 1e-2},
    "pytorch_optimizer.MADGRAD": {"lr": 1e-2},
    "pytorch_optimizer.APOLLO": {"lr": 1e-2},
    "pytorch_optimizer.SPAM": {"lr": 1e-2, "density": 1.0},
    "lion_pytorch.Lion": {"lr": 1e-3},
    "prodigyopt.Prodigy": {"lr": 1.0},
    "transformers.optimization.Adafactor": {"lr": 1e-2, "relative_step": False},
    "optimi.AdamW": {"lr": 1e-2},
}
NEAREST = Recipe("nearest", weights="bf16_nearest", exp_avg="fp32", exp_avg_sq="fp32")
# These warn of what they are about to do when they are imported or made.
pytestmark = pytest.mark.filterwarnings("ignore")


def maker(name, **options):
    module, kind = name.rsplit(".", 1)
    package = pytest.importorskip(module)
    return lambda parameters: getattr(package, kind)(parameters, **PEERS[name], **options)


@pytest.mark.parametrize("name", PEERS)
def test_with_exact_masters_it_is_the_fp32_run_bit_for_bit(name):
    fp32, reference = make_run(maker(name), None)
    model, optimizer = make_run(maker(name), "bf16-fp32-master")
    nearest, control = make_run(maker(name), NEAREST)
    for run in ((model, optimizer), (fp32, reference), (nearest, control)):
        train(*run, range(100))
    expected = [bits(p) for p in fp32.parameters()]
    assert all(map(torch.equal, map(bits, exact_weights(model, optimizer)), expected))
    assert not all(map(torch.equal, map(bits, exact_weights(nearest, control)), expected))


SCHEDULE_FREE = {
    "schedulefree.RAdamScheduleFree": {"lr": 1e-2},
    "pytorch_optimizer.ScheduleFreeAdamW": {"lr": 1e-2},
}


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_swaps_its_weights_as_in_fp32(name):
    module, kind = name.rsplit(".", 1)
    package = pytest.importorskip(module)

    def make(parameters):
        return getattr(package, kind)(parameters, **SCHEDULE_FREE[name])

    runs = [make_run(make, recipe) for recipe in (None, "bf16-fp32-master")]
    for steps in (range(5), range(5, 50)):
        for model, optimizer in runs:
            optimizer.train()
            train(model, optimizer, steps)
            optimizer.eval()
        (fp32, _), (model, optimizer) = runs
        expected = [bits(p) for p in fp32.parameters()]
        assert all(map(torch.equal, map(bits, exact_weights(model, optimizer)), expected))


@pytest.mark.parametrize(("kind", "lr"), [("AdamWScheduleFree", 1e-2), ("SGDScheduleFree", 1e-1)])
def test_schedule_free_of_its_package_becomes_ours_and_differs_by_rounding(kind, lr):
    package = pytest.importorskip("schedulefree")

    def make(parameters):
        return getattr(package, kind)(parameters, lr=lr, weight_decay=0.1, warmup_steps=10, r=0.5)

    fp32, reference = make_run(make, None)
    model, optimizer = make_run(make, None)
    for each in (reference, optimizer):
        each.train()
    train(fp32, reference, range(20))
    train(model, optimizer, range(20))
    torch_bf16.convert(optimizer, "bf16-fp32-master", model=model)
    assert type(optimizer) is getattr(torch_bf16, kind)
    for steps in (range(20, 60), range(60, 100)):
        for each, its in ((fp32, reference), (model, optimizer)):
            its.train()
            train(each, its, steps)
            its.eval()
        for mine, theirs in zip(model.parameters(), fp32.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        for key in ("k", "weight_sum", "lr_max", "scheduled_lr"):
            assert optimizer.param_groups[0][key] == reference.param_groups[0][key]
    optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(2).bfloat16())})
    for key in ("lr", "weight_decay", "warmup_steps", "r"):
        assert optimizer.param_groups[-1][key] == optimizer.param_groups[0][key]


def low_rank(parameters):
    matrices, vectors = [], []
    for p in parameters:
        (matrices if p.ndim == 2 else vectors).append(p)
    options = {"rank": 2, "update_proj_gap": 20, "proj_type": "std"}
    return [{"params": vectors}, {"params": matrices, **options}]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("apollo_torch.APOLLOAdamW", {"proj": "random", "scale_type": "channel", "scale": 1}),
        ("apollo_torch.APOLLOAdamW", {"proj": "random", "scale_type": "tensor", "scale": 128}),
        ("galore_torch.GaLoreAdamW", {"scale": 0.25}),
    ],
    ids=["apollo", "apollo-mini", "galore"],
)
def test_low_rank_moments_are_carried(name, options):
    module, kind = name.rsplit(".", 1)
    package = pytest.importorskip(module)

    def make(parameters):
        groups = low_rank(parameters)
        groups[1].update(options)
        return getattr(package, kind)(groups, lr=1e-2)

    runs = [make_run(make, recipe) for recipe in (None, "bf16-fp32-master")]
    for run in runs:
        train(*run, range(50))
    (fp32, _), (model, optimizer) = runs
    expected = [bits(p) for p in fp32.parameters()]
    assert all(map(torch.equal, map(bits, exact_weights(model, optimizer)), expected))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((name, {}) for name in ("AdamW8bit", "PagedAdamW8bit", "Adam8bit", "Lion8bit")),
        ("AdamW", {"optim_bits": 8}),
        ("Lion", {"optim_bits": 8, "is_paged": True}),
    ],
)
def test_8_bit_moments_become_ours_where_the_recipe_asks_for_them(kind, options):
    bnb = pytest.importorskip("bitsandbytes")
    int8 = Recipe("int8", exp_avg="int8", exp_avg_sq="int8")
    ours = getattr(torch_bf16, kind.replace("8bit", "").replace("Paged", ""))
    runs = [
        make_run(lambda p: getattr(bnb.optim, kind)(p, lr=1e-2, **options), int8),
        make_run(lambda p: ours(p, lr=1e-2, recipe=int8), int8, convert_it=False),
    ]
    for run in runs:
        train(*run, range(20))
    assert type(runs[0][1]) is ours
    assert all(map(torch.equal, *(model.parameters() for model, _ in runs)))
    with pytest.raises(NotImplementedError, match=rf"torch_bf16.{ours.__name__} keeps its.*BF16_"):
        make_run(lambda p: getattr(bnb.optim, kind)(p, lr=1e-2, **options), "bf16-stochastic")


def test_lomo_is_told_of_released_gradients():
    package = pytest.importorskip("lomo_optim")
    model = torch.nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match=r"release_gradients\(model, optimizer\) does"):
        torch_bf16.prepare(model, package.Lomo(model, lr=1e-2))
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", ["Lookahead", "TRAC"])
def test_a_wrapper_is_refused(kind):
    peers = pytest.importorskip("pytorch_optimizer")
    with pytest.raises(NotImplementedError, match="wraps another optimizer, AdamW"):
        make_run(lambda p: getattr(peers, kind)(torch.optim.AdamW(p)), "bf16-stochastic")

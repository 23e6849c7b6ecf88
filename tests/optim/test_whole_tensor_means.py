"""Cautious updates and update clipping: what a mean over each tensor decides before its update."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from bucket_cases import bits as raw_bits
from bucket_cases import inputs_of, make_case
from optimizer_cases import BACKENDS, assert_same, snapshot, take_steps
from torch import nn

import torch_bf16
from torch_bf16.backends import Totals, choose
from torch_bf16.rules import CAUTIOUS_ADAMW, LARGEST_STATISTIC, STABLE_ADAMW

LR, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.99), 1e-6
OPTIONS = {"lr": LR, "weight_decay": DECAY, "betas": BETAS}
MAKERS = {
    "cautious": lambda ps, **k: torch_bf16.AdamW(ps, **OPTIONS, eps=EPS, cautious=True, **k),
    "lion": lambda ps, **k: torch_bf16.Lion(ps, **OPTIONS, cautious=True, **k),
    "clipped": lambda ps, **k: torch_bf16.AdamW(ps, **OPTIONS, eps=EPS, update_clipping=True, **k),
}
every_maker = pytest.mark.parametrize("kind", MAKERS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def weights(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (40, 33), (77,), (5, 64)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradient(parameter, step):
    """Of a size that outgrows the second moment every seventh step."""
    generator = torch.Generator().manual_seed(100 * step + parameter.numel())
    size = 3.0 if step % 7 == 3 else 0.1
    noise = torch.randn(parameter.shape, generator=generator) * size
    return (noise + 0.05 * parameter.detach().float()).to(parameter.dtype)


def train(optimizer, steps):
    for step in steps:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gradient(p, step)
        optimizer.step()
    return optimizer


def debiased(beta, t):
    return beta * (1 - beta ** (t - 1)) / (1 - beta**t)


def clipped(w, g, m, v, t):
    """Algorithm 2 of the paper, with the betas of each step, in float64."""
    beta1, beta2 = (debiased(beta, t) for beta in BETAS)
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    rms = (g * g / v.clamp(min=EPS**2)).mean().sqrt()
    lr = LR / max(1.0, float(rms))
    return w - lr * DECAY * w - lr * m / (v.sqrt() + EPS), m, v


def mask_of(u, g):
    mask = (u * g > 0).double()
    return mask / mask.mean().clamp(min=1e-3)


def cautious(w, g, m, v, t):
    """AdamW, and the mask as the authors' code has it, in float64."""
    beta1, beta2 = BETAS
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + EPS)
    return w * (1 - LR * DECAY) - LR * u * mask_of(m, g), m, v


def lion(w, g, m, v, t):
    beta1, beta2 = BETAS
    c = beta1 * m + (1 - beta1) * g
    return (
        w * (1 - LR * DECAY) - LR * c.sign() * mask_of(c, g),
        beta2 * m + (1 - beta2) * g,
        v,
    )


@every_backend
@pytest.mark.parametrize(
    ("kind", "reference"), [("cautious", cautious), ("lion", lion), ("clipped", clipped)]
)
def test_fp32_is_the_papers_to_rounding(kind, reference, backend):
    parameters = weights()
    train(MAKERS[kind](parameters, backend=backend), range(1, 31))
    for start, parameter in zip(weights(), parameters, strict=True):
        w = start.detach().double()
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for t in range(1, 31):
            # The gradient depends on the weight, which fp32 rounds.
            g = gradient(w.float(), t).double()
            w, m, v = reference(w, g, m, v, t)
        assert (parameter.double() - w).abs().max() < 1e-5 * w.abs().max()


@every_maker
def test_it_is_another_step_than_the_plain_one(kind):
    here, plain = weights(), weights()
    train(MAKERS[kind](here), range(4))
    other = MAKERS[kind](plain)
    other.param_groups[0].update(cautious=False, update_clipping=False)
    train(other, range(4))
    assert not torch.equal(here[0], plain[0])
    other.param_groups[0].pop("cautious", None)
    rule = other.rule_of_group(other.param_groups[0])
    assert rule.statistic is None


@every_backend
def test_where_nothing_agrees_nothing_but_the_decay_is_left(backend):
    (p,) = parameters = [nn.Parameter(torch.ones(64))]
    optimizer = MAKERS["cautious"](parameters, backend=backend)
    p.grad = torch.ones(64)
    optimizer.step()
    before = p.detach().clone()
    p.grad = torch.full((64,), -0.01)
    optimizer.step()
    assert torch.equal(p, before * np.float32(1 - LR * DECAY))


@every_backend
def test_a_mask_of_one_element_grows_no_more_than_a_thousandfold(backend):
    (p,) = parameters = [nn.Parameter(torch.zeros(10_000))]
    optimizer = MAKERS["lion"](parameters, backend=backend)
    p.grad = torch.zeros(10_000)
    p.grad[7] = 1.0
    optimizer.step()
    assert p[7].item() == pytest.approx(-LR * 1000, rel=1e-6)
    assert p.count_nonzero() == 1


@every_maker
@every_backend
def test_a_number_that_is_none_spoils_its_own_weight_alone(kind, backend):
    parameters = weights(torch.bfloat16)
    optimizer = train(MAKERS[kind](parameters, backend=backend), range(2))
    for p in parameters:
        p.grad = gradient(p, 2)
        p.grad.view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    optimizer.step()
    for p in parameters:
        assert not p.view(-1)[:3].isfinite().any()
        assert p.view(-1)[3:].isfinite().all()


@pytest.mark.parametrize("rule", [CAUTIOUS_ADAMW, STABLE_ADAMW], ids=lambda rule: rule.name)
def test_factors_are_what_the_means_say(rule):
    assert rule.factor(1.0) == 1.0
    if rule is STABLE_ADAMW:
        assert [rule.factor(x) for x in (0.0, 0.3, 4.0)] == [1.0, 1.0, 0.5]
        assert rule.factor(LARGEST_STATISTIC) == 1 / 128
    else:
        assert [rule.factor(x) for x in (0.0, 1e-4, 0.5)] == [1000.0, 1000.0, 2.0]


@every_backend
@pytest.mark.parametrize("rule", ["cautious_adamw", "stable_adamw"])
def test_parts_of_a_tensor_share_its_sum(backend, rule):
    """As runs that a kernel cannot count, and shards, do."""
    sizes, half = (4096 + 130,), 2113
    whole, (gradient,) = make_case(rule, "stochastic", torch.bfloat16, [0], sizes)
    pieces, _ = make_case(rule, "stochastic", torch.bfloat16, [0, half], (half, half))
    one = choose(torch.device("cpu"), backend)
    gradient.nan_to_num_(1.0, 2.0, -2.0)
    flat = [plane for each in whole.planes[0] for plane in each]
    copies = [plane.clone() for plane in flat]
    cut = [tuple((copy[a : a + half],) for copy in copies) for a in (0, half)]
    totals = Totals(torch.zeros(1, dtype=torch.int64), np.zeros(2, int), np.full(2, sizes[0]))
    bases = np.repeat(whole.bases, 2, axis=0)
    pieces = replace(pieces, planes=cut, totals=totals, bases=bases)
    for bucket, gradients in ((whole, [gradient]), (pieces, [gradient[:half], gradient[half:]])):
        kernel = one.load(bucket)
        for step in (1, 2):
            inputs = inputs_of(bucket, gradients, step)
            bucket.totals.sums.zero_()
            kernel.measure(inputs)
            kernel(inputs)
    for a, b in zip(flat, copies, strict=True):
        np.testing.assert_array_equal(raw_bits(a), raw_bits(b))


@every_maker
def test_threads_change_no_bit(kind):
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(0)
            (p,) = parameters = [nn.Parameter(torch.zeros(1_200_001, dtype=torch.bfloat16))]
            optimizer = MAKERS[kind](parameters, backend="cpu")
            for _ in range(2):
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
                optimizer.step()
            found.append(p.detach().clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@every_maker
@every_backend
def test_released_gradients_step_as_others(kind, backend):
    found = []
    for release in (False, True):
        torch.manual_seed(0)
        model = torch_bf16.cast_model(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8)))
        optimizer = MAKERS[kind](model.named_parameters(), backend=backend)
        if release:
            torch_bf16.release_gradients(model, optimizer)
        for seed in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(optimizer))
    assert_same(*found)


@every_maker
def test_a_resumed_run_is_the_uninterrupted_one(kind):
    whole = train(MAKERS[kind](weights(torch.bfloat16)), range(6))
    half = train(MAKERS[kind](weights(torch.bfloat16)), range(3))
    saved = copy.deepcopy(half.state_dict())
    parameters = [nn.Parameter(p.detach().clone()) for p in half.param_groups[0]["params"]]
    resumed = MAKERS[kind](parameters)
    resumed.load_state_dict(saved)
    train(resumed, range(3, 6))
    assert_same(snapshot(resumed), snapshot(whole))
    copied = copy.deepcopy(half)
    train(copied, range(3, 6))
    assert_same(snapshot(copied), snapshot(whole))


def test_a_state_dict_that_does_not_have_the_options_leaves_them():
    plain = torch_bf16.AdamW(weights(torch.bfloat16), lr=LR)
    train(plain, range(2))
    ours = torch_bf16.AdamW(weights(torch.bfloat16), lr=LR, cautious=True)
    ours.load_state_dict(plain.state_dict())
    assert ours.param_groups[0]["cautious"] is True
    plain.load_state_dict(ours.state_dict())
    assert plain.param_groups[0]["cautious"] is True
    train(plain, range(2))
    theirs = torch.optim.AdamW(weights(torch.bfloat16), lr=LR)
    train(theirs, range(2))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["cautious"] is True
    assert "cautious" not in theirs.state_dict()["param_groups"][0]


@every_maker
@every_backend
def test_a_skipped_step_leaves_every_bit(kind, backend):
    optimizer = train(MAKERS[kind](weights(torch.bfloat16), backend=backend), range(2))
    before = snapshot(optimizer)
    optimizer.skip_next_step_where(torch.tensor(1.0))
    take_steps(optimizer, [5])
    assert_same(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 1


@every_backend
def test_groups_have_rules_of_their_own_and_later_ones_the_constructors(backend):
    first, second, third = weights(torch.bfloat16)
    mixed = torch_bf16.AdamW(
        [{"params": [first]}, {"params": [second], "cautious": False}],
        **{**OPTIONS, "cautious": True, "backend": backend},
    )
    mixed.add_param_group({"params": [third], "cautious": False, "update_clipping": True})
    names = [mixed.rule_of_group(group).name for group in mixed.param_groups]
    assert names == ["cautious_adamw", "adamw", "stable_adamw"]
    mixed.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert mixed.rule_of_group(mixed.param_groups[-1]) is CAUTIOUS_ADAMW
    train(mixed, range(2))
    for n, option in enumerate(({"cautious": True}, {}, {"update_clipping": True})):
        alone = weights(torch.bfloat16)[n]
        optimizer = torch_bf16.AdamW([(f"#{n}", alone)], **OPTIONS, **option, backend=backend)
        train(optimizer, range(2))
        assert torch.equal(alone, (first, second, third)[n])


def test_a_gradient_that_comes_now_and_then_changes_nothing_for_others():
    together, alone = weights(torch.bfloat16), weights(torch.bfloat16)[:1]
    both = torch_bf16.AdamW([("a", together[0]), ("b", together[1])], **OPTIONS, cautious=True)
    one = torch_bf16.AdamW([("a", alone[0])], **OPTIONS, cautious=True)
    for step in range(5):
        together[0].grad, alone[0].grad = gradient(together[0], step), gradient(alone[0], step)
        together[1].grad = gradient(together[1], step) if step % 2 else None
        both.step()
        one.step()
        assert torch.equal(together[0], alone[0])


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (torch_bf16.AdamW, {"cautious": True, "update_clipping": True}, "no two of them"),
        (torch_bf16.AdamW, {"cautious": True, "amsgrad": True}, "with amsgrad=True"),
        (torch_bf16.AdamW, {"update_clipping": True, "amsgrad": True}, "with amsgrad=True"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(make, options, words):
    with pytest.raises(NotImplementedError, match=words):
        make(weights(), **options)
    optimizer = make(weights()[:1])
    with pytest.raises(NotImplementedError, match=words):
        optimizer.add_param_group({"params": weights()[1:], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("option", ["cautious", "update_clipping"])
def test_an_option_that_is_a_number_is_refused(option):
    with pytest.raises(
        ValueError, match=rf"{option}=0.5 in parameter group 0 must be True or False"
    ):
        torch_bf16.AdamW(weights(), **{option: 0.5})


@pytest.mark.parametrize(
    ("make", "option", "others"),
    [
        (torch_bf16.Adam, "cautious", "AdamW and Lion"),
        (torch_bf16.SGD, "cautious", "AdamW and Lion"),
        (torch_bf16.Lion, "update_clipping", "AdamW"),
        (torch_bf16.AdamWScheduleFree, "cautious", "AdamW and Lion"),
    ],
)
def test_a_group_of_a_class_without_the_rule_is_refused(make, option, others):
    words = (
        f"{option}=True in parameter group 0: {make.__name__} has no rule for {option}; {others}"
    )
    with pytest.raises(NotImplementedError, match=words):
        make([{"params": weights(), option: True}])
    optimizer = make(weights())
    optimizer.param_groups[0][option] = True
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(NotImplementedError, match="Nothing was updated"):
        train(optimizer, range(1))
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


def test_the_monitor_compares_with_the_step_that_is_taken():
    model = torch_bf16.cast_model(nn.Linear(64, 64), "bf16-fp32-master")
    optimizer = MAKERS["clipped"](model.named_parameters(), recipe="bf16-fp32-master")
    monitor = torch_bf16.UpdateMonitor(optimizer, every=1)
    train(optimizer, range(5))
    (layer,) = [each for name, each in monitor.layers.items() if "weight" in name]
    assert layer.survived == pytest.approx(1.0, abs=1e-3)

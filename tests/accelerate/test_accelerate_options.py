"""A recipe's options through a kwargs handler and the environment; gradients summed or released."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from accelerate.utils import AutocastKwargs
from thousandths import THOUSANDTHS, Summing, assert_summed
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import torch_bf16
from accelerate_bf16 import BF16RecipeKwargs


def batches(count=4):
    torch.manual_seed(1)
    return [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(count)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def test_every_option_of_the_handler_reaches_the_optimizer(make_accelerator):
    handler = BF16RecipeKwargs(
        weights="bf16+16", exp_avg="fp32", exp_avg_sq="bf16_nearest", seed=9,
        keep_fp32=["2"], accumulate="fp32",
    )  # fmt: skip
    both = [AutocastKwargs(enabled=True), handler]
    accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=both)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    assert optimizer.recipe == torch_bf16.get_recipe(
        "bf16-stochastic", weights="bf16+16", exp_avg="fp32", exp_avg_sq="bf16_nearest",
        seed=9, keep_fp32=("2",), accumulate="fp32",
    )  # fmt: skip
    assert model[2].weight.dtype == torch.float32
    assert model[0].weight.dtype == torch.bfloat16


def test_the_environment_fills_in_what_the_handler_leaves_open(make_accelerator, monkeypatch):
    monkeypatch.setenv("BF16_WEIGHTS", "bf16+fp32")
    monkeypatch.setenv("BF16_EXP_AVG", "fp32")
    monkeypatch.setenv("BF16_SEED", "4")
    handler = BF16RecipeKwargs(weights="bf16+16")
    accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=[handler])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    recipe = optimizer.recipe
    assert (recipe.weights, recipe.exp_avg, recipe.seed) == ("bf16+16", "fp32", 4)


def test_the_environment_alone_is_enough(make_accelerator, monkeypatch):
    monkeypatch.setenv("BF16_ACCUMULATE", "bf16_stochastic")
    accelerator = make_accelerator("bf16-stochastic")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    assert optimizer.recipe.accumulate == "bf16_stochastic"


def test_a_subclass_of_the_handler_is_one_and_its_defaults_count(make_accelerator):
    @dataclass
    class Exact(BF16RecipeKwargs):
        weights: str | None = "bf16+16"
        release_gradients: bool | None = True
        note: str = "not an option"

    handler = Exact(seed=3)
    accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=[handler])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    assert optimizer.recipe == torch_bf16.get_recipe("bf16-stochastic", weights="bf16+16", seed=3)
    assert handler.release() is not None


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_what_a_model_computes_in_is_an_option(make_accelerator, monkeypatch, compute):
    monkeypatch.setenv("BF16_COMPUTE", compute)
    accelerator = make_accelerator("bf16-stochastic")
    model, x = network(), batches(1)[0][0]
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    one = nn.functional.linear(x, model[0].weight.float(), model[0].bias.float())
    assert torch.equal(model[0](x), one) is (compute == "fp32")
    assert prepared(x).dtype == torch.float32
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[compute]
    with accelerator.autocast():
        inside = nn.functional.linear(x.to(dtype), model[0].weight)
    assert inside.dtype == dtype
    accelerator.backward(prepared(x).sum())
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    optimizer.step()


def test_autocast_is_that_of_an_optimizers_own_recipe(make_accelerator):
    accelerator = make_accelerator("bf16-stochastic")
    x = batches(1)[0][0]

    def computed_in():
        with accelerator.autocast():
            return (x @ x.T).dtype

    assert computed_in() == torch.bfloat16
    model = network()
    recipe = torch_bf16.get_recipe("bf16-stochastic", compute="fp32")
    accelerator.prepare(model, torch_bf16.AdamW(model.parameters(), recipe=recipe))
    assert computed_in() == torch.float32
    model = network()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert computed_in() == torch.bfloat16


def test_the_backend_comes_from_the_handler_else_from_the_environment(
    make_accelerator, monkeypatch
):
    def chosen(*handlers):
        accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=list(handlers))
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator.prepare(model, optimizer)
        mse_loss(model(batches()[0][0]), batches()[0][1]).backward()
        optimizer.step()
        return optimizer._engine.plan._launches[0].batch.backend.name

    monkeypatch.setenv("TORCH_BF16_BACKEND", "eager")
    assert chosen() == "eager"
    assert chosen(BF16RecipeKwargs(backend="cpu")) == "cpu"
    monkeypatch.setenv("BF16_BACKEND", "cpu")
    assert chosen() == "cpu"
    assert chosen(BF16RecipeKwargs(backend="eager")) == "eager"


@pytest.mark.parametrize(
    ("mixed_precision", "handlers", "message"),
    [("no", 1, "has no effect with mixed_precision='no'"), ("bf16-fp32-master", 2, "not several")],
)
def test_a_refused_accelerator_does_not_bind_the_process_to_its_mode(
    make_accelerator, mixed_precision, handlers, message
):
    def make(mixed_precision, handlers):
        options = [BF16RecipeKwargs() for _ in range(handlers)]
        return make_accelerator(mixed_precision, kwargs_handlers=options)

    with pytest.raises(ValueError, match=message):
        make(mixed_precision, handlers)
    assert make("bf16-stochastic", 1).mixed_precision == "bf16-stochastic"


def test_options_that_cannot_be_meant_are_refused():
    with pytest.raises(ValueError, match="is for released gradients"):
        BF16RecipeKwargs(release_gradients=False, release_max_norm=1.0)
    with pytest.raises(ValueError, match="release_gradients='maybe' must be True, False or None"):
        BF16RecipeKwargs(release_gradients="maybe")
    with pytest.raises(ValueError, match="release_norm='all' is unknown; use one of parameter"):
        BF16RecipeKwargs(release_gradients=True, release_norm="all")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "bf17"}, "weights='bf17'.* use one of"),
        ({"accumulate": "fp64"}, "accumulate='fp64' is not a format for a sum"),
        ({"keep_fp32": 5}, "keep_fp32=5 must be a tuple"),
        ({"keep_fp32": ["head"]}, "keep_fp32='head' matches no module of Sequential"),
        ({"seed": 1.5}, "seed=1.5 must be an int"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; known backends: cpu, eager, triton"),
        ({"release_max_norm": 1.0}, "release_gradients=True is not set"),
        ({"release_norm": "last_step"}, "release_gradients=True is not set"),
    ],
)
def test_wrong_values_are_refused_at_prepare_and_leave_everything_as_it_was(
    make_accelerator, options, message
):
    accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=[BF16RecipeKwargs(**options)])
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=message):
        accelerator.prepare(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(optimizer) is torch.optim.AdamW


def test_keep_fp32_names_a_part_of_one_model_among_several(make_accelerator, mode):
    """As of a GAN, or beside a reference model."""
    handler = BF16RecipeKwargs(keep_fp32=("2",))
    accelerator = make_accelerator(mode, kwargs_handlers=[handler])
    reference, without, model = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), network()
    accelerator.prepare(reference)
    optimizers = [torch.optim.SGD(each.parameters()) for each in (without, model)]
    with pytest.raises(ValueError, match=r"'2' matches no module of Linear .* up that one first"):
        accelerator.prepare(without, optimizers[0])
    assert (type(optimizers[0]), without.weight.dtype) == (torch.optim.SGD, torch.float32)
    accelerator.prepare(without, model, *optimizers)
    kept = [p.dtype for each in (reference, without, model) for p in each.parameters()]
    assert kept == [torch.bfloat16] * 6 + [torch.float32] * 2
    accelerator.free_memory()
    del model, optimizers
    another = torch.nn.Linear(8, 8)
    accelerator.prepare(another, torch.optim.SGD(another.parameters()))
    assert another.weight.dtype == torch.bfloat16


def test_keep_fp32_that_matches_nothing_is_refused_once_the_model_is_trained(make_accelerator):
    handler = BF16RecipeKwargs(keep_fp32=("nonsense",))
    accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=[handler])
    model = accelerator.prepare(network())
    with pytest.raises(ValueError, match="'nonsense' matches no module of Sequential"):
        accelerator.prepare(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("accumulate", ["bf16_nearest", "bf16_stochastic", "fp32"])
def test_accumulate_sums_in_the_format_that_was_asked_for(make_accelerator, accumulate):
    handler = BF16RecipeKwargs(accumulate=accumulate)
    accelerator = make_accelerator(
        "bf16-stochastic", kwargs_handlers=[handler], gradient_accumulation_steps=1000
    )
    bare = Summing()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    seen = []
    for x in THOUSANDTHS:
        with accelerator.accumulate(model):
            accelerator.backward(1000 * model(x))
            if accelerator.sync_gradients:
                seen.append(bare.w.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
    (gradient,) = seen
    assert_summed(gradient, accumulate)


@pytest.mark.parametrize(
    ("by", "kind"),
    [
        ("the same", torch_bf16.SGD),
        ("one that freed it", torch.optim.SGD),
        ("another", torch.optim.SGD),
        ("another", torch_bf16.SGD),
    ],
)
def test_an_optimizer_alone_gets_the_options_of_a_model_prepared_before(
    make_accelerator, caplog, by, kind
):
    handler = BF16RecipeKwargs(release_gradients=True, release_max_norm=1.0)
    handlers = [handler] if by != "another" else []
    second = first = make_accelerator("bf16-stochastic", kwargs_handlers=handlers)
    model = first.prepare(network())
    if by == "one that freed it":
        first.free_memory()
    if by == "another":
        second = make_accelerator(kwargs_handlers=[handler])
    before = [p.detach().float() for p in model.parameters()]
    optimizer = second.prepare(kind(model.parameters(), lr=1.0))
    assert sum("bytes per trained" in each.getMessage() for each in caplog.records) == 1
    second.backward(1000 * model(torch.ones(4, 8)).square().mean())
    optimizer.step()
    moved = [(p.detach() - old).norm() for p, old in zip(model.parameters(), before, strict=True)]
    assert max(moved).item() == pytest.approx(1.0, abs=0.02)


def test_released_gradients_train_the_same_bits(make_accelerator):
    ends = []
    for release in (False, True):
        accelerator = make_accelerator(
            "bf16-stochastic", kwargs_handlers=[BF16RecipeKwargs(release_gradients=release)]
        )
        bare = network()
        model, optimizer, scheduler = accelerator.prepare(
            bare,
            inner := torch.optim.AdamW(bare.parameters(), lr=0.01),
            torch.optim.lr_scheduler.StepLR(inner, 1),
        )
        for x, y in batches():
            accelerator.backward(mse_loss(model(x), y))
            assert all((p.grad is None) == release for p in bare.parameters())
            if release:
                for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
                    with pytest.raises(NotImplementedError, match="Clip by BF16_RELEASE_MAX_NORM"):
                        clip(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        ends.append([p.detach().clone() for p in bare.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_release_goes_on_as_it_is_when_something_else_is_prepared(make_accelerator):
    handlers = [BF16RecipeKwargs(release_gradients=True)]
    accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=handlers)
    model = network()
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    handle = optimizer.optimizer._engine.release
    accelerator.prepare(network())
    assert optimizer.optimizer._engine.release is handle is not None


@pytest.mark.parametrize("accumulate", ["bf16_nearest", "bf16_stochastic", "fp32"])
def test_released_sums_train_the_same_bits(make_accelerator, accumulate):
    """Five batches, of which the last one makes a step alone: the sum is stepped by ``step()``."""
    ends = []
    for release in (False, True):
        options = BF16RecipeKwargs(release_gradients=release, accumulate=accumulate)
        accelerator = make_accelerator(
            "bf16-stochastic", kwargs_handlers=[options], gradient_accumulation_steps=2
        )
        bare, data = network(), DataLoader(batches(5), batch_size=None)
        model, optimizer, loader = accelerator.prepare(
            bare, torch.optim.AdamW(bare.parameters(), lr=0.01), data
        )
        for x, _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).float().square().mean())
                full = accelerator.sync_gradients and not loader.end_of_dataloader
                assert all((p.grad is None) == (release and full) for p in bare.parameters())
                optimizer.step()
                optimizer.zero_grad()
        ends.append([p.detach().clone() for p in bare.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_the_next_optimizer_takes_the_released_steps_over(make_accelerator, keep, release):
    """By the same accelerator, once that has freed the first one, or by another."""
    bare, kept = network(), []
    for seed, again in enumerate((True, release)):
        handler = BF16RecipeKwargs(release_gradients=again, seed=seed)
        accelerator = make_accelerator("bf16-stochastic", kwargs_handlers=[handler])
        for _ in range(2):
            optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
            model, optimizer = accelerator.prepare(bare, optimizer)
            kept += [optimizer] if keep else []
            for x, y in batches():
                accelerator.backward(mse_loss(model(x), y))
                assert all((p.grad is None) == again for p in bare.parameters())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.free_memory()

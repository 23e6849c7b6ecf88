"""Sums of gradients: what each format keeps, on one device."""

import copy
import pickle

import numpy as np
import oracle
import pytest
import torch
from bucket_cases import bits
from torch.distributed.checkpoint.state_dict import get_state_dict

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.recipe import ACCUMULATIONS

N = 1000
TINY = 0.001


def model_and_optimizer(accumulate, shape=(65, 64), name="w", **options):
    """One bf16 parameter, and an optimizer with that accumulation."""
    model = torch.nn.Module()
    model.register_parameter(name, torch.nn.Parameter(torch.ones(shape).bfloat16()))
    recipe = Recipe("mine", accumulate=accumulate, **options)
    optimizer = torch_bf16.SGD(list(model.named_parameters()), lr=0.5, recipe=recipe)
    return model, optimizer


def add(parameter, gradient):
    """A backward pass that brings this gradient."""
    (parameter * gradient).sum().backward()


def accumulated(accumulate, shape=(65, 64)):
    model, optimizer = model_and_optimizer(accumulate, shape)
    for _ in range(N):
        add(model.w, torch.tensor(TINY).bfloat16())
    return model.w, optimizer


def test_a_thousand_gradients_of_a_thousandth_make_one():
    exact = N * torch.tensor(TINY).bfloat16().double().item()
    plain, _ = accumulated("bf16_nearest")
    assert plain.grad.eq(0.5).all()  # the control: what torch does

    wide, _ = accumulated("fp32")
    assert wide.grad.dtype == torch.float32
    assert (wide.grad.double() - exact).abs().max() <= N * exact * 2**-24

    noisy, _ = accumulated("bf16_stochastic")
    assert noisy.grad.dtype == torch.bfloat16
    # Each addition rounds between neighbours at most 2^-8 apart (sums stay below 2), with mean zero
    # and a variance of at most a quarter of the square: six standard deviations of a martingale.
    deviation = (N**0.5) * 2**-7 / 2
    errors = noisy.grad.double() - exact
    assert errors.abs().max() <= 6 * deviation
    assert errors.mean().abs() <= 6 * deviation / errors.numel() ** 0.5
    assert errors.abs().max() > 0


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (4097,), (3, 5)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_stochastic_sums_are_those_of_the_oracle(shape, backend):
    model, optimizer = model_and_optimizer("bf16_stochastic", shape, seed=11)
    optimizer.backend = backend
    for step in (1, 2):
        total = None
        for number in range(4):
            gradient = torch.randn(shape).bfloat16()
            add(model.w, gradient)
            new = bits(gradient).view(np.uint16)
            if number == 0:
                total = new
            else:
                total = oracle.accumulate_stochastic(total, new, 11, "w", step, number)
            np.testing.assert_array_equal(bits(model.w.grad).view(np.uint16), total)
        optimizer.step()
        optimizer.zero_grad()


def test_no_two_micro_batches_share_noise_keys():
    from torch_bf16.numerics.counter_rng import GRADIENT, block_keys, stream_base, sum_base

    base = stream_base(3, 17, GRADIENT.stream)
    pairs = [(step, number) for step in range(1, 300) for number in range(1, 300)]
    steps, numbers = np.array(pairs, np.int64).T
    window = sum_base(base, steps)
    k0, k1 = block_keys(window, numbers, 0)
    assert len(np.unique(k0 << 32 | k1)) == len(pairs)


def test_the_sum_stays_in_one_place_and_no_second_buffer_lives():
    model, _optimizer = model_and_optimizer("bf16_stochastic")
    add(model.w, torch.ones(65, 64).bfloat16())
    place = model.w.grad.data_ptr()
    for _ in range(3):
        add(model.w, torch.ones(65, 64).bfloat16())
        assert model.w.grad.data_ptr() == place
    assert model.w.grad.eq(4).all()


@pytest.mark.parametrize("format", ACCUMULATIONS)
def test_zero_grad_starts_again(format):
    model, optimizer = model_and_optimizer(format)
    for set_to_none in (True, False):
        for _ in range(3):
            add(model.w, torch.ones(65, 64).bfloat16())
        assert model.w.grad.eq(3).all()
        optimizer.zero_grad(set_to_none)
        assert model.w.grad is None if set_to_none else model.w.grad.eq(0).all()


@pytest.mark.parametrize("format", ACCUMULATIONS)
def test_clipping_and_the_step_see_the_sum(format):
    model, optimizer = model_and_optimizer(format, (4, 4))
    for _ in range(3):
        add(model.w, torch.ones(4, 4).bfloat16())
    assert torch_bf16.total_norm(model.parameters()) == 12
    torch.nn.utils.clip_grad_value_(model.parameters(), 2.0)
    assert model.w.grad.eq(2).all()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 4.0)
    torch.testing.assert_close(model.w.grad.float(), torch.ones(4, 4), atol=0.005, rtol=0)
    optimizer.step()
    torch.testing.assert_close(model.w.float(), torch.full((4, 4), 0.5), atol=0.005, rtol=0)


@pytest.mark.parametrize("format", ACCUMULATIONS)
def test_a_resumed_run_repeats_the_uninterrupted_one(format):
    def run(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            for _ in range(4):
                add(model.w, torch.randn(65, 64).bfloat16())
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = model_and_optimizer(format)
    run(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, range(2, 4))
    resumed, other = model_and_optimizer(format)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    run(resumed, other, range(2, 4))
    assert torch.equal(model.w, resumed.w)


def test_states_are_made_before_the_first_step_which_dcp_loads_in_place():
    model, optimizer = model_and_optimizer("fp32", weights="bf16+16")
    _, states = get_state_dict(model, optimizer)
    assert states["state"]["w"]["remainder16"].shape == model.w.shape
    assert model.w.grad is None
    assert model.w.grad_dtype == torch.float32
    for _ in range(2):
        add(model.w, torch.tensor(TINY).bfloat16())
    assert model.w.grad.dtype == torch.float32
    optimizer.step()
    assert optimizer.exact_weight(model.w).ne(1).all()
    # Gradients that are there are left alone, and states are not made.
    model, optimizer = model_and_optimizer("fp32")
    add(model.w, torch.tensor(TINY).bfloat16())
    before = model.w.grad.clone()
    get_state_dict(model, optimizer)
    assert torch.equal(model.w.grad, before)


def test_a_sum_that_is_zeroed_after_a_gradient_on_the_side_is_no_sum_of_others():
    model, optimizer = model_and_optimizer("bf16_stochastic")
    for _ in range(3):  # pytest makes an error of a warning
        add(model.w, torch.tensor(TINY).bfloat16())
        torch.autograd.grad((model.w * 2).sum(), model.w)
        # As after a step that a scaler has skipped.
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("format", ["bf16_stochastic", "fp32"])
def test_a_gradient_asked_for_on_the_side_leaves_the_sum_alone(format):
    model, _ = model_and_optimizer(format)
    add(model.w, torch.ones(65, 64).bfloat16())
    torch.autograd.grad((model.w * 5).sum(), model.w)
    assert model.w.grad.eq(1).all()
    add(model.w, torch.ones(65, 64).bfloat16())
    assert model.w.grad.eq(2).all()


@pytest.mark.parametrize("format", ["bf16_stochastic", "fp32"])
def test_a_backward_pass_that_fails_leaves_nothing_behind(format):
    model, optimizer = model_and_optimizer(format)
    add(model.w, torch.ones(65, 64).bfloat16())
    hook = model.w.register_post_accumulate_grad_hook(lambda p: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        add(model.w, torch.ones(65, 64).bfloat16())
    hook.remove()
    optimizer.zero_grad()
    add(model.w, torch.ones(65, 64).bfloat16())
    assert model.w.grad.eq(1).all()


@pytest.mark.parametrize("format", ["bf16_stochastic", "fp32"])
def test_a_backward_pass_that_fails_leaves_the_sums_of_earlier_ones(format):
    model, _optimizer = model_and_optimizer(format)
    for _ in range(2):
        add(model.w, torch.ones(65, 64).bfloat16())
    hook = model.w.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        add(model.w, torch.ones(65, 64).bfloat16())
    hook.remove()
    assert model.w.grad.eq(2).all()
    add(model.w, torch.ones(65, 64).bfloat16())
    assert model.w.grad.eq(3).all()


@pytest.mark.parametrize("format", ["bf16_stochastic", "fp32"])
def test_remove_gives_gradients_back_to_torch(format):
    model, optimizer = model_and_optimizer("bf16_nearest")
    handle = torch_bf16.accumulate_gradients(model, optimizer, format)
    add(model.w, torch.ones(65, 64).bfloat16())
    handle.remove()
    assert model.w.grad.dtype == torch.bfloat16
    for _ in range(N):
        add(model.w, torch.tensor(2.0**-9).bfloat16())
    assert model.w.grad.eq(1).all()


def test_an_optimizer_that_is_gone_leaves_gradients_to_torch():
    model, _ = model_and_optimizer("bf16_stochastic")
    for _ in range(3):
        add(model.w, torch.ones(65, 64).bfloat16())
    assert model.w.grad.eq(3).all()


@pytest.mark.parametrize("format", ["bf16_stochastic", "fp32"])
def test_copies_of_an_optimizer_accumulate_as_it_does(format):
    _, optimizer = model_and_optimizer(format)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (parameter,) = other.param_groups[0]["params"]
        for _ in range(300):
            add(parameter, torch.tensor(2.0**-8).bfloat16())
        assert parameter.grad.float().mean() > 1.1


@pytest.mark.parametrize("format", ["bf16_stochastic", "fp32"])
def test_parameters_added_or_thawed_later_take_part(format):
    _, optimizer = model_and_optimizer(format)
    late = torch.nn.Parameter(torch.ones(4, 4).bfloat16())
    frozen = torch.nn.Parameter(torch.ones(4, 4).bfloat16(), requires_grad=False)
    optimizer.add_param_group({"params": [("late", late), ("frozen", frozen)]})
    optimizer.step()
    frozen.requires_grad_()
    optimizer.step()
    for parameter in (late, frozen):
        for _ in range(600):
            add(parameter, torch.tensor(2.0**-8).bfloat16())
        assert parameter.grad.float().mean() > 1.5


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained-elsewhere"])
def test_a_group_may_be_removed_between_steps(frozen):
    """What is left is summed as by an optimizer that never had it, and what is gone as in torch."""

    def sums(removes):
        torch.manual_seed(0)
        layers = [torch_bf16.cast_model(torch.nn.Linear(8, 8)) for _ in range(3)]
        groups = [{"params": [*each.parameters()]} for each in layers[0 if removes else 1 :]]
        recipe = Recipe("mine", accumulate="bf16_stochastic")
        optimizer = torch_bf16.SGD(groups, lr=0.5, recipe=recipe)
        for step in range(2):
            for number in range(3):
                generator = torch.Generator().manual_seed(10 * step + number)
                for p in (p for each in layers for p in each.parameters() if p.requires_grad):
                    add(p, torch.randn(p.shape, generator=generator).bfloat16())
            if not step:
                optimizer.step()
                optimizer.zero_grad()
                layers[0].zero_grad()
                if removes:
                    del optimizer.param_groups[0]
                layers[0].requires_grad_(not frozen)
        return layers

    one, other = sums(True), sums(False)
    for layer, twin in zip(one[1:], other[1:], strict=True):
        assert torch.equal(layer.weight.grad, twin.weight.grad)
        assert torch.equal(layer.bias.grad, twin.bias.grad)
    assert (one[0].weight.grad is None) == frozen


def test_a_group_may_be_split_between_steps():
    model = torch_bf16.cast_model(torch.nn.Linear(8, 8))
    recipe = Recipe("mine", accumulate="bf16_stochastic")
    optimizer = torch_bf16.SGD(model.named_parameters(), lr=0.5, recipe=recipe)
    for _ in range(2):
        for number in range(101):
            for p in model.parameters():
                add(p, torch.tensor(2.0**-9 if number else 1.0).bfloat16())
        assert (model.weight.grad.float().mean() - (1 + 100 * 2**-9)).abs() <= 6 * 10 * 2**-8 / 8
        optimizer.step()
        optimizer.zero_grad()
        torch_bf16.separate_vectors(optimizer)


def test_a_parameter_that_was_replaced_is_summed_from_the_next_step_on():
    model, optimizer = model_and_optimizer("bf16_stochastic", (8, 8))
    model.w = torch.nn.Parameter(model.w.detach().clone())
    optimizer.param_groups[0]["params"][0] = model.w
    for fits in (False, True):
        for number in range(101):
            add(model.w, torch.tensor(2.0**-9 if number else 1.0).bfloat16())
        assert model.w.grad.eq(1).all().item() == (not fits)
        optimizer.step()
        optimizer.zero_grad()


def test_a_transposed_parameter_has_the_sums_of_its_contiguous_copy():
    sums = []
    for strided in (False, True):
        model, _optimizer = model_and_optimizer("bf16_stochastic", (6, 10))
        if strided:
            model.w.data = model.w.data.t().contiguous().t()
        torch.manual_seed(0)
        for _ in range(4):
            add(model.w, torch.randn(6, 10).bfloat16())
        sums.append(model.w.grad)
    assert sums[1].stride() == (1, 6)
    assert torch.equal(*sums)


def test_what_is_asked_wrongly_is_refused():
    model, optimizer = model_and_optimizer("bf16_nearest")
    with pytest.raises(
        ValueError, match="'fp16' is unknown; use one of bf16_nearest, bf16_stochastic"
    ):
        torch_bf16.accumulate_gradients(model, optimizer, "fp16")
    with pytest.raises(ValueError, match=r"accumulate_gradients was given an SGD, .*by a recipe"):
        torch_bf16.accumulate_gradients(model, torch.optim.SGD(model.parameters()), "fp32")
    with pytest.raises(
        ValueError, match="accumulate='fp16' is not a format for a sum of gradients"
    ):
        Recipe("mine", accumulate="fp16")


def test_a_cuda_graph_cannot_record_a_sum_that_counts_on_the_host(monkeypatch):
    model, _ = model_and_optimizer("bf16_stochastic")
    gradient = torch.tensor(TINY).bfloat16()
    add(model.w, gradient)
    before = model.w.grad.clone()
    monkeypatch.setattr("torch_bf16.backends.cuda_graphs.capturing", lambda devices: True)
    with pytest.raises(RuntimeError, match=r"Accumulate in 'fp32'.*this gradient was not added"):
        add(model.w, gradient)
    assert torch.equal(model.w.grad, before)
    monkeypatch.undo()
    add(model.w, gradient)
    assert (model.w.grad.double() - 2 * before.double()).abs().max() <= 2**-16

    wide, _ = model_and_optimizer("fp32")
    monkeypatch.setattr("torch_bf16.backends.cuda_graphs.capturing", lambda devices: True)
    for _ in range(2):
        add(wide.w, gradient)
    assert torch.equal(
        wide.w.grad, torch.full_like(wide.w, 2 * gradient.item(), dtype=torch.float32)
    )


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # torch's, of create_graph
@pytest.mark.parametrize("shape", [(65, 64), (3, 5)])
def test_sums_with_a_graph_have_the_bits_of_those_without(shape):
    sums = []
    for create_graph in (False, True):
        model, optimizer = model_and_optimizer("bf16_stochastic", shape)
        for _ in range(20):
            (model.w.square() * TINY).sum().backward(create_graph=create_graph)
        sums.append(model.w.grad)
        assert optimizer.recipe.accumulate == "bf16_stochastic"  # it lives
    assert torch.equal(*sums)
    assert sums[0].grad_fn is None
    (second,) = torch.autograd.grad(sums[1].sum(), model.w)
    assert second.float().sub(20 * 2 * TINY).abs().max() < 20 * 2 * TINY * 2**-5

"""Averages of weights that move, beside one in bf16 rounded to nearest, which does not."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import torch_bf16
from torch_bf16 import EMA, ema_multi_avg_fn

DECAY, STEPS, N = 0.9999, 400, 128 * 128
every_format = pytest.mark.parametrize("format", ["fp32", "bf16_stochastic"])


def model(value=1.0):
    module = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(module.weight, value)
    return module


def averaged(make):
    """From weights of 1, an average of weights of 1.5."""
    average = make(model(1.0))
    average.update_parameters(model(1.0))
    for _ in range(STEPS):
        average.update_parameters(model(1.5))
    return average.module.weight.detach().double()


def true_place():
    return 1.5 - 0.5 * DECAY**STEPS


MAKE = {
    "ema": lambda m, format: EMA(m, DECAY, format=format, backend="eager"),
    "swa_utils": lambda m, format: AveragedModel(
        m.float() if format == "fp32" else m, multi_avg_fn=ema_multi_avg_fn(DECAY, backend="eager")
    ),
}


@every_format
@pytest.mark.parametrize("kind", MAKE)
def test_an_average_arrives_where_the_weights_lead(kind, format):
    try:
        found = averaged(lambda m: MAKE[kind](m, format))
    except RuntimeError as error:
        if kind == "swa_utils" and "Tensors of the same index must be" in str(error):
            pytest.skip(f"torch {torch.__version__} averages no weights of another dtype: {error}")
        raise
    # Rounding to one of two neighbours: a variance of at most distance times step, each step; the
    # mean over N independent weights has 1/N of it. Five deviations, and fp32's own roundings.
    spread = math.sqrt((true_place() - 1.0) * 2.0**-7 / N) if format == "bf16_stochastic" else 0.0
    assert abs(found.mean().item() - true_place()) <= 5 * spread + STEPS * 2.0**-23
    assert true_place() - 1.0 > 0.019


def test_control_an_average_in_bf16_rounded_to_nearest_does_not_move():
    found = averaged(lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(DECAY)))
    assert (found == 1.0).all()


@every_format
def test_an_average_is_the_same_again_and_goes_on_from_its_state_dict(format):
    def run(parts):
        torch.manual_seed(0)
        source = nn.Linear(8, 8, dtype=torch.bfloat16)
        ema = EMA(source, 0.99, format=format, backend="eager")
        for part in parts:
            for _ in range(part):
                with torch.no_grad():
                    source.weight.add_(0.25)
                ema.update_parameters(source)
            fresh = EMA(source, 0.99, format=format, backend="eager")
            fresh.load_state_dict(copy.deepcopy(ema.state_dict()))
            ema = fresh
        return ema.module.weight

    assert torch.equal(run([10]), run([4, 6]))


def test_backends_agree_bit_for_bit():
    def run(backend):
        torch.manual_seed(0)
        source = nn.Linear(9, 7, dtype=torch.bfloat16)
        ema = EMA(source, 0.9, format="bf16_stochastic", backend=backend)
        for _ in range(4):
            nn.init.normal_(source.weight)
            ema.update_parameters(source)
        return ema.module.weight

    assert torch.equal(run("cpu"), run("eager"))


@every_format
def test_a_cuda_graph_cannot_record_an_update(format, monkeypatch):
    average = EMA(model(1.0), 0.5, format=format)
    for value in (1.0, 2.0):
        average.update_parameters(model(value))
    monkeypatch.setattr("torch_bf16.backends.cuda_graphs.capturing", lambda devices: True)
    with pytest.raises(RuntimeError, match=r"average of weights.*outside of the capture"):
        average.update_parameters(model(3.0))
    assert (average.module.weight == 1.5).all()


def test_what_autocast_has_cast_is_not_taken_for_the_other_weights():
    source = nn.Linear(4, 4)
    ema = EMA(source)
    ema.update_parameters(source)
    nn.init.constant_(source.weight, 1.0)
    x = torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = source(x)
        with ema.swapped(source):
            within = source(x)
            expected = ema.module(x)
        after = source(x)
    assert torch.equal(within, expected)
    assert torch.equal(before, after)
    assert not torch.equal(before, within)


def test_swapping_keeps_the_weights_and_their_exact_masters():
    torch.manual_seed(0)
    source = torch_bf16.cast_model(nn.Linear(6, 6), "bf16-fp32-master")

    def train(swap):
        module = copy.deepcopy(source)
        optimizer = torch_bf16.AdamW(
            module.parameters(), lr=1e-4, recipe="bf16-fp32-master", backend="eager"
        )
        ema = EMA(module, 0.5, backend="eager")
        for _ in range(3):
            for p in module.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            ema.update_parameters(module)
            if swap:
                before = module.weight.detach().clone()
                with ema.swapped(module):
                    assert torch.equal(module.weight, ema.module.weight.bfloat16())
                assert torch.equal(module.weight, before)
        state = optimizer.state[module.weight]
        return module.weight.detach(), state["remainder16"]

    assert all(map(torch.equal, train(True), train(False)))


@pytest.mark.parametrize("format", ["fp32", "bf16_stochastic", None])
def test_a_forward_pass_that_writes_a_weight_leaves_its_average_alone(format):
    source = torch_bf16.cast_model(nn.Embedding(8, 4, max_norm=0.1))
    ema = EMA(source, format=format)
    before = ema.module.weight.clone()
    with ema.swapped(source), torch.no_grad():
        source(torch.arange(8))
    assert torch.equal(ema.module.weight, before)


def test_weights_come_back_after_an_error():
    source = model()
    ema = EMA(source, backend="eager")
    ema.update_parameters(source)
    before = source.weight.data_ptr()
    with pytest.raises(RuntimeError, match="inside"), ema.swapped(source):
        raise RuntimeError("inside")
    assert source.weight.data_ptr() == before


def test_buffers_are_copied_and_torchs_update_bn_works():
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ema = EMA(source, backend="eager")
    source(torch.randn(8, 3))
    ema.update_parameters(source)
    assert torch.equal(ema.module[1].running_mean, source[1].running_mean)
    assert ema.module[1].num_batches_tracked == 1
    update_bn([torch.randn(8, 3)], ema)
    assert not torch.equal(ema.module[1].running_mean, source[1].running_mean)


def test_a_buffer_that_has_grown_is_copied():
    source = nn.Linear(3, 3)
    source.register_buffer("cache", torch.zeros(2))
    ema = EMA(source, 0.5)
    source.cache = torch.ones(4, 2)
    for _ in range(2):
        ema.update_parameters(source)
    assert torch.equal(ema.module.cache, source.cache)
    assert ema.module.cache.data_ptr() != source.cache.data_ptr()


@pytest.mark.parametrize("make", ["ema", "swa_utils"])
def test_averaged_buffers_move_and_those_that_count_are_copied(make):
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    average = {
        "ema": lambda: EMA(source, 0.5, use_buffers=True),
        "swa_utils": lambda: AveragedModel(
            source, multi_avg_fn=ema_multi_avg_fn(0.5), use_buffers=True
        ),
    }[make]()
    expected = None
    for _ in range(3):
        source(torch.randn(8, 3) + 3)
        average.update_parameters(source)
        now = source[1].running_mean.clone()
        expected = now if expected is None else expected.lerp(now, 0.5)
    torch.testing.assert_close(average.module[1].running_mean, expected)
    assert average.module[1].num_batches_tracked == 3


def test_swapping_takes_the_buffers_that_are_averaged_and_writes_none():
    source = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ema = EMA(source, 0.5, use_buffers=True)
    for _ in range(2):
        source(torch.randn(8, 3) + 3)
        ema.update_parameters(source)
    before = [copy.deepcopy(each.state_dict()) for each in (source, ema)]
    with ema.swapped(source):
        assert torch.equal(source[1].running_mean, ema.module[1].running_mean)
        assert not torch.equal(source[1].running_mean, before[0]["1.running_mean"])
        source(torch.randn(8, 3))
    for module, state in zip((source, ema), before, strict=True):
        for name, each in module.state_dict().items():
            assert torch.equal(each, state[name]), name


def test_an_average_that_does_not_lie_in_rows_moves_as_one_that_does():
    rows = torch.randn(6, 4).bfloat16()
    columns = rows.t().contiguous().t()
    value = torch.randn(6, 4).bfloat16()
    move = [ema_multi_avg_fn(0.5) for _ in range(2)]
    for _ in range(2):
        for each, average in zip(move, (rows, columns), strict=True):
            each([average], [value], 1)
        assert torch.equal(rows, columns)
    assert (rows - value).abs().max() < 2


@pytest.mark.parametrize("earlier", [False, True])
def test_averages_lie_like_the_weights_that_were_copied_and_move_as_in_rows(earlier):
    rows = nn.Conv2d(4, 4, 3)
    convolution = copy.deepcopy(rows)
    if not earlier:
        convolution.to(memory_format=torch.channels_last)
    averages = [EMA(each, 0.5, format="bf16_stochastic") for each in (rows, convolution)]
    convolution.to(memory_format=torch.channels_last)
    lies = averages[1].module.weight.is_contiguous(memory_format=torch.channels_last)
    assert lies == (not earlier)
    for _ in range(3):
        for ema, each in zip(averages, (rows, convolution), strict=True):
            with torch.no_grad():
                each.weight.add_(1.0)
            ema.update_parameters(each)
    one, other = (ema.module.weight for ema in averages)
    assert torch.equal(one, other)
    torch.testing.assert_close(one.float(), rows.weight - 0.75, atol=0.02, rtol=0.02)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"decay=1\.5 must be a number between 0 and 1"):
        EMA(model(), 1.5)
    with pytest.raises(
        ValueError, match="format='bf16' must be one of fp32, bf16_stochastic, or None"
    ):
        EMA(model(), format="bf16")
    with pytest.raises(ValueError, match="pass the module that EMA was made from"):
        EMA(model()).update_parameters(nn.Sequential(model()))
    with pytest.raises(ValueError, match=r"swapped was given an OrderedDict and takes"):
        EMA(model()).swapped(model().state_dict()).__enter__()
    with pytest.raises(ValueError, match=r"has shape \(3, 3\), and its average has shape"):
        EMA(nn.Linear(2, 3)).update_parameters(nn.Linear(3, 3))
    wrapped = nn.Sequential(model())
    with (
        pytest.raises(ValueError, match="swapped: this model and the averaged one differ"),
        EMA(model()).swapped(wrapped),
    ):
        pass


def test_averages_are_pickled_with_what_moves_them():
    model = torch.nn.Linear(4, 4)
    averages = [
        torch_bf16.EMA(model, 0.9),
        AveragedModel(model, multi_avg_fn=torch_bf16.ema_multi_avg_fn(0.9)),
    ]
    for each in averages:
        for _ in range(2):
            each.update_parameters(model)
        loaded = pickle.loads(pickle.dumps(each))
        with torch.no_grad():
            model.weight.add_(1)
        for average in (each, loaded):
            average.update_parameters(model)
        assert torch.equal(loaded.module.weight, each.module.weight)


def test_the_average_of_exact_masters_moves_by_less_than_a_spacing_of_bf16():
    torch.manual_seed(0)
    module = torch_bf16.cast_model(nn.Linear(16, 8), "bf16-fp32-master")
    optimizer = torch_bf16.SGD(module.parameters(), lr=1e-6, recipe="bf16-fp32-master")
    ema, rounded = EMA(module, 0.9), EMA(module, 0.9)
    expected = None
    for _ in range(20):
        for p in module.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        ema.update_parameters(module, optimizer)
        rounded.update_parameters(module)
        exact = {name: optimizer.exact_weight(p) for name, p in module.named_parameters()}
        expected = exact if expected is None else expected
        expected = {name: each.lerp(exact[name], 0.1) for name, each in expected.items()}
    for name, average in ema.module.named_parameters():
        torch.testing.assert_close(average.detach(), expected[name], rtol=1e-6, atol=1e-9)
    assert not torch.allclose(rounded.module.weight, expected["weight"], rtol=1e-6, atol=1e-9)


def test_an_average_takes_no_other_library_s_optimizer_for_masters():
    module = model()
    ema = EMA(module)
    with pytest.raises(ValueError, match="update_parameters was given an SGD"):
        ema.update_parameters(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert ema.n_averaged == 0

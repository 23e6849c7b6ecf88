"""Moments of one byte: codes in blocks of 64, against the oracle and by exhaustion."""

import numpy as np
import oracle_formats
import pytest
import torch
from torch import nn

from torch_bf16 import AdamW, Recipe
from torch_bf16.formats import BF16_NEAREST, BF16_STOCHASTIC, FP32, INT8, UINT8
from torch_bf16.states.recoding import recode

BOTH = {"int8": INT8, "uint8": UINT8}
TOP = {"int8": 127, "uint8": 255}
BYTES = Recipe("bytes", exp_avg="int8", exp_avg_sq="int8")

every_format = pytest.mark.parametrize("name", BOTH)


def encode(name, x, r):
    planes = torch.empty(len(x), dtype=BOTH[name].planes[0].dtype), torch.empty(len(x) // 64)
    BOTH[name].encode(x, torch.as_tensor(r, dtype=torch.int32).expand(len(x)), planes)
    return planes


def decode(name, *planes):
    return BOTH[name].decode(planes)


def codes_with_top(name):
    """Blocks with every code among them, and the largest in each."""
    top = TOP[name]
    codes = torch.arange(-top if name == "int8" else 0, top + 1)
    codes = torch.cat([codes, torch.full((-len(codes) % 63,), top)]).view(-1, 63)
    tops = torch.full((len(codes), 1), top)
    return torch.cat([codes, tops], 1).to(BOTH[name].planes[0].dtype).view(-1)


@every_format
@pytest.mark.parametrize("r", [0, 0x7FFF, 0xFFFF])
def test_every_code_comes_back_with_its_scale_whatever_was_drawn(name, r):
    codes = codes_with_top(name)
    generator = torch.Generator().manual_seed(0)
    for exponent in (-100, -60, -20, 0, 60, 127):
        scale = (1 + torch.rand(len(codes) // 64, generator=generator)) * 2.0**exponent
        planes = encode(name, decode(name, codes, scale), r)
        assert torch.equal(planes[0], codes)
        assert torch.equal(planes[1], scale)


@every_format
def test_encoding_is_the_oracles(name):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300 * 64, generator=generator) * 10.0 ** torch.randint(
        -44, 38, (300, 1), generator=generator
    ).expand(-1, 64).reshape(-1)
    x[:64] = 0
    for block, value in enumerate((np.nan, np.inf, -np.inf, 1e-45, 3.4e38, -0.0, -1e-40), start=1):
        x[block * 64 + 5] = value
    r = torch.randint(0, 65536, x.shape, generator=generator, dtype=torch.int32)
    want = oracle_formats.encode(name, x.numpy(), r.numpy())
    got = encode(name, x, r)
    np.testing.assert_array_equal(got[0].numpy(), want[0])
    np.testing.assert_array_equal(got[1].numpy(), want[1])
    np.testing.assert_array_equal(decode(name, *got).numpy(), oracle_formats.decode(name, want))


def test_second_moments_are_unbiased_over_all_draws():
    """Between every two codes, the mean over the 16,384 draws is the number, to 2**-15 of a gap."""
    draws = torch.arange(0, 2**16, 4, dtype=torch.int32).repeat_interleave(64)
    for code in (1, 2, 3, 17, 100, 200, 254):
        x = torch.full((64,), float(code**2)) + (2 * code + 1) * torch.linspace(0, 1, 64)
        # Two places of a block are for the largest and for zero.
        x[0], x[1] = 255.0**2, 0.0
        found = decode("uint8", *encode("uint8", x.repeat(2**14), draws)).view(-1, 64).double()
        error = (found.mean(0) - x).abs() / (2 * code + 1)
        # On top comes what fp32 rounds in the number itself.
        assert error[2:].max() <= 2.0**-15 + 255**2 * 2.0**-22 / (2 * code + 1) + 1e-5
        assert found[:, 1].max() == 0


def test_codes_are_monotone_for_equal_draws():
    for name, least in (("int8", -1.0), ("uint8", 0.0)):
        # Each block has a largest of its own size, 1.
        x = torch.linspace(least, 1, 63 * 500).view(-1, 63)
        x = torch.cat([x, torch.ones(len(x), 1)], 1).view(-1)
        for r in (0, 0x1234, 0xFFFF):
            codes = encode(name, x, r)[0].view(-1, 64)[:, :63].reshape(-1).int()
            assert (codes.diff() >= 0).all()


def test_a_first_moment_goes_to_the_nearest_root():
    x = torch.randn(64 * 1000, generator=torch.Generator().manual_seed(2))
    codes, scale = encode("int8", x, 0)
    root = (x.abs() / scale.repeat_interleave(64)).double().sqrt() * 127 * x.sign()
    assert (root - codes).abs().max() <= 0.5 + 1e-4


def test_a_second_moment_is_zero_for_zero_alone():
    x = torch.zeros(128)
    x[3], x[5], x[70] = 1.0, 1e-38, -1.0
    codes = encode("uint8", x, 0)[0]
    assert codes[3] == 255
    assert codes[5] == 1
    assert codes.count_nonzero() == 2


@every_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(name, value):
    x = torch.rand(192) + 0.5
    x[70] = value
    back = decode(name, *encode(name, x, 0x8000))
    assert back[64:128].isnan().all()
    assert back[:64].isfinite().all()
    assert back[128:].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "blocked"),
    [((3, 64), True), ((2, 4, 16), True), ((64, 3), False), ((64,), None), ((5, 0), True)],
)
def test_the_format_follows_from_the_shape(shape, blocked):
    parameter = torch.empty(shape, dtype=torch.bfloat16)
    expected = {True: (INT8, UINT8), False: (BF16_NEAREST, BF16_STOCHASTIC), None: (FP32, FP32)}
    assert (
        tuple(
            BYTES.format_of(role, parameter.shape, parameter.dtype)
            for role in ("exp_avg", "exp_avg_sq")
        )
        == (expected[blocked])
    )


def trained(recipe=BYTES, steps=3, backend=None, shape=(6, 128)):
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape).bfloat16())
    optimizer = AdamW([("w", parameter)], lr=1e-2, recipe=recipe, backend=backend)
    for _ in range(steps):
        parameter.grad = torch.randn(shape).bfloat16()
        optimizer.step()
    return optimizer, parameter


def test_a_scale_plane_has_a_row_for_each_of_the_parameters():
    optimizer, parameter = trained()
    state = optimizer.state[parameter]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in state.items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.int8, (6, 128)),
        "exp_avg_scale": (torch.float32, (6, 2)),
        "exp_avg_sq": (torch.uint8, (6, 128)),
        "exp_avg_sq_scale": (torch.float32, (6, 2)),
    }


def test_a_resumed_run_equals_an_uninterrupted_one():
    whole, parameter = trained(steps=5)
    half, other = trained(steps=3)
    state = half.state_dict()
    resumed = AdamW([("w", other)], lr=1e-2, recipe=BYTES)
    resumed.load_state_dict(state)
    for _ in range(2):
        other.grad = torch.randn(other.shape).bfloat16()
        resumed.step()
    assert torch.equal(other, parameter)
    for key, value in whole.state[parameter].items():
        assert torch.equal(resumed.state[other][key], value), key


def test_moments_of_fp32_are_taken_over_and_come_back():
    optimizer, parameter = trained()
    state = optimizer.state[parameter]
    for key, format_ in (("exp_avg", INT8), ("exp_avg_sq", UINT8)):
        planes = state[key], state[f"{key}_scale"]
        again = recode(format_.decode(planes), format_)
        assert all(map(torch.equal, planes, again))
    theirs = torch.optim.AdamW([nn.Parameter(parameter.detach().clone())], lr=1e-2)
    theirs.param_groups[0]["params"][0].grad = torch.randn(6, 128).bfloat16()
    theirs.step()
    saved = theirs.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].float()
    ours = AdamW([parameter], lr=1e-2, recipe=BYTES)
    ours.load_state_dict(saved)
    x = saved["state"][0]["exp_avg"]
    back = INT8.decode((ours.state[parameter]["exp_avg"], ours.state[parameter]["exp_avg_scale"]))
    # Half a code of 127, of the largest in each block.
    largest = x.abs().view(-1, 64).amax(1, keepdim=True)
    assert ((back - x).view(-1, 64).abs() <= largest / 127).all()


def test_rows_that_are_no_whole_blocks_train_in_bf16():
    optimizer, parameter = trained(shape=(64, 3))
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_a_gradient_that_is_not_finite_makes_no_finite_weight(backend):
    optimizer, parameter = trained(backend=backend)
    parameter.grad[2, 70] = float("inf")
    for _ in range(2):
        optimizer.step()
        parameter.grad = torch.randn(parameter.shape).bfloat16()
    block = torch.zeros(6, 128, dtype=torch.bool)
    block[2, 64:] = True
    assert parameter[block].isnan().all()
    assert parameter[~block].isfinite().all()

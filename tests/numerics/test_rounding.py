"""The contract of `torch_bf16.numerics.rounding`, on bits; tests/proofs has the full sweeps."""

import numpy as np
import oracle_formats
import pytest
import torch
from proofs import rounding as prove

from torch_bf16.numerics.rounding import (
    bf16_nearest,
    bf16_stochastic,
    join8,
    join16,
    split8,
    split16,
)

LOWER_HALVES = (
    0x0000, 0x0001, 0x0002, 0x00FF, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF,
    0x8000, 0x8001, 0x8002, 0xBFFF, 0xC000, 0xFF00, 0xFFFE, 0xFFFF,
)  # fmt: skip
DRAWS = (0x0000, 0x0001, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF)

SPECIALS = {
    "+0": (0x00000000, 0x0000),
    "-0": (0x80000000, 0x8000),
    "+inf": (0x7F800000, 0x7F80),
    "-inf": (0xFF800000, 0xFF80),
    "the NaN that CUDA makes": (0x7FFFFFFF, 0x7FFF),
    "the same, negative": (0xFFFFFFFF, 0xFFFF),
    "quiet NaN": (0x7FC00000, 0x7FC0),
    "the NaN that x86 makes": (0xFFC00000, 0xFFC0),
    "smallest signalling NaN": (0x7F800001, 0x7FC0),
    "the same, negative too": (0xFF800001, 0xFFC0),
    "largest bf16": (0x7F7F0000, 0x7F7F),
    "smallest bf16 subnormal": (0x00010000, 0x0001),
    "smallest normal": (0x80800000, 0x8080),
    "one": (0x3F800000, 0x3F80),
}


def fp32(bits):
    return torch.from_numpy(oracle_formats.from_bits(bits))


def uint16(x):
    return x.view(torch.int16).numpy().view(np.uint16)


def assert_same(got, want, x, draw=None):
    """Shows value, bits, draw, got and want of the first difference."""
    got = got if isinstance(got, np.ndarray) else got.numpy()
    wrong = np.flatnonzero(got != want)
    if len(wrong):
        i = wrong[0]
        value = x.flatten()[i]
        pytest.fail(
            f"{len(wrong)} of {got.size} differ; first: x={float(value)} "
            f"bits={int(value.view(torch.int32)) & 0xFFFFFFFF:#010x} draw={draw} "
            f"got={int(got.flat[i]):#x} want={int(want.flat[i]):#x}"
        )


@pytest.fixture(scope="module")
def every_upper_half():
    """All 65,536 upper halves, so all signs and exponents, with 16 lower halves each."""
    upper = np.arange(2**16, dtype=np.uint64)[:, None] << 16
    return fp32((upper | np.array(LOWER_HALVES, dtype=np.uint64)).reshape(-1))


def test_nearest_equals_oracle_for_every_upper_half(every_upper_half):
    x = every_upper_half
    assert_same(uint16(bf16_nearest(x)), oracle_formats.bf16_nearest(x.numpy()), x)


@pytest.mark.parametrize("draw", DRAWS, ids=hex)
def test_stochastic_equals_oracle_for_every_upper_half(every_upper_half, draw):
    x = every_upper_half
    r = torch.full_like(x, draw, dtype=torch.int32)
    assert_same(
        uint16(bf16_stochastic(x, r)), oracle_formats.bf16_stochastic(x.numpy(), draw), x, draw
    )


def test_split_and_join_equal_oracle_for_every_upper_half(every_upper_half):
    x = every_upper_half
    hi, lo = split16(x)
    want_hi, want_lo = oracle_formats.split16(x.numpy())
    assert_same(uint16(hi), want_hi, x)
    assert_same(lo, want_lo, x)
    want = oracle_formats.join16(want_hi, want_lo).view(np.int32)
    assert_same(join16(hi, lo).view(torch.int32), want, x)


def test_a_stale_lower_half_beside_a_zero_never_makes_a_nan():
    """``p.data.mul_(mask)`` zeroes a weight without a trace; split16 makes no such pair."""
    lo = torch.arange(-(2**15), 2**15).to(torch.int16)
    for zero in (0.0, -0.0):
        hi = torch.full(lo.shape, zero, dtype=torch.bfloat16)
        joined = join16(hi, lo)
        assert_same(
            joined.view(torch.int32),
            oracle_formats.join16(uint16(hi), lo.numpy()).view(np.int32),
            hi,
        )
        assert joined.abs().max() < 2.0**-133
        assert torch.equal(joined.signbit(), hi.signbit())


@pytest.mark.parametrize("upper", [0x3F80, 0xC041], ids=hex)
def test_round_up_count_equals_dropped_half(upper):
    """2**26 cases an upper half; all 2**32 of eight upper halves are in tests/proofs."""
    generator = torch.Generator().manual_seed(upper)
    some = torch.randint(2**16, (768,), generator=generator).tolist()
    ends = [*range(64), *range(0x8000 - 64, 0x8000 + 64), *range(0x10000 - 64, 0x10000)]
    prove.check_round_up_counts(upper, [*ends, *some])


@pytest.mark.parametrize("upper", prove.UPPER_HALVES[::3], ids=hex)
def test_24_bits_round_up_as_often_as_the_dropped_byte_says(upper):
    prove.check_24_bits_counts(upper)


@pytest.mark.parametrize("sign", [0, 2**31], ids=["positive", "negative"])
def test_24_bits_round_up_from_the_right_draw_on(sign):
    """All upper halves and dropped bytes; 401 is prime to 256."""
    prove.check_24_bits_thresholds(sign, sign + prove.INFINITY, step=401)


@pytest.mark.parametrize("r", [0, 1, 255])
def test_what_24_bits_hold_comes_back_whatever_was_drawn(r):
    for sign in (0, 2**31):
        for x in prove.slabs(sign, sign + prove.INFINITY + 1, step=256 * 37):
            back = join8(*split8(x, torch.full_like(x, r, dtype=torch.int32)))
            assert torch.equal(prove.patterns(back), prove.patterns(x))


@pytest.mark.parametrize("upper", prove.UPPER_HALVES, ids=hex)
def test_every_dropped_half_rounds_up_from_one_draw_on(upper):
    """The draws just below and at the threshold: with rising results, this fixes the count."""
    dropped = torch.arange(1, 2**16)
    x = prove.as_fp32(upper * 2**16 + dropped)
    threshold = (2**16 - dropped).to(torch.int32)
    assert (prove.halves(bf16_stochastic(x, threshold)) == upper + 1).all()
    assert (prove.halves(bf16_stochastic(x, threshold - 1)) == upper).all()


def test_nearest_is_a_control_that_the_round_up_count_fails(monkeypatch):
    monkeypatch.setattr(prove, "bf16_stochastic", lambda x, r: bf16_nearest(x))
    with pytest.raises(AssertionError, match=r"dropped 0x4000: 0 of 65,536 draws round up"):
        prove.check_round_up_counts(0x3F80, [0x4000])


@pytest.mark.parametrize("sign", [0, 2**31], ids=["positive", "negative"])
def test_every_nan_stays_nan(sign):
    prove.check_nan_stays_nan(sign + prove.INFINITY + 1, sign + 2**31)


@pytest.mark.parametrize("sign", [0, 2**31], ids=["positive", "negative"])
def test_noise_never_makes_an_infinity(sign):
    """The saturation zone: every number from the largest bf16 to the largest fp32."""
    for draw in DRAWS:
        for x in prove.slabs(sign + 0x7F7F0000, sign + prove.INFINITY):
            r = torch.full_like(x, draw, dtype=torch.int32)
            assert (prove.halves(bf16_stochastic(x, r)) == (sign >> 16) + 0x7F7F).all()


def test_nearest_overflows_to_infinity_from_half_a_step_on():
    x = fp32([0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7F7FFF, 0xFF7F8000])
    assert prove.halves(bf16_nearest(x)).tolist() == [0x7F7F, 0x7F80, 0x7F80, 0xFF7F, 0xFF80]


@pytest.mark.parametrize("name", SPECIALS)
def test_specials(name):
    bits, want = SPECIALS[name]
    x = fp32([bits])
    assert prove.halves(bf16_nearest(x)).item() == want
    assert prove.halves(split16(x)[0]).item() == want
    for draw in DRAWS:
        assert prove.halves(bf16_stochastic(x, torch.tensor([draw]).int())).item() == want


def test_nearest_is_torchs_cast_on_all_ties():
    """And on the neighbours of each tie; all 2**32 patterns are in tests/proofs/rounding.py."""
    for offset in (0x7FFF, 0x8000, 0x8001):
        x = prove.as_fp32(torch.arange(2**16) * 2**16 + offset)
        same = (prove.halves(bf16_nearest(x)) == prove.halves(x.to(torch.bfloat16))) | x.isnan()
        assert same.all(), f"{x[~same][:3]}"


@pytest.mark.parametrize(
    "start", [0x00000000, 0x3F000000, 0x7F000000, 0xBF000000, 0xFF000000], ids=hex
)
def test_nearest_and_split_on_a_dense_slab(start):
    prove.check_nearest_is_torchs_cast(start, start + 2**22)
    prove.check_split_is_lossless(start, start + 2**22)


def test_split_is_lossless_across_the_saturation_zone():
    prove.check_split_is_lossless(0x7F7E0000, 0x7F820000)
    prove.check_split_is_lossless(0xFF7E0000, 0xFF820000)


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (4097,), (), (0, 3), (3, 5, 7)], ids=str)
def test_sizes_and_shapes(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    r = torch.full(shape, 0x8000, dtype=torch.int32)
    hi, lo = split16(x)
    for result in (bf16_nearest(x), bf16_stochastic(x, r), hi):
        assert result.shape == x.shape
        assert result.dtype == torch.bfloat16
    assert lo.dtype == torch.int16
    assert torch.equal(join16(hi, lo), x)


def test_strides_do_not_matter():
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    r = torch.randint(2**16, (6, 10), dtype=torch.int32)
    for view in (lambda t: t.T, lambda t: t[::2, 1::3], lambda t: t[:, 3]):
        dense = view(x).contiguous()
        assert torch.equal(bf16_nearest(view(x)), bf16_nearest(dense))
        assert torch.equal(
            bf16_stochastic(view(x), view(r)), bf16_stochastic(dense, view(r).contiguous())
        )
        hi, lo = split16(x)
        assert torch.equal(join16(view(hi), view(lo)), dense)


def test_arguments_are_left_alone():
    x = torch.randn(4097, requires_grad=True)
    r = torch.randint(2**16, (4097,), dtype=torch.int32)
    before, draws = x.detach().clone(), r.clone()
    hi, lo = split16(x)
    halves = hi.clone(), lo.clone()
    results = bf16_nearest(x), bf16_stochastic(x, r), join16(hi, lo)
    assert not any(result.requires_grad for result in results)
    assert torch.equal(x, before)
    assert torch.equal(r, draws)
    assert torch.equal(hi, halves[0])
    assert torch.equal(lo, halves[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_refuses_what_is_not_fp32(dtype):
    x, r = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"bf16_nearest: x has dtype {dtype}"):
        bf16_nearest(x)
    with pytest.raises(ValueError, match=f"bf16_stochastic: x has dtype {dtype}"):
        bf16_stochastic(x, r)
    with pytest.raises(ValueError, match=f"split16: x has dtype {dtype}"):
        split16(x)


def test_refuses_draws_that_are_not_int32():
    with pytest.raises(ValueError, match=r"r has dtype torch.int16"):
        bf16_stochastic(torch.zeros(3), torch.zeros(3, dtype=torch.int16))


def test_refuses_halves_of_the_wrong_kind():
    with pytest.raises(ValueError, match=r"parts have dtypes torch.float32 and torch.int16"):
        join16(torch.zeros(3), torch.zeros(3, dtype=torch.int16))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, and pytest -m gpu"
)
def test_cuda_gives_the_bits_of_the_cpu(every_upper_half):
    x = every_upper_half
    cuda = x.cuda()
    assert torch.equal(
        bf16_nearest(cuda).cpu().view(torch.int16), bf16_nearest(x).view(torch.int16)
    )
    for draw in DRAWS:
        r = torch.full_like(x, draw, dtype=torch.int32)
        got = bf16_stochastic(cuda, r.cuda()).cpu()
        assert torch.equal(got.view(torch.int16), bf16_stochastic(x, r).view(torch.int16))
    hi, lo = split16(cuda)
    assert torch.equal(hi.cpu().view(torch.int16), split16(x)[0].view(torch.int16))
    assert torch.equal(lo.cpu(), split16(x)[1])
    joined = join16(hi, lo).cpu().view(torch.int32)
    assert torch.equal(joined, join16(*split16(x)).view(torch.int32))

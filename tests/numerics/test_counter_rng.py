"""`torch_bf16.numerics.counter_rng`: the same bits as the oracle, and bits that behave like noise.

The statistics are deterministic, since the seeds are fixed. Each is a z-score, standard normal for
true noise: a chi-square with k degrees of freedom counts as (chi2 - k) / sqrt(2 k), a correlation
of n pairs as correlation * sqrt(n). With m scores per test, true noise has

    max |z| > 6               with probability below m * 2e-7 (the tail of chi-square, 255 degrees)
    |sum of z| / sqrt(m) > 5  with probability below 1e-6

so a failure is a defect and not bad luck. The second sees a defect too small for any single score.
"""

from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch

from torch_bf16.numerics import counter_rng
from torch_bf16.numerics.counter_rng import (
    FIRST_MOMENT,
    GRADIENT,
    REDUCTION,
    SECOND_MOMENT,
    WEIGHT,
    block_keys,
    draw16,
    noise,
    noise_bits,
    stream_base,
    tensor_key,
)

STREAMS = (WEIGHT.stream, FIRST_MOMENT.stream, GRADIENT.stream, REDUCTION.stream)
KEYS = [tensor_key(f"layers.{i}.weight") for i in range(17)]


def uint32(x):
    return x.numpy().view(np.uint32)


def draws(seed=0, step=1, key=KEYS[0], draw=WEIGHT, start=0, n=2**18, stream=None):
    stream = draw.stream if stream is None else stream
    return draw16(noise(seed, step, key, stream, start, n), draw)


def chi_square(values, bins):
    counts = torch.bincount(values, minlength=bins).double()
    expected = len(values) / bins
    degrees = bins - 1
    return float((counts - expected).square().sum() / expected - degrees) / (2 * degrees) ** 0.5


def correlation(a, b):
    scale = ((65536**2 - 1) / 12) ** 0.5
    a, b = ((x.double() - 32767.5) / scale for x in (a, b))
    return float(a @ b) / len(a) ** 0.5


def pair_chi_square(a, b):
    """Over the 65,536 cells of both upper bytes: sees any dependence, not only a linear one."""
    return chi_square((a >> 8 << 8) + (b >> 8), 2**16)


def assert_standard_normal(scores):
    largest, m = max(map(abs, scores)), len(scores)
    assert largest <= 6, f"max |z| = {largest:.1f}, m = {m}"
    total = abs(sum(scores)) / m**0.5
    assert total <= 5, f"|sum of z| / sqrt(m) = {total:.1f}, m = {m}"


# The bits


@pytest.mark.parametrize("n", [0, 1, 3, 4097])
@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 2, 2**32, 2**33 - 1, 2**45 + 7], ids=hex)
def test_equals_oracle_at_every_start(start, n):
    got = noise(5, 9, KEYS[1], FIRST_MOMENT.stream, start, n)
    assert got.dtype == torch.int32
    want = oracle.noise(5, 9, oracle.tensor_key("layers.1.weight"), 1, start, n)
    np.testing.assert_array_equal(uint32(got), want)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, -(2**63), 2**64 - 1])
@pytest.mark.parametrize("step", [0, 1, 16, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5])
def test_equals_oracle_for_every_seed_and_step(seed, step):
    for stream in STREAMS:
        got = uint32(noise(seed, step, KEYS[0], stream, 2**32 - 4, 9))
        np.testing.assert_array_equal(got, oracle.noise(seed, step, KEYS[0], stream, 2**32 - 4, 9))


def test_oracle_arrays_equal_oracle_scalars():
    start = 3 * 2**32 - 50
    want = [oracle.noise_at(-3, 7, KEYS[2], 1, start + i) for i in range(100)]
    np.testing.assert_array_equal(oracle.noise(-3, 7, KEYS[2], 1, start, 100), want)


def test_pinned_bits():
    """These values are in the weights of whoever trained with them: a change is a new contract."""
    assert tensor_key("layers.0.weight") == 0x3E163D53ECC2C30C
    assert stream_base(0, 1, WEIGHT.stream) == (0x5888F125, 0x5F56F89B)
    bits = uint32(noise(0, 1, 2, WEIGHT.stream, 2**32 - 2, 4)).tolist()
    assert bits == [0xD621838E, 0x9F560DE7, 0x2BEF874D, 0x809EB970]


def test_does_not_depend_on_the_launch_split():
    start, n = 2**32 - 1000, 4097
    whole = noise(1, 2, KEYS[0], WEIGHT.stream, start, n)
    for cuts in ([0, n], [0, 1, n], [0, 999, 1000, 1001, n], [0, 64, 64, 4096, n]):
        parts = [
            noise(1, 2, KEYS[0], WEIGHT.stream, start + begin, end - begin)
            for begin, end in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_does_not_depend_on_the_size_of_its_own_pieces(monkeypatch):
    whole = noise(1, 2, KEYS[0], WEIGHT.stream, 2**32 - 100, 257)
    monkeypatch.setattr(counter_rng, "_MAX_PIECE", 7)
    assert torch.equal(noise(1, 2, KEYS[0], WEIGHT.stream, 2**32 - 100, 257), whole)


def test_noise_bits_leaves_the_indices_alone_and_keeps_their_shape():
    index = torch.arange(15, dtype=torch.int32).view(3, 5)
    before = index.clone()
    k0, k1 = block_keys(stream_base(0, KEYS[0], WEIGHT.stream), 1, 0)
    got = noise_bits(k0, k1, index)
    assert torch.equal(index, before)
    assert torch.equal(got.flatten(), noise(0, 1, KEYS[0], WEIGHT.stream, 0, 15))


def test_a_draw_is_unsigned():
    bits = torch.tensor([0, -1, -(2**31), 2**31 - 1, 0x12345678], dtype=torch.int32)
    assert draw16(bits, WEIGHT).tolist() == [0, 0xFFFF, 0x8000, 0x7FFF, 0x1234]


@pytest.mark.parametrize("kind", ["numpy-uint32", "numpy-int64", "torch-int64"])
def test_block_keys_of_arrays_equal_those_of_ints(kind):
    generator = np.random.default_rng(0)
    t0, t1, step, index_hi = generator.integers(0, 2**32, (4, 500), dtype=np.uint32)
    step[:4], index_hi[:4] = (0, 1, 2**31, 2**32 - 1), (0, 1, 2**31, 2**32 - 1)
    convert = {
        "numpy-uint32": np.asarray,
        "numpy-int64": lambda a: a.astype(np.int64),
        "torch-int64": lambda a: torch.from_numpy(a.astype(np.int64)),
    }[kind]
    got = block_keys((convert(t0), convert(t1)), convert(step), convert(index_hi))
    want = [
        block_keys((int(a), int(b)), int(s), int(hi))
        for a, b, s, hi in zip(t0, t1, step, index_hi, strict=True)
    ]
    np.testing.assert_array_equal(np.stack([np.asarray(k) for k in got], axis=1), want)
    one_step = block_keys((convert(t0), convert(t1)), 7, 0)
    assert int(one_step[1][3]) == block_keys((int(t0[3]), int(t1[3])), 7, 0)[1]


@pytest.mark.parametrize(("start", "n"), [(-1, 3), (0, -1)])
def test_refuses_negative_ranges(start, n):
    with pytest.raises(ValueError, match=rf"start={start} and n={n}, but elements are counted"):
        noise(0, 1, KEYS[0], WEIGHT.stream, start, n)


# The statistics


HALVES = pytest.mark.parametrize("draw", [WEIGHT, SECOND_MOMENT], ids=["upper half", "lower half"])


@HALVES
@pytest.mark.parametrize("n", [2**14, 2**18, 2**20])
@pytest.mark.parametrize("part", ["all 16 bits", "upper 8", "lower 8"])
def test_draws_are_uniform(part, n, draw):
    shift, bins = {"all 16 bits": (0, 2**16), "upper 8": (8, 256), "lower 8": (0, 256)}[part]
    scores = []
    for step, key in enumerate(KEYS[:16]):
        r = draws(step=step, key=key, start=step * 1_000_003, n=n, draw=draw)
        scores.append(chi_square((r >> shift) % bins, bins))
    assert_standard_normal(scores)


LAGS = [1, 2, 3, 16, 64, 768, 1024, 4096, 65536]


@HALVES
@pytest.mark.parametrize("lag", LAGS)
def test_no_serial_correlation(lag, draw):
    r = [draws(key=key, n=2**18 + lag, draw=draw) for key in KEYS[:16]]
    assert_standard_normal([correlation(x[:-lag], x[lag:]) for x in r])


@HALVES
@pytest.mark.parametrize("lag", LAGS)
def test_no_serial_dependence(lag, draw):
    r = [draws(key=key, n=2**18 + lag, draw=draw) for key in KEYS[:16]]
    assert_standard_normal([pair_chi_square(x[:-lag], x[lag:]) for x in r])


# What differs -> arguments of the two draws to compare, for the i-th of 16 pairs.
NEIGHBOURS = {
    "stream": lambda i: ({"stream": i % 3}, {"stream": (i + 1 + i // 3 % 2) % 3}),
    "step": lambda i: ({"step": i}, {"step": i + 1}),
    "step by two": lambda i: ({"step": i}, {"step": i + 2}),
    "tensor": lambda i: ({"key": KEYS[i]}, {"key": KEYS[i + 1]}),
    "seed": lambda i: ({"seed": i}, {"seed": i + 1}),
    "block": lambda i: ({"start": i << 32}, {"start": (i + 1) << 32}),
}


@HALVES
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_independent(name, draw):
    pairs = []
    for i in range(16):
        first, second = NEIGHBOURS[name](i)
        one, other = ({"step": 40 + i, "draw": draw, **given} for given in (first, second))
        pairs.append((draws(**one), draws(**other)))
    assert_standard_normal([correlation(a, b) for a, b in pairs])
    assert_standard_normal([pair_chi_square(a, b) for a, b in pairs])


@pytest.mark.parametrize("lag", [0, 1, 16, 768, 1024])
def test_the_two_halves_of_a_word_are_independent(lag):
    pairs = []
    for key in KEYS[:16]:
        upper = draws(key=key, n=2**18 + lag)
        lower = draws(key=key, n=2**18 + lag, draw=SECOND_MOMENT)
        pairs.append((upper[lag:], lower[: 2**18]))
    assert_standard_normal([correlation(a, b) for a, b in pairs])
    assert_standard_normal([pair_chi_square(a, b) for a, b in pairs])


def test_draws_of_one_element_over_the_steps_are_independent():
    steps, index = np.arange(2**12), torch.arange(64, dtype=torch.int32)
    scores = []
    for key in KEYS[:4]:
        k0, k1 = block_keys(stream_base(0, key, WEIGHT.stream), steps, 0)
        over_steps = [noise_bits(a, b, index) for a, b in zip(k0, k1, strict=True)]
        elements = draw16(torch.stack(over_steps, dim=1), WEIGHT)
        for element, neighbour in pairwise(elements):
            scores.append(chi_square(element >> 8, 256))
            scores.append(correlation(element[1:], element[:-1]))
            scores.append(correlation(element, neighbour))
    assert_standard_normal(scores)


def test_two_steps_are_no_permutation_of_each_other():
    """Step keys whose difference is smaller than the tensor pair its elements with one another."""
    index = torch.arange(2**16, dtype=torch.int32)
    scores = []
    for i in range(16):
        base = stream_base(0, KEYS[i], WEIGHT.stream)
        k0, k1 = block_keys(base, 1, 0)
        _, other = block_keys(base, 2, 0)
        first = draw16(noise_bits(k0, k1, index), WEIGHT)
        second = draw16(noise_bits(k0 ^ 0x5555, other, index ^ 0x5555), WEIGHT)
        scores += [correlation(first, second), chi_square((first >> 12 << 4) + (second >> 12), 256)]
    assert_standard_normal(scores)


def flip_scores(before, after):
    """One score for each of the 16 bits: how often it flips, against half of the time."""
    flips = ((before ^ after)[:, None] >> torch.arange(16, dtype=torch.int32)) & 1
    return ((flips.double().mean(dim=0) - 0.5) * 2 * len(before) ** 0.5).tolist()


@HALVES
def test_avalanche_of_the_index_bits(draw):
    generator = torch.Generator().manual_seed(0)
    scores = []
    for bit in range(32):
        index = torch.randint(-(2**31), 2**31, (2**16,), generator=generator).to(torch.int32)
        flipped = index ^ counter_rng._as_int32(1 << bit)
        k0, k1 = block_keys(stream_base(0, KEYS[bit % 16], WEIGHT.stream), 1, 0)
        before, after = (draw16(noise_bits(k0, k1, i), draw) for i in (index, flipped))
        scores += flip_scores(before, after)
    assert_standard_normal(scores)


@HALVES
def test_avalanche_of_the_step_bits(draw):
    scores = []
    for bit in range(32):
        steps = [1009 * i for i in range(16)]
        before = torch.cat([draws(step=s, n=4096, draw=draw) for s in steps])
        after = torch.cat([draws(step=s ^ (1 << bit), n=4096, draw=draw) for s in steps])
        scores += flip_scores(before, after)
    assert_standard_normal(scores)


def test_a_linear_counter_fails_these_tests():
    """The control: multiples of the golden ratio are uniform, and anything but independent."""
    r = draw16(torch.arange(2**18, dtype=torch.int32) * counter_rng._as_int32(0x9E3779B9), WEIGHT)
    with pytest.raises(AssertionError, match=r"max \|z\|"):
        assert_standard_normal([correlation(r[:-1], r[1:])])


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA or ROCm device, and pytest -m gpu"
)
def test_cuda_gives_the_bits_of_the_cpu():
    args = (3, 2**31 + 1, KEYS[0], GRADIENT.stream, 2**33 - 2000, 4097)
    assert torch.equal(noise(*args, device="cuda").cpu(), noise(*args))

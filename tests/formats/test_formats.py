"""Every format in every dialect against the oracle, on bits."""

import functools

import numba
import numpy as np
import oracle_formats
import pytest
import torch

from torch_bf16.backends.cpu import codegen
from torch_bf16.backends.cpu.bits import add32, and32, float_from_bits, low32, shl32, shr32
from torch_bf16.backends.cpu.codecs import CODECS
from torch_bf16.backends.cpu.compiler import Compiler
from torch_bf16.backends.cpu.planes import pointers, row
from torch_bf16.formats import FORMATS
from torch_bf16.numerics.counter_rng import WEIGHT, draw16, noise_bits

SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
ZERO = np.uint32(0)
KEYS = (np.uint32(0x12345678), np.uint32(0x9ABCDEF0))

every_format = pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.block == 1])


@pytest.fixture(scope="module")
def patterns() -> np.ndarray:
    """Every upper half with lower halves that meet each branch: 65,536 x 16 numbers."""
    lower = np.array(
        [
            0,
            1,
            2,
            255,
            16383,
            16384,
            32766,
            32767,
            32768,
            32769,
            32770,
            49151,
            49152,
            65280,
            65534,
            65535,
        ],
        np.uint32,
    )
    upper = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    return (upper[:, None] | lower).reshape(-1).view(np.float32)


def numpy_of(dtype: torch.dtype) -> type:
    """The element of a plane of that dtype, whose bits are read unsigned if they are not fp32."""
    return np.float32 if dtype == torch.float32 else UNSIGNED[dtype.itemsize]


def as_numpy(plane: torch.Tensor) -> np.ndarray:
    return plane.view(torch.int16).numpy() if plane.itemsize == 2 else plane.numpy()


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    unsigned = UNSIGNED[a.itemsize]
    np.testing.assert_array_equal(a.view(unsigned), b.view(unsigned))


def draws(n: int) -> np.ndarray:
    """The upper halves of the words that KEYS give for elements 0 .. n - 1."""
    words = noise_bits(*(int(key) for key in KEYS), torch.arange(n, dtype=torch.int32))
    return draw16(words, WEIGHT).numpy().view(np.uint32)


def addresses_of(planes) -> np.ndarray:
    return np.array([[plane.ctypes.data for plane in planes]])


@functools.cache
def numba_codec(name: str):
    """Of a format: what reads two elements, writes them, and draws their words, and pointers to
    planes at given addresses."""
    compiler = Compiler(f"only_{name}")
    formats = [FORMATS[name]]
    return (
        codegen.reads(compiler, formats, [0]),
        codegen.writes(compiler, formats, [0], [(0, WEIGHT.shift)]),
        codegen.words(compiler, 1, transposed=False),
        pointers(formats),
    )


def numba_encode(name: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The planes of an even number of elements."""
    _, write, words_of, planes_at = numba_codec(name)

    @numba.njit(error_model="numpy")
    def run(addresses, x, keys):
        planes = planes_at(row(addresses, 0), 0)
        for i in range(0, len(x), 2):
            words = words_of(keys, low32(i), low32(i), ())
            write(planes, np.uintp(i), (x[i],), (x[i + 1],), words, None, np.uintp(0))

    planes = tuple(np.zeros(len(x), numpy_of(p.dtype)) for p in FORMATS[name].planes)
    run(addresses_of(planes), x, KEYS)
    return planes


def numba_decode(name: str, planes: tuple[np.ndarray, ...]) -> np.ndarray:
    """The numbers in planes of an even number of elements."""
    read, *_, planes_at = numba_codec(name)

    @numba.njit(error_model="numpy")
    def run(addresses, out):
        planes = planes_at(row(addresses, 0), 0)
        for i in range(0, len(out), 2):
            one, two = read(planes, np.uintp(i), None, np.uintp(0))
            out[i], out[i + 1] = one[0], two[0]

    out = np.zeros(len(planes[0]), np.float32)
    run(addresses_of(planes), out)
    return out


def quieted(x: np.ndarray) -> np.ndarray:
    """What an operation that gives ``x`` gives: no signalling NaN."""
    bits = x.view(np.uint32)
    return np.where(np.isnan(x), bits | np.uint32(0x00400000), bits).view(np.float32)


@every_format
def test_encoding_is_the_oracles_for_every_upper_half(name, patterns):
    r = draws(len(patterns))
    expected = oracle_formats.encode(name, patterns, r)
    eager = [torch.zeros(len(patterns), dtype=p.dtype) for p in FORMATS[name].planes]
    noise = torch.from_numpy(r.view(np.int32))
    FORMATS[name].encode(torch.from_numpy(patterns.copy()), noise, eager)
    for want, one in zip(expected, eager, strict=True):
        same_bits(as_numpy(one), np.asarray(want))
    results = quieted(patterns)
    planes = numba_encode(name, results)
    for want, one in zip(oracle_formats.encode(name, results, r), planes, strict=True):
        same_bits(one, np.asarray(want))


@every_format
def test_decoding_is_the_oracles_for_any_bits_in_the_planes(name, patterns):
    rng = np.random.default_rng(0)
    planes = []
    for plane in FORMATS[name].planes:
        bits = rng.integers(0, 2 ** (8 * plane.dtype.itemsize), len(patterns), np.uint64)
        planes.append(bits.astype(UNSIGNED[plane.dtype.itemsize]).view(numpy_of(plane.dtype)))
    if name == "bf16+fp32":  # half of them as encoded, half of them written from outside
        planes[0][::2] = oracle_formats.bf16_nearest(planes[1][::2])
    signed = [
        p.view(SIGNED[p.itemsize]) if plane.dtype in (torch.int16, torch.int8) else p
        for p, plane in zip(planes, FORMATS[name].planes, strict=True)
    ]
    expected = oracle_formats.decode(name, signed)
    as_torch = [
        torch.from_numpy(p.view(SIGNED[p.itemsize])).view(plane.dtype)
        for p, plane in zip(planes, FORMATS[name].planes, strict=True)
    ]
    same_bits(FORMATS[name].decode(as_torch).numpy(), expected)
    same_bits(numba_decode(name, tuple(planes)), expected)


ENCODE_STOCHASTIC = CODECS["bf16_stochastic"][1]


@numba.njit(error_model="numpy")
def count_round_ups(upper, counts):
    """For each lower half, over all draws: how often the result is the next bf16."""
    for lower in range(65536):
        up = 0
        x = float_from_bits(add32(shl32(upper, np.uint32(16)), low32(lower)))
        for r in range(65536):
            up += shr32(ENCODE_STOCHASTIC(x, low32(r))[0], np.uint32(16)) != upper
        counts[lower] = up


@pytest.mark.parametrize("upper", [0x3F80, 0xBF80, 0x0000, 0x8000, 0x007F, 0x4B12, 0x7F7E])
def test_numba_rounds_up_as_often_as_the_discarded_half_says(upper):
    counts = np.zeros(65536, np.int64)
    count_round_ups(np.uint32(upper), counts)
    np.testing.assert_array_equal(counts, np.arange(65536))


DECODE, ENCODE = CODECS["bf16+16"]


@numba.njit(error_model="numpy")
def count_broken(first, last):
    """Patterns that the two halves do not restore; NaNs that do not stay NaN."""
    back = np.zeros(1, np.float32)
    lost = visible = 0
    for pattern in range(first, last):
        bits = low32(pattern)
        nan = and32(bits, np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        want = bits | np.uint32(0x00400000) if nan else bits
        high, low = ENCODE(float_from_bits(low32(want)), ZERO)
        kept = and32(high, np.uint32(0xFFFF0000))
        back[0] = DECODE((kept, and32(low, np.uint32(0xFFFF0000))))
        lost += back.view(np.uint32)[0] != want
        visible += nan != (and32(kept, np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000))
    return lost, visible


@pytest.mark.parametrize("block", ["positive", "negative"])
def test_numba_bf16_plus_16_restores_every_pattern_of_every_fifteenth_exponent(block):
    sign = 0 if block == "positive" else 1 << 31
    for exponent in range(0, 256, 15):
        start = sign + (exponent << 23)
        assert count_broken(start, start + (1 << 23)) == (0, 0)


def test_numba_nearest_rounds_halfway_cases_to_even():
    for bits, want in ((0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x7F7F8000, 0x7F80)):
        x = np.array([bits, 0], np.uint32).view(np.float32)
        (plane,) = numba_encode("bf16_nearest", x)
        assert plane[0] == want

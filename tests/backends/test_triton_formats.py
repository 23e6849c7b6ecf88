"""Every format in Triton's dialect against the oracle, on bits, under Triton's interpreter."""

import numpy as np
import oracle_formats
import pytest
import torch
from bucket_cases import OF_ORACLE

from torch_bf16.formats import FORMATS

triton = pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
tl = pytest.importorskip("triton.language")

from torch_bf16.backends.triton import codecs  # noqa: E402

BLOCK = 1 << 14
ELEMENTWISE = [name for name, format_ in FORMATS.items() if format_.block == 1]
LOWER = [0, 1, 255, 16384, 32767, 32768, 32769, 49152, 65534, 65535]


@triton.jit
def encode_all(x_ptr, words_ptr, planes_ptr, n, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0)
    word = tl.load(words_ptr + at, mask=mask, other=0).to(tl.uint32)
    planes = codecs.encode(FORMAT, x, (word,), 0, 16, False)
    for number in tl.static_range(len(planes)):
        raw = planes[number].to(tl.uint32, bitcast=True)
        tl.store(planes_ptr + number * n + at, raw, mask=mask)


@triton.jit
def decode_all(
    planes_ptr, x_ptr, n, FORMAT: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    planes = ()
    for number in tl.static_range(len(SIZES)):
        raw = tl.load(planes_ptr + number * n + at, mask=mask, other=0).to(tl.uint32)
        plane = raw.to(tl.float32, bitcast=True) if SIZES[number] == 4 else raw
        planes = planes + (plane,)
    tl.store(x_ptr + at, codecs.decode(FORMAT, planes), mask=mask)


def patterns():
    upper = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    return (upper[:, None] | np.array(LOWER, np.uint32)).reshape(-1)


def sizes_of(name):
    return tuple(plane.dtype.itemsize for plane in FORMATS[name].planes)


def encode(name, bits, words):
    """The planes' bits, int32 ``[planes, n]``."""
    n = len(bits)
    planes = torch.zeros(len(sizes_of(name)), n, dtype=torch.int32)
    x = torch.from_numpy(bits.view(np.float32))
    encode_all[(-(-n // BLOCK),)](x, torch.from_numpy(words), planes, n, name, BLOCK)
    return planes.numpy()


def decode(name, planes):
    """The bits of the fp32 numbers, uint32 ``[n]``."""
    n = planes.shape[1]
    x = torch.zeros(n)
    decode_all[(-(-n // BLOCK),)](torch.from_numpy(planes), x, n, name, sizes_of(name), BLOCK)
    return x.numpy().view(np.uint32)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_encoding_is_the_oracles_for_every_upper_half(interpreted, name):
    bits = patterns()
    # A signalling NaN is not an operation's result.
    bits[np.isnan(bits.view(np.float32))] |= np.uint32(0x00400000)
    words = np.random.default_rng(0).integers(0, 2**32, len(bits), np.uint32).view(np.int32)
    expected = oracle_formats.encode(
        name, bits.view(np.float32), words.view(np.uint32) >> np.uint32(16)
    )
    got = interpreted(encode, name, bits, words)
    for want, plane in zip(expected, got, strict=True):
        want = np.asarray(want)
        kept = plane.view(np.uint32) >> np.uint32(32 - 8 * want.itemsize)
        np.testing.assert_array_equal(kept, want.view(f"u{want.itemsize}"))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_decoding_is_the_oracles_for_any_bits_in_the_planes(interpreted, name):
    rng = np.random.default_rng(0)
    # A plane of fewer than four bytes has them at the top.
    unused = [np.uint32(32 - 8 * size) for size in sizes_of(name)]
    planes = [rng.permutation(patterns()) >> bits << bits for bits in unused]
    stored = [
        (plane >> bits).astype(f"u{kept.dtype.itemsize}").view(OF_ORACLE[kept.dtype])
        for plane, bits, kept in zip(planes, unused, FORMATS[name].planes, strict=True)
    ]
    if name == "bf16+fp32":  # half of them as encoded, half of them written from outside
        stored[0][::2] = oracle_formats.bf16_nearest(stored[1][::2])
        planes[0] = stored[0].astype(np.uint32) << np.uint32(16)
    expected = oracle_formats.decode(name, stored)
    got = interpreted(decode, name, np.stack(planes).view(np.int32))
    np.testing.assert_array_equal(got, expected.view(np.uint32))

"""How division and square root of ``backends/triton/ieee.py`` round, run in NumPy.

python tests/proofs/quotients.py    a few minutes

They are the assembler's own short way for ``div.rn`` and ``sqrt.rn``, so they round as those do:
``tests/backends/test_triton_ieee.py`` compares the two with any approximation. Here is what can be
said beyond that: with the nearest approximation they round right everywhere, and with all others
that NVIDIA's PTX ISA admits (``rcp.approx.ftz`` off by one unit in the last place,
``rsqrt.approx.ftz`` by 2**-22.9) but for the numbers that are listed.

- Roots: every mantissa, at even and odd exponents.
- Quotients: one rounds wrong only where a / b is about as near to the middle of two numbers as the
  error of what is rounded. With 24-bit integers A and B, that is A * 2**S = B * c + k for an odd
  25-bit c and a small k; ``HARDEST`` says why none beyond 8. All of these are run, for every B.
- Ranges: what is in range by the instructions' own account rounds right, at every exponent.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from ptx.arithmetic import F32, F64, U32, rcp, rsqrt
from ptx.inline import run

from torch_bf16.backends.triton.ieee import DIV_PTX, SQRT_PTX

# The quotient's approximation is off by 1.5 units at most, which the reciprocal's error of 2**-24
# turns into 3 / 2**24 of B, and the rounding of a remainder of 25 bits into as much again.
HARDEST = 8
SLAB = 1 << 19


def near(function, ulps):
    """``function``, some units in the last place beside."""
    return lambda x: (function(x).view(np.int32) + ulps).view(F32)


def computed(text, arguments, rcp=rcp, rsqrt=rsqrt):
    """(results, whether they are the short way's) for fp32 arrays of a length divisible by 8."""
    lanes = [lane for each in arguments for lane in each.reshape(8, -1)]
    results, usual = run(text, lanes, {"rcp": rcp, "rsqrt": rsqrt})
    return np.concatenate(results), usual


def check_roots(exponent, ulps, step=1):
    """Every ``step``-th mantissa, without those whose approximation the manual does not admit."""
    first = (exponent + 127) << 23
    tried, found = 0, []
    for start in range(first, first + (1 << 24), SLAB * step):
        x = np.arange(start, start + SLAB * step, step, dtype=U32).view(F32)
        exact = np.sqrt(x.astype(F64))
        approximation = near(rsqrt, ulps)
        admitted = abs(approximation(x).astype(F64) * exact - 1) <= 2.0**-22.9
        got, usual = computed(SQRT_PTX, [x], rsqrt=approximation)
        assert usual.all(), f"{x[0]} is not in range"
        wrong = admitted & (got != exact.astype(F32))
        found += x[wrong].tolist()
        tried += int(admitted.sum())
    return tried, found


def check_quotients(k, shift, ulps, step=1):
    """Every a / b at a distance k from the middle; in [1, 2) for a shift of 24, below 1 for 25."""
    low = (k & -k).bit_length() - 1
    bits, tried, found = shift - low, 0, []
    for start in range(1 << 23, 1 << 24, SLAB * step):
        b = np.arange(start, min(start + SLAB * step, 1 << 24), step, dtype=np.int64)
        # With fewer factors of two than k, c would be even; with more there is none.
        b = b[(b & -b) == (1 << low)]
        c = (-(k >> low) * _inverse(b >> low)) & ((1 << bits) - 1)
        c = (c[:, None] + (np.arange(1 << (25 - bits)) << bits)).ravel()
        b = np.repeat(b, 1 << (25 - bits))
        a = (b * c + k) >> shift
        kept = (c >= 1 << 24) & (a >= 1 << 23) & (a < 1 << 24)
        a, b = _padded(a[kept]).astype(F32), _padded(b[kept]).astype(F32)
        if not len(a):
            continue
        approximation = near(rcp, ulps)
        exact = 1 / b.astype(F64)
        admitted = abs(approximation(b).astype(F64) - exact) <= 2.0 ** np.floor(np.log2(exact) - 23)
        got, usual = computed(DIV_PTX, [a, b], rcp=approximation)
        assert usual.all(), "not in range"
        wrong = admitted & (got != (a.astype(F64) / b.astype(F64)).astype(F32))
        found += zip(a[wrong].tolist(), b[wrong].tolist(), strict=True)
        tried += int(admitted.sum())
    return tried, found


def _inverse(odd):
    x = odd * 3 ^ 2
    for _ in range(3):
        x = x * (2 - odd * x) & 0xFFFFFFFF
    return x


def _padded(x):
    return np.concatenate([x, np.full(-len(x) % 8, 1 << 23)])


def check_ranges(count, step=1):
    """Every ``step``-th number with a plain mantissa over all of them, and any bits."""
    signs_and_exponents = np.arange(512, dtype=U32)[:, None] << 23
    plain = (signs_and_exponents | np.array([0, 1, 0x400000, 0x7FFFFF], U32)).ravel()
    rng = np.random.default_rng(0)
    tops = plain[::step]
    for start in range(0, len(tops), 64):
        some = tops[start : start + 64]
        a, b = np.repeat(some, len(plain)), np.tile(plain, len(some))
        _check_range(a.view(F32), b.view(F32))
    for _ in range(count):
        a, b = rng.integers(0, 1 << 32, (2, SLAB), dtype=U32)
        _check_range(a.view(F32), b.view(F32))
    return len(tops) * len(plain) + count * SLAB, []


def _check_range(a, b):
    for text, arguments, exact in (
        (DIV_PTX, [a, b], lambda a, b: a / b), (SQRT_PTX, [b], np.sqrt),
    ):  # fmt: skip
        # Each number beside usual ones, so that it alone decides.
        with np.errstate(all="ignore"):
            expected = exact(*(each.astype(F64) for each in arguments)).astype(F32)
        lanes = [each if i == 0 else np.ones_like(each) for each in arguments for i in range(8)]
        results, usual = run(text, lanes, {"rcp": rcp, "rsqrt": rsqrt})
        wrong = usual & (results[0].view(U32) != expected.view(U32))
        assert not wrong.any(), [(each[wrong][0], results[0][wrong][0]) for each in arguments]


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    unexpected = 0

    def prove(claim, check, *arguments, nearest=True):
        nonlocal unexpected
        begin = time.perf_counter()
        tried, wrong = check(*arguments)
        unexpected += len(wrong) if nearest else 0
        seconds = time.perf_counter() - begin
        print(f"{tried:12,} in {seconds:5.1f} s: {claim}; wrong: {wrong or 'none'}", flush=True)

    np.seterr(all="ignore")
    prove("what is taken in range", check_ranges, 16)
    for ulps in (-2, -1, 0, 1, 2):
        prove(f"roots of [1, 4), approximation {ulps:+}", check_roots, 0, ulps, nearest=ulps == 0)
    for exponent in (-101, 126):
        prove(f"roots from 2**{exponent}, every 16th", check_roots, exponent, 0, 16)
    for ulps in (-1, 0, 1):
        for k in range(1, HARDEST + 1):
            for sign in (-1, 1):
                for shift in (24, 25):
                    claim = f"2**{shift} a = b c {sign * k:+}, approximation {ulps:+}"
                    prove(claim, check_quotients, sign * k, shift, ulps, nearest=ulps == 0)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())

"""The rounding contract, by exhaustion: python tests/proofs/rounding.py (a few minutes).

`tests/numerics` runs the same checks on subsets. Slabs are 2**18 patterns, which is what
stays in a CPU's cache.
"""

import argparse
import time

import torch

from torch_bf16.numerics.rounding import (
    bf16_nearest,
    bf16_stochastic,
    join8,
    join16,
    split8,
    split16,
)

DRAWS = 2**16
SLAB = 2**18

INFINITY = 0x7F800000
# One upper half of each kind: both signs; zero, subnormal, normal, and the last binade.
UPPER_HALVES = (0x0000, 0x0041, 0x3F80, 0x7F7E, 0x8000, 0x8041, 0xBF81, 0xFF7E)


def as_fp32(bits):
    """int64 bit patterns in [0, 2**32) -> fp32."""
    return bits.to(torch.int32).view(torch.float32)


def halves(x):
    """The bits of a bf16 tensor, int32 in [0, 65535]."""
    return x.view(torch.int16).to(torch.int32) & 0xFFFF


def slabs(start, stop, step=1):
    """fp32 tensors that hold every ``step``-th bit pattern in [start, stop), in order."""
    for begin in range(start, stop, SLAB * step):
        yield as_fp32(torch.arange(begin, min(begin + SLAB * step, stop), step))


def patterns(x):
    """The bits of an fp32 tensor, int64 in [0, 2**32)."""
    return x.view(torch.int32).long() & 0xFFFFFFFF


def check_round_up_counts(upper, dropped):
    """For each dropped half, exactly that many of the 65,536 draws round away from zero."""
    draws = torch.arange(DRAWS, dtype=torch.int32)
    for chunk in torch.as_tensor(dropped).split(SLAB // DRAWS):
        x = as_fp32(upper * 2**16 + chunk)[:, None].expand(-1, DRAWS)
        up = halves(bf16_stochastic(x, draws)) - upper
        least, most = up.aminmax()
        assert least >= 0, f"upper {upper:#06x}: a result is below the number"
        assert most <= 1, f"upper {upper:#06x}: a result is more than one step away"
        counts = up.sum(dim=1)
        wrong = (counts != chunk).nonzero().flatten()
        assert not len(wrong), (
            f"upper {upper:#06x}, dropped {int(chunk[wrong[0]]):#06x}: {int(counts[wrong[0]])} of "
            f"65,536 draws round up, want {int(chunk[wrong[0]])}"
        )


def check_24_bits_counts(upper):
    """For each byte that `split8` drops, exactly that many of the 256 draws round up."""
    draws = torch.arange(256, dtype=torch.int32).expand(256, 256)
    dropped = torch.arange(256)[:, None]
    for down in range(upper * 2**16, (upper + 1) * 2**16, 256):
        x = as_fp32(down + dropped).expand(256, 256)
        up = (patterns(join8(*split8(x, draws))) - down) // 256
        assert ((up == 0) | (up == 1)).all(), f"{down:#010x}: more than one step away"
        counts = up.sum(dim=1)
        assert (counts == dropped.view(-1)).all(), f"{down:#010x}: counts {counts.tolist()}"


def check_24_bits_thresholds(start, stop, step=1):
    """The smallest draw that rounds up, for finite patterns; the largest float of 24 bits stays."""
    for x in slabs(start, stop, step):
        bits = patterns(x)
        dropped = (bits & 0xFF).int()
        last = (bits & 0x7FFFFF00) == 0x7F7FFF00
        for draw, up in ((256 - dropped, dropped > 0), (255 - dropped, torch.zeros_like(last))):
            got = patterns(join8(*split8(x, draw.clamp(max=255))))
            same = got == bits - dropped + 256 * (up & ~last)
            assert same.all(), f"{_first(x, ~same)}: became {int(got[~same][0]):#x}"


def check_nearest_is_torchs_cast(start, stop):
    """For patterns that are not NaN: NaN payloads are torch's own affair."""
    for x in slabs(start, stop):
        same = (halves(bf16_nearest(x)) == halves(x.to(torch.bfloat16))) | x.isnan()
        assert same.all(), f"{_first(x, ~same)}: not what torch's cast gives"


def check_split_is_lossless(start, stop):
    """All bits come back; a signalling NaN comes back quiet."""
    for x in slabs(start, stop):
        bits = x.view(torch.int32)
        back = join16(*split16(x)).view(torch.int32)
        same = back == torch.where(x.isnan(), bits | 0x00400000, bits)
        assert same.all(), f"{_first(x, ~same)}: came back as {int(back[~same][0]):#x}"


def check_nan_stays_nan(start, stop):
    """In nearest, in stochastic under extreme draws, and in the visible half of split16."""
    for x in slabs(start, stop):
        assert x.isnan().all(), f"{_first(x, ~x.isnan())} is not a NaN"
        quiet_half = (x.view(torch.int32) >> 16 | 0x0040) & 0xFFFF
        results = {"nearest": bf16_nearest(x), "split16": split16(x)[0]}
        for r in (0, 0x8000, 0xFFFF):
            draws = torch.full_like(x, r, dtype=torch.int32)
            results[f"stochastic, draw {r:#06x}"] = bf16_stochastic(x, draws)
            results[f"split8, draw {r:#06x}"] = split8(x, draws >> 8)[0]
        for name, result in results.items():
            same = halves(result) == quiet_half
            assert same.all(), f"{name}: {_first(x, ~same)} lost its sign, its payload or NaN"


def _first(x, wrong):
    bits = int(x[wrong][0].view(torch.int32)) & 0xFFFFFFFF
    return f"{bits:#010x} ({float(x[wrong][0])})"


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()

    def prove(claim, check, *args):
        begin = time.perf_counter()
        check(*args)
        print(f"proved in {time.perf_counter() - begin:5.1f} s: {claim}", flush=True)

    for upper in UPPER_HALVES:
        claim = f"round-ups = dropped half, upper {upper:#06x}, 65,536 halves x 65,536 draws"
        prove(claim, check_round_up_counts, upper, range(DRAWS))
    for upper in UPPER_HALVES:
        claim = (
            f"24 bits: round-ups = dropped byte, upper {upper:#06x}, 256 x 256 bytes x 256 draws"
        )
        prove(claim, check_24_bits_counts, upper)
    for sign in (0, 2**31):
        claim = f"24 bits: the smallest draw that rounds up, all finite from {sign:#010x}"
        prove(claim, check_24_bits_thresholds, sign, sign + INFINITY)
    prove("nearest = torch's cast, all but NaN", check_nearest_is_torchs_cast, 0, 2**32)
    prove("split16 is lossless, all 2**32 patterns", check_split_is_lossless, 0, 2**32)
    for sign in (0, 2**31):
        first = sign + INFINITY + 1
        prove(f"NaN stays NaN, from {first:#010x}", check_nan_stays_nan, first, sign + 2**31)


if __name__ == "__main__":
    main()

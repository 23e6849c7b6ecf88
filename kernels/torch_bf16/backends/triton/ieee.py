"""Correctly rounded division and square root in fp32, where Triton's own are slow or wrong.

Triton's own take the assembler's fast path for usual numbers, and branch to a slow path for every
number outside its range. With ``TOGETHER``, for GPUs that have packed fp32 arithmetic, the eight
numbers of a thread take the same fast path at once, and one branch checks whether any of them is
out of range; if so, all eight are computed as Triton does. ``tests/proofs/quotients.py`` and
``tests/backends/test_triton_ieee.py`` show that the bits are the same.
"""

# Device code is Triton's language, which a type checker takes for Python.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from torch_bf16.errors import version_numbers

__all__ = ["div", "sqrt", "together"]

_EIGHT = range(8)
_PAIRS = range(0, 8, 2)

# The fast path serves [2**-101, 2**128), the assembler's own range, where Newton's step from the
# approximation rounds correctly: one check of the largest of the eight differences of bits.
SQRT_PTX = "\n".join(
    [
        "{ .reg .pred usual; .reg .b32 largest, above<8>; .reg .f32 r<8>, s<8>, n<8>;",
        ".reg .b64 X, R, S, N, H, half;",
        "mov.b32 largest, 0; mov.b64 half, {0f3F000000, 0f3F000000};",
        *(
            f"rsqrt.approx.ftz.f32 r{i}, ${8 + i}; mov.b32 above{i}, ${8 + i}; "
            f"add.u32 above{i}, above{i}, 0xF3000000; max.u32 largest, largest, above{i};"
            for i in _EIGHT
        ),
        *(
            f"mov.b64 X, {{${8 + i}, ${9 + i}}}; mov.b64 R, {{r{i}, r{i + 1}}}; "
            f"mul.rn.f32x2 S, X, R; mul.rn.f32x2 H, R, half; mov.b64 {{s{i}, s{i + 1}}}, S; "
            f"neg.f32 n{i}, s{i}; neg.f32 n{i + 1}, s{i + 1}; mov.b64 N, {{n{i}, n{i + 1}}}; "
            f"fma.rn.f32x2 N, N, S, X; fma.rn.f32x2 N, N, H, S; mov.b64 {{${i}, ${i + 1}}}, N;"
            for i in _PAIRS
        ),
        "setp.le.u32 usual, largest, 0x727FFFFF; @usual bra done;",
        *(f"sqrt.rn.f32 ${i}, ${8 + i};" for i in _EIGHT),
        "done: }",
    ]
)

# The dividend is at least 2**-98, so that the remainder is exact, and the quotient at least
# 2**-125. Anything else out of range makes the quotient zero or NaN: a divisor below 2**-126 or
# above 2**126, whose reciprocal is flushed, Inf, NaN, and a quotient that overflows on the way.
DIV_PTX = "\n".join(
    [
        "{ .reg .pred usual; .reg .f32 y<8>, n<8>, a<8>, q<8>;",
        ".reg .b64 A, Y, N, E, Q, one; mov.b64 one, {0f3F800000, 0f3F800000};",
        *(f"rcp.approx.ftz.f32 y{i}, ${16 + i}; neg.f32 n{i}, ${16 + i};" for i in _EIGHT),
        *(
            f"mov.b64 A, {{${8 + i}, ${9 + i}}}; mov.b64 Y, {{y{i}, y{i + 1}}}; "
            f"mov.b64 N, {{n{i}, n{i + 1}}}; fma.rn.f32x2 E, N, Y, one; "
            "fma.rn.f32x2 Y, Y, E, Y; mul.rn.f32x2 Q, A, Y; fma.rn.f32x2 E, N, Q, A; "
            f"fma.rn.f32x2 Q, Y, E, Q; mov.b64 {{${i}, ${i + 1}}}, Q;"
            for i in _PAIRS
        ),
        "setp.eq.b32 usual, 0, 0;",
        *(
            f"abs.f32 a{i}, ${8 + i}; abs.f32 q{i}, ${i}; "
            f"setp.ge.and.f32 usual, a{i}, 0f0E800000, usual; "
            f"setp.ge.and.f32 usual, q{i}, 0f01000000, usual;"
            for i in _EIGHT
        ),
        "@usual bra done;",
        *(f"div.rn.f32 ${i}, ${8 + i}, ${16 + i};" for i in _EIGHT),
        "done: }",
    ]
)

_SQRT, _DIV = tl.constexpr(SQRT_PTX), tl.constexpr(DIV_PTX)
_ONE_ARGUMENT = tl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8))
_TWO_ARGUMENTS = tl.constexpr(",".join(["=&f"] * 8 + ["f"] * 16))
# Triton 3.5 flushes subnormals in sqrt_rn and div_rn on NVIDIA's GPUs (triton#8557). Inline PTX
# does not run in its interpreter, where NumPy computes both.
_FLUSHES = tl.constexpr(
    version_numbers(triton.__version__) < (3, 6)
    and torch.version.hip is None
    and not knobs.runtime.interpret
)


def together(architecture: int | str) -> bool:
    """Whether the eight numbers of a thread are computed together.

    Args:
        architecture: Triton's name for it: 100 for sm_100, "gfx942"; 0 for its interpreter.
    """
    # These GPUs have packed fp32 arithmetic, and would need most of their issue slots without it.
    return isinstance(architecture, int) and 100 <= architecture < 110


@triton.jit
def sqrt(x, TOGETHER: tl.constexpr):
    """The square root of each element."""
    if TOGETHER and x.numel >= 1024:
        return tl.inline_asm_elementwise(_SQRT, _ONE_ARGUMENT, [x], tl.float32, True, 8)
    elif _FLUSHES:
        return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def div(a, b, TOGETHER: tl.constexpr):
    """The quotient of each pair of elements."""
    if TOGETHER and a.numel >= 1024:
        return tl.inline_asm_elementwise(_DIV, _TWO_ARGUMENTS, [a, b], tl.float32, True, 8)
    elif _FLUSHES:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1
        )
    else:
        return tl.div_rn(a, b)

"""What the CPU kernels compile to for AVX2 and arm64, which need not be here."""

from __future__ import annotations

import re
from itertools import product

import pytest
from cross_compiled import TARGETS, cross_compiled, loops

MOMENTS = {"bf16": ("bf16_nearest", "bf16_stochastic"), "int8": ("int8", "int8")}
# A root or a quotient of a full vector, by processor.
WIDE = {
    "haswell": (r"vsqrtps .*%ymm", r"vdivps .*%ymm"),
    "znver3": (r"vsqrtps .*%ymm", r"vdivps .*%ymm"),
    "neoverse-n1": (r"fsqrt v\d+\.4s", r"fdiv v\d+\.4s"),
    "neoverse-v1": (r"fsqrt z\d+\.s", r"fdivr? z\d+\.s"),
    "apple-m1": (r"fsqrt v\d+\.4s", r"fdiv v\d+\.4s"),
}
# Also lanes that are taken apart, gathered, or stored one by one behind branches.
SCALAR = (
    r"v?(sqrt|div)ss |f(sqrt|div) s\d|call|bl |vpextr|vpinsr|umov|smov|mov w\d+, v|vgather"
    r"|tbn?z|st1 \{.*\}\["
)
ROUNDED_ONCE = r"\t(vfn?m(add|sub)|fn?m(la|ls|add|sub|ad|sb)\b)"
ESTIMATE = r"\t(v?rsqrt|v?rcp|frsqrt|frecp)"


@pytest.fixture(scope="module")
def assembly():
    """Of all moments: the process takes longer to start than to compile for one more."""
    return cross_compiled(MOMENTS)


def count(pattern, body):
    return sum(bool(re.match(pattern, each)) for each in body)


# With int8 moments LLVM gives an SVE loop a mask, and stores numbers for the codes lane by lane.
VECTORS = [each for each in product(MOMENTS, TARGETS) if each != ("int8", "neoverse-v1")]


@pytest.mark.parametrize(("moments", "cpu"), VECTORS)
def test_the_update_is_a_loop_of_full_vectors_with_exact_roots_and_quotients(
    assembly, moments, cpu
):
    root, quotient = WIDE[cpu]
    found = [body for body in loops(assembly[moments][cpu]) if count(quotient, body)]
    assert found, f"no loop divides by {quotient}"
    update = found[0]
    # For each number one of v, and one of m where it is stored by its root.
    roots = {"bf16": 1, "int8": 2}[moments]
    assert count(root, update) == roots * count(quotient, update)
    assert [each for each in update if re.match(SCALAR, each)] == []


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("moments", MOMENTS)
def test_nothing_is_estimated_fused_or_called(assembly, moments, cpu):
    text = assembly[moments][cpu]
    # A fused product and sum has other bits.
    assert re.findall(ROUNDED_ONCE, text) == []
    assert re.findall(ESTIMATE, text) == []
    called = re.findall(r"^\t(?:callq?|bl)\t(\w+)", text, re.MULTILINE)
    own = ("NRT_", "numba_", "Py", "_ZN")
    assert [name for name in called if not name.startswith(own)] == []

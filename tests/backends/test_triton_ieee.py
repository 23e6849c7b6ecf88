"""Division and root of eight numbers at once are the assembler's own short way, and round right."""

import functools
import importlib
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")

import sass
import triton
import triton.language as tl
from forked_scripts import call_in_fork
from proofs.quotients import check_quotients, check_ranges, check_roots, near, rcp, rsqrt
from ptx.arithmetic import fma
from ptx.inline import run
from triton.compiler import ASTSource, compile
from triton_variants import TARGETS

from torch_bf16.backends.triton import ieee


@triton.jit
def _quotient(in_ptr, out_ptr):
    tl.store(out_ptr, ieee.div(tl.load(in_ptr), tl.load(in_ptr + 1), False))


@triton.jit
def _root(in_ptr, out_ptr):
    tl.store(out_ptr, ieee.sqrt(tl.load(in_ptr), False))


@functools.cache
def short_way(kernel, target):
    """What the assembler makes of one operation: approximation, products and sums."""
    source = ASTSource(kernel, {"in_ptr": "*fp32", "out_ptr": "*fp32"})
    options = {"num_warps": 1, "enable_fp_fusion": False}
    found = compile(source, target=TARGETS[target], options=options)
    with tempfile.TemporaryDirectory() as folder:
        code = sass.Code.of(found.asm["cubin"], Path(folder))
    texts = code.usual(0, len(code.instructions))
    texts = texts[: next(i for i, text in enumerate(texts) if "STG" in text)]
    return [text for text in texts if sass.opcode(text).split(".")[0] in ("MUFU", "FFMA", "FMUL")]


def run_sass(texts, arguments, approximations):
    """The last result. The approximation is of the last argument."""
    registers = {}

    def value(text):
        if text.startswith("-"):
            return -value(text[1:])
        if text == "RZ" or not text.startswith("R"):
            return np.array([0.0 if text == "RZ" else float(text)], np.float32)
        return registers.get(text, arguments[0])

    for text in texts:
        to, *operands = re.split(r",\s*", text.replace(".reuse", "").split(None, 1)[1])
        if "MUFU" in text:
            registers[operands[0]] = arguments[-1]
            registers[to] = approximations[sass.opcode(text)](arguments[-1])
        elif "FMUL" in text:
            registers[to] = value(operands[0]) * value(operands[1])
        else:
            registers[to] = fma(*map(value, operands))
    return registers[to]


@pytest.mark.parametrize("ulps", range(-3, 4))
@pytest.mark.parametrize(
    ("kernel", "text", "count"), [(_quotient, ieee.DIV_PTX, 2), (_root, ieee.SQRT_PTX, 1)]
)
def test_the_short_way_is_the_assemblers_own(kernel, text, count, ulps):
    rng = np.random.default_rng(0)
    exponents = rng.integers(-40, 40, (count, 1 << 16))
    arguments = list(np.ldexp(rng.uniform(1, 2, (count, 1 << 16)), exponents).astype(np.float32))
    approximations = near(rcp, ulps), near(rsqrt, ulps)
    own = run_sass(
        short_way(kernel, "sm_100"), arguments,
        dict(zip(("MUFU.RCP", "MUFU.RSQ"), approximations, strict=True)),
    )  # fmt: skip
    lanes = [each for each in arguments for _ in range(8)]
    names = dict(zip(("rcp", "rsqrt"), approximations, strict=True))
    results, usual = run(text, lanes, names)
    assert usual.all()
    for each in results:
        assert (each.view(np.uint32) == own.view(np.uint32)).all()


def test_roots_and_the_hardest_quotients_round_right():
    assert check_roots(0, 0, step=64)[1] == []
    for k, shift in ((1, 24), (-1, 25), (-3, 24), (2, 25)):
        tried, wrong = check_quotients(k, shift, 0, step=15)
        assert tried > 10_000
        assert wrong == []


def test_what_is_out_of_range_is_never_taken_for_usual():
    check_ranges(1, step=27)


def ptx_of(kernel):
    source = ASTSource(kernel, {"in_ptr": "*fp32", "out_ptr": "*fp32"})
    return compile(source, target=TARGETS["sm_90"], options={"num_warps": 1}).asm["ptx"]


def print_ptx_of_triton_35():
    triton.__version__ = "3.5.1"
    importlib.reload(ieee)
    print(ptx_of(_quotient), ptx_of(_root))


def test_triton_35_which_flushes_subnormals_is_given_the_instructions(tmp_path):
    ptx_text = call_in_fork(print_ptx_of_triton_35, folder=tmp_path)
    inline = re.findall(r"begin inline asm\s+(?:\.loc.*\s+)?((?:div|sqrt)\S+)", ptx_text)
    assert inline == ["div.rn.f32", "sqrt.rn.f32"]

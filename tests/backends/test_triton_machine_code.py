"""What the Triton kernels compile to, for GPUs that need not be there.

The bound on instructions follows from the issue rate and the bandwidth of a GPU: see the README in
``backends/triton``.
"""

import re
from itertools import cycle, product

import pytest
import torch

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")

import gcn
import sass
import triton
import triton.language as tl
from compiled_code import bytes_moved, measured
from every_rule import RULES
from triton.compiler import ASTSource, compile
from triton_variants import (
    TARGETS,
    all_variants,
    compiled,
    compiled_measure,
    compiled_prepare,
    compiled_squares,
    one_variant_of_each_other_rule,
)

from torch_bf16.backends.triton import _NEEDED_ON_ROCM
from torch_bf16.backends.triton.arithmetic import _exp, _log, _power
from torch_bf16.backends.triton.scalars import OPTIONS
from torch_bf16.rules import ADAFACTOR, ADAMW


def _few(variants):
    """AdamW's with bf16 gradients, and with fp32 ones, and of other rules, the first and the last.

    Formats and gradients are decoded apart from the rule. tests/proofs/machine_code.py measures
    every layout with bf16 gradients, for all targets.
    """
    layouts = {}
    for name, each in variants.items():
        layouts.setdefault((each.rule, each.gradient_dtype), []).append(name)
    for (rule, gradient), names in layouts.items():
        if gradient == torch.bfloat16:
            yield from names if rule is ADAMW else dict.fromkeys((names[0], names[-1]))
        elif rule is ADAMW:
            yield from (names[0], FP32, names[-1])


FP32 = "adamw_fp32_fp32_fp32_float32"
VARIANTS = {name: all_variants()[name] for name in _few(all_variants())}
SCALAR_RULES = [*RULES.values(), ADAFACTOR]
ROOTS_FLUSH = tuple(int(part) for part in triton.__version__.split(".")[:2]) < _NEEDED_ON_ROCM
STOCHASTIC = "adamw_bf16_stochastic_bf16_nearest_bf16_stochastic_bfloat16"
EXACT = "adamw_bf16_plus_16_fp32_fp32_bfloat16"
OTHERS = one_variant_of_each_other_rule()
# What does not depend on the rule, and little on the target.
GENERATIONS = ["sm_80", "sm_90", "sm_100", "gfx942", "gfx1100"]
# Instructions per element that an H200 can issue in the time that it moves a byte: 132
# multiprocessors, 4 schedulers each, 32 lanes, 1.98 GHz; 4.8 TB/s. Two thirds of them may be used.
PER_BYTE = 132 * 4 * 32 * 1.98e9 / 4.8e12 * 2 / 3

# A root, the maximum over a block, codes and back: see the README.
PER_BLOCKED_NUMBER = 36
# Accesses to the stack, LDL and STL: the price of 96 registers, with which five programs share a
# multiprocessor.
SPILLS_WITH_TWO_IN_BLOCKS = 20

every_variant = pytest.mark.parametrize("name", VARIANTS)


def whole_blocks(variant, folder, target="sm_90"):
    """(opcodes executed for a whole block by a thread, its elements, the kernel's resources)."""
    code = sass.Code.of(compiled(variant, target).asm["cubin"], folder)
    (opcodes,) = [body for body in code.loops() if {"STG.E.64", "STG.E.128"} & set(body)]
    stored = sum(opcodes.count(f"STG.E.{width}") * width // 8 for width in (64, 128))
    elements = stored / bytes_moved(variant)[1]
    return opcodes, elements, code.resources


# For sm_90 a test below compiles all of these.
@pytest.mark.parametrize(
    ("name", "target"),
    [*zip([*VARIANTS][::3], cycle(["gfx942", "sm_100", "sm_80"]), strict=False)],
)
def test_every_third_variant_compiles_for_one_more_target(name, target):
    kernel = compiled(VARIANTS[name], target)
    assert kernel.asm["hsaco" if target == "gfx942" else "cubin"]


@pytest.mark.skipif(ROOTS_FLUSH, reason="on ROCm the backend asks for Triton 3.7")
# Those of int8 are of two targets, one with waves of 64 threads and one with 32.
@pytest.mark.parametrize(
    ("recipe", "target"),
    [
        *product(["bf16_nearest_bf16_stochastic"], ["gfx90a", "gfx942", "gfx1100", "gfx1201"]),
        *product(["int8_uint8"], ["gfx942", "gfx1201"]),
    ],
)
def test_amds_roots_are_of_the_number_itself(recipe, target):
    """Its reciprocal's root flushes subnormals, and Newton's steps from there end in NaN."""
    assembly = compiled(VARIANTS[f"adamw_bf16_stochastic_{recipe}_bfloat16"], target).asm["amdgcn"]
    assert "v_sqrt_f32" in assembly
    assert "v_rsq" not in assembly


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx1100", "gfx1201"])
def test_amds_threads_take_eight_elements_in_wide_accesses_and_spill_nothing(target):
    found = measured(VARIANTS[STOCHASTIC], target)
    assert found["elements"] == 8
    assert (found["loads"], found["stores"]) == ({"128": 4}, {"128": 3})
    assert found["spills"] == found["stack"] == 0


@every_variant
def test_whole_blocks_use_wide_accesses_little_stack_and_few_instructions(name, tmp_path):
    variant = VARIANTS[name]
    opcodes, elements, resources = whole_blocks(variant, tmp_path)
    in_blocks = [each for each in variant.formats if each.block > 1]
    assert resources["spills"] <= (SPILLS_WITH_TWO_IN_BLOCKS if len(in_blocks) > 1 else 0)
    accesses = [each for each in opcodes if each.startswith(("LDG", "STG"))]
    # Eight elements of a thread: 64 bits of a plane of single bytes, 128 of every other one.
    bytewise = [
        plane for each in variant.formats for plane in each.planes if plane.dtype.itemsize == 1
    ]
    wide = {"LDG.E.128"} | ({"LDG.E.64", "STG.E.64"} if bytewise else set())
    wide |= {"STG.E.128"} if in_blocks != list(variant.formats) else set()
    assert set(accesses) - ({"LDG.E", "STG.E"} if in_blocks else set()) == wide
    assert accesses.count("LDG.E") == accesses.count("STG.E") == len(in_blocks)
    assert (
        accesses.count("STG.E.64") * 8 == accesses.count("LDG.E.64") * 8 == elements * len(bytewise)
    )
    read, written = bytes_moved(variant)
    loaded = sum(accesses.count(f"LDG.E.{width}") * width // 8 for width in (64, 128))
    assert loaded == elements * read
    share = PER_BYTE * (9 / 8 if bytewise else 1)
    bound = (read + written) * share + PER_BLOCKED_NUMBER * len(in_blocks)
    assert len(opcodes) / elements <= bound


# Each rule for one of the two, which divide in different ways: machine_code.py has both.
@pytest.mark.parametrize(("name", "target"), [*zip(OTHERS, cycle(["sm_100", "sm_90"]))])
def test_other_rules_are_bound_by_memory_too(name, target, tmp_path):
    variant = OTHERS[name]
    opcodes, elements, resources = whole_blocks(variant, tmp_path, target)
    assert resources["spills"] == resources["stack"] == 0
    accesses = {each for each in opcodes if each.startswith(("LDG", "STG"))}
    assert accesses == {"LDG.E.128", "STG.E.128"}
    # All that an H200 can issue in the time, where the bound above leaves a third.
    assert len(opcodes) / elements <= sum(bytes_moved(variant)) * PER_BYTE * 1.5


@pytest.mark.parametrize(("target", "most"), [("sm_80", 64), ("sm_90", 64), ("sm_100", 52)])
def test_adamw_with_stochastic_rounding_takes_few_instructions(target, most, tmp_path):
    opcodes, elements, _ = whole_blocks(VARIANTS[STOCHASTIC], tmp_path, target)
    assert len(opcodes) / elements <= most


@pytest.mark.parametrize("name", [STOCHASTIC, EXACT])
def test_nothing_spills_where_eight_numbers_are_taken_together(name):
    found = measured(VARIANTS[name], "sm_100")
    assert found["spills"] == found["stack"] == 0


def test_division_and_root_are_ieee_and_nothing_is_fused_or_flushed():
    ptx = compiled(VARIANTS[FP32], "sm_90").asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert "div.full" not in ptx
    assert "approx" not in ptx
    assert "fma.rn" not in ptx
    assert ".ftz" not in ptx


def test_sixteen_bit_numbers_are_rounded_on_bits_alone():
    for name, variant in VARIANTS.items():
        if variant.formats[0].name != "fp32" or variant.gradient_dtype == torch.bfloat16:
            conversions = re.findall(r"cvt\.\S*bf16\S*", compiled(variant, "sm_90").asm["ptx"])
            assert not conversions, name


# Each rule for one of AMD's two sizes of waves, which mean nothing to a scalar.
@pytest.mark.parametrize(
    ("rule", "target"),
    [*product(SCALAR_RULES, ["sm_90"]), *zip(SCALAR_RULES, cycle(["gfx942", "gfx1100"]))],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_scalars_of_every_rule_compile_in_unfused_ieee_doubles(rule, target):
    kernel = compiled_prepare(rule, target)
    if target.startswith("gfx"):
        assert kernel.asm["hsaco"]
        return
    ptx = kernel.asm["ptx"]
    # A rule whose gradient was scaled before its step divides by nothing.
    assert set(re.findall(r"div\S*", ptx)) <= {"div.rn.f64"}
    assert set(re.findall(r"sqrt\S*", ptx)) <= {"sqrt.rn.f64"}
    assert "fma" not in ptx
    assert "approx" not in ptx


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", [name for name in OTHERS if OTHERS[name].rule.statistic])
def test_sums_of_statistics_read_whole_blocks_in_wide_accesses(name, target, tmp_path):
    kernel = compiled_measure(OTHERS[name], target)
    if target.startswith("gfx"):
        assembly = kernel.asm["amdgcn"]
        assert gcn.resources(assembly)["spills"] == 0
        assert re.search(r"(global|buffer)_load_(dwordx4|b128)", assembly)
        return
    code = sass.Code.of(kernel.asm["cubin"], tmp_path)
    assert code.resources["spills"] == 0
    loads = [{text.split()[0] for text in body if text.startswith("LDG")} for body in code.loops()]
    assert {"LDG.E.128"} in loads
    ptx = kernel.asm["ptx"]
    assert re.search(r"(atom|red)\S*add\S*64", ptx)
    assert "st.global" not in ptx
    # Roots of several numbers together are fused, and right; see test_triton_ieee.py.
    assert "fma.rn" not in ptx or target == "sm_100"


@pytest.mark.parametrize(("size", "target"), [*zip(cycle([2, 4]), GENERATIONS)])
def test_sums_of_squares_read_whole_blocks_in_wide_accesses(size, target, tmp_path):
    kernel = compiled_squares(size, target)
    if target.startswith("gfx"):
        assembly = kernel.asm["amdgcn"]
        assert gcn.resources(assembly)["spills"] == 0
        assert re.search(r"global_load_(dwordx4|b128)", assembly)
        return
    code = sass.Code.of(kernel.asm["cubin"], tmp_path)
    assert code.resources["spills"] == 0
    loads = [{text.split()[0] for text in body if text.startswith("LDG")} for body in code.loops()]
    assert {"LDG.E.128"} in loads
    # Of one number, where addresses are not aligned.
    assert all(each <= {"LDG.E.128"} or len(each) == 1 for each in loads)


@triton.jit
def _functions(x_ptr, out_ptr, EXP: tl.constexpr, LOG: tl.constexpr, POWER: tl.constexpr):
    x = tl.load(x_ptr)
    tl.store(out_ptr, EXP(x))
    tl.store(out_ptr + 1, LOG(x))
    tl.store(out_ptr + 2, POWER(x, 5))


@pytest.mark.parametrize("target", GENERATIONS)
def test_powers_exp_and_log_compile(target):
    """No rule uses all of them, and the interpreter takes what the compiler refuses."""
    fixed = {"EXP": _exp, "LOG": _log, "POWER": _power}
    signature = {"x_ptr": "*fp64", "out_ptr": "*fp64", **dict.fromkeys(fixed, "constexpr")}
    source = ASTSource(_functions, signature, constexprs=fixed)
    assert compile(source, target=TARGETS[target], options=OPTIONS).asm

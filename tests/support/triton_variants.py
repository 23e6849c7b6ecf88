"""Compiling the Triton kernels for devices that need not be there."""

import torch
from bucket_cases import HYPER
from every_rule import RULES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torch_bf16 import RECIPES, Recipe
from torch_bf16.backends import Variant
from torch_bf16.backends.triton import squares
from torch_bf16.backends.triton.kernel import constants, options, step
from torch_bf16.backends.triton.scalars import OPTIONS, prepare, prepare_constants
from torch_bf16.backends.triton.statistic import measure, measure_constants
from torch_bf16.formats import BF16_STOCHASTIC, INT8
from torch_bf16.rules import (
    ACCUMULATE,
    ADAM,
    ADAMW,
    AVERAGE,
    SECOND_MOMENT,
    SGD,
    SGD_MOMENTUM,
    SGD_NESTEROV,
    WEIGHTS,
)

TARGETS = {
    **{f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942")},
    **{name: GPUTarget("hip", name, 32) for name in ("gfx1100", "gfx1201")},
}
# What one documented recipe for each byte count asks for, beside the named ones.
OTHERS = (
    Recipe("24-bit", weights="bf16+8"),
    Recipe("8-bit moments", exp_avg="int8", exp_avg_sq="int8"),
    Recipe("24-bit, 8-bit moments", weights="bf16+8", exp_avg="int8", exp_avg_sq="int8"),
)


def all_variants():
    """Every variant that an optimizer with a recipe of the README can ask for."""
    shapes = [
        torch.empty(2, 64, dtype=torch.bfloat16),
        torch.empty(2, dtype=torch.bfloat16),
        torch.empty(2, 2),
    ]
    gpu = torch.device("cuda")
    alone = [
        Variant(ACCUMULATE, (BF16_STOCHASTIC,), torch.bfloat16, gpu),
        Variant(AVERAGE, (INT8,), torch.bfloat16, gpu),
    ]
    found = {variant.name: variant for variant in alone}
    for rule in (ADAMW, ADAM, SGD, SGD_MOMENTUM, SGD_NESTEROV):
        for recipe in (*RECIPES.values(), *OTHERS):
            for parameter in shapes:
                formats = formats_of(recipe, rule, parameter)
                for gradient in (torch.bfloat16, torch.float32):
                    variant = Variant(rule, formats, gradient, gpu)
                    found[variant.name] = variant
    return found


def formats_of(recipe, rule, parameter):
    """What a recipe makes of a parameter's numbers; averages are kept like second moments."""
    first = WEIGHTS if rule.role == WEIGHTS else SECOND_MOMENT
    roles = (first, *(state.role for state in rule.states))
    return tuple(recipe.format_of(role, parameter.shape, parameter.dtype) for role in roles)


def one_variant_of_each_other_rule():
    """What a bf16 matrix takes with the first recipe, and the average of a bf16 weight."""
    recipe, matrix = RECIPES["bf16-stochastic"], torch.empty(2, 2, dtype=torch.bfloat16)
    known = {variant.rule for variant in all_variants().values()}
    found = {}
    for rule in RULES.values():
        if rule not in known:
            formats = formats_of(recipe, rule, matrix)
            variant = Variant(rule, formats, torch.bfloat16, torch.device("cuda"))
            found[variant.name] = variant
    return found


def n_scalars(rule):
    return len(rule.scalars(rule.options(HYPER), 1, 1.0))


def compiled(variant, target):
    """The kernel of a variant for a target, with its intermediate forms in ``asm``."""
    measures = variant.rule.statistic is not None
    asked = variant, n_scalars(variant.rule) + measures, TARGETS[target].arch
    return _over_tables(step, constants(*asked), options(*asked), target)


def compiled_measure(variant, target):
    """The kernel that sums a variant's statistic."""
    asked = variant, n_scalars(variant.rule), TARGETS[target].arch
    return _over_tables(measure, measure_constants(*asked), options(*asked), target)


def _over_tables(kernel, fixed, how, target):
    """A kernel over the tables of a bucket."""
    tables = {"chunks_ptr": "*i32", "tensors_ptr": "*i64", "gradients_ptr": "*i64"}
    signature = {**tables, "table_ptr": "*fp32", **dict.fromkeys(fixed, "constexpr")}
    source = ASTSource(kernel, signature, constexprs=fixed)
    return compile(source, target=TARGETS[target], options=how)


def compiled_prepare(rule, target):
    """The kernel that computes a rule's scalars."""
    fixed = prepare_constants(rule, len(rule.options(HYPER)))
    tables = {"rows_ptr": "*i64", "values_ptr": "*i64", "steps_ptr": "*fp32", "table_ptr": "*fp32"}
    signature = {**tables, **dict.fromkeys(fixed, "constexpr")}
    return compile(
        ASTSource(prepare, signature, constexprs=fixed), target=TARGETS[target], options=OPTIONS
    )


def compiled_squares(size, target):
    """The kernel that adds up squares of elements of so many bytes."""
    fixed = squares.squares_constants({2: torch.bfloat16, 4: torch.float32}[size])
    tables = {"pieces_ptr": "*i32", "tensors_ptr": "*i64", "sums_ptr": "*fp64"}
    signature = {**tables, **dict.fromkeys(fixed, "constexpr")}
    return compile(
        ASTSource(squares.squares_of_pieces, signature, fixed),
        target=TARGETS[target],
        options=squares.OPTIONS,
    )

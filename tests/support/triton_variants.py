"""Compiling the Triton kernels for devices that need not be there."""

import torch
from bucket_cases import HYPER
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torch_bf16 import RECIPES, Recipe
from torch_bf16.backends import Variant
from torch_bf16.backends.triton.kernel import constants, options, step
from torch_bf16.backends.triton.scalars import OPTIONS, prepare, prepare_constants
from torch_bf16.formats import BF16_STOCHASTIC
from torch_bf16.rules import (
    ACCUMULATE,
    ADAM,
    ADAMW,
    RULES,
    SECOND_MOMENT,
    SGD,
    SGD_MOMENTUM,
    SGD_NESTEROV,
    WEIGHTS,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
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
    adding = Variant(ACCUMULATE, BF16_STOCHASTIC, (), torch.bfloat16, gpu)
    found = {adding.name: adding}
    for rule in (ADAMW, ADAM, SGD, SGD_MOMENTUM, SGD_NESTEROV):
        for recipe in (*RECIPES.values(), *OTHERS):
            for parameter in shapes:
                weights = recipe.format_of("weights", parameter)
                states = tuple(recipe.format_of(s.role, parameter) for s in rule.states)
                for gradient in (torch.bfloat16, torch.float32):
                    variant = Variant(rule, weights, states, gradient, gpu)
                    found[variant.name] = variant
    return found


def one_variant_of_each_other_rule():
    """What a bf16 matrix takes with the first recipe, and the average of a bf16 weight."""
    recipe, matrix = RECIPES["true-bf16-stochastic"], torch.empty(2, 2, dtype=torch.bfloat16)
    known = {variant.rule for variant in all_variants().values()}
    found = {}
    for rule in RULES.values():
        if rule not in known:
            role = WEIGHTS if rule.role == WEIGHTS else SECOND_MOMENT
            states = tuple(recipe.format_of(s.role, matrix) for s in rule.states)
            weights, gpu = recipe.format_of(role, matrix), torch.device("cuda")
            variant = Variant(rule, weights, states, torch.bfloat16, gpu)
            found[variant.name] = variant
    return found


def n_scalars(rule):
    return len(rule.scalars(rule.options(HYPER), 1, 1.0))


def compiled(variant, target):
    """The kernel of a variant for a target, with its intermediate forms in ``asm``."""
    fixed = constants(variant, n_scalars(variant.rule))
    tables = {"chunks_ptr": "*i32", "tensors_ptr": "*i64", "gradients_ptr": "*i64"}
    signature = {**tables, "table_ptr": "*fp32", **dict.fromkeys(fixed, "constexpr")}
    return compile(
        ASTSource(step, signature, constexprs=fixed),
        target=TARGETS[target],
        options=options(variant, hip=TARGETS[target].backend == "hip"),
    )


def compiled_prepare(rule, target):
    """The kernel that computes a rule's scalars."""
    fixed = prepare_constants(rule, len(rule.options(HYPER)))
    tables = {"rows_ptr": "*i32", "values_ptr": "*i64", "steps_ptr": "*fp32", "table_ptr": "*fp32"}
    signature = {**tables, **dict.fromkeys(fixed, "constexpr")}
    return compile(
        ASTSource(prepare, signature, constexprs=fixed), target=TARGETS[target], options=OPTIONS
    )

"""Compiling the Triton kernels for devices that need not be there."""

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torch_bf16 import RECIPES, Recipe
from torch_bf16.backends import Variant
from torch_bf16.backends.triton.kernel import constants, options, step
from torch_bf16.formats import BF16_STOCHASTIC
from torch_bf16.rules import ACCUMULATE, RULES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What one documented recipe for each byte count asks for, beside the named ones.
OTHERS = (Recipe("24-bit weights", weights="remainder8"),)
HYPER = {
    "lr": 1.0, "betas": (0.5, 0.5), "eps": 1.0, "weight_decay": 0.0, "momentum": 0.5,
    "dampening": 0.0,
}  # fmt: skip


def all_variants():
    """Every variant that an optimizer with a recipe of the README can ask for."""
    shapes = [
        torch.empty(2, 2, dtype=torch.bfloat16),
        torch.empty(2, dtype=torch.bfloat16),
        torch.empty(2, 2),
    ]
    gpu = torch.device("cuda")
    adding = Variant(ACCUMULATE, BF16_STOCHASTIC, (), torch.bfloat16, gpu)
    found = {adding.name: adding}
    for rule in RULES.values():
        if rule is ACCUMULATE:
            continue
        for recipe in (*RECIPES.values(), *OTHERS):
            for parameter in shapes:
                weights = recipe.format_of("weights", parameter)
                states = tuple(recipe.format_of(s.role, parameter) for s in rule.states)
                for gradient in (torch.bfloat16, torch.float32):
                    variant = Variant(rule, weights, states, gradient, gpu)
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

"""What the NumPy oracle makes of the trials of certificates, for every variant that is shipped."""

import numpy as np
import oracle
import torch
from bucket_cases import LAYOUTS
from every_rule import RULES

from torch_bf16.backends import Variant
from torch_bf16.backends.certificates.trial import SEED, Trial, digests_of, settled
from torch_bf16.formats import FORMATS
from torch_bf16.rules import EXACT, FIRST_MOMENT, ITERATE, SECOND_MOMENT

_OF_ONE_NUMBER = ("accumulate", "average", "store")
_NAMED = [name for name in LAYOUTS if not name.startswith("only_")]


def variants(rule_name):
    """The variants of a rule that have digests: layouts, dtypes of gradients, orders of indices.

    A state has the format of its role, as recipes give it: int8 codes have a sign, second moments
    have none.
    """
    rule = RULES[rule_name]
    names = []
    for weight, first, second in (LAYOUTS[each] for each in _NAMED):
        iterate = weight if len(FORMATS[weight].planes) == 1 else "fp32"
        of_role = {FIRST_MOMENT: first, SECOND_MOMENT: second, EXACT: "fp32", ITERATE: iterate}
        names.append((weight, *(of_role[state.role] for state in rule.states)))
    if rule_name in _OF_ONE_NUMBER:
        names = [(each,) for each in FORMATS]
    found = {}
    for layout in names:
        formats = tuple(FORMATS[each] for each in layout)
        for gradient in (torch.bfloat16, torch.float32):
            orders = ["consecutive", "strided"]
            # Of formats in blocks, a step takes copies in row-major order; and the order is nothing
            # to a variant without noise.
            if all(each.block == 1 for each in formats) and any(
                each.stochastic for each in formats
            ):
                orders.append("transposed")
            for indices in orders:
                variant = Variant(rule, formats, gradient, torch.device("cpu"), indices)
                found[variant.name] = variant
    return list(found.values())


def by_the_oracle(variant):
    """Each plane after the steps of the variant's trial, computed by the oracle."""
    trial = Trial.of(variant)
    roles = ["weight", *(state.name for state in variant.rule.states)]
    formats = dict(zip(roles, (each.name for each in variant.formats), strict=True))
    tensors = []
    for number, (planes, gradient) in enumerate(zip(trial.planes, trial.gradients, strict=True)):
        values = {role: tuple(map(_floats, each)) for role, each in zip(roles, planes, strict=True)}
        _, start, *run = trial.runs[number]
        where = {"strided": {"run": run}, "transposed": {"matrix": run}}.get(variant.indices, {})
        for scalars in trial.scalars:
            values = oracle.optimizer_step(
                variant.rule.name, formats, values, _floats(gradient), trial.groups[number],
                seed=SEED, name=f"p{number}", step=int(scalars.steps[number]), start=start, **where,
            )  # fmt: skip
        tensors.append([[_bits(plane) for plane in values[role]] for role in roles])
    return settled(variant.formats, tensors)


def digests_by_the_oracle(variant):
    return digests_of(by_the_oracle(variant))


def _floats(plane):
    return plane.view(np.float32) if plane.dtype == np.uint32 else plane


def _bits(plane):
    plane = np.asarray(plane)
    return plane.view(np.uint32) if plane.dtype == np.float32 else plane

"""By which kernels and verdicts of a rule are found on disk."""

from dataclasses import replace

import pytest

from torch_bf16 import rules

OURS = [each for each in vars(rules).values() if isinstance(each, rules.Rule)]

SOURCE = """
from torch_bf16.rules import arithmetic

RATE = 1.0


def scaled(g):
    return g * 2.0


def update(w, g, states, scalars):
    return arithmetic.maximum(w - scaled(g) * RATE, w), ()
"""


def rule_of(source):
    scope = {"__name__": "mine"}
    exec(source, scope)
    return replace(rules.SGD, name="mine", update=scope["update"])


@pytest.mark.parametrize("rule", OURS, ids=lambda rule: rule.name)
def test_rules_of_this_package_are_found_by_their_names(rule):
    assert rule.identifier == rule.name


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("w - scaled", "w + scaled"),
        ("* 2.0", "* 3.0"),
        ("RATE = 1.0", "RATE = 2.0"),
        ("maximum", "minimum"),
    ],
)
def test_a_rule_from_elsewhere_has_another_identifier_once_it_is_edited(was, becomes):
    before = rule_of(SOURCE).identifier
    assert before.startswith("mine_")
    assert rule_of(SOURCE).identifier == before
    assert rule_of(SOURCE.replace(was, becomes)).identifier != before

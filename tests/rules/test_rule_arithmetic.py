"""What rules compute their scalars with, against the standard library and exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from bucket_cases import HYPER
from every_rule import RULES

from torch_bf16.rules import FIRST_MOMENT, ITERATE, arithmetic
from torch_bf16.rules.nadam import mu_product


def within(ours, reference, ulps):
    return abs(ours - reference) <= ulps * math.ulp(reference)


@pytest.mark.parametrize("base", [0.0, 0.5, 0.9, 0.999, 0.99999, 1.0])
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 10, 999, 12345, 10**6])
def test_power_is_off_by_at_most_its_exponent_in_units_of_two_to_the_minus_53(base, exponent):
    exact = Fraction(base) ** min(exponent, 999) if exponent < 1000 else Fraction(base**exponent)
    # Beyond, the library's own power, half a unit off, is the reference.
    error = abs(Fraction(arithmetic.power(base, exponent)) - exact)
    assert error <= (exponent + 1) * exact / 2**53 + Fraction(math.ulp(0.0))


def test_exp_and_log_are_those_of_the_standard_library_to_two_ulps():
    rng = np.random.default_rng(0)
    for x in [0.0, -0.0, 1.0, -1.0, 708.9, -707.9, 1e-300, *rng.uniform(-700, 700, 2000).tolist()]:
        assert within(arithmetic.exp(x), math.exp(x), 2), x
    powers = np.ldexp(rng.uniform(1, 2, 2000), rng.integers(-1022, 1023, 2000)).tolist()
    for x in [1.0, 2.0, 0.5, 2.0**-1022, 1.7e308, 1 + 2**-52, 1 - 2**-53, *powers]:
        assert within(arithmetic.log(x), math.log(x), 2), x


def test_exp_and_log_beyond_their_range():
    inf = math.inf
    assert [arithmetic.exp(x) for x in (inf, 800.0, -800.0, -inf)] == [inf, inf, 0.0, 0.0]
    assert [arithmetic.log(x) for x in (0.0, inf)] == [-inf, inf]
    assert all(map(math.isnan, map(arithmetic.log, (-1.0, -inf, math.nan))))
    assert math.isnan(arithmetic.exp(math.nan))


@pytest.mark.parametrize("name", RULES)
def test_a_rule_flattens_its_options_and_needs_no_other(name):
    rule = RULES[name]
    options = rule.options(HYPER)
    assert all(isinstance(each, float) for each in options)
    assert all(isinstance(each, float) for each in rule.scalars(options, 3, 1.0))


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("decay", [0.0, 1e-9, 2e-5, 1e-4, 4e-3, 1.0, 100.0])
def test_nadams_product_is_that_of_all_steps(beta1, decay):
    product = 1.0
    for step in range(1, 1500):
        product *= beta1 * (1 - 0.5 * 0.96 ** (step * decay))
        # What counts is 1 minus the product, to far less than a step of fp32.
        assert abs(mu_product(beta1, decay, step) - product) <= 1e-10 * (1 - product)


@pytest.mark.parametrize("name", RULES)
def test_weights_beside_the_weights_share_their_noise_with_no_first_moment(name):
    roles = {state.role for state in RULES[name].states}
    assert not roles >= {ITERATE, FIRST_MOMENT}, "give ITERATE a stream in backends/bucket.py"

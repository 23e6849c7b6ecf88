"""Certificates: faults are found before a kernel is used, and training goes on without it."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from bucket_cases import LAYOUTS
from certificate_digests import digests_by_the_oracle, variants
from every_rule import RULES
from planted_faults import PLACES, Failing, Planted, shows, trained

from torch_bf16 import RECIPES, Recipe, backends
from torch_bf16.backends import Variant, choose, choose_for
from torch_bf16.backends.certificates import certificate, verdicts
from torch_bf16.backends.certificates.digests import expected
from torch_bf16.backends.certificates.trial import Trial, digests_of
from torch_bf16.backends.eager import EagerBackend
from torch_bf16.formats import BF16_NEAREST, BF16_STOCHASTIC, FP32, ROLES
from torch_bf16.rules import ADAMW, WEIGHTS

CPU = torch.device("cpu")
VARIANT = Variant(ADAMW, (BF16_STOCHASTIC, BF16_NEAREST, BF16_STOCHASTIC), torch.bfloat16, CPU)

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize(("number", "rule"), [*enumerate(RULES)])
def test_the_digests_are_those_of_the_oracle(number, rule):
    found = variants(rule)
    # Each rule, and over all of them each format with each dtype and stride: all are made by
    # tests/proofs/digests.py.
    for variant in found[6 * number % 17 :: 17] or found[:1]:
        assert expected(variant) == digests_by_the_oracle(variant), (
            f"{variant.name} has other digests, or none: if a rule, a format or the trial is new, "
            f"run `python tests/proofs/digests.py --rules {rule}`"
        )


@pytest.mark.parametrize(("place", "role"), [*enumerate(ROLES)])
def test_every_format_that_a_recipe_can_name_is_in_a_layout_that_has_digests(place, role):
    laid_out = {each[place] for name, each in LAYOUTS.items() if not name.startswith("only_")}
    missing = {each.name for each in ROLES[role].values()} - laid_out
    assert not missing, (
        f"no certificate tries {role} in {', '.join(missing)}: add a layout to LAYOUTS of "
        "tests/support/bucket_cases.py, then run `python tests/proofs/digests.py`"
    )


def test_all_that_recipes_ask_for_has_a_digest():
    recipes = [*RECIPES.values(), Recipe(exp_avg="int8", exp_avg_sq="int8")]
    shapes = ((64, 64), torch.bfloat16), ((64,), torch.bfloat16), ((64, 64), torch.float32)
    for rule in (each for each in RULES.values() if each.role == WEIGHTS):
        roles = (WEIGHTS, *(state.role for state in rule.states))
        for recipe in recipes:
            for shape, dtype in shapes:
                formats = tuple(recipe.format_of(role, shape, dtype) for role in roles)
                variant = Variant(rule, formats, dtype, CPU)
                assert expected(variant) is not None, variant.name


def test_every_shipped_variant_has_a_digest_for_each_plane():
    for variant in (each for rule in RULES for each in variants(rule)):
        assert len(expected(variant)) == sum(len(each.planes) for each in variant.formats)


def some_variants():
    """Each rule once, each layout of AdamW, of every dtype and stride in turn."""
    chosen = [variants(name)[number % 4] for number, name in enumerate(RULES)]
    return chosen + variants("adamw")[1::5]


# Numba takes seconds for each variant, and every step of other tests tries its own.
@pytest.mark.parametrize(("backend", "every"), [("eager", 1), ("cpu", 15)])
def test_a_right_backend_passes(backend, every):
    for variant in some_variants()[::every]:
        assert certificate.fault_of(choose(CPU, backend), variant) is None


# All of them, in every variant, take tests/proofs/digests.py --planted.
@pytest.mark.parametrize(("number", "place"), [*enumerate(PLACES)])
def test_a_planted_fault_is_found(number, place):
    variants = [each for each in some_variants() if shows(place, each)][number % 7 :: 7]
    for variant in variants:
        fault = certificate._load_kernels(Planted(place), Trial.of(variant))()
        assert fault is not None, variant.name
        assert "has the wrong bits" in fault
    assert variants


def test_a_fault_says_which_elements_have_which_bits(monkeypatch):
    made = Trial.of(VARIANT)

    def one_bit_off(self, bucket):
        kernel = EagerBackend.load(self, bucket)

        def call(inputs):
            kernel(inputs)
            if inputs.scalars.steps[0] == 1000:
                bucket.planes[3][0][0].view(torch.int16)[[17, 20]] ^= 1

        call.compile = kernel.compile
        return call

    monkeypatch.setattr(Planted, "load", one_bit_off)
    fault = certificate._load_kernels(Planted("rule"), made)()
    right = made.run(EagerBackend(), CPU)[0][3]
    assert "weight has the wrong bits, in aligned tensors: 2 of 4097 in tensor 3;" in fault
    for place in (17, 20):
        got, want = int(right[place]) ^ 1, int(right[place])
        assert f"tensor 3 has {got:#06x} at {place} and not {want:#06x}" in fault
    assert "eager on this CPU" not in fault


def test_a_fault_that_eager_shares_says_so(monkeypatch):
    monkeypatch.setattr(certificate, "expected", lambda variant: ["0"] * 8)
    fault = certificate._load_kernels(choose(CPU, "eager"), Trial.of(VARIANT))()
    assert "that of eager on this CPU; eager on this CPU is wrong, too" in fault


def test_the_eager_backend_on_the_host_judges_variants_without_a_digest(monkeypatch):
    monkeypatch.setattr(certificate, "expected", lambda variant: None)
    made = Trial.of(VARIANT)
    assert certificate._load_kernels(choose(CPU, "cpu"), made)() is None
    assert "weight" in certificate._load_kernels(Planted("rule"), made)()


def _read_only(monkeypatch):
    """Root may write anywhere, so permissions would not show it."""
    monkeypatch.setenv("TORCH_BF16_CACHE", "/dev/null/verdicts")
    assert verdicts.folder() is None


def _read_only_since(monkeypatch):
    def refuse(*arguments, **named):
        raise PermissionError("read-only")

    monkeypatch.setattr(verdicts.json, "dump", refuse)


@pytest.mark.parametrize(
    ("wrong", "folder"),
    [
        (Failing(), None),
        *((Planted(place), None) for place in PLACES),
        *((Planted("rule"), each) for each in (_read_only, _read_only_since)),
    ],
)
def test_training_goes_on_in_another_backend_with_the_right_bits(
    wrong, folder, monkeypatch, caplog
):
    want = trained("eager")
    monkeypatch.setitem(backends._BACKENDS, "cpu", wrong)
    if folder is not None:
        folder(monkeypatch)
    with caplog.at_level(logging.WARNING, "torch_bf16"):
        assert torch.equal(trained(), want)
        assert torch.equal(trained(), want)
    (record,) = caplog.records
    assert "is not used for adamw_bf16_stochastic" in record.getMessage()
    # A compiler that is missing is no fault of a kernel.
    assert ("please report" in record.getMessage()) == isinstance(wrong, Planted)


def test_only_the_variant_that_fails_goes_elsewhere(monkeypatch):
    strided = dataclasses.replace(VARIANT, indices="strided")
    monkeypatch.setattr(
        backends, "fault_of", lambda b, v: "wrong" if b.name == "cpu" and v == strided else None
    )
    assert choose_for(strided).name == "eager"
    assert choose_for(VARIANT).name == "cpu"


def test_no_backend_at_all_is_an_error_that_says_what_each_did(monkeypatch):
    monkeypatch.setattr(backends, "fault_of", lambda b, v: f"{b.name} is off by one")
    with pytest.raises(backends.BackendUnavailableError, match=r"cpu is off by one.*eager is off"):
        choose_for(VARIANT)


def test_a_backend_asked_for_by_name_is_not_tried(monkeypatch):
    monkeypatch.setattr(backends, "fault_of", pytest.fail)
    assert choose_for(VARIANT, "cpu").name == "cpu"
    monkeypatch.setenv("TORCH_BF16_BACKEND", "eager")
    assert choose_for(VARIANT).name == "eager"
    assert choose_for(VARIANT, "cpu").name == "cpu"
    monkeypatch.setenv("TORCH_BF16_BACKEND", "gpu")
    with pytest.raises(ValueError, match="unknown backend 'gpu'; known backends: cpu, eager"):
        choose_for(VARIANT)


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(certificate.cuda_graphs, "capturing", lambda devices: True)
    assert "CUDA graph" in certificate.fault_of(Planted("nowhere"), VARIANT)
    assert certificate._known == {}


def test_a_trial_leaves_random_numbers_and_gradient_mode_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with torch.inference_mode():
        assert certificate.fault_of(choose(CPU, "cpu"), VARIANT) is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.is_grad_enabled()


def test_a_rule_whose_options_cannot_be_made_up_is_used_untried(caplog):
    def options(group):
        raise KeyError("mine")

    mine = dataclasses.replace(ADAMW, name="mine", options=options)
    variant = Variant(mine, (BF16_STOCHASTIC, FP32, FP32), torch.bfloat16, CPU)
    with caplog.at_level(logging.INFO, "torch_bf16"):
        assert certificate.fault_of(choose(CPU, "cpu"), variant) is None
    assert "cannot be tried" in caplog.text


@pytest.mark.parametrize("rule", RULES)
def test_most_weights_of_a_trial_stay_finite(rule):
    # Of numbers that are all NaN a fault shows nothing; a scale of NaN makes a whole block of them.
    found = [each for each in variants(rule) if each.formats[0].planes[0].block == 1]
    variant = next((v for v in found if any(each.block > 1 for each in v.formats)), found[0])
    weights = np.concatenate(Trial.of(variant).run(choose(CPU, "eager"), CPU)[0])
    floats = (weights.astype(np.uint32) << 8 * (4 - weights.itemsize)).view(np.float32)
    assert np.isfinite(floats).mean() > 0.95


def test_all_planes_of_a_trial_change():
    # A trial whose numbers stayed as they were would certify a kernel that does nothing.
    for variant in some_variants():
        planes = Trial.of(variant).planes
        before = digests_of([[t[i][j] for t in planes]
                             for i, each in enumerate(variant.formats)
                             for j in range(len(each.planes))])  # fmt: skip
        assert all(a != b for a, b in zip(before, expected(variant), strict=True)), variant.name

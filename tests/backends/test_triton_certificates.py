"""Certificates of the Triton kernels, run by Triton's interpreter on the trial's small tensors."""

import dataclasses

import pytest
from certificate_digests import by_the_oracle, variants

from torch_bf16 import backends
from torch_bf16.backends.certificates import certificate, trial
from torch_bf16.backends.certificates.trial import digests_of
from torch_bf16.rules import ADAM, ADAMW, arithmetic

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")


def fault_in(rule, number, plant=None):
    """What a certificate says of a variant, with a fault planted in one of the kernel's parts."""
    variant = variants(rule)[number]
    with pytest.MonkeyPatch.context() as patch:
        # The large tensors take the interpreter minutes.
        patch.setattr(trial, "_LARGE", ())
        digests = digests_of(by_the_oracle(variant))
        patch.setattr(certificate, "expected", lambda variant: digests)
        if plant:
            plant(patch)
        return certificate._load(backends._BACKENDS["triton"], variant)()


@pytest.mark.parametrize(("rule", "number"), [("adamw", 3), ("store", 4)])
def test_the_kernels_pass(interpreted, rule, number):
    assert interpreted(fault_in, rule, number) is None


def in_load(patch):
    from torch_bf16.backends.triton import chunks

    load = chunks.load_plane

    def beside(at, i, n, size, *rest):
        return load(at + size, i, n, size, *rest)

    patch.setattr(chunks, "load_plane", beside)


def in_store(patch):
    from torch_bf16.backends.triton import kernel

    store = kernel.store_plane
    patch.setattr(kernel, "store_plane", lambda at, i, stop, *rest: store(at, i, stop - 1, *rest))


def in_noise(patch):
    from torch_bf16.backends.triton import kernel

    word = kernel.noise_word
    patch.setattr(kernel, "noise_word", lambda k0, k1, i, eight: word(k0, k1, i + 8, eight))


def in_rounding(patch):
    from torch_bf16.backends.triton import kernel

    encode = kernel.encode

    def off_by_one(name, x, words, *rest):
        return encode(name, x, tuple(word + 0x10000 for word in words), *rest)

    patch.setattr(kernel, "encode", off_by_one)


def _without_eps(w, g, states, scalars):
    grad_scale, decay, beta2, one_minus_beta1, one_minus_beta2, step_size, _ = scalars
    m, v = states
    g = g * grad_scale
    m = m + (g - m) * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    return w * decay - arithmetic.div(m * step_size, arithmetic.sqrt(v)), (m, v)


def in_rule(patch):
    from torch_bf16.backends.triton import arithmetic, kernel, launch

    other = arithmetic.lift_update(dataclasses.replace(ADAMW, update=_without_eps))
    patch.setattr(kernel, "lift_update", lambda rule, together: other)
    patch.setattr(launch, "constants", kernel.constants.__wrapped__)


def in_scalars(patch):
    from torch_bf16.backends.triton import arithmetic, scalars

    patch.setattr(scalars, "lift_scalars", lambda rule: arithmetic.lift_scalars(ADAM))


@pytest.mark.parametrize("plant", [in_load, in_store, in_noise, in_rounding, in_rule, in_scalars])
def test_a_fault_in_any_part_of_the_kernels_is_found(interpreted, plant):
    fault = interpreted(fault_in, "adamw", 0, plant)
    assert fault is not None
    assert ("scalars of step" if plant is in_scalars else "has the wrong bits") in fault

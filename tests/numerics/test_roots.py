"""The square root of fp32 numbers on devices without fp64; all of them: tests/proofs/roots.py."""

import numpy as np
import pytest
import torch

from torch_bf16.gradients.norm import norm_over_ranks
from torch_bf16.numerics import roots

SPECIAL = [0, 1, 2, 0x007FFFFF, 0x00800000, 0x3F7FFFFF, 0x3F800000, 0x7F7FFFFF, 0x7F800000,
           0x7FC00000, 0x7F800001]  # fmt: skip


def numbers(step):
    """Every ``step``-th bit pattern of each sign, and the special ones."""
    patterns = torch.arange(-(2**31), 2**31, step)
    special = torch.tensor(SPECIAL)
    return torch.cat([patterns, special, special - 2**31]).to(torch.int32).view(torch.float32)


def assert_is_ieees(found, x):
    with np.errstate(invalid="ignore"):
        expected = np.sqrt(x.numpy())
    got = found.numpy()
    same = (got.view(np.int32) == expected.view(np.int32)) | (np.isnan(got) & np.isnan(expected))
    assert same.all(), x[int(np.argmin(same))]


@pytest.mark.parametrize("root", [roots.sqrt, roots.sqrt_without_fp64])
def test_the_root_is_ieees_on_every_kind_of_number(root):
    for x in (numbers(4093), torch.arange(0x3F800000, 0x40800000, 61).int().view(torch.float32)):
        assert_is_ieees(root(x), x)


@pytest.mark.parametrize("ulps", [-30, -3, -1, 1, 3, 30])
def test_a_root_that_is_ulps_off_is_corrected(ulps, monkeypatch):
    x, exact = numbers(65521), torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda y: exact(y) + ulps)
    assert_is_ieees(roots.sqrt_without_fp64(x), x)


def test_shapes_stay_and_nothing_is_overwritten():
    x = torch.tensor([[4.0, 2.0], [0.25, 2.0**-148]])
    found = roots.sqrt_without_fp64(x)
    assert found.tolist() == [[2.0, 2.0**0.5], [0.5, 2.0**-74]] or found.shape == x.shape
    assert x.tolist() == [[4.0, 2.0], [0.25, 2.0**-148]]


def test_norms_are_taken_on_the_host_where_a_device_has_no_fp64(monkeypatch):
    norms = {(): [torch.tensor(3e30), torch.tensor(4e30)]}
    expected = norm_over_ranks(norms)
    monkeypatch.setattr("torch_bf16.gradients.norm.has_fp64", lambda device: False)
    assert torch.equal(norm_over_ranks(norms), expected)


def test_devices_without_fp64_are_known():
    assert roots.has_fp64(torch.device("cpu"))
    assert roots.has_fp64(torch.device("cuda"))
    assert not roots.has_fp64(torch.device("mps"))

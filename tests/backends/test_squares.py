"""Sums of squares: right over the whole range of numbers, the same in every run."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from gpu_marks import each_device

import torch_bf16
from torch_bf16 import backends
from torch_bf16.backends.certificates import fault_of_squares, sums
from torch_bf16.backends.pieces import addresses_and_sizes, cut

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
SCALES = [1.0, 2.0**54, 2.0**100, 2.0**-44, 2.0**-120, 0.0]


def tensors_of(dtype, scale, sizes=(1, 0, 130, 5000, 70_001)):
    """Normally distributed numbers, at addresses of any kind."""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(n + 1, generator=generator, dtype=torch.float64) for n in sizes]
    return [(scale * each).to(dtype)[1:] for each in numbers]


def exact(tensors):
    """In fp64, each number a power of two away so that no square underflows."""
    numbers = torch.cat([each.double() for each in tensors])
    return math.fsum((numbers * numbers).tolist())


def relative_error(name, dtype, scale, sizes=(1, 0, 130, 5000)):
    tensors = tensors_of(dtype, scale, sizes)
    found = float(backends.choose(CPU, name).squares(tensors))
    expected = exact(tensors)
    return abs(found / expected - 1) if expected else found


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cpu_kernel_is_right_to_fp64(dtype, scale):
    assert relative_error("cpu", dtype, scale, (1, 0, 130, 5000, 70_001)) < 1e-13


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_triton_kernel_is_right_to_fp32(interpreted, dtype, scale):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    # A sum of at most 32 squares for each lane, then a tree of 2048 of them: 32 + 11 roundings.
    assert interpreted(relative_error, "triton", dtype, scale) < 43 * 2.0**-24


def wrong_sum(name, dtype, change=None):
    with pytest.MonkeyPatch.context() as patch:
        if change:
            change(patch)
        # Of the last size the interpreter takes its time.
        patch.setattr(sums, "_SIZES", (1, 3, 0, 130, 4097, 2**16 + 77))
        return sums.wrong_sum(backends.choose(CPU, name), CPU, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_kernels_pass_the_trial(interpreted, dtype):
    assert wrong_sum("cpu", dtype) is None
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    assert interpreted(wrong_sum, "triton", dtype) is None


def one_element_short(patch):
    from torch_bf16.backends.triton import squares

    block = squares._block
    patch.setattr(squares, "_block", lambda at, i, n, *rest: block(at, i, n - 1, *rest))


def one_element_on(patch):
    from torch_bf16.backends.triton import squares

    block = squares._block
    patch.setattr(
        squares, "_block", lambda at, i, n, x, size, *r: block(at + size, i, n, x, size, *r)
    )


@pytest.mark.parametrize("change", [one_element_short, one_element_on])
def test_a_planted_fault_is_found(interpreted, change):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    assert "a sum of squares is" in interpreted(wrong_sum, "triton", torch.bfloat16, change)


def test_a_kernel_that_fails_its_trial_is_not_used_and_that_is_said(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("TORCH_BF16_CACHE", str(tmp_path))
    cpu = backends._BACKENDS["cpu"]
    monkeypatch.setattr(type(cpu), "squares", lambda self, tensors: torch.tensor(1.0).double())
    monkeypatch.setattr("torch_bf16.backends.certificates.certificate._known", {})
    for each in (backends._squares_by, backends._warn_of):
        each.cache_clear()
    tensors = tensors_of(torch.float32, 1.0)
    try:
        with caplog.at_level(logging.WARNING):
            found = backends.squares(tensors)
        assert float(found) == pytest.approx(exact(tensors), rel=1e-5)
        assert "cpu backend is not used for sums of squares in torch.float32" in caplog.text
        assert "a sum of squares is 1.0 and not" in fault_of_squares(cpu, CPU, torch.float32)
    finally:
        for each in (backends._squares_by, backends._warn_of):
            each.cache_clear()


def test_the_number_of_threads_does_not_change_a_bit():
    tensors, before, found = tensors_of(torch.bfloat16, 1.0, (3_000_001, 7, 500_000)), 1, []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(float(backends.choose(CPU, "cpu").squares(tensors)))
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 1


def test_what_no_kernel_reads_is_left_to_torch():
    strided, repeated = torch.randn(8, 6)[:, ::2], torch.randn(1, 6).expand(8, 6)
    assert addresses_and_sizes([strided]) is None
    assert addresses_and_sizes([repeated]) is None
    for tensor in (strided, repeated, torch.randn(40).half(), torch.randn(40).double()):
        parameter = torch.nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor
        norm = torch_bf16.total_norm(parameter)
        assert norm.item() == pytest.approx(tensor.double().norm().item(), rel=1e-6)
        assert norm.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_order_of_dimensions_in_memory_is_all_one_to_a_kernel(dtype):
    matrix, images = torch.randn(8, 6).to(dtype), torch.randn(4, 3, 5, 5).to(dtype)
    found = float(backends.squares([matrix.t(), images.to(memory_format=torch.channels_last)]))
    assert found == pytest.approx(exact([matrix.flatten(), images.flatten()]), rel=1e-14)


@each_device()
def test_norms_are_right_on_every_device(device):
    parameters = []
    for tensor in [*tensors_of(torch.bfloat16, 1.0), *tensors_of(torch.float32, 2.0**70)[:3]]:
        parameters.append(torch.nn.Parameter(torch.zeros_like(tensor, device=device)))
        parameters[-1].grad = tensor.to(device)
    expected = math.sqrt(exact([p.grad.cpu() for p in parameters]))
    found = [torch_bf16.total_norm(parameters) for _ in range(2)]
    assert found[0].item() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(*found)
    assert found[0].device.type == device


def test_pieces_are_those_of_the_tensors():
    tensors = [torch.zeros(n, dtype=torch.bfloat16) for n in (5, 0, 8, 1)]
    found = addresses_and_sizes(tensors)
    np.testing.assert_array_equal(found, [(each.data_ptr(), len(each)) for each in tensors])
    which, starts = cut(found[:, 1], 4)
    assert [*zip(which, starts, strict=True)] == [(0, 0), (0, 4), (2, 0), (2, 4), (3, 0)]


def test_a_bf16_norm_of_many_elements_is_not_off_by_thousandths():
    """torch's own on CPUs adds up in fp32, one after the other."""
    parameter = torch.nn.Parameter(torch.zeros(20_000_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.1)
    expected = 20_000_000**0.5 * parameter.grad[0].item()
    assert torch_bf16.total_norm(parameter).item() == pytest.approx(expected, rel=1e-7)

"""Launching the Triton kernels without a GPU: a driver that compiles, and notes the launches."""

import numpy as np
import pytest
import torch
from bucket_cases import SIZES, inputs_of, make_case

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")

from launchless import Driver
from triton.runtime import driver

import torch_bf16
from torch_bf16.backends.triton import TritonBackend, launch
from torch_bf16.backends.triton import scalars as scalars_module
from torch_bf16.backends.triton.kernel import step


@pytest.fixture
def device(monkeypatch):
    step.device_caches.clear()
    monkeypatch.setattr(driver, "_active", Driver())
    yield driver.active
    step.device_caches.clear()


def compiled_kernels():
    return len(step.device_caches[0][0])


def test_nothing_is_compiled_after_the_first_step(device):
    bucket, gradients = make_case("adamw", "stochastic", torch.bfloat16, [0] * len(SIZES))
    kernel = launch.TritonKernel(bucket)
    for number in (1, 2, 15, 16, 17, 1 << 20):
        kernel(inputs_of(bucket, gradients, number))
        assert compiled_kernels() == 1
    assert len(device.launches) == 6


def test_other_tensors_of_a_variant_take_the_same_kernel(device):
    for sizes in ((1,), (16, 1), (100_000, 3, 17)):
        case = make_case("adamw", "stochastic", torch.bfloat16, [0] * len(sizes), sizes=sizes)
        launch.TritonKernel(case[0])(inputs_of(*case, 1))
    assert compiled_kernels() == 1
    assert [arguments[0] for arguments in device.launches] == [1, 2, 15]


def test_a_bucket_without_elements_launches_nothing(device):
    case = make_case("sgd", "nearest", torch.bfloat16, [0, 0], sizes=(0, 0))
    launch.TritonKernel(case[0])(inputs_of(*case, 1))
    assert device.launches == []


def test_every_element_is_in_one_chunk():
    sizes = (0, 8192, 8193, 30_000)
    bucket, _ = make_case("sgd", "nearest", torch.bfloat16, [0] * 4, sizes=sizes)
    chunks = launch._chunks(bucket)
    assert chunks.tolist() == [[1, 0], [2, 0], [2, 1], *([3, i] for i in range(4))]
    assert np.bincount(chunks[:, 0]).tolist() == [0, 1, 2, 4]


def test_a_steps_two_kernels_are_compiled_at_the_first_step_and_never_again(device):
    scalars_module.prepare.device_caches.clear()
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16).view(64, 64))
    weight.grad = torch.ones_like(weight)
    optimizer = torch_bf16.AdamW([weight], lr=1e-3, backend="triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonBackend, "unavailable", lambda self, device: None)
        for step_number in range(20):
            optimizer.param_groups[0]["lr"] = 1.0 / (1 + step_number)
            optimizer.scale_next_step(1.0 if step_number % 2 else torch.tensor(16.0))
            optimizer.step()
            assert compiled_kernels() == 1
            assert len(scalars_module.prepare.device_caches[0][0]) == 1
    assert len(device.launches) == 2 * 20
    scalars_module.prepare.device_caches.clear()


def test_kernels_are_compiled_when_a_step_is_planned_and_before_it_is_counted(device):
    scalars_module.prepare.device_caches.clear()
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = torch_bf16.AdamW([weight], lr=1e-3, backend="triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonBackend, "unavailable", lambda self, device: None)
        broken = patch.context()
        with broken as inner:

            def fail(*arguments, **named):
                raise RuntimeError("no C compiler")

            inner.setattr(step, "warmup", fail)
            with pytest.raises(RuntimeError, match="no C compiler"):
                optimizer.step()
        assert device.launches == []
        assert not optimizer.state
        optimizer.step()
    assert len(device.launches) == 2
    scalars_module.prepare.device_caches.clear()

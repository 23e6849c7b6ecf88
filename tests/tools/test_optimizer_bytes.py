"""Bytes of an optimizer: what it holds, and what a step moves."""

import pytest
import torch
from bench_cases import PARAMETERS, SHAPES, TORCH, entry, stepped

from torch_bf16 import RECIPES
from torch_bf16.tools.bench.entries import ours
from torch_bf16.tools.optimizer_bytes import held_bytes, moved_bytes


@pytest.mark.parametrize(("recipe", "states"), [("bf16-stochastic", 4), ("bf16-fp32-master", 10)])
def test_bytes_of_ours_are_those_of_the_formats(recipe, states):
    """Of a matrix; the vector has an exact master and fp32 moments in both."""
    (each,) = ours([recipe])
    assert RECIPES[recipe].bytes_per_parameter == 2 + states
    optimizer = stepped(each, [(48, 64), (64,)])
    matrix, vector, steps = 48 * 64, 64, 2 * 4
    held = (4 + states) * matrix + (4 + 10) * vector + steps
    assert held_bytes(optimizer) == held
    assert moved_bytes(optimizer) == 2 * held - 2 * (matrix + vector)


def test_torch_in_fp32_holds_16_bytes_and_moves_28():
    optimizer = stepped(TORCH, [(48, 64)])
    assert held_bytes(optimizer) == 16 * 48 * 64 + 4
    assert moved_bytes(optimizer) == 28 * 48 * 64 + 8


def test_tensors_are_found_wherever_a_library_keeps_them():
    """int8 codes in an object in a list in a dict; the gradient again, which counts once."""
    optimizer = stepped(entry(), SHAPES)
    assert held_bytes(optimizer) == (2 + 2 + 1) * PARAMETERS


def test_tensors_that_a_subclass_is_made_of_count():
    class Quantized(torch.Tensor):
        @staticmethod
        def __new__(cls, codes, scale):
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

        def __init__(self, codes, scale):
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

        def __torch_dispatch__(self, *arguments):
            raise AssertionError("nothing is computed here")

    optimizer = stepped(TORCH, [(48, 64)])
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    codes = torch.zeros(48, 64, dtype=torch.uint8)
    state["exp_avg"] = Quantized(codes, torch.zeros(48))
    assert held_bytes(optimizer) == (4 + 4 + 4 + 1) * 48 * 64 + 4 * 48 + 4

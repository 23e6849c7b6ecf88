"""Tensors whose elements are several runs of the whole tensor, or lie in transposed order."""

import itertools

import numpy as np
import pytest
import torch
from bucket_cases import BLOCKED, assert_oracle_agrees, id_of, make_case
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_bf16.backends import choose
from torch_bf16.sharding.dtensor import box_at
from torch_bf16.sharding.span import Span, runs_of

# Runs of one element, of odd numbers, across blocks of a kernel, over blocks of 2**32, alone, and
# of eight and nine elements.
SIZES = (0, 3, 4097, 4 * 1021, 2 * 8192 + 6, 50, 8192, 9 * 1000)
RUNS = (
    (7, 100),
    (1, 2**33),
    (17, 4001),
    (1021, 1022),
    (8198, 2**32 - 5),
    (50, 60),
    (8, 24),
    (9, 70),
)
OFFSETS = (0, 5, 2**31 - 9, 2**32 - 2000, 7, 2**32 - 20, 40, 3)
BLOCKED_SIZES = (0, 64, 4096, 5 * 192, 2 * 8192 + 640)
BLOCKED_RUNS = ((64, 128), (1024, 2**33), (64, 4096), (192, 256), (8512, 2**32 - 64))
BLOCKED_OFFSETS = (0, 64, 2**31 - 64, 2**32 - 1984, 128)
CASES = [
    ("adamw", "stochastic", torch.bfloat16),
    ("adamw", "bf16+fp32", torch.float32),
    ("sgd_momentum", "stochastic", torch.bfloat16),
    ("adamw", "int8", torch.bfloat16),
    ("average", "only_uint8", torch.bfloat16),
    ("store", "only_int8", torch.float32),
]


def run_and_compare(case, backend):
    sizes, runs, offsets = SIZES, RUNS, OFFSETS
    if case[1] in BLOCKED:
        sizes, runs, offsets = BLOCKED_SIZES, BLOCKED_RUNS, BLOCKED_OFFSETS
    case = make_case(*case, offsets, sizes=sizes, runs=runs)
    assert_oracle_agrees(case, choose(torch.device("cpu"), backend), (1, 2), offsets, runs)


@pytest.mark.parametrize("case", CASES, ids=id_of)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_steps_on_runs_equal_the_oracle_bit_for_bit(backend, case):
    run_and_compare(case, backend)


@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_tritons_steps_on_runs_equal_the_oracle_bit_for_bit(interpreted, case):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    interpreted(run_and_compare, case, "triton")


# Matrices of one row, of one column, cut at both ends, of eight and nine columns, the widest, the
# highest, and of which the last ends as late as a tensor can.
TRANSPOSED_SIZES = (0, 3, 4097, 4 * 1021, 8192, 2 * 8192 + 6, 9000, 9000, 700)
MATRICES = (
    (7, 100),
    (5, 1),
    (1, 40),
    (1021, 9),
    (8, 3),
    (9, 5),
    (2**19 - 1, 3),
    (3, 2**19 - 1),
    (64, 1024),
)
PLACES = (0, 5, 11, 2**31 - 9, 8, 16, 2**19 - 100, 3 * (2**19 - 5), 2**32 - 700)


def walk_and_compare(case, backend):
    case = make_case(*case, PLACES, sizes=TRANSPOSED_SIZES, matrices=MATRICES)
    backend = choose(torch.device("cpu"), backend)
    assert_oracle_agrees(case, backend, (1, 2), PLACES, matrices=MATRICES)


@pytest.mark.parametrize("case", CASES[:3], ids=id_of)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_steps_in_transposed_order_equal_the_oracle_bit_for_bit(backend, case):
    walk_and_compare(case, backend)


@pytest.mark.parametrize("case", CASES[:3], ids=id_of)
def test_tritons_steps_in_transposed_order_equal_the_oracle_bit_for_bit(interpreted, case):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    interpreted(walk_and_compare, case, "triton")


@pytest.mark.parametrize("columns", [2, 3, 7, 1000, 2**19 - 3, 2**19 - 1])
def test_divisions_in_fp32_are_exact(columns):
    """Of every number that kernels divide, by an inverse that is at most two units off."""
    x = np.arange(2**19 + 2**15, dtype=np.int64)
    exact = np.float32(1) / np.float32(columns)
    units = range(-2, 3)
    for inverse in (
        exact * (np.float32(1) + np.float32(unit) * np.float32(2**-23)) for unit in units
    ):
        quotients = ((x.astype(np.float32) + np.float32(0.5)) * inverse).astype(np.int32)
        assert np.array_equal(quotients, x // columns)


@pytest.mark.parametrize("indices", ["strided", "transposed"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_triton_compiles_a_kernel_for_runs(target, indices):
    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    from dataclasses import replace

    from triton_variants import all_variants, compiled

    plain = all_variants()["adamw_bf16_stochastic_bf16_nearest_bf16_stochastic_bfloat16"]
    kernel = compiled(replace(plain, indices=indices), target)
    assert kernel.asm["hsaco" if target == "gfx942" else "cubin"]


def pieces(indices, mesh_shape, placements):
    """What each rank of a mesh holds of a tensor, by cutting the tensor itself, as torch does."""
    held = {(): indices}
    for size, placement in zip(mesh_shape, placements, strict=True):
        held = {
            (*coordinate, i): part
            for coordinate, whole in held.items()
            for i, part in enumerate(cut(whole, size, placement))
        }
    return held


def cut(whole, size, placement):
    if isinstance(placement, Replicate):
        return [whole] * size
    dim = placement.dim
    if not isinstance(placement, _StridedShard):
        return chunks(whole, size, dim)
    each = [chunks(part, size, dim) for part in chunks(whole, placement.split_factor, dim)]
    return [torch.cat([part[i] for part in each], dim) for i in range(size)]


def chunks(whole, n, dim):
    parts = list(whole.chunk(n, dim))
    return parts + [whole.narrow(dim, 0, 0)] * (n - len(parts))


PLACEMENTS = [
    (Replicate(),),
    (Shard(0),),
    (Shard(1),),
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(1), Shard(1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(1, split_factor=2), Shard(1)),
    (Replicate(), _StridedShard(0, split_factor=2), Shard(0)),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_the_global_indices_of_a_shard_are_those_of_its_elements(placements):
    strided = any(isinstance(each, _StridedShard) for each in placements)
    for shape in [(8, 4), (4, 12), (1, 8), (8, 4, 3), (5, 7), (7, 3), (3, 1)]:
        if strided and any(size % 4 for size in shape[:2]):
            continue
        for mesh_shape in itertools.product((1, 2, 3), repeat=len(placements)):
            if strided and (mesh_shape[-1] != 2 or 3 in mesh_shape):
                continue
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            for coordinate, held in pieces(whole, mesh_shape, placements).items():
                box = box_at(shape, mesh_shape, coordinate, placements)
                assert torch.equal(whole[box], held) or held.numel() == whole[box].numel() == 0
                start, width, pitch = runs_of(shape, box)
                e = torch.arange(held.numel())
                found = start + e // width * pitch + e % width
                assert torch.equal(found, held.flatten())


def test_uneven_fsdp_over_tensor_parallelism_cuts_what_tensor_parallelism_left():
    # Tensor parallelism leaves 4 and 3 rows; FSDP cuts these into 2, 2, 0 and 1, 1, 1.
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    rows = [box_at((7, 2), (3, 2), (dp, tp), placements)[0] for tp in range(2) for dp in range(3)]
    assert [(r.start, r.stop) for r in rows] == [(0, 2), (2, 4), (4, 4), (4, 5), (5, 6), (6, 7)]


@pytest.mark.parametrize("box", [(slice(0, 4), slice(0, 3), slice(0, 4))])
def test_runs_at_unequal_distances_are_refused(box):
    with pytest.raises(ValueError, match="dimensions 1 and 2"):
        runs_of((4, 6, 8), box)


def test_long_runs_are_spans_of_their_own():
    span = Span("w", (4, 2**32), 0, 4 * 2**31, 5, 2**31, 2**32)
    assert [(s.start, s.numel, s.offset) for s in span.split()] == [
        (run * 2**31, 2**31, 5 + run * 2**32) for run in range(4)
    ]

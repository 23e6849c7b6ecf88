"""What Triton compiles for GPUs has the oracle's bits: its PTX is run, without a GPU.

A process for each GPU, because there Triton's driver is replaced: see ``tests/support/ptx``. Every
variant is run by ``tests/proofs/compiled_kernels.py``.
"""

from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")

import torch
from certificate_digests import variants
from forkserver import forkserver
from optimizer_cases import assert_same, make_optimizer, make_parameters, snapshot, take_steps
from proofs.compiled_kernels import fault, install
from ptx import machine
from ptx.arithmetic import U32, U64
from ptx.memory import Global
from ptx.program import Program


@pytest.fixture(scope="module")
def compiled_for():
    """``compiled_for("sm_90", function, *arguments)``: a call where the Triton backend's kernels
    are those of a GPU."""
    pools = {}

    def call(target, function, *arguments):
        if target not in pools:
            pools[target] = ProcessPoolExecutor(1, forkserver(), install, (target,))
        return pools[target].submit(function, *arguments).result(timeout=240)

    yield call
    for pool in pools.values():
        pool.shutdown()


def number_of(rule, name):
    """Which of a rule's variants has a name that ends like this."""
    (number,) = [n for n, each in enumerate(variants(rule)) if each.name.endswith(name)]
    return number


STOCHASTIC, EXACT = "bf16_stochastic_bf16_nearest_bf16_stochastic_bfloat16", "16_fp32_fp32_bfloat16"


@pytest.mark.parametrize(
    ("target", "rule", "name"),
    [
        ("sm_80", "adamw", EXACT),
        ("sm_90", "adamw", STOCHASTIC),
        ("sm_90", "adamw", f"{STOCHASTIC}_strided"),
        ("sm_90", "adamw", f"{STOCHASTIC}_transposed"),
        ("sm_90", "adam", "_8_int8_uint8_bfloat16"),
        # Eight divisions and roots at once, in packed arithmetic.
        ("sm_100", "adamw", STOCHASTIC),
    ],
)
def test_compiled_kernels_pass_the_certificate_that_a_gpu_asks_of_them(
    compiled_for, target, rule, name
):
    assert compiled_for(target, fault, rule, number_of(rule, name)) is None


def test_compiled_sums_of_squares_are_right(compiled_for):
    assert compiled_for("sm_90", fault, "squares", 0) is None


def optimizers_agree(name, recipe):
    optimizers = [
        make_optimizer(name, recipe, backend, make_parameters().values(), lr=torch.tensor(0.01))
        for backend in ("triton", "eager")
    ]
    for optimizer in optimizers:
        take_steps(optimizer, [0])
        optimizer.scale_next_step(torch.tensor(0.25))
        take_steps(optimizer, [1])
        optimizer.skip_next_step_where(torch.tensor(1.0))
        take_steps(optimizer, [2])
        optimizer.param_groups[0]["lr"].mul_(0.5)
        take_steps(optimizer, [3])
    assert_same(*map(snapshot, optimizers))


@pytest.mark.parametrize("recipe", ["stochastic", "master"])
def test_optimizers_step_with_compiled_kernels_as_they_do_in_eager(compiled_for, recipe):
    compiled_for("sm_90", optimizers_agree, "adamw", recipe)


def fault_where(old, new):
    """What a certificate says where each such instruction is another one."""
    of_kernel = Program.of_kernel
    with pytest.MonkeyPatch.context() as patch:
        tampered = lambda text: of_kernel(text.replace(old, new))  # noqa: E731
        patch.setattr(machine, "_program", tampered)
        return fault("adamw", number_of("adamw", STOCHASTIC))


@pytest.mark.parametrize(
    ("old", "new"),
    [("0x7632U", "0x7610U"), ("sqrt.rn.f32", "mov.b32"), ("shr.u32", "shr.s32")],
)
def test_another_instruction_is_found(compiled_for, old, new):
    said = compiled_for("sm_90", fault_where, old, new)
    assert "has the wrong bits" in said


def run(text, *tensors, n_bytes=0, programs=1):
    """64 threads of each program."""
    addresses = {f"in{number}": U64(each.data_ptr()) for number, each in enumerate(tensors)}
    program, memory = Program.of_inline(text), Global(tensors, 64)
    machine.Lanes(program, range(programs), 64, addresses, memory, n_bytes).run()


TID = "mov.u32 %r1, %tid.x; "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ld.global.b32 {%r1}, [in0 + 2]; ret;", "not aligned"),
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [in0 + 8]; ret;", "not aligned"),
        ("st.global.b32 [in0 + 256], {1}; ret;", "outside of all tensors"),
        (TID + "setp.lt.u32 %p1, %r1, 8; @%p1 bra on; bar.sync 0; on: ret;", "some threads miss"),
        (TID + "st.shared.b32 [0], {%r1}; ret;", "two warps at one word"),
        (TID + "st.shared.b32 [64], {1}; ret;", "beyond shared memory"),
        ("add.s32 %r1, %r2, 1; ret;", "%r2"),
        ("bar.warp.sync -1; ret;", "bar.warp.sync"),
        ("red.global.add.f32 [in0], 0f3F800000; ret;", "f32"),
        (TID + "shfl.sync.bfly.b32 %r2, %r1, 1, 31, 255; ret;", "lanes are left out"),
        (TID + "shfl.sync.bfly.b32 %r2, %r1, 1, 0x1C1F, -1; ret;", "0x1C1F"),
    ],
)
def test_what_a_gpu_would_not_tell_is_an_error(text, message):
    tensor = torch.zeros(64, dtype=torch.int32)
    with pytest.raises((AssertionError, ValueError), match=message):
        run(text, tensor, n_bytes=64)


@pytest.mark.parametrize(
    "text",
    [
        "mov.u32 %r1, %ctaid.x; st.global.b32 [in0], {%r1}; ret;",
        "mov.u32 %r1, %ctaid.x; setp.eq.b32 %p1, %r1, 0; @%p1 st.global.b32 [in0], {%r1};"
        " ld.global.b32 {%r2}, [in0]; ret;",
    ],
)
def test_programs_that_use_each_others_results_are_an_error(text):
    tensor = torch.zeros(1, dtype=torch.int32)
    run(text, tensor)
    with pytest.raises(AssertionError, match="two programs at one number"):
        run(text, tensor, programs=2)


@pytest.mark.parametrize(
    "name",
    [
        "add.rz.f32", "add.ftz.f32", "sqrt.approx.f32", "div.full.f32", "max.NaN.f32",
        "cvt.rni.s32.f32", "mul.hi.u32", "bfe.s32", "setp.lt.or.u32", "rcp.rn.f32",
    ],
)  # fmt: skip
def test_what_is_not_computed_is_not_taken_for_its_kin(name):
    with pytest.raises(AssertionError, match=f"{name} is not computed here"):
        run(f"{name} %r1, 1, 2, 3; ret;", torch.zeros(64))


def test_registers_that_some_lanes_wrote_hold_no_zeros_in_the_others():
    tensor = torch.zeros(64, dtype=torch.int32)
    run(
        TID + "setp.lt.u32 %p1, %r1, 8; @%p1 mov.u32 %r2, 0; mul.wide.u32 %rd1, %r1, 4;"
        " add.s64 %rd1, %rd1, in0; st.global.b32 [%rd1], {%r2}; ret;",
        tensor,
    )
    assert torch.equal(tensor == 0, torch.arange(64) < 8)


def test_lanes_that_part_meet_again_and_exchange_what_barriers_let_them():
    """Each thread counts up to its own number, and reads it from another warp's."""
    tensor = torch.zeros(64, dtype=torch.int32)
    run(
        TID + "mov.u32 %r2, 0; loop: setp.ge.u32 %p1, %r2, %r1; @%p1 bra done; add.s32 %r2, %r2, 1;"
        " bra loop; done: shl.b32 %r3, %r1, 2; st.shared.b32 [%r3], {%r2}; bar.sync 0;"
        " xor.b32 %r4, %r1, 33; shl.b32 %r4, %r4, 2; ld.shared.b32 %r5, [%r4];"
        " mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd1, in0; st.global.b32 [%rd1], {%r5}; ret;",
        tensor, n_bytes=256,
    )  # fmt: skip
    assert torch.equal(tensor, torch.arange(64, dtype=torch.int32) ^ 33)


def test_numbers_beyond_a_shift_or_an_integer_and_nan_do_what_ptx_says():
    tensor = torch.zeros(14, dtype=torch.int32)
    text = "".join(
        f"{each} st.global.b32 [in0 + {4 * place}], {{%r1}}; "
        for place, each in enumerate(
            [
                "shl.b32 %r1, 1, 32;",
                "shr.s32 %r1, -8, 40;",
                "shr.u32 %r1, -8, 40;",
                "cvt.rzi.s32.f32 %r1, 0f4F800000;",
                "cvt.rzi.s32.f32 %r1, 0f7FC00000;",
                "prmt.b32 %r1, 0x00008000, 0x11223344, 0x7659;",
                "min.f32 %r1, 0f00000000, 0f80000000;",
                "div.rn.f32 %r1, 0f00000000, 0f00000000;",
                "max.f32 %r1, 0f7FC00001, 0f7FC00002;",
                "max.f32 %r1, 0f7FC00001, 0fBF800000;",
                "mov.b32 %r2, 0f7FC00001; redux.sync.max.f32 %r1, %r2, -1;",
                TID + "and.b32 %r1, %r1, 31; setp.eq.u32 %p1, %r1, 5;"
                " selp.f32 %r2, 0f3F800000, 0f7FC00001, %p1; redux.sync.max.f32 %r1, %r2, -1;",
                TID
                + "and.b32 %r1, %r1, 31; sub.s32 %r1, %r1, 16; redux.sync.add.s32 %r1, %r1, -1;",
                "cvt.rzi.s64.f32 %rd1, 0f7FC00000; shr.u64 %rd1, %rd1, 32; cvt.u32.u64 %r1, %rd1;",
            ]
        )
    )
    run(text + "ret;", tensor)
    nan, minus, one = 0x7FFFFFFF, 0xBF800000, 0x3F800000
    want = [0, -1, 0, 2**31 - 1, 0, 0x112233FF, -(2**31), nan, nan, minus, nan, one, -16, -(2**31)]
    np.testing.assert_array_equal(tensor.numpy().view(U32), np.array(want, np.int64).astype(U32))

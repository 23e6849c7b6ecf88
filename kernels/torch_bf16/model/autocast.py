"""Operations that torch's autocast leaves alone, in which fp32 tensors meet bf16 weights.

Autocast brings the arguments of matrix products to one dtype, and those of some operations to the
wider one. With bf16 weights, more operations get tensors of both dtypes, which torch then refuses
("Index put requires the source and destination dtypes match"): masks filled with a learned token,
scatters, cross products, norms. On CPUs autocast leaves norms and products with a vector alone,
too, and some functions have no kernel for bf16, or one that returns garbage (the matrix exponential
of ``parametrizations.orthogonal``). A mask is often filled with the lowest number of another
tensor's dtype, and that of fp32 is too low for bf16. ``lstm`` chooses oneDNN's kernel for its fp32
input, and autocast then gives that kernel bf16 numbers, which it refuses on CPUs with AVX2 alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_bf16.torch_patches import Kernels

__all__ = [
    "GAPS",
    "computes_in_fp32",
    "fill_gaps",
    "overloads",
    "widen",
    "widen_under_fp32",
]

_NORMS = ("layer_norm", "group_norm", "instance_norm", "rms_norm")
_PROMOTING = (
    *("bilinear", "mv", "addmv", "dot", "vdot", "inner", "tensordot", "cross", "linalg_cross"),
    *("lerp", "embedding_bag", "linalg_multi_dot", "chain_matmul", "_weight_norm"),
    *("index_put", "index_add", "index_copy", "index_reduce", "masked_scatter"),
    *("scatter", "scatter_add", "scatter_reduce"),
    # Autocast narrows the dense matrix alone, and the backward pass then refuses the two dtypes.
    *("_sparse_mm", "_sparse_addmm"),
    # Their zero points are buffers, which stay in fp32.
    *("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine"),
)
_IN_PLACE = (
    *("lerp_", "addmm_", "addmv_", "addbmm_", "baddbmm_", "put_"),
    *("index_put_", "index_add_", "index_copy_", "index_reduce_", "masked_scatter_"),
    *("scatter_", "scatter_add_", "scatter_reduce_"),
)
_FP32_ONLY = (
    *("linalg_matrix_exp", "_linalg_slogdet", "_linalg_det", "logdet", "linalg_solve_triangular"),
    *("linalg_pinv", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "linalg_ldl_factor"),
    *("linalg_ldl_factor_ex", "linalg_solve_ex", "linalg_vander", "pdist"),
    *("special_ndtri", "special_log_ndtr", "special_zeta", "_standard_gamma", "binomial"),
    *("complex", "polar"),
    # In bf16 the first rounds to other levels; the second is fused with observers, which are fp32.
    *("fake_quantize_per_channel_affine", "fused_moving_avg_obs_fake_quant"),
)
_FP32_ONLY_ON_CPUS = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
# Not fill_, which full() and ones() call: each goes through Python here, for ten microseconds.
_FILLING = (
    *("masked_fill.Scalar", "masked_fill_.Scalar", "index_fill.int_Scalar"),
    *("index_fill_.int_Scalar", "where.ScalarOther", "where.ScalarSelf", "fill_diagonal_"),
)

# With bf16 arguments torch asks first whether oneDNN has a kernel for them.
_CAST = ("lstm.input",)

# What a model may compute from weights alone. Most of it is in fp32 under any autocast on CUDA.
_OF_WEIGHTS = (
    *("exp", "expm1", "log", "log10", "log2", "log1p", "pow", "rsqrt", "reciprocal", "softplus"),
    *("sigmoid", "tanh", "mean"),
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv", "sum", "cumsum", "cumprod", "logsumexp"),
    *("softmax.int", "log_softmax.int", "norm", "linalg_vector_norm", "linalg_matrix_norm"),
    *("renorm", "dist", "cosine_similarity"),
)

_FLOATS = (torch.float32, torch.bfloat16)
_FP32_MAX, _BF16_MAX = (torch.finfo(each).max for each in _FLOATS)


def fill_gaps() -> None:
    """Let the operations in :data:`GAPS` take fp32 tensors with bf16 weights under autocast.

    For the whole process and all models in it; :func:`cast_model` calls it. Calls that worked
    before run as they did, except functions that have no sound bf16 kernel. An operation for which
    torch has an autocast rule of its own is left alone.

    Example:
        >>> fill_gaps()
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     y = torch.nn.LayerNorm(4, dtype=torch.bfloat16)(torch.randn(2, 4))
        >>> y.dtype
        torch.float32
    """
    _IN_GAPS.apply()


def widen_under_fp32() -> None:
    """Let functions of weights alone return fp32 under autocast to fp32.

    Otherwise embeddings, norms and exponentials would be bf16, and so would what is computed from
    them. Nothing changes under autocast to bf16. For the whole process.
    """
    _UNDER_FP32.apply()


def computes_in_fp32(device_type: str) -> bool:
    """Whether autocast to fp32 is on, see :func:`torch_bf16.arithmetic`."""
    enabled = torch.is_autocast_enabled(device_type)
    return enabled and torch.get_autocast_dtype(device_type) == torch.float32


def widen(argument: Any) -> Any:
    """The argument in fp32 if it is a bf16 tensor, otherwise unchanged."""
    if isinstance(argument, Tensor) and argument.dtype == torch.bfloat16:
        return argument.float()
    return argument


def overloads(name: str) -> list[Any]:
    """The overloads that users can call, without those for ``out=`` or named dimensions."""
    name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    names = ([overload] if overload else packet.overloads()) if packet else []
    operators = [getattr(packet, each) for each in names]
    left_out = {"out", "dimname"}
    return [
        operator
        for operator in operators
        if left_out.isdisjoint(operator._overloadname.split("_"))
        # TorchScript's own overloads have no kernel.
        and torch._C._dispatch_has_kernel(operator.name())
    ]


def _fill(library: Library) -> None:
    for key, gaps in GAPS.items():
        for convert, names in gaps.items():
            for name in names:
                for operator in overloads(name):
                    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
                        library.impl(operator, _kernel(operator, convert, key), key)


def _widen_weights(library: Library) -> None:
    for key in GAPS:
        operator = torch.ops.aten.embedding.default
        library.impl(operator, _kernel(operator, list, key, widen_result=True), key)
        for operator in (each for name in _OF_WEIGHTS for each in overloads(name)):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
                library.impl(operator, _kernel(operator, _leave, key), key)


_IN_GAPS = Kernels("autocast_kernels", _fill)
_UNDER_FP32 = Kernels("autocast_to_fp32", _widen_weights)


def _kernel(
    operator: Any,
    convert: Callable[[Sequence[Any]], Sequence[Any]],
    key: str,
    *,
    widen_result: bool = False,
) -> Any:
    below_autocast = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    device = key.removeprefix("Autocast").lower()
    run, convert_to_fp32 = operator, _IN_FP32.get(convert, convert)
    if convert is _cast_all:
        # In inference mode a mode gets the whole operation and decomposes it in Python, which
        # chooses oneDNN's kernel for bf16, too.
        run = functools.partial(operator._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)

    # torch.compile would make it a graph of its own, once for each mixture of dtypes.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    def call(*args: Any, **kwargs: Any) -> Any:
        fp32 = computes_in_fp32(device)
        converted = (convert_to_fp32 if fp32 else convert)([*args, *kwargs.values()])
        kwargs = dict(zip(kwargs, converted[len(args) :], strict=True))
        with torch._C._ExcludeDispatchKeyGuard(below_autocast):
            result = run(*converted[: len(args)], **kwargs)
        return widen(result) if fp32 and widen_result else result

    return call


def _leave(arguments: Sequence[Any]) -> Sequence[Any]:
    """The arguments as they are; under autocast to fp32 they are widened (:data:`_IN_FP32`)."""
    return arguments


def _widen_all(arguments: Sequence[Any]) -> Sequence[Any]:
    return [
        [widen(x) for x in each] if isinstance(each, list) else widen(each) for each in arguments
    ]


def _cast_all(arguments: Sequence[Any]) -> Sequence[Any]:
    """All arguments in the dtype that autocast on the CPU computes in."""
    dtype = torch.get_autocast_dtype("cpu")

    def cast(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [cast(each) for each in argument]
        floats = isinstance(argument, Tensor) and argument.dtype in _FLOATS
        return argument.to(dtype) if floats else argument

    return cast(arguments)


def _promote(arguments: Sequence[Any]) -> Sequence[Any]:
    """All arguments in fp32 if one tensor is."""
    several = [x for each in arguments if isinstance(each, list) for x in each]
    return _widen_all(arguments) if any(map(_is_fp32, [*arguments, *several])) else arguments


def _promote_by_input(arguments: Sequence[Any]) -> Sequence[Any]:
    """All arguments of a norm in fp32 if its input is."""
    return _widen_all(arguments) if _is_fp32(arguments[0]) else arguments


def _promote_gain(arguments: Sequence[Any]) -> Sequence[Any]:
    """Gain and bias of a batch norm in fp32 if its input or the statistics that it writes are."""
    x, weight, bias, mean, *rest = arguments
    if _is_fp32(x) or _is_fp32(mean):
        weight, bias = widen(weight), widen(bias)
    return [x, weight, bias, mean, *rest]


def _follow_target(arguments: Sequence[Any]) -> Sequence[Any]:
    """The tensor that is written in place keeps its dtype, and the other arguments take it."""
    target = arguments[0].dtype
    if target not in _FLOATS:
        return arguments
    return [
        each.to(target) if isinstance(each, Tensor) and each.dtype in _FLOATS else each
        for each in arguments
    ]


def _saturate(arguments: Sequence[Any]) -> Sequence[Any]:
    """Numbers that fp32 can hold and bf16 cannot become the largest or the lowest of bf16."""
    if not any(isinstance(each, Tensor) and each.dtype == torch.bfloat16 for each in arguments):
        return arguments
    return [
        math.copysign(_BF16_MAX, each)
        if isinstance(each, float) and _BF16_MAX < abs(each) <= _FP32_MAX
        else each
        for each in arguments
    ]


def _is_fp32(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.dtype == torch.float32


_Convert = Callable[[Sequence[Any]], Sequence[Any]]
# Under autocast to fp32 no operation computes in bf16, whatever the dtypes of its tensors.
_IN_FP32: dict[_Convert, _Convert] = {
    _promote: _widen_all,
    _promote_by_input: _widen_all,
    _leave: _widen_all,
}
_ANYWHERE: dict[_Convert, tuple[str, ...]] = {
    _promote: _PROMOTING,
    _follow_target: _IN_PLACE,
    _widen_all: _FP32_ONLY,
    _promote_gain: ("batch_norm",),
    _saturate: _FILLING,
}

GAPS: dict[str, dict[_Convert, tuple[str, ...]]] = {
    "AutocastCPU": {
        **_ANYWHERE,
        _promote_by_input: _NORMS,
        _cast_all: _CAST,
        _widen_all: (*_FP32_ONLY, *_FP32_ONLY_ON_CPUS),
    },
    "AutocastCUDA": _ANYWHERE,
}
"""For each dispatch key, the functions that convert arguments, each with its operations."""

"""What PTX instructions compute, in NumPy, for many lanes at once: registers to registers.

The PTX ISA says what each does. What it leaves open is as on a GPU: a NaN that fp32 arithmetic
makes is 0x7fffffff. An instruction or a modifier (``.ftz``, ``.sat``, ``.NaN``) that is not among
those below is an error: what it changes would not be computed.
"""

import functools
import operator
import re

import numpy as np

F32, F64, U32, U64 = np.float32, np.float64, np.uint32, np.uint64
TYPES = {
    "pred": np.bool_, "f32": F32, "f64": F64,
    **{f"{kind}{bits}": getattr(np, f"uint{bits}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_FORMS = re.compile(
    r"""(add|sub|mul)(\.rn)?\.f(32|64|32x2) | (div|sqrt|fma)\.rn\.f(32|64|32x2)
    | (rcp|rsqrt)\.approx\.ftz\.f32 | (neg|abs)\.f(32|64|32x2) | (min|max|copysign)\.f(32|64)
    | (add|sub|min|max|div|rem)\.[su](16|32|64) | (neg|abs)\.s(16|32|64)
    | (mul|mad)\.lo\.[su](16|32|64) | (mul|mad)\.wide\.[su](16|32)
    | (and|or|xor|not)\.(pred|b16|b32|b64) | shl\.b(16|32|64) | shr\.[su](16|32|64)
    | bfe\.u(32|64) | prmt\.b32 | (mov|selp)\.(pred|[bsuf](16|32|64))
    | setp\.(eq|ne|lt|le|gt|ge)(\.and)?\.[bsuf](16|32|64)
    | setp\.((eq|ne|lt|le|gt|ge)u|num|nan)(\.and)?\.f(32|64)
    | cvt\.[su](8|16|32|64)\.[su](8|16|32|64) | cvt\.rzi\.[su](16|32|64)\.f(32|64)
    | cvt\.rn\.f(32|64)\.[su](8|16|32|64) | cvt\.rn\.f32\.f64 | cvt\.f64\.f32""",
    re.VERBOSE,
)
_WIDER = {np.int16: np.int32, np.uint16: U32, np.int32: np.int64, np.uint32: U64}
_ORDERED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def fma(a, b, c):
    """fp32 ``a * b + c``, rounded once."""
    with np.errstate(all="ignore"):
        # The product is exact in fp64. The sum is rounded to odd there, and so not twice.
        product, c = a.astype(F64) * b.astype(F64), np.asarray(c, F64)
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
        even = (total.view(U64) & U64(1)) == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        odd = even & (error != 0) & np.isfinite(total)
        return np.where(odd, np.nextafter(total, toward), total).astype(F32)


def rcp(b):
    """The nearest reciprocal; subnormals are flushed, as ``.ftz`` says."""
    return _flushed((1 / _flushed(b).astype(F64)).astype(F32))


def rsqrt(x):
    """The nearest reciprocal of the root, flushed alike."""
    return _flushed((1 / np.sqrt(_flushed(x).astype(F64))).astype(F32))


def _flushed(x):
    return np.where(abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


@functools.cache
def operand_types(name):
    """The types of an instruction's operands, as NumPy's."""
    assert _FORMS.fullmatch(name), f"{name} is not computed here"
    operation, *rest = name.split(".")
    kind = TYPES.get(rest[-1], U64)
    if operation in ("setp", "selp"):
        return [kind, kind, np.bool_]
    if operation in ("shl", "shr"):
        return [kind, U32]
    if operation in ("mul", "mad") and rest[0] == "wide":
        return [kind, kind, _WIDER[kind]]
    if operation == "bfe":
        return [kind, U32, U32]
    return [kind] * 3


def compute(name, values, approximations):
    """The result of an instruction.

    Args:
        name: the instruction.
        values: of its operands, of the types of :func:`operand_types`.
        approximations: functions for ``rcp`` and ``rsqrt``, whose last bits a GPU decides.
    """
    operation, *rest = name.split(".")
    if rest[-1] == "f32x2":
        return _packed(name, values, approximations)
    if operation in approximations:
        return approximations[operation](values[0])
    if operation == "setp":
        return _compared(rest[0], values)
    if operation == "cvt":
        return _converted(rest, values[0])
    if operation in ("mul", "mad") and rest[0] == "wide":
        wide = _WIDER[TYPES[rest[-1]]]
        product = np.multiply(values[0], values[1], dtype=wide, casting="unsafe")
        return product + values[2] if operation == "mad" else product
    result = _OPERATIONS[operation](*values)
    return _canonical(result) if rest[-1] == "f32" and operation in _ARITHMETIC else result


def _canonical(x):
    nan = np.isnan(x)
    return np.where(nan, U32(0x7FFFFFFF).view(F32), x) if nan.any() else x


def _packed(name, values, approximations):
    """Two fp32 numbers in a register of 64 bits."""
    single = name.replace("f32x2", "f32")
    halves = [np.atleast_1d(each).view(F32).reshape(-1, 2) for each in values]
    results = [compute(single, [each[:, n] for each in halves], approximations) for n in (0, 1)]
    return np.ascontiguousarray(np.stack(results, axis=1)).view(U64).reshape(-1)


def _compared(how, values):
    a, b, *more = values
    unordered = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else False
    if how == "nan":
        result = unordered
    elif how == "num":
        result = ~unordered
    elif how[:-1] in _ORDERED:
        result = _ORDERED[how[:-1]](a, b) | unordered
    else:
        result = _ORDERED[how](a, b) & ~np.asarray(unordered)
    return result & more[0] if more else result


def _converted(how, x):
    to = TYPES[how[-2]]
    if how[0] == "rzi":
        # Out of range it saturates. NaN becomes 0, and the highest bit where 64 are involved.
        limits = np.iinfo(to)
        long = x.dtype.itemsize == 8 or np.dtype(to).itemsize == 8
        nan = 0.0 if not long else float(limits.min or 2.0 ** (limits.bits - 1))
        whole = np.nan_to_num(np.trunc(x.astype(F64)), nan=nan)
        inside = np.clip(whole, float(limits.min), np.nextafter(float(limits.max), 0.0))
        return np.where(whole >= float(limits.max), limits.max, inside.astype(to)).astype(to)
    return x.astype(to)


def _extreme(pick, zeros):
    """Of some numbers; the others beside a NaN, and of two zeros that with the sign asked for."""

    def choose(a, b, *others):
        if others:
            return choose(choose(a, b), *others)
        if a.dtype.kind != "f":
            return pick(a, b)
        bits = {4: U32, 8: U64}[a.itemsize]
        both = zeros(np.asarray(a).view(bits), np.asarray(b).view(bits)).view(a.dtype)
        return np.where((a == 0) & (b == 0), both, pick(a, b))

    return choose


def _permuted(a, b, selector):
    source = a.astype(U64) | b.astype(U64) << U64(32)
    result = U32(0)
    for place in range(4):
        choice = selector >> U32(4 * place)
        byte = (source >> (choice & U32(7)).astype(U64) * U64(8)).astype(U32) & U32(255)
        sign = np.where(byte & U32(128), U32(255), U32(0))
        result = result | np.where(choice & U32(8), sign, byte) << U32(8 * place)
    return result


def _shift(operation):
    def shifted(x, amount):
        width = 8 * x.itemsize
        # To the right, what is signed keeps its sign.
        most = width - 1 if x.dtype.kind == "i" else width
        amount = np.minimum(amount, U32(most))
        inside = operation(x, np.minimum(amount, U32(width - 1)).astype(x.dtype))
        return np.where(amount == width, x.dtype.type(0), inside)

    return shifted


def _bit_field(x, place, length):
    one = x.dtype.type(1)
    return x >> place.astype(x.dtype) & (one << length.astype(x.dtype)) - one


def _quotient(a, b):
    if a.dtype.kind == "f":
        return a / b
    # Toward zero, where NumPy rounds down.
    quotient, one = a // b, a.dtype.type(1)
    return np.where((quotient < 0) & (quotient * b != a), quotient + one, quotient)


def _magnitude(x):
    return np.abs(x) if x.dtype.kind != "f" else np.copysign(x, x.dtype.type(1))


_ARITHMETIC = ("add", "sub", "mul", "div", "sqrt", "fma", "min", "max")
_OPERATIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _quotient, "sqrt": np.sqrt,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "fma": fma, "mad": lambda a, b, c: a * b + c,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "neg": np.negative, "abs": _magnitude, "copysign": lambda sign, x: np.copysign(x, sign),
    "mov": lambda x: x,
    "max": _extreme(np.fmax, np.bitwise_and), "min": _extreme(np.fmin, np.bitwise_or),
    "shl": _shift(np.left_shift), "shr": _shift(np.right_shift), "bfe": _bit_field,
    "prmt": _permuted, "selp": lambda a, b, p: np.where(p, a, b),
}  # fmt: skip

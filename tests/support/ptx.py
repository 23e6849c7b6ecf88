"""Running the straight PTX of ``backends/triton/ieee.py`` in NumPy, for many numbers at once."""

import re

import numpy as np

F32, F64, U32 = np.float32, np.float64, np.uint32


def fma(a, b, c):
    """fp32 ``a * b + c``, rounded once."""
    with np.errstate(all="ignore"):
        # The product is exact in fp64. The sum is rounded to odd there, and so not twice.
        product, c = a.astype(F64) * b.astype(F64), np.asarray(c, F64)
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
        even = (total.view(np.uint64) & 1) == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        odd = even & (error != 0) & np.isfinite(total)
        return np.where(odd, np.nextafter(total, toward), total).astype(F32)


def run(text, inputs, approximations):
    """(each output, whether the branch past the exact instructions is taken).

    Args:
        text: the instructions; of the eight numbers all are computed.
        inputs: eight fp32 arrays for each argument.
        approximations: a function for ``rcp`` and one for ``rsqrt``.
    """
    registers = {f"${8 + number}": each for number, each in enumerate(inputs)}
    with np.errstate(all="ignore"):
        for line in re.split(r";\s*", text.replace("\n", " ").strip("{ ")):
            name, _, rest = line.strip().partition(" ")
            if name.startswith("@"):
                assert rest == "bra done"
                return [registers[f"${number}"] for number in range(8)], registers[name[1:]]
            if name.startswith("."):
                continue
            to, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
            values = [_value(registers, each) for each in operands]
            result = _result(name, values, approximations)
            if to.startswith("{"):
                registers.update(zip(re.findall(r"[^{},\s]+", to), result, strict=True))
            else:
                registers[to] = result
    raise AssertionError("there is no branch")


def _value(registers, operand):
    if operand.startswith("{"):
        return tuple(_value(registers, each) for each in re.findall(r"[^{},\s]+", operand))
    if operand.startswith("0f"):
        return np.array([int(operand[2:], 16)], U32).view(F32)
    return U32(int(operand, 0)) if operand[0].isdigit() else registers[operand]


def _result(name, values, approximations):
    operation, *rest = name.split(".")
    if rest[-1] == "f32x2":
        halves = zip(*values, strict=True)
        return tuple(_result(".".join([operation, *rest[:-1], "f32"]), each, {}) for each in halves)
    first = values[0]
    if operation in ("rcp", "rsqrt"):
        return approximations[operation](first)
    if operation == "fma":
        return fma(*values)
    if operation == "mul":
        return values[0] * values[1]
    if operation == "neg":
        return -first
    if operation == "abs":
        return abs(first)
    if operation == "mov":
        return first
    if operation == "add":
        return _bits(first) + values[1]
    if operation == "max":
        return np.maximum(first, values[1])
    if rest[0] == "eq":
        return np.equal(first, values[1])
    if rest[0] == "le":
        return first <= values[1]
    assert name == "setp.ge.and.f32", name
    return (first >= values[1]) & values[2]


def _bits(x):
    return x.view(U32) if x.dtype == F32 else x

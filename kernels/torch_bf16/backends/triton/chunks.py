"""What all kernels over chunks share: find a chunk in the tables, load and store planes.

``launch.py`` describes the tables.
"""

# Device code is Triton's language, which a type checker takes for Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .codecs import decode

__all__ = ["find_chunk", "load_numbers", "load_plane", "store_plane"]


@triton.jit
def find_chunk(
    chunks_ptr,
    tensors_ptr,
    gradients_ptr,
    table_ptr,
    SIZES: tl.constexpr,
    SHARED: tl.constexpr,
    DRAWS: tl.constexpr,
    N_SCALARS: tl.constexpr,
    N_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Look up the chunk that this program works on.

    Returns the tensor's row, the index of the chunk's first element, the scalars, the number of the
    step, for each number the addresses of the chunk's first element in its planes, the bitwise or
    of all addresses of the tensor, and the number of elements to update.
    """
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunks_ptr + 2 * chunk).to(tl.int64)
    first = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * CHUNK
    row = tensors_ptr + tensor * N_COLUMNS
    gradient = tl.load(gradients_ptr + 2 * tensor)
    scalars_row = table_ptr + tl.load(gradients_ptr + 2 * tensor + 1) * (N_SCALARS + 2)
    scalars = ()
    for i in tl.static_range(N_SCALARS):
        scalars = scalars + (tl.load(scalars_row + i),)
    step_number = tl.load(scalars_row + N_SCALARS).to(tl.int64).to(tl.uint32)
    skipped = tl.load(scalars_row + N_SCALARS + 1) != 0.0

    addresses = ((gradient + first * SIZES[0][0],),)
    address_bits = gradient
    for i in tl.static_range(1, len(SIZES)):
        planes = ()
        for j in tl.static_range(len(SIZES[i])):
            address = tl.load(row + DRAWS[i][2] + j)
            address_bits |= address
            planes = planes + (address + first // SHARED[i][j] * SIZES[i][j],)
        addresses = addresses + (planes,)

    # Address 0 means that the tensor has no gradient in this step.
    idle = skipped | (gradient == 0)
    n_elements = tl.where(idle, 0, tl.minimum(tl.load(row) - first, CHUNK).to(tl.int32))
    return row, first, scalars, step_number, addresses, address_bits, n_elements


@triton.jit
def load_numbers(
    addresses,
    start,
    stop,
    FORMATS: tl.constexpr,
    SIZES: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """The gradient, weights and states of elements ``start .. start + BLOCK - 1``, in fp32."""
    numbers = ()
    for i in tl.static_range(len(FORMATS)):
        planes = ()
        for j in tl.static_range(len(SIZES[i])):
            plane = load_plane(
                addresses[i][j], start, stop, tl.constexpr(SIZES[i][j]),
                tl.constexpr(SHARED[i][j]), BLOCK, FULL,
            )  # fmt: skip
            planes = planes + (plane,)
        numbers = numbers + (decode(tl.constexpr(FORMATS[i]), planes),)
    return numbers


@triton.constexpr_function
def _dtype(size):
    return {1: tl.uint8, 2: tl.uint16, 4: tl.float32}[size]


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, FULL: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    # After the cast: a hint on the integer is lost, and accesses are as narrow as an element.
    return tl.multiple_of(pointer, 16) if FULL else pointer


@triton.jit
def load_plane(
    address,
    start,
    stop,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Elements ``start .. start + BLOCK - 1`` of a plane, in the layout that codecs expect."""
    if SHARED > 1:
        return load_plane(address, start // SHARED, stop // SHARED, SIZE, 1, BLOCK // SHARED, FULL)
    elif FULL and SIZE == 2:
        # In pairs, because 16-bit registers cost a move for every second element.
        pairs = tl.load(_pointer(address, tl.uint32, True) + start // 2 + tl.arange(0, BLOCK // 2))
        return tl.join(pairs << 16, pairs & 0xFFFF0000).reshape(BLOCK)
    else:
        elements = start + tl.arange(0, BLOCK)
        pointers = _pointer(address, _dtype(SIZE), FULL) + elements
        plane = tl.load(pointers) if FULL else tl.load(pointers, mask=elements < stop, other=0)
        return plane if SIZE == 4 else plane.to(tl.uint32) << (32 - 8 * SIZE)


@triton.jit
def store_plane(
    address,
    start,
    stop,
    plane,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    elements = start // SHARED + tl.arange(0, BLOCK // SHARED)
    pointers = _pointer(address, _dtype(SIZE), FULL) + elements
    value = plane if SIZE == 4 else (plane >> (32 - 8 * SIZE)).to(_dtype(SIZE))
    if FULL:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=elements < stop // SHARED)

"""Files of safetensors, read by the definition of their format: a length, a JSON header, numbers.

https://huggingface.co/docs/safetensors: eight bytes of little-endian length, that many bytes of
JSON with each tensor's dtype, shape and place, then the tensors, without gaps.
"""

from __future__ import annotations

import functools
import json
from math import prod
from pathlib import Path
from typing import Any

import torch

from torch_bf16.checkpoints.files import damaged_safetensors

from .saved import Saved, SavedTensor, read_numbers

__all__ = ["read_safetensors"]

_LENGTH = 8
_LONGEST_HEADER = 100_000_000  # the library's own bound
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read_safetensors(path: Path) -> Saved:
    """The tensors of a file by name; those of a dtype that torch does not have are left out.

    Raises:
        CheckpointError: it is truncated, or its header is not valid.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if size < _LENGTH or length > min(size - _LENGTH, _LONGEST_HEADER):
            raise damaged_safetensors(path, f"its header would have {length:,} bytes")
        text = file.read(length)
    try:
        header: Any = json.loads(text)
        entries = {name: each for name, each in header.items() if name != "__metadata__"}
        # safetensors sorts what it writes by dtype and name.
        found = Saved(path, {}, ordered=False)
        first = _LENGTH + length
        places: list[tuple[int, int, str]] = []
        for name, each in entries.items():
            is_complex = each["dtype"] == "C64"
            dtype = torch.float32 if is_complex else _DTYPES.get(each["dtype"])
            begin, end = each["data_offsets"]
            shape = (*each["shape"], 2) if is_complex else tuple(each["shape"])
            if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
                raise ValueError(f"{name} has shape {shape} and bytes {begin} to {end}")
            if first + end > size:
                raise damaged_safetensors(path, f"{name} would end at byte {first + end:,}")
            places.append((begin, end, name))
            if dtype is None:
                found.left_out.append(name)
                found.notes.append(
                    f"{name} is {each['dtype']}, a dtype that is unknown here: left out"
                )
                continue
            if end - begin != prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} of shape {shape} has {end - begin} bytes")
            read = functools.partial(read_numbers, path, first + begin, dtype)
            found.tensors[name] = SavedTensor(shape, dtype, read, is_complex=is_complex)
        at = 0
        for begin, end, name in sorted(places):
            if begin != at:
                raise ValueError(f"{name} begins at byte {begin:,} of the tensors, not at {at:,}")
            at = end
        if first + at != size:
            raise ValueError(f"{size - first - at:,} bytes belong to no tensor")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged_safetensors(path, f"its header is not valid ({error})") from None
    return found

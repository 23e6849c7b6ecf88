"""What the formats of whole blocks must compute: a part of ``oracle_formats.py``, too."""

import numpy as np


def in_blocks(x):
    return np.asarray(x).reshape(-1, 64)


def block_scales(x):
    """float32 [blocks, 1]: the largest magnitude of each 64, or NaN beside anything not finite."""
    largest = np.abs(in_blocks(x)).max(axis=1, keepdims=True, initial=0)
    floor = np.where(largest > 0, np.float32(2.0**-100), np.float32(0))
    scales = np.maximum(largest, floor).astype(np.float32)
    return np.where(np.isfinite(in_blocks(x)).all(axis=1, keepdims=True), scales, np.float32("nan"))


def encode_int8(x):
    scales = block_scales(x)
    root = np.sqrt(np.abs(in_blocks(x))) * np.sqrt(np.float32(127 * 127) / scales)
    root = np.round(np.nan_to_num(root, nan=0.0))
    codes = np.where(np.signbit(in_blocks(x)), -root, root)
    return codes.astype(np.int8).reshape(x.shape), scales[:, 0]


def encode_uint8(x, r):
    scales = block_scales(x)
    per_scale = np.float32(255 * 255) / scales
    square = in_blocks(x) * per_scale
    root = np.sqrt(in_blocks(x)) * np.sqrt(per_scale)
    # 1 is the least that a number above zero is stored as. An odd whole root counts as just below.
    root = np.fmax(root, np.float32(1.25))
    below = np.where(root % 2 == 1, root - 1, np.floor(root))
    # In fp64, where all of this is exact: the share of the way to the next code's number, rounded
    # to 14 bits, is that many of the draws.
    share = (square.astype(np.float64) - np.float64(below) ** 2) / (2 * np.float64(below) + 1)
    up = share > (in_blocks(r).astype(np.float64) // 4 + 0.5) / 2**14
    codes = np.where(in_blocks(x) > 0, below + up, 0)
    return codes.astype(np.uint8).reshape(x.shape), scales[:, 0]


def decode_codes(codes, scales, top):
    code = in_blocks(codes).astype(np.float32)
    square = code * np.abs(code) * (np.float32(1) / np.float32(top * top))
    return (square * scales.reshape(-1, 1)).reshape(codes.shape)

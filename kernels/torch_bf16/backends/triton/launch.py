"""Running the kernel over all chunks of a bucket: its tables, and one launch.

Two tables are made once and stay on the device: ``chunks``, int32 ``[chunks, 2]`` of (tensor,
number of the chunk within it), and ``tensors``, int64 with one row per tensor: number of elements,
global index of the first one, two words for each noise stream in use, the addresses of the planes
of the weights and of each state, and where the variant is strided, width and pitch. Two more go up
at every step, in one copy: ``steps``, int64 ``[n, 3]`` of (address of the gradient, number of the
step, row of scalars), and the fp32 scalars.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends.bucket import Bucket, Variant

from .kernel import CHUNK, constants, noise_streams, options, step

__all__ = ["launch"]


@dataclass
class _Tables:
    chunks: Tensor
    tensors: Tensor


def launch(bucket: Bucket) -> None:
    """Take one step for a bucket; returns when the kernel is in the current stream's queue."""
    device = bucket.variant.device
    if bucket.prepared is None:
        bucket.prepared = _tables(bucket)
    tables: _Tables = bucket.prepared
    if len(tables.chunks) == 0:
        return
    steps, scalars = _step_tables(bucket)
    fixed: dict[str, Any] = constants(bucket.variant, bucket.scalars.shape[1])
    fixed = {**fixed, **options(bucket.variant, torch.version.hip is not None)}
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        step[(len(tables.chunks),)](tables.chunks, tables.tensors, steps, scalars, **fixed)


def _tables(bucket: Bucket) -> _Tables:
    n_chunks = -(-np.asarray(bucket.numels) // CHUNK)
    first = np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks)
    tensors = np.repeat(np.arange(len(n_chunks)), n_chunks)
    chunks = np.stack([tensors, np.arange(len(tensors)) - first], axis=1).astype(np.int32)
    rows = [
        [numel, offset, *words, *(plane.data_ptr() for planes in each for plane in planes), *run]
        for numel, offset, words, each, run in zip(
            bucket.numels, bucket.offsets, _words(bucket), bucket.planes, _runs(bucket), strict=True
        )
    ]
    device = bucket.variant.device
    return _Tables(_upload(chunks, device), _upload(np.array(rows, np.int64), device))


def _runs(bucket: Bucket) -> np.ndarray:
    """Width and pitch of each tensor, where they are needed."""
    both = np.stack([bucket.widths, bucket.pitches], axis=1)
    return both if bucket.variant.strided else both[:, :0]


def _words(bucket: Bucket) -> np.ndarray:
    """For each tensor, the two base words of each noise stream that the variant draws from."""
    variant: Variant = bucket.variant
    numbers = [
        next(i for i, draw in enumerate(variant.draws) if draw.stream == stream)
        for stream in noise_streams(variant)
    ]
    return bucket.bases[:, numbers].reshape(len(bucket.numels), -1).astype(np.int64)


def _step_tables(bucket: Bucket) -> tuple[Tensor, Tensor]:
    addresses = [gradient.data_ptr() for gradient in bucket.gradients]
    steps = np.stack([np.array(addresses, np.int64), bucket.steps, bucket.rows], axis=1)
    both = _upload(
        np.concatenate(
            [steps.reshape(-1).view(np.uint8), bucket.scalars.reshape(-1).view(np.uint8)]
        ),
        bucket.variant.device,
    )
    return both[: steps.nbytes].view(torch.int64), both[steps.nbytes :].view(torch.float32)


def _upload(table: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it.

    torch's pinned allocator hands the staging memory out again only when the copy is done.
    """
    host = torch.from_numpy(np.ascontiguousarray(table))
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)

"""Running the kernel over all chunks of a bucket: its tables, and one launch.

Three tables are made once and stay on the device: ``chunks``, int32 ``[chunks, 2]`` of (tensor,
number of the chunk within it), and ``tensors``, int64 with one row per tensor: number of elements,
global index of the first one, two words for each noise stream in use, the addresses of the planes
of the weights and of each state, and where the variant is strided, width and pitch; and
``gradients``, int64 ``[n, 2]``, of each its address and the tensor's row in the fourth table, which
go up when they have changed. That fourth, ``Bucket.table``, was computed on the device by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_bf16.backends.bucket import Bucket, Variant

from .kernel import CHUNK, constants, noise_streams, options, step
from .tables import Table, on, upload

__all__ = ["launch"]


@dataclass
class _Tables:
    chunks: Tensor
    tensors: Tensor
    gradients: Table
    arguments: dict[str, Any] | None = None


def launch(bucket: Bucket) -> None:
    """Take one step for a bucket; returns when the kernel is in the current stream's queue."""
    if bucket.prepared is None:
        bucket.prepared = _tables(bucket)
    tables: _Tables = bucket.prepared
    if len(tables.chunks) == 0:
        return
    table, rows = bucket.table, bucket.rows
    if table is None:
        table, rows = _host_scalars(bucket), np.arange(len(bucket.numels))
    if tables.arguments is None:
        fixed = constants(bucket.variant, table.shape[1] - 2)
        tables.arguments = {**fixed, **options(bucket.variant, torch.version.hip is not None)}
    addresses = [gradient.data_ptr() for gradient in bucket.gradients]
    gradients = np.stack([np.array(addresses, np.int64), rows], axis=1)
    with on(bucket.variant.device):
        step[(len(tables.chunks),)](
            tables.chunks,
            tables.tensors,
            tables.gradients.of(gradients),
            table,
            **tables.arguments,
        )


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
    return _Tables(upload(chunks, device), upload(np.array(rows, np.int64), device), Table(device))


def _host_scalars(bucket: Bucket) -> Tensor:
    """``Bucket.table`` of a bucket whose scalars came from the host."""
    told = np.stack([bucket.steps, np.zeros_like(bucket.steps)], axis=1)
    table = np.concatenate([bucket.scalars[bucket.rows], told], axis=1).astype(np.float32)
    return upload(table, bucket.variant.device)


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

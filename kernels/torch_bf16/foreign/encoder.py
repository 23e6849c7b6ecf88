"""fp32 numbers on their way into planes, encoded in as few kernel calls as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_bf16.engine.batch import Batch, Job, alike
from torch_bf16.formats import Format
from torch_bf16.rules import STORE
from torch_bf16.sharding import Span

__all__ = ["Encoder"]


class Encoder:
    """Encodes what an optimizer's own step computed; its batches last as long as the planes."""

    def __init__(self) -> None:
        self._batches: dict[Any, Batch] = {}
        self._used: dict[Any, Batch] = {}
        self._jobs: list[tuple[Job, Tensor, int]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        format_: Format,
        planes: Sequence[Tensor],
        x: Tensor,
        span: Span,
        suffix: str,
        step: int,
    ) -> None:
        """Have a tensor encoded.

        Args:
            format_: of the numbers.
            planes: this rank's, written by :meth:`run`.
            x: the numbers; any floating-point dtype.
            span: which elements of the whole tensor they are.
            suffix: goes behind the span's name, to key the noise.
            step: the number of the draw.
        """
        memory = [each.contiguous() for each in planes]
        self._copies += [
            (old, new)
            for old, new in zip(planes, memory, strict=True)
            if old.data_ptr() != new.data_ptr()
        ]
        x = x.float().contiguous()
        for piece in span.pieces() if span.numel else ():
            part = tuple(
                piece.of(each, plane.block)
                for each, plane in zip(memory, format_.planes, strict=True)
            )
            named = replace(piece, name=piece.name + suffix)
            job = Job(named, STORE, (format_,), (part,), torch.float32)
            self._jobs.append((job, piece.of(x), step))

    def run(self, seed: int, backend: str | None) -> None:
        """Encode all that was added.

        Args:
            seed: of the noise.
            backend: name of the backend; None for the best that works.
        """
        for some in alike(self._jobs, lambda each: each[0].variant):
            jobs, xs, steps = zip(*some, strict=True)
            planes = [(job.span, *(each.data_ptr() for each in job.planes[0])) for job in jobs]
            key = (jobs[0].variant, seed, backend, *planes)
            batch = self._batches.get(key) or Batch(jobs, seed, backend)
            self._used[key] = batch
            batch.run_alike(xs, steps)
        for old, new in self._copies:
            old.copy_(new)
        self._jobs, self._copies = [], []

    def finish(self) -> None:
        """End a step: batches that it did not use are of planes that are gone."""
        self._batches, self._used = self._used, {}

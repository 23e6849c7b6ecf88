"""Formats of one plane: fp32, and bf16 rounded to nearest or stochastically."""

from __future__ import annotations

import torch

from torch_bf16.numerics.rounding import bf16_nearest, bf16_stochastic

from .format import Format, Plane

__all__ = ["BF16_NEAREST", "BF16_STOCHASTIC", "FP32"]


def _decode(planes):
    return planes[0].float()


def _encode_fp32(x, r, planes):
    planes[0].copy_(x)


def _encode_nearest(x, r, planes):
    planes[0].copy_(bf16_nearest(x))


def _encode_stochastic(x, r, planes):
    planes[0].copy_(bf16_stochastic(x, r))


_BF16 = (Plane("", torch.bfloat16),)

FP32 = Format("fp32", (Plane("", torch.float32),), False, _decode, _encode_fp32)
BF16_NEAREST = Format("bf16_nearest", _BF16, False, _decode, _encode_nearest)
BF16_STOCHASTIC = Format("bf16_stochastic", _BF16, True, _decode, _encode_stochastic)

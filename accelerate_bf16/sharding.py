"""Finds the modules of a model that need an FSDP2 group of their own.

A group of FSDP2 gathers parameters of one dtype. Modules that stay in fp32 beside bf16 weights are
sharded separately, before the module that contains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_bf16 import plugin_api

__all__ = ["fp32_groups", "policy"]


def policy(version: int) -> Any:
    """FSDP's policy for bf16 weights whose gradients are reduced in fp32.

    Inputs are not cast: the forward pass runs under autocast, as with DDP, and a norm gets fp32
    inputs with all their bits. For FSDP1 nothing is cast: a dtype for parameters would also apply
    to modules that stay in fp32, and all other parameters are bf16 already.
    """
    from torch.distributed import fsdp

    if version == 1:
        return fsdp.MixedPrecision(reduce_dtype=torch.float32)
    return fsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def fp32_groups(mode: str, model: nn.Module, fp32: Mapping[str, nn.Parameter]) -> list[nn.Module]:
    """The outermost modules of an unsharded model whose parameters all stay in fp32."""
    staying = {id(p) for p in fp32.values()}
    groups = list(_outermost(model, staying))
    inside = {id(p) for group in groups for p in plugin_api.parameters_in(group)}
    for name, parameter in fp32.items():
        if id(parameter) not in inside:
            raise NotImplementedError(
                f"mixed_precision={mode!r} keeps parameter {name!r} in float32 beside bfloat16 "
                "parameters of the same module, and FSDP2 gathers both together, in one dtype. "
                "Put it into a module of its own, keep its whole module in float32 "
                "(keep_fp32), or train with DDP. Nothing was sharded"
            )
    return groups


def _outermost(module: nn.Module, staying: set[int]) -> Iterator[nn.Module]:
    ids = [id(p) for p in plugin_api.parameters_in(module)]
    # A container is never called, so nothing would gather its parameters.
    callable_ = type(module).forward is not nn.Module.forward
    if ids and callable_ and staying.issuperset(ids):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, staying)

"""The peers: torch's AdamW, and the libraries that train bf16 weights.

Every library runs the AdamW that it recommends for weights stored in bf16, as its documentation and
source describe it, on its fastest path for the device.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bf16.optim.variants import VARIANTS
from torch_bf16.recipe import get_recipe

from .entries import Entry

__all__ = ["BASELINE", "PEERS", "Peer"]


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        module: the module that is imported.
        pip: the package that is installed.
        entries: its ways to train bf16 weights.
    """

    module: str
    pip: str
    entries: tuple[Entry, ...]

    @property
    def installed(self) -> bool:
        """Whether the library can be found; importing it may still fail."""
        return importlib.util.find_spec(self.module) is not None


def _peer(module: str, *entries: Entry, pip: str | None = None) -> Peer:
    return Peer(module, pip or module, entries)


def _schedule_free(parameters: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
    """The package's AdamW, which steps only in train mode and starts in the other one."""
    optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(parameters, **options)
    optimizer.train()
    return optimizer


def _muon(parameters: Sequence[Tensor], kind: str, **options: Any) -> torch.optim.Optimizer:
    """A library's Muon over all matrices except those of embeddings, which are much longer."""
    muon: Any = importlib.import_module(kind).Muon
    hidden = [p for p in parameters if p.ndim == 2 and len(p) <= 8 * p.shape[1]]
    if not hidden:
        raise ValueError(
            "no matrix is left for Muon: those with more than 8 times as many rows as columns "
            "count as embeddings, which it does not step. Choose another --model, or more --tensors"
        )
    # One library must be told that these are Muon's; the others take all that is passed.
    groups: Any = [{"params": hidden, "use_muon": True}] if kind == "pytorch_optimizer" else hidden
    return muon(groups, **options)


def _muon_entry(
    name: str,
    stores: str,
    kind: str,
    *,
    fp32: bool = False,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Entry:
    """A library's Muon; all take five iterations and hold a weight, a gradient and a momentum."""
    fields: dict[str, Any] = {"arguments": {"lr": 1e-4, "weight_decay": 0.01}, **more}
    return Entry(
        name,
        stores,
        f"{__name__}:_muon",
        estimate=12 if fp32 else 6.1,
        options={"kind": kind, **(options or {})},
        dtype=torch.float32 if fp32 else torch.bfloat16,
        **fields,
    )


_STABLE = {"torch-optimi": "optimi", "pytorch-optimizer": "pytorch_optimizer"}


def _stable(library: str) -> Entry:
    """A library's AdamW with update clipping, all fp32."""
    needs, name = (_STABLE[library], library), f"{library} StableAdamW"
    target = f"{needs[0]}:StableAdamW"
    return Entry(name, "all fp32", target, 16, dtype=torch.float32, needs=needs)


def _ours_with(option: str) -> Entry:
    name, made = f"{option.replace('_', ' ')} 8 bytes", {option: True}
    return Entry(
        name, "ours, in bf16-stochastic", "torch_bf16:AdamW", 10.1, made, scratch=0, is_ours=True
    )


BASELINE = "torch fused fp32"

_TORCH = (
    Entry(
        BASELINE,
        "all fp32",
        "torch.optim:AdamW",
        estimate=16,
        options={"fused": True},
        dtype=torch.float32,
        scratch=0,
    ),
    Entry(
        "torch fused bf16",
        "all bf16, to nearest: loses small updates",
        "torch.optim:AdamW",
        estimate=8,
        options={"fused": True},
        scratch=0,
    ),
)

PEERS: dict[str, Peer] = {
    "torch": _peer("torch", *_TORCH),
    "torchao": _peer(
        "torchao",
        Entry(
            "torchao 8-bit SR",
            "weights bf16 stochastic, moments 8 bits with fp32 scales per 256",
            "torchao.optim:AdamW8bit",
            estimate=6.1,
            options={"bf16_stochastic_round": True},
            compiles=True,
        ),
        Entry(
            "torchao bf16 SR",
            "weights bf16 stochastic, moments bf16 to nearest (torchao.optim._AdamW)",
            "torchao.optim:_AdamW",
            estimate=8,
            options={"bf16_stochastic_round": True},
            compiles=True,
        ),
    ),
    "flashoptim": _peer(
        "flashoptim",
        Entry(
            "flashoptim 24-bit",
            "weights bf16 + 8 bits to nearest, moments 8 bits with fp16 scales per 32",
            "flashoptim:FlashAdamW",
            estimate=7.2,
            options={"master_weight_bits": 24},
            only_on="cuda",
        ),
    ),
    "optimi": _peer(
        "optimi",
        Entry(
            "optimi Kahan",
            "weights bf16 + bf16 Kahan sum, moments bf16 to nearest",
            "optimi:AdamW",
            estimate=10,
        ),
        # Its default, it says; but with torch 2.11 version 0.3.3 takes no nn.Parameter for a
        # tensor that its kernels can update, and loops.
        Entry(
            "optimi Kahan, Triton",
            "weights bf16 + bf16 Kahan sum, moments bf16 to nearest",
            "optimi:AdamW",
            estimate=10,
            options={"triton": True},
            only_on="cuda",
        ),
        pip="torch-optimi",
    ),
    "bitsandbytes": _peer(
        "bitsandbytes",
        Entry(
            "bitsandbytes 8-bit",
            "weights bf16 to nearest, moments 8 bits with fp32 scales per 256",
            "bitsandbytes.optim:AdamW8bit",
            estimate=6.1,
        ),
    ),
    "torchastic": _peer(
        "torchastic",
        Entry(
            "torchastic SR",
            "weights and moments bf16 stochastic",
            "torchastic:AdamW",
            estimate=8,
        ),
    ),
    "heavyball": _peer(
        "heavyball",
        # consume_grad would remove the gradients, which the next step needs. The 24-bit mode is
        # left out: its single graph takes minutes to compile for thirty tensors.
        Entry(
            "heavyball SR",
            "weights and moments bf16 stochastic",
            "heavyball:AdamW",
            estimate=12,
            options={"storage_dtype": "bfloat16", "consume_grad": False},
            compiles=True,
        ),
    ),
    "pytorch-optimizer": _peer(
        "pytorch_optimizer",
        Entry(
            "pytorch-optimizer Kahan",
            "StableAdamW: weights bf16 + bf16 Kahan sum, moments bf16 to nearest",
            "pytorch_optimizer:StableAdamW",
            estimate=14,
            options={"kahan_sum": True},
        ),
        Entry(
            "pytorch-optimizer 24-bit",
            "weights bf16 + 8 bits to nearest, moments 8 bits with fp16 scales per 32",
            "pytorch_optimizer:FlashAdamW",
            estimate=7.2,
            options={"master_weight_bits": 24},
        ),
        pip="pytorch-optimizer",
    ),
    "schedulefree": _peer(
        "schedulefree",
        Entry(
            "schedulefree fp32",
            "AdamWScheduleFree of the package, all fp32",
            f"{__name__}:_schedule_free",
            estimate=16,
            dtype=torch.float32,
        ),
        Entry(
            "schedule-free 8 bytes",
            "ours, in bf16-stochastic",
            "torch_bf16:AdamWScheduleFree",
            estimate=10.1,
            scratch=0,
            is_ours=True,
        ),
    ),
    "variants": _peer("torch", *map(_stable, _STABLE), *map(_ours_with, VARIANTS)),
    "offload": _peer(
        "torch",
        Entry(
            "torchao offload bf16",
            "moments and a copy of the weights on the host, bf16 to nearest, steps there",
            "torch_bf16.tools.bench.offload:TorchaoOffload",
            estimate=6,
            only_on="cuda",
            needs=("torchao", "torchao"),
        ),
        *(
            Entry(
                f"{name}, states on the host",
                "ours, with offload='states'",
                "torch_bf16:AdamW",
                estimate=2.1 + get_recipe(name).bytes_per_parameter,
                options={"recipe": get_recipe(name, offload="states")},
                scratch=0,
                is_ours=True,
            )
            for name in ("bf16-stochastic", "bf16-fp32-master")
        ),
    ),
    "muon": _peer(
        "torch.optim._muon",  # since torch 2.9
        _muon_entry("torch Muon fp32", "torch.optim.Muon, all fp32", "torch.optim", fp32=True),
        _muon_entry("torch Muon bf16", "torch.optim.Muon, all bf16", "torch.optim"),
        _muon_entry(
            "pytorch-optimizer Muon",
            "all fp32",
            "pytorch_optimizer",
            fp32=True,
            needs=("pytorch_optimizer", "pytorch-optimizer"),
        ),
        _muon_entry(
            "heavyball Muon SR",
            "weights and momentum bf16 stochastic",
            "heavyball",
            arguments={"lr": 1e-4, "weight_decay": 0.01, "betas": (0.95, 0.99)},
            options={"storage_dtype": "bfloat16", "consume_grad": False},
            compiles=True,
            needs=("heavyball", "heavyball"),
        ),
        _muon_entry("Muon 6 bytes", "ours, in bf16-stochastic", "torch_bf16", is_ours=True),
        pip="torch",
    ),
}
"""Peers by their names after ``--against``."""

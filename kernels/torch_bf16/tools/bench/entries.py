"""Who is measured: ours in each recipe, torch's AdamW, and the libraries that train bf16 weights.

Every library runs the AdamW that it recommends for weights stored in bf16, as its documentation and
source describe it, on its fastest path for the device.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.recipe import RECIPES, Recipe, get_recipe

from .models import Shapes

__all__ = ["BASELINE", "OPTIONS", "OURS", "PEERS", "Entry", "Peer", "ours"]

# The same for all, so that no one gains by skipping a term.
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Entry:
    """One optimizer with one way to store its numbers.

    Attributes:
        name: in tables.
        stores: what it keeps of weights and moments, in words.
        target: its class, ``"module:name"``, called with parameters, ``arguments`` and
            ``options``.
        estimate: bytes per parameter, weights and gradients included, by which it is decided what
            fits into memory together. Generous: what is reported is measured.
        options: more arguments of the class.
        arguments: hyperparameters; those that all share unless told otherwise.
        attributes: set on the optimizer.
        dtype: of weights and gradients.
        scratch: bytes per element of the largest tensor that a step needs for a moment, likewise.
        compiles: its first step runs ``torch.compile``.
        only_on: the device type that it needs, None for any.
        way: how its steps are taken, one of ``WAYS``; None for gradients that stay where they are.
    """

    name: str
    stores: str
    target: str
    estimate: float
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    scratch: float = 32
    compiles: bool = False
    only_on: str | None = None
    way: str | None = None

    def make(self, shapes: Shapes, device: torch.device) -> torch.optim.Optimizer:
        """The optimizer over parameters of these shapes, each with a gradient."""
        # A block repeated: normal numbers for a billion parameters would take a CPU a minute. And
        # written in place: a temporary of the largest tensor would be part of a measured peak.
        block = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).to(device)
        # Scaled once: freed between small tensors that live on, each copy would leave a hole.
        weights, gradients = block * 0.02, block.flip(0) * 1e-3
        parameters = []
        for shape in shapes:
            parameter = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=device))
            parameter.grad = torch.empty_like(parameter)
            _fill(parameter.detach(), weights)
            _fill(parameter.grad, gradients)
            parameters.append(parameter)
        module, name = self.target.split(":")
        cls = getattr(importlib.import_module(module), name)
        optimizer = cls(parameters, **self.arguments, **self.options)
        for attribute, value in self.attributes.items():
            setattr(optimizer, attribute, value)
        return optimizer


def _fill(tensor: Tensor, block: Tensor) -> None:
    for part in tensor.view(-1).split(len(block)):
        part.copy_(block[: len(part)])


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        module: what is imported.
        pip: what is installed.
        entries: how it trains bf16 weights.
    """

    module: str
    pip: str
    entries: tuple[Entry, ...]

    @property
    def installed(self) -> bool:
        """Whether it can be found; importing it may still fail."""
        return importlib.util.find_spec(self.module) is not None


def _schedule_free(parameters: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
    """The package's AdamW, which steps in train mode alone and starts in the other."""
    made = importlib.import_module("schedulefree").AdamWScheduleFree(parameters, **options)
    made.train()
    return made


def _muon(parameters: Sequence[Tensor], kind: str, **options: Any) -> torch.optim.Optimizer:
    """A Muon of what it is for: matrices, but for those of embeddings, which are much longer."""
    made = importlib.import_module(kind).Muon
    hidden = [p for p in parameters if p.ndim == 2 and max(p.shape) <= 8 * min(p.shape)]
    return made(hidden, **options)


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
    "torch": Peer("torch", "torch", _TORCH),
    "torchao": Peer(
        "torchao",
        "torchao",
        (
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
    ),
    "flashoptim": Peer(
        "flashoptim",
        "flashoptim",
        (
            Entry(
                "flashoptim 24-bit",
                "weights bf16 + 8 bits to nearest, moments 8 bits with fp16 scales per 32",
                "flashoptim:FlashAdamW",
                estimate=7.2,
                options={"master_weight_bits": 24},
                only_on="cuda",
            ),
        ),
    ),
    "optimi": Peer(
        "optimi",
        "torch-optimi",
        (
            Entry(
                "optimi Kahan",
                "weights bf16 + bf16 Kahan sum, moments bf16 to nearest",
                "optimi:AdamW",
                estimate=10,
            ),
        ),
    ),
    "bitsandbytes": Peer(
        "bitsandbytes",
        "bitsandbytes",
        (
            Entry(
                "bitsandbytes 8-bit",
                "weights bf16 to nearest, moments 8 bits with fp32 scales per 256",
                "bitsandbytes.optim:AdamW8bit",
                estimate=6.1,
            ),
        ),
    ),
    "torchastic": Peer(
        "torchastic",
        "torchastic",
        (
            Entry(
                "torchastic SR",
                "weights and moments bf16 stochastic",
                "torchastic:AdamW",
                estimate=8,
            ),
        ),
    ),
    "heavyball": Peer(
        "heavyball",
        "heavyball",
        (
            # consume_grad would take the gradients away, which the next step needs. There is a
            # 24-bit mode, too, whose one graph of all tensors takes minutes to compile for thirty.
            Entry(
                "heavyball SR",
                "weights and moments bf16 stochastic",
                "heavyball:AdamW",
                estimate=12,
                options={"storage_dtype": "bfloat16", "consume_grad": False},
                compiles=True,
            ),
        ),
    ),
    "pytorch-optimizer": Peer(
        "pytorch_optimizer",
        "pytorch-optimizer",
        (
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
        ),
    ),
    "schedulefree": Peer(
        "schedulefree",
        "schedulefree",
        (
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
            ),
        ),
    ),
    "muon": Peer(
        "torch.optim._muon",  # since torch 2.9
        "torch",
        tuple(
            Entry(
                name,
                stores,
                f"{__name__}:_muon",
                estimate=estimate,
                arguments={"lr": 1e-4, "weight_decay": 0.01},
                options={"kind": kind},
                dtype=dtype,
            )
            for name, stores, kind, estimate, dtype in (
                ("torch Muon fp32", "torch.optim.Muon, all fp32", "torch.optim", 12, torch.float32),
                ("torch Muon bf16", "torch.optim.Muon, all bf16", "torch.optim", 6, torch.bfloat16),
                ("Muon 6 bytes", "ours, in bf16-stochastic", "torch_bf16", 6.1, torch.bfloat16),
            )
        ),
    ),
}
"""By the name after ``--against``."""

OURS = tuple(recipe.name for recipe in dict.fromkeys(RECIPES.values()))
"""Names of our entries: those of the recipes."""


def ours(names: Sequence[str | Recipe], backend: str | None = None) -> tuple[Entry, ...]:
    """Our AdamW in each of these recipes.

    Args:
        names: of recipes, or recipes; aliases count as what they stand for.
        backend: None for the one that is chosen for the device.
    """
    recipes = [get_recipe(name) for name in names]
    return tuple(
        Entry(
            recipe.name,
            f"weights {recipe.weights}, moments {recipe.exp_avg} / {recipe.exp_avg_sq}",
            "torch_bf16:AdamW",
            # Vectors keep masters and fp32 moments; there are few of them.
            estimate=2.1 + recipe.bytes_per_parameter,
            options={"recipe": recipe},
            attributes={"backend": backend},
            scratch=0 if backend != "eager" else 48,
        )
        for recipe in dict.fromkeys(recipes)
    )

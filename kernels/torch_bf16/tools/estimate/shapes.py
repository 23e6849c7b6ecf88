"""What a model is made of, as far as memory is concerned: shapes, and which of them are trained."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from torch_bf16.model.kept_fp32 import fp32_parameters
from torch_bf16.model.parameter_groups import param_groups

__all__ = ["ModelShapes", "Weight", "conversion_notes", "narrowed", "shapes_of"]

_CONVERTED = {
    **dict.fromkeys((torch.float16, torch.float64), "model.float()"),
    torch.complex128: "p.to(torch.complex64)",
}
_NUMBERED = re.compile(r"^(.*?\.)?\d+(?=\.)")


@dataclass(frozen=True)
class Weight:
    """A parameter.

    Attributes:
        name: its full name in the model.
        shape: the shape of the whole tensor; of a complex one, that of ``torch.view_as_real``.
        trained: whether it requires a gradient.
        stays_fp32: whether ``cast_model`` leaves it in fp32, as norms with running statistics.
        frozen_as: its dtype if it is frozen in another one than fp32, which every precision keeps;
            if it is complex, that of its numbers, which are fp32 if it is trained.
        hidden: whether Muon orthogonalises its updates, as ``param_groups(model, muon=True)``
            decides; None if there is no model: then Muon orthogonalises all matrices.
    """

    name: str
    shape: tuple[int, ...]
    trained: bool = True
    stays_fp32: bool = False
    frozen_as: torch.dtype | None = None
    hidden: bool | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """What decides its bytes: all but the name."""
        return self.shape, self.trained, self.stays_fp32, self.frozen_as, self.hidden

    @cached_property
    def unit(self) -> str:
        """The FSDP2 unit that it belongs to: its first numbered module, or ``""`` for the root."""
        match = _NUMBERED.match(self.name)
        return match[0] if match else ""


@dataclass
class ModelShapes:
    """The parameters of a model, tied ones once, and the bytes of its buffers.

    Attributes:
        source: where the shapes come from, for people.
        weights: the parameters.
        buffer_bytes: bytes of all buffers.
        persistent_bytes: bytes of the buffers that checkpoints hold.
        narrowed_bytes: bytes that ``model.bfloat16()`` saves on buffers, which no recipe does.
        narrowed_persistent_bytes: the part of them that it saves on persistent ones.
        known: whether the shapes are those of a model; else one matrix stands for all weights.
        notes: caveats for the user.
        model: the model on the meta device, if there is one.
    """

    source: str
    weights: list[Weight]
    buffer_bytes: int = 0
    persistent_bytes: int = 0
    narrowed_bytes: int = 0
    narrowed_persistent_bytes: int = 0
    known: bool = True
    notes: list[str] = field(default_factory=list)
    model: nn.Module | None = None

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(each.numel for each in self.weights)

    @property
    def trained(self) -> int:
        """Elements of the parameters that require a gradient."""
        return sum(each.numel for each in self.weights if each.trained)


def shapes_of(model: nn.Module, source: str) -> ModelShapes:
    """The shapes of a model, on whatever device."""
    staying = {id(p) for p in fp32_parameters(model).values()}
    trained = any(p.requires_grad for p in model.parameters())
    groups = param_groups(model, muon=True) if trained else ()
    hidden = {name for each in groups if each["use_muon"] for name, _ in each["params"]}
    weights = [
        Weight(
            name,
            (*p.shape, 2) if p.is_complex() else tuple(p.shape),
            p.requires_grad,
            id(p) in staying,
            _kept_dtype(p),
            name in hidden,
        )
        for name, p in model.named_parameters()
    ]
    buffers = dict(model.named_buffers())
    persistent = [buffers[name] for name in buffers.keys() & model.state_dict().keys()]
    return ModelShapes(
        source,
        weights,
        _bytes(buffers.values()),
        _bytes(persistent),
        sum(narrowed(each.numel(), each.dtype) for each in buffers.values()),
        sum(narrowed(each.numel(), each.dtype) for each in persistent),
        notes=conversion_notes(p.dtype for p in model.parameters() if p.requires_grad),
        model=model,
    )


def narrowed(numel: int, dtype: torch.dtype) -> int:
    """Bytes that ``model.bfloat16()`` saves on a buffer."""
    return numel * (dtype.itemsize - 2) if dtype.is_floating_point else 0


def conversion_notes(dtypes: Iterable[torch.dtype]) -> list[str]:
    """A caveat about trained weights in dtypes that no recipe starts from, if there are any."""
    names = sorted(str(each).removeprefix("torch.") for each in {*dtypes} & _CONVERTED.keys())
    if not names:
        return []
    how = sorted({_CONVERTED[getattr(torch, each)] for each in names})
    return [
        f"weights in {' and '.join(names)}, from which no recipe starts, are counted as they are "
        f"after {' and '.join(how)}"
    ]


def _kept_dtype(parameter: Tensor) -> torch.dtype | None:
    """See :attr:`Weight.frozen_as`."""
    if parameter.is_complex():
        return torch.float32 if parameter.requires_grad else parameter.dtype.to_real()
    other = not parameter.requires_grad and parameter.dtype != torch.float32
    return parameter.dtype if other else None


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
